"""The three ops in plain, differentiable torch: the CPU implementation, and what autograd runs.

Arithmetic is float32 whatever the type of the stream (float64 for a float64 stream), so `math` only
matters to the GPU kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def _arithmetic(*tensors: Tensor | None) -> torch.dtype:
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def stem(sequence: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype) -> Tensor:
    """GELU(conv1d(sequence)), channels last: (N, 4, L) to (N, L, C)."""
    kind = _arithmetic(sequence, weight)
    half = weight.shape[2] // 2
    y = F.conv1d(sequence.to(kind), weight.to(kind), bias.to(kind), padding=half)
    return F.gelu(y, approximate="tanh").transpose(1, 2).contiguous().to(out_dtype)


def conv_norm(x: Tensor, conv_weight: Tensor, dilation: int, epsilon: float) -> Tensor:
    """The block's first half: 3-tap dilated depthwise convolution, then the norm over (L, C)."""
    kind = _arithmetic(x)
    return _normalised(x.to(kind), conv_weight.to(kind), dilation, epsilon).to(x.dtype)


def _normalised(wide: Tensor, taps: Tensor, dilation: int, epsilon: float) -> Tensor:
    # Three shifted products rather than F.conv1d: its dilated depthwise path is several times
    # slower on CPU, and needs two transposes.
    y = wide * taps[1]
    if dilation < wide.shape[1]:
        y = y + F.pad(wide[:, :-dilation] * taps[0], (0, 0, dilation, 0))
        y = y + F.pad(wide[:, dilation:] * taps[2], (0, 0, 0, dilation))
    centred = y - y.mean((1, 2), keepdim=True)
    # A mean far larger than the spread leaves its rounding error behind: take that out as well.
    centred = centred - centred.mean((1, 2), keepdim=True)
    return centred * torch.rsqrt(centred.square().mean((1, 2), keepdim=True) + epsilon)


def block(
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
) -> Tensor:
    """One CheriBlock, (N, L, C) to (N, L, C)."""
    kind = _arithmetic(x)
    wide = x.to(kind)
    z = _normalised(wide, conv_weight.to(kind), dilation, epsilon)
    hidden = F.gelu(z @ w1.to(kind).T, approximate="tanh")
    return (wide + residual_scale * (hidden @ w2.to(kind).T)).to(x.dtype)


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
) -> tuple[Tensor, Tensor]:
    """Profile logits on the kept window, and log counts: (N, L, C) to (N, O, L_out), (N, G)."""
    kind = _arithmetic(x, profile_weight)
    length, half = x.shape[1], profile_weight.shape[2] // 2
    low, high = start - half, length - end_trim + half
    kept = slice(max(low, 0), min(high, length))
    channels = x[:, kept].to(kind).transpose(1, 2)
    counted = slice(count_start, length - count_end_trim)
    summary = x[:, counted].to(kind).mean(1)
    if control is not None:
        channels = torch.cat([channels, control[:, :, kept].to(kind)], 1)
        total = control[:, :, counted].to(kind).sum((1, 2), keepdim=True)[:, :, 0]
        summary = torch.cat([summary, torch.log(total + 1.0)], 1)
    channels = F.pad(channels, (max(-low, 0), max(high - length, 0)))
    profile = F.conv1d(channels, profile_weight.to(kind), profile_bias.to(kind))
    counts = F.linear(summary, count_weight.to(kind), count_bias.to(kind))
    return profile, counts
