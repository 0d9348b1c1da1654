"""The block's backward kernels in Triton's interpreter against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from common import EPSILON, SCALE, STREAM, TIERS, in_double, make_block, reference_block, worst
from common import poisoned as poisoned

from cheri_export.kernels import launch

# Largest error of a gradient over its largest element: three-product dots leave float32 rounding;
# fp16 dots 2**-11 of each operand; 16-bit streams round x's gradient, and bf16 also the gradient
# before the norm (2**-9), which conv_weight's sees. In the bf16 tier w1's and w2's are products of
# bf16 operands, which the interpreter cuts where the GPU rounds.
LIMITS = {
    "fp32": (1e-6, 2e-6, 2e-6, 2e-6),
    "mixed": (5e-4, 3e-3, 2e-3, 2e-3),
    "fp16": (1e-3, 3e-3, 2e-3, 2e-3),
    "bf16": (8e-3, 2e-2, 7e-3, 7e-3),
}


def gradients(parts, grad_out, dilation, math):
    """Gradients by the kernels, and by autograd in float64."""
    _, mean, rstd = launch.block_forward(*parts, dilation, SCALE, EPSILON, math, True)
    found = launch.block_backward(grad_out, *parts, mean, rstd, dilation, SCALE, math)
    exact = [part.requires_grad_() for part in in_double(*parts)]
    out = reference_block(*exact, dilation)
    return found, torch.autograd.grad(out, exact, grad_out.double())


@pytest.mark.parametrize("math", TIERS)
@pytest.mark.parametrize(
    ("n", "length", "channels", "hidden", "dilation"),
    [(3, 2, 3, 5, 1), (1, 63, 5, 20, 40), (1, 65, 16, 32, 200), (1, 34, 48, 50, 16)],
)
def test_gradients_agree_with_float64(n, length, channels, hidden, dilation, math):
    """All four gradients, every element written."""
    parts = make_block(n, length, channels, hidden, STREAM[math])
    grad_out = torch.randn(parts[0].shape, generator=torch.Generator().manual_seed(7))
    found, expected = gradients(parts, grad_out.to(STREAM[math]), dilation, math)
    for part, have, want, limit in zip(parts, found, expected, LIMITS[math], strict=True):
        assert have.dtype == part.dtype
        assert have.shape == part.shape
        if length > 2 or math in ("fp32", "mixed"):
            assert worst(have, want) <= limit * float(want.abs().max())


@pytest.mark.parametrize("math", ["fp32", "mixed", "bf16"])
@pytest.mark.parametrize("magnitude", [1e-12, 1e12])
def test_gradients_of_any_magnitude_keep_their_accuracy(magnitude, math):
    """Mean losses give tiny gradients, loss scales huge ones: neither leaves the range of fp16."""
    parts = make_block(1, 30, 16, 32, STREAM[math])
    grad_out = magnitude * torch.randn(parts[0].shape, generator=torch.Generator().manual_seed(7))
    found, expected = gradients(parts, grad_out.to(STREAM[math]), 4, math)
    for have, want, limit in zip(found, expected, LIMITS[math], strict=True):
        assert worst(have, want) <= limit * float(want.abs().max())


def test_gradients_of_weights_beyond_the_range_of_fp16_are_safe():
    """Large and small weights keep the relative accuracy of the fp32 tier."""
    x, conv, w1, w2 = make_block(1, 40, 16, 32, torch.float32)
    parts = (x, conv, 1e6 * w1, 1e-6 * w2)
    grad_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    found, expected = gradients(parts, grad_out, 4, "fp32")
    for have, want in zip(found, expected, strict=True):
        assert worst(have, want) <= 1e-5 * float(want.abs().max())


def test_gradient_of_x_does_not_depend_on_the_batch():
    """Alone or in the last place of three: the same bits; and twice the same bits."""
    parts = make_block(3, 66, 16, 32, torch.float32)
    x, *weights = parts
    grad_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    found, _ = gradients(parts, grad_out, 4, "fp32")
    again, _ = gradients(parts, grad_out, 4, "fp32")
    alone, _ = gradients((x[2:], *weights), grad_out[2:], 4, "fp32")
    assert torch.equal(found[0][2:], alone[0])
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)


def test_weights_can_be_left_out():
    """Attribution needs x's gradient only."""
    parts = make_block(1, 20, 5, 8, torch.float32)
    _, mean, rstd = launch.block_forward(*parts, 1, SCALE, EPSILON, "fp32", True)
    grad_out = torch.ones_like(parts[0])
    arguments = (grad_out, *parts, mean, rstd, 1, SCALE, "fp32")
    dx, *others = launch.block_backward(*arguments, needs_weights=False)
    assert torch.equal(dx, launch.block_backward(*arguments)[0])
    assert others == [None, None, None]


def test_parameters_of_any_type_get_gradients_of_their_type():
    """bf16 and fp16 parameters, as a converted model holds them."""
    x, conv, w1, w2 = make_block(2, 40, 16, 32, torch.bfloat16)
    parts = (x, conv.bfloat16(), w1.bfloat16(), w2.half())
    grad_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    found, expected = gradients(parts, grad_out, 4, "bf16")
    for part, have, want in zip(parts, found, expected, strict=True):
        assert have.dtype == part.dtype
        assert worst(have, want) <= 2e-2 * float(want.abs().max())
