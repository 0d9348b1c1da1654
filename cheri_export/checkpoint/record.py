"""The result of reading a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from cheri_export.spec import FP16_MAX, ModelSpec


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One Cherimoya model as data: geometry, weights and where they came from.

    Attributes
    ----------
    spec: ModelSpec
        Geometry, checked against every tensor.

    weights: dict of str to torch.Tensor
        What the forward pass needs, under one spelling for all releases: ``iconv.weight``
        (C, 4, k), ``iconv.bias`` (C,), ``blocks.{i}.conv_weight`` (3, C), ``blocks.{i}.gamma``
        (C,) in 0.0.1 only, ``blocks.{i}.linear1.weight`` (H, C), ``blocks.{i}.linear2.weight``
        (C, H), ``fconv.weight`` (O, C + T, k), ``fconv.bias`` (O,), ``linear.weight``
        (G, C + 1 if T else C), ``linear.bias`` (G,). Dtype as stored (float16, bfloat16, float32
        or float64), contiguous, on the CPU, without gradient, all finite in float32.

    tensors: dict of str to torch.Tensor
        Every tensor as read: original keys and dtypes, with ``lw0`` and ``lw1``.

    config: dict
        The configuration as read, JSON-ready. Empty for a bare state dict. For whole-module
        pickles and modules in memory: their hyper-parameters under the same names.

    release: str
        Release, or range of releases, that wrote the file.

    release_reason: str
        The evidence for `release`.

    warnings: tuple of str
        What the user should know, one line each.

    path: str or None
        The file that was read.

    sha256: str or None
        Of the file that was read.

    n_parameters: int
        Values used by the forward pass: the sum over `weights`. `n_stored` counts the file's.

    source_sha256: str or None
        Of the original checkpoint, where `path` is a copy made by `write_weights`. It is what
        the copy says, and is not checked.
    """

    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    release: str
    release_reason: str
    warnings: tuple[str, ...]
    path: str | None
    sha256: str | None
    n_parameters: int
    source_sha256: str | None = None

    @property
    def n_stored(self) -> int:
        """Values in the file, with ``lw0``, ``lw1`` and doubled spellings."""
        return sum(t.numel() for t in self.tensors.values())


def weight_extremes(checkpoint: Checkpoint, limit: float = FP16_MAX) -> list[tuple[str, float]]:
    """The weights that do not fit a narrower type.

    Parameters
    ----------
    checkpoint: Checkpoint

    limit: float, optional
        Largest magnitude that fits. Default is float16's, 65504.

    Returns
    -------
    list of (str, float)
        Name and largest magnitude of every weight beyond `limit`, in the order of `weights`.
    """
    largest = ((n, float(t.abs().max())) for n, t in checkpoint.weights.items() if t.numel())
    return [(name, value) for name, value in largest if value > limit]
