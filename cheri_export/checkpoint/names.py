"""Which names a checkpoint may mention. Nothing named is ever imported, called or built."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

from cheri_export.checkpoint.messages import problem, show

DTYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""Element type of each storage class that torch.save names."""


@dataclasses.dataclass(frozen=True)
class Name:
    """A global that the pickle mentions: a label, with nothing behind it."""

    module: str
    name: str

    @property
    def full(self) -> str:
        """Dotted form."""
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(eq=False, repr=False)
class Inert:
    """Stands in for an object: its class's name, its arguments and its state, all plain data.

    It has no methods and is never compared, hashed by value, iterated or called.
    """

    label: str
    args: tuple[Any, ...] = ()
    state: dict[Any, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Storage:
    """A tensor storage by reference: record `key` of the archive, `numel` elements."""

    key: str
    kind: str
    numel: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Element type; None for quantised and untyped storages."""
        return DTYPES.get(self.kind)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor by reference. It has been checked to lie inside its storage."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


# Whole packages whose objects may occur in a pickled model. Their classes become `Inert`.
_PACKAGES = ("cherimoya", "bpnetlite", "torch.nn")

# Python 2 spellings, which pickle protocols up to 2 use.
_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_EXACT = {
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "_codecs.encode",
    "copyreg._reconstructor",
    "builtins.object",
    "builtins.set",
    "builtins.frozenset",
    "builtins.list",
    "builtins.dict",
    "builtins.int",
    "builtins.float",
    "builtins.complex",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch._tensor._rebuild_from_type_v2",
    "torch.serialization._get_layout",
    # A fitted model's log holds NumPy scalars.
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
}
_PATTERNS = re.compile(
    r"torch\._utils\._rebuild_\w+"
    r"|torch(\.cuda)?\.\w+Storage|torch\.storage\.(Typed|Untyped|_\w+)?Storage"
    r"|torch\.(float|bfloat|int|uint|complex|quint|qint|bits)\w*|torch\.(bool|half|double)"
    r"|torch\.per_(tensor|channel)_\w+"
)


def admit(module: str, name: str) -> Name:
    """Turn a global's name into a label, or refuse it.

    Raises
    ------
    CheckpointError
        If the name is not one that checkpoints use. A name with dots would reach an attribute of
        something else, so it is refused whatever it starts with.
    """
    module = _PYTHON2.get(module, module)
    found = Name(module, name)
    if name.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        inside = any(module == p or module.startswith(p + ".") for p in _PACKAGES)
        if inside or found.full in _EXACT or _PATTERNS.fullmatch(found.full):
            return found
    raise problem(
        f"the file asks for {show(found.full)}, which no Cherimoya checkpoint needs; nothing was "
        "executed; do not load it with other tools, and get the checkpoint from its author"
    )
