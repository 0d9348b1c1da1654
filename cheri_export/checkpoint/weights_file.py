"""The copy of a checkpoint that an export carries: weights.safetensors."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from typing import Any

import torch

from cheri_export.checkpoint.build import assemble
from cheri_export.checkpoint.messages import problem, show
from cheri_export.checkpoint.record import Checkpoint
from cheri_export.errors import OutputError

FORMAT = "cherimoya"
_MAX_HEADER = 100_000_000


def write_weights(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Write every tensor of the checkpoint, and what is needed to read it back.

    Parameters
    ----------
    checkpoint: Checkpoint

    path: str or path-like
        A ``.safetensors`` file; replaced whole, or left as it was if writing fails.

    Raises
    ------
    OutputError
        If the file cannot be written.
    """
    from safetensors.torch import save

    attributes = {
        "release": checkpoint.release,
        "release_reason": checkpoint.release_reason,
        "n_parameters": checkpoint.n_parameters,
        "spec": checkpoint.spec.to_dict(),
    }
    contents = {
        "config": checkpoint.config,
        "attributes": attributes,
        "warnings": list(checkpoint.warnings),
        # safetensors sorts tensors by size; the order of a state dict is worth keeping.
        "order": list(checkpoint.tensors),
        "sha256": checkpoint.source_sha256 or checkpoint.sha256 or "",
    }
    # One entry: safetensors writes several in an order that differs from run to run.
    metadata = {FORMAT: json.dumps(contents)}
    tensors = {
        k: t.detach().cpu().clone(memory_format=torch.contiguous_format)
        for k, t in checkpoint.tensors.items()
    }
    data = save(tensors, metadata)
    target = os.fsdecode(os.fspath(path))
    temporary = None
    try:
        folder = os.path.dirname(os.path.abspath(target))
        handle, temporary = tempfile.mkstemp(prefix=".weights-", dir=folder)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        # mkstemp makes the file private; give it the permissions of any new file.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise OutputError(
            f"{show(target, 300)}: cannot be written ({error.strerror or type(error).__name__}); "
            "choose another place"
        ) from None


def header(data: bytes) -> dict[str, Any] | None:
    """The JSON header of a safetensors file; None if `data` is no such file."""
    if len(data) < 10:
        return None
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(_MAX_HEADER, len(data) - 8) or data[8:9] != b"{":
        return None
    try:
        found = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def from_safetensors(data: bytes, head: dict[str, Any], path: str, sha256: str) -> Checkpoint:
    """Read a file of `write_weights`; any other safetensors file counts as a bare state dict.

    Raises
    ------
    CheckpointError
        If it is damaged or no Cherimoya model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
        raise problem(
            f"a safetensors file that is damaged ({show(type(error).__name__)}); "
            "copy or download it again"
        ) from None
    found = head.get("__metadata__")
    metadata = found if isinstance(found, dict) else {}
    if FORMAT not in metadata:
        note = "a safetensors file of another tool, read as a bare state dict"
        return assemble(tensors, None, path=path, sha256=sha256, notes=[note])
    try:
        contents = json.loads(metadata[FORMAT])
        config, notes, order = (contents.get(key) for key in ("config", "warnings", "order"))
    except (ValueError, RecursionError, TypeError, AttributeError):
        raise problem("the metadata of the safetensors file are damaged; copy it again") from None
    lines = [show(n, 1000) for n in notes if isinstance(n, str)] if isinstance(notes, list) else []
    names = [k for k in order if isinstance(k, str)] if isinstance(order, list) else []
    if sorted(names) == sorted(tensors):
        tensors = {key: tensors[key] for key in names}
    source = contents.get("sha256")
    return assemble(
        tensors,
        config,
        path=path,
        sha256=sha256,
        notes=lines,
        source_sha256=show(source) if isinstance(source, str) and source else None,
    )
