"""Geometry from tensor shapes. Every tensor is checked; the configuration is not looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from cheri_export.checkpoint.messages import RESAVE, problem, shape, show

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

MAX_LAYERS = 31
"""Dilation 2**30 is the largest that fits a 32-bit integer, and is longer than any chromosome."""

KERNELS = {(True, 19, 75): "0.0.1", (False, 21, 1): "before 0.1.1", (False, 21, 75): "0.1.1 on"}
"""(gamma, kernel of the first convolution, of the profile head) in every release."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes that the tensors state. Names as in `ModelSpec`."""

    n_filters: int
    hidden: int
    n_layers: int
    n_outputs: int
    n_count_outputs: int
    n_control_tracks: int
    stem_kernel: int
    profile_kernel: int
    has_gamma: bool


def check_tensor(key: str, value: Any) -> torch.Tensor:
    """Accept a dense floating-point tensor with data.

    Raises
    ------
    CheckpointError
        Names the tensor and what it is instead: no tensor, sparse, quantised, meta, a subclass,
        or of another dtype than float16, bfloat16, float32 or float64.
    """
    if not isinstance(value, torch.Tensor):
        found = show(value)
    elif type(value) not in (torch.Tensor, torch.nn.Parameter):
        found = f"a {show(type(value).__name__)}"
    elif value.layout is not torch.strided or value.is_nested:
        found = f"a sparse tensor ({show(str(value.layout))})"
    elif value.is_quantized:
        found = f"a quantised tensor ({show(str(value.dtype))})"
    elif value.device.type == "meta":
        found = "a meta tensor, which has no data"
    elif value.dtype not in FLOATS:
        found = f"a tensor of {show(str(value.dtype))}"
    else:
        return value.detach()
    raise problem(
        f"{show(key)} is {found}; a dense tensor of float32, bfloat16, float16 or float64 is "
        f"needed; {RESAVE}"
    )


def is_plain(value: Any) -> bool:
    """Whether an ignored tensor can be kept in a safetensors file."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    dense = value.layout is torch.strided and not value.is_quantized and not value.is_nested
    kinds = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    return dense and value.device.type != "meta" and value.dtype in kinds


def measure(tensors: Mapping[str, torch.Tensor], n_layers: int) -> Geometry:
    """Read the geometry off the shapes.

    Parameters
    ----------
    tensors: mapping of str to torch.Tensor
        Under canonical names; complete.

    n_layers: int

    Raises
    ------
    CheckpointError
        Names the tensor, its shape and the shape needed.
    """
    if n_layers > MAX_LAYERS:
        raise problem(
            f"{n_layers} blocks, the last with dilation 2**{n_layers - 1}; at most {MAX_LAYERS} "
            "are supported; train a model with fewer layers"
        )
    stem = _sizes(tensors, "iconv.weight", 3, "(C, 4, k)")
    head = _sizes(tensors, "fconv.weight", 3, "(O, C + T, k)")
    counts = _sizes(tensors, "linear.weight", 2, "(G, C), or (G, C + 1) with controls")
    width, hidden = stem[0], _sizes(tensors, "blocks.0.linear1.weight", 2, "(H, C)")[0]
    if min(*stem, *head, *counts, hidden) < 1:
        empty = next(n for n, t in tensors.items() if 0 in t.shape)
        raise problem(
            f"{empty} has shape {shape(tensors[empty].shape)}; every size must be 1 or more "
            f"(n_filters included); {RESAVE}"
        )
    for name, k in (("iconv.weight", stem[2]), ("fconv.weight", head[2])):
        if k % 2 == 0:
            raise problem(
                f"{name} has kernel size {k}, which is even; an odd one is needed; {RESAVE}"
            )
    gamma = "blocks.0.gamma" in tensors
    tracks = head[1] - width
    _expect(tensors, "iconv.weight", (width, 4, stem[2]))
    _expect(tensors, "iconv.bias", (width,))
    for i in range(n_layers):
        _expect(tensors, f"blocks.{i}.conv_weight", (3, width))
        _expect(tensors, f"blocks.{i}.linear1.weight", (hidden, width))
        _expect(tensors, f"blocks.{i}.linear2.weight", (width, hidden))
        if gamma:
            name = f"blocks.{i}.gamma"
            _expect(tensors, name, (width,) if tensors[name].ndim == 1 else (1, width))
    if tracks < 0:
        raise problem(
            f"fconv.weight has shape {shape(head)}: {head[1]} input channels, fewer than the "
            f"{width} filters of iconv.weight; (O, {width} + controls, k) is needed; {RESAVE}"
        )
    _expect(tensors, "fconv.bias", (head[0],))
    needed = width + (1 if tracks else 0)
    if counts[1] != needed:
        raise problem(
            f"linear.weight has shape {shape(counts)}; ({counts[0]}, {needed}) is needed, since "
            f"iconv.weight has {width} filters and fconv.weight {tracks} control tracks; {RESAVE}"
        )
    _expect(tensors, "linear.bias", (counts[0],))
    if (gamma, stem[2], head[2]) not in KERNELS:
        raise problem(
            f"iconv.weight has kernel {stem[2]} and fconv.weight kernel {head[2]}, "
            f"{'with' if gamma else 'without'} gamma; releases have 19 and 75 with gamma (0.0.1), "
            "21 and 1 (before 0.1.1) or 21 and 75 without; a changed architecture cannot be read"
        )
    return Geometry(
        width, hidden, n_layers, head[0], counts[0], tracks, stem[2], head[2], has_gamma=gamma
    )


def _sizes(
    tensors: Mapping[str, torch.Tensor], name: str, ndim: int, needed: str
) -> tuple[int, ...]:
    if tensors[name].ndim != ndim:
        raise problem(
            f"{name} has shape {shape(tensors[name].shape)}; {needed} is needed; {RESAVE}"
        )
    return tuple(tensors[name].shape)


def _expect(tensors: Mapping[str, torch.Tensor], name: str, needed: tuple[int, ...]) -> None:
    if tuple(tensors[name].shape) != needed:
        raise problem(
            f"{name} has shape {shape(tensors[name].shape)}; {shape(needed)} is needed, to agree "
            f"with iconv.weight, fconv.weight and blocks.0.linear1.weight; {RESAVE}"
        )


def check_values(name: str, value: torch.Tensor) -> None:
    """All values must be finite, also after conversion to float32, which every tier starts from.

    Raises
    ------
    CheckpointError
        Names the tensor and how many values are not.
    """
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        nan = int(torch.isnan(value).sum())
        raise problem(
            f"{name} has {bad} of {value.numel()} values that are not finite ({nan} NaN, "
            f"{bad - nan} infinite); finite weights are needed; training probably diverged, so "
            "use an earlier checkpoint"
        )
    if value.dtype is torch.float64:
        over = int((~torch.isfinite(value.float())).sum())
        if over:
            raise problem(
                f"{name} has {over} of {value.numel()} values beyond the range of float32; "
                "weights that fit it are needed; training probably diverged, so use an earlier "
                "checkpoint"
            )
