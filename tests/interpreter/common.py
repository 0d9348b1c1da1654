"""What the interpreter cases share: the float64 block, random cases and poisoned allocations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

EPSILON = 1e-3
SCALE = 0.15
STREAM = {
    "fp32": torch.float32,
    "mixed": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
TIERS = tuple(STREAM)

BF16_SLACK = 2.1
"""The interpreter cuts float32 to bf16 where the GPU rounds: twice the error of one rounding."""


def slack(dtype: torch.dtype) -> float:
    """Factor on a limit for results of type `dtype`."""
    return BF16_SLACK if dtype == torch.bfloat16 else 1.0


def reference_block(
    x: Tensor, conv: Tensor, w1: Tensor, w2: Tensor, dilation: int, scale: float = SCALE
) -> Tensor:
    """The block in the type of `x`, statistics in two passes."""
    length = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, dilation, dilation))
    y = padded[:, :length] * conv[0] + x * conv[1] + padded[:, 2 * dilation :] * conv[2]
    y = y - y.mean((1, 2), keepdim=True)
    z = y / torch.sqrt((y * y).mean((1, 2), keepdim=True) + EPSILON)
    hidden = torch.nn.functional.gelu(z @ w1.T, approximate="tanh")
    return x + scale * (hidden @ w2.T)


def make_block(
    n: int, length: int, channels: int, hidden: int, dtype: torch.dtype, trained: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random x, conv_weight, w1 and w2; linear std 0.1 and conv std 0.3, or 0.02 untrained."""
    generator = torch.Generator().manual_seed(1000 * length + channels)
    conv_std, std = (0.3, 0.1) if trained else (0.02, 0.02)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(n, length, channels).to(dtype)
    return (
        x,
        conv_std * normal(3, channels),
        std * normal(hidden, channels),
        std * normal(channels, hidden),
    )


def in_double(*tensors: Tensor) -> list[Tensor]:
    """Every tensor in float64."""
    return [tensor.double() for tensor in tensors]


def worst(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    difference = (found.double() - expected).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every fresh allocation with NaN, so that an element that is not written is seen."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(
        torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan"))
    )
