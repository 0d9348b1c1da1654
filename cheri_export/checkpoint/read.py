"""Read a checkpoint file of any release. Nothing in the file is executed."""

from __future__ import annotations

import hashlib
import io
import os
import pickletools
from typing import Any

import torch

from cheri_export.checkpoint import pickles
from cheri_export.checkpoint.archives import ZIP_MAGIC, Archive, open_archive
from cheri_export.checkpoint.build import assemble
from cheri_export.checkpoint.files import describe, read_bytes
from cheri_export.checkpoint.messages import problem, show
from cheri_export.checkpoint.modules import is_module, take_apart
from cheri_export.checkpoint.payload import check_stored, split
from cheri_export.checkpoint.record import Checkpoint
from cheri_export.checkpoint.weights_file import from_safetensors, header
from cheri_export.errors import CheckpointError


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint.

    Parameters
    ----------
    path: str or path-like
        A file of `Cherimoya.save` (0.1.0 on), a state dict saved by itself, a model pickled whole
        (0.0.1 and 0.1.0), or a copy made by `write_weights`.

    Returns
    -------
    Checkpoint
        With every tensor checked; see there for names, shapes and dtypes.

    Raises
    ------
    CheckpointError
        One line: what was found, what was needed, what to do. It begins with the path.
    """
    name = os.fsdecode(os.fspath(path))
    data = read_bytes(name)
    digest = hashlib.sha256(data).hexdigest()
    try:
        return _read(data, name, digest)
    except CheckpointError as error:
        raise problem(f"{show(name, limit=300)}: {error}") from None


def _read(data: bytes, path: str, digest: str) -> Checkpoint:
    archive = open_archive(data)
    if archive is not None:
        if is_module(archive.tree):
            tensors, config = take_apart(archive.tree, archive.tensor)
            return assemble(tensors, config, path=path, sha256=digest)
        return _dictionary(data, archive, path, digest)
    head = header(data)
    if head is not None:
        return from_safetensors(data, head, path, digest)
    raise _no_checkpoint(data)


def _dictionary(data: bytes, archive: Archive, path: str, digest: str) -> Checkpoint:
    """A dictionary: torch loads it with ``weights_only=True``, after our own inspection.

    The inspection bounds the memory that torch is going to take and names what is refused.
    """
    stored, _, _ = split(archive.tree)
    check_stored(stored)
    try:
        payload: Any = torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=True, mmap=False
        )
    except Exception as error:  # torch raises many kinds, pickle's own among them
        raise problem(
            f"torch.load(weights_only=True) refuses the file ({type(error).__name__}); a file of "
            "Cherimoya.save() is needed; save the model again, or copy the file again"
        ) from None
    tensors, config, notes = split(payload)
    return assemble(tensors, config, path=path, sha256=digest, notes=notes)


def _no_checkpoint(data: bytes) -> CheckpointError:
    """Say what the file is. A plain pickle is inspected for the names it asks for."""
    needed = "a file of Cherimoya.save() is needed; give that file"
    if data[:2] in (b"PK", ZIP_MAGIC[:2]):
        return problem(f"a damaged or empty zip archive; {needed}")
    if data[:1] == b"\x80" or _is_old_pickle(data):
        try:
            tree, _ = pickles.load(io.BytesIO(data), lambda _: None)
        except CheckpointError as error:
            return error
        except pickles.Malformed:
            return problem(f"a damaged or unknown pickle, not a checkpoint; {needed}")
        return problem(f"a plain Python pickle of {show(tree)}, not a checkpoint; {needed}")
    return problem(f"not a checkpoint but {describe(data)}; {needed}")


def _is_old_pickle(data: bytes) -> bool:
    """Whether a file without a pickle's first byte is one all the same (protocols 0 and 1)."""
    try:
        stream = io.BytesIO(data[: 1 << 20])
        for count, _ in enumerate(pickletools.genops(stream)):
            if count > 100_000:
                return False
        # Text may well begin with a pickle (a full stop is one); it has to be all of the file.
        return not data[stream.tell() :].strip()
    except Exception:  # genops raises ValueError and what decoding of arguments raises
        return False
