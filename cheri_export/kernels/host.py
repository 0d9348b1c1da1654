"""What the launchers share: the device at hand, its guard, and the scales of fp16 operands."""

from __future__ import annotations

import contextlib
import functools
import math as _math
from typing import Any

import torch
from torch import Tensor

from cheri_export.errors import InputError
from cheri_export.kernels import table

TIERS = ("fp32", "mixed", "fp16", "bf16")
STREAM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def _architecture(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return table.nearest_architecture(10 * major + minor)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def target(x: Tensor) -> tuple[int, int, bool]:
    """Architecture, multiprocessors and whether inline assembly runs (not in the interpreter)."""
    if not x.is_cuda:
        return 90, 4, False
    return _architecture(x.device.index), _multiprocessors(x.device.index), True


def guard(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context in which `x`'s device is the current one; Triton launches on the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and starts at a multiple of 16 bytes, else a copy.

    Triton makes another binary for pointers without that alignment, whose sums may run in another
    order: an example's bits would depend on where it lies in memory.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor, ...],
    scalars: tuple[int | float, ...],
    constants: tuple[int | float | bool, ...],
    **options: int | None,
) -> None:
    """Launch `kernel` with its parameters in order, by the binary of an earlier launch if it can.

    Triton looks at every argument at every launch, which takes 30 us here; a small batch runs
    shorter than that. Everything that selects a binary is in the key: types of the tensors,
    constants, options and device. The rest never does: pointers are aligned to 16 bytes (see
    `aligned`), and no kernel is specialised on the value of a scalar.
    """
    key = (
        kernel.fn.__name__, tensors[0].device.index, tuple([tensor.dtype for tensor in tensors]),
        constants, tuple(options.values()),
    )  # fmt: skip
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = kernel[(programs,)](*tensors, *scalars, *constants, **options)
        if compiled is not None:  # the interpreter has no binary
            _COMPILED[key] = compiled
        return
    compiled[(programs, 1, 1)](*tensors, *scalars, *constants)


def check_math(math: str) -> None:
    """Refuse an unknown tier."""
    if math not in TIERS:
        raise InputError(f"math is {math!r}; expected one of {', '.join(TIERS)}")


@functools.lru_cache(1024)
def z_scale(length: int, channels: int) -> float:
    """Largest power of two that keeps any normalised value, |z| <= sqrt(L * C), below 2**15."""
    return 2.0 ** (15 - _math.ceil(_math.log2(length * channels) / 2))


@functools.lru_cache(1024)
def g_bound(length: int, channels: int) -> float:
    """Power of two >= 2**11 * sqrt(C) * sqrt(L * C) / 2**15, see `fused_block_kernel`.

    A row of w1 is at most 2**11 times its inverse scale in each of its C elements, and a
    normalised position has a norm of at most sqrt(L * C).
    """
    return 2.0 ** _math.ceil(11 - 15 + _math.log2(channels * length * channels) / 2)
