"""One-line error texts: whatever a file contains must not break or flood the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from cheri_export.errors import CheckpointError

KEYS = (
    "iconv.weight, iconv.bias, blocks.{i}.conv_weight, blocks.{i}.linear1.weight, "
    "blocks.{i}.linear2.weight, fconv.weight, fconv.bias, linear.weight, linear.bias"
)
"""The tensors of every release, as they are named in error messages."""

RESAVE = "save the model again with Cherimoya.save()"


def show(value: object, limit: int = 80) -> str:
    """`value` as short printable text.

    Names come from the file, so control characters (line breaks, terminal escapes) are escaped
    and the length is limited. Containers and unknown objects give their type only: their repr
    may be exponentially large.
    """
    if isinstance(value, str):
        text = value[: limit + 1]
    elif value is None or isinstance(value, (bool, float)):
        text = repr(value)
    elif isinstance(value, int):
        text = (
            str(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"
        )
    elif isinstance(value, (list, tuple)) and all(type(v) is int for v in value[:9]):
        text = "[" + ", ".join(show(v) for v in value[:8]) + (", ...]" if len(value) > 8 else "]")
    else:
        text = f"an object of type {type(value).__name__}"
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def listing(names: Iterable[object], limit: int = 5) -> str:
    """The first `limit` names, and how many more there are."""
    shown = list(names)
    text = ", ".join(show(n) for n in shown[:limit])
    return text if len(shown) <= limit else f"{text} and {len(shown) - limit} more"


def shape(sizes: Iterable[int]) -> str:
    """A tensor shape as ``(3, 32)``."""
    return "(" + ", ".join(str(int(s)) for s in sizes) + ")"


def problem(message: str) -> CheckpointError:
    """A `CheckpointError` whose text is one line of printable characters."""
    return CheckpointError(show(" ".join(message.split()), limit=1200))
