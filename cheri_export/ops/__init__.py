"""`cheri::stem`, `cheri::block`, `cheri::head`: importing this registers them with torch."""

from cheri_export.ops.registry import block, head, stem

__all__ = ["block", "head", "stem"]
