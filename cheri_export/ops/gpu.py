"""The ops on a CUDA device: the Triton kernels, or plain torch where there are none for a case.

There are none where Triton is missing, on GPUs before sm_80, and for float64. What is chosen
depends on types and shapes only, so that a result never depends on the batch.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch

from cheri_export.ops import plain

Tensor = torch.Tensor

_OLDEST = (8, 0)
_STREAMS = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def _launch() -> ModuleType | None:
    try:
        from cheri_export.kernels import launch
    except ImportError as error:
        warnings.warn(
            f"the Triton kernels cannot be used ({error}); plain torch runs instead, several times "
            "slower: pip install triton",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return launch


@functools.cache
def _old(index: int) -> bool:
    if torch.cuda.get_device_capability(index) >= _OLDEST:
        return False
    warnings.warn(
        f"{torch.cuda.get_device_name(index)} is older than sm_80, for which there are no kernels; "
        "plain torch runs instead, several times slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return True


def _kernels(x: Tensor, channels: int) -> ModuleType | None:
    launch = _launch()
    if launch is None or _old(x.device.index) or channels > launch.MAX_CHANNELS:
        return None
    return launch


def stem(
    sequence: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype, math: str
) -> Tensor:
    """`cheri::stem` on CUDA."""
    launch = _kernels(sequence, weight.shape[0]) if out_dtype in _STREAMS else None
    if launch is None or weight.dtype == torch.float64:
        return plain.stem(sequence, weight, bias, out_dtype)
    out: Tensor = launch.stem_forward(sequence, weight, bias, out_dtype, math)
    return out


def block(
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
) -> Tensor:
    """`cheri::block` on CUDA."""
    launch = _kernels(x, x.shape[2]) if x.dtype in _STREAMS else None
    if launch is None:
        return plain.block(x, conv_weight, w1, w2, dilation, residual_scale, epsilon)
    out: Tensor = launch.block_forward(
        x, conv_weight, w1, w2, dilation, residual_scale, epsilon, math
    )[0]
    return out


def block_backward(
    grad: Tensor,
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
    needs_weights: bool,
) -> tuple[Tensor | None, ...] | None:
    """Gradients of the block on CUDA, or None where plain torch has to give them.

    The statistics are recomputed from x, one more read of it (60 us at N=512, L=1024, C=128, bf16
    on an H200), so that x is all that a block saves and inference stores nothing for a backward.
    """
    launch = _kernels(x, x.shape[2]) if x.dtype in _STREAMS else None
    if launch is None:
        return None
    mean, rstd = launch.block_statistics(x, conv_weight, dilation, epsilon, math, w1.shape[0])
    found: tuple[Tensor | None, ...] = launch.block_backward(
        grad, x, conv_weight, w1, w2, mean, rstd, dilation, residual_scale, math, needs_weights
    )
    return found


def head(
    x: Tensor,
    control: Tensor | None,
    profile_weight: Tensor,
    profile_bias: Tensor,
    count_weight: Tensor,
    count_bias: Tensor,
    start: int,
    end_trim: int,
    count_start: int,
    count_end_trim: int,
    math: str,
) -> tuple[Tensor, Tensor]:
    """`cheri::head` on CUDA."""
    tensors = (x, control, profile_weight, profile_bias, count_weight, count_bias)
    windows = (start, end_trim, count_start, count_end_trim)
    launch = _kernels(x, x.shape[2]) if x.dtype in _STREAMS else None
    if launch is None or profile_weight.dtype == torch.float64:
        return plain.head(*tensors, *windows)
    found: tuple[Tensor, Tensor] = launch.head_forward(*tensors, *windows, math)
    return found
