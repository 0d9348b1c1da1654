"""From a checkpoint, or a cherimoya model in memory, to our torch module."""

from __future__ import annotations

import os
from typing import Any

from cheri_export.checkpoint import checkpoint_from_module, read_checkpoint
from cheri_export.modules import Cherimoya, build_module


def load(path: str | os.PathLike[str], *, precision: str = "fp32") -> Cherimoya:
    """Load a checkpoint of any release.

    Parameters
    ----------
    path: path
        The checkpoint.

    precision: str
        Tier: ``fp32``, ``mixed``, ``fp16`` or ``bf16``.

    Returns
    -------
    model: Cherimoya
        In eval mode, on the CPU, without gradients.

    Raises
    ------
    CheckpointError
        The file is no usable Cherimoya checkpoint.
    """
    checkpoint = read_checkpoint(path)
    return build_module(checkpoint.spec, checkpoint.weights, precision)


def from_cherimoya(model: Any, *, precision: str = "fp32") -> Cherimoya:
    """Convert a model of the package cherimoya (any release) that is in memory.

    Parameters
    ----------
    model: torch.nn.Module
        The model; it is not changed and shares no memory with the result.

    precision: str
        Tier: ``fp32``, ``mixed``, ``fp16`` or ``bf16``.

    Returns
    -------
    model: Cherimoya
        In eval mode, on the CPU, without gradients.

    Raises
    ------
    CheckpointError
        It is no Cherimoya model.
    """
    checkpoint = checkpoint_from_module(model)
    return build_module(checkpoint.spec, checkpoint.weights, precision)
