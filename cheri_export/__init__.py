"""cheri-export: a trained Cherimoya checkpoint in, fast and checked inference out.

Importing the package imports neither torch nor onnx: each public name below brings what it needs
when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "CheriError": "cheri_export.errors",
    "CheriBlock": "cheri_export.modules",
    "Cherimoya": "cheri_export.modules",
    "Checkpoint": "cheri_export.checkpoint",
    "ExportOptions": "cheri_export.pipeline",
    "ExportResult": "cheri_export.pipeline",
    "ModelSpec": "cheri_export.spec",
    "attribution_ops": "cheri_export.attribution",
    "export": "cheri_export.pipeline",
    "export_onnx": "cheri_export.onnx_model",
    "finish_onnx": "cheri_export.onnx_model",
    "from_cherimoya": "cheri_export.loading",
    "load": "cheri_export.loading",
    "read_checkpoint": "cheri_export.checkpoint",
    "translation_table": "cheri_export.onnx_model",
}

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from cheri_export.attribution import attribution_ops
    from cheri_export.checkpoint import Checkpoint, read_checkpoint
    from cheri_export.errors import CheriError
    from cheri_export.loading import from_cherimoya, load
    from cheri_export.modules import CheriBlock, Cherimoya
    from cheri_export.onnx_model import export_onnx, finish_onnx, translation_table
    from cheri_export.pipeline import ExportOptions, ExportResult, export
    from cheri_export.spec import ModelSpec


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'cheri_export' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
