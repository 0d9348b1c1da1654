"""The block's forward kernels in Triton's interpreter against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from common import (
    EPSILON,
    SCALE,
    STREAM,
    TIERS,
    in_double,
    make_block,
    reference_block,
    slack,
    worst,
)
from common import poisoned as poisoned

from cheri_export.errors import InputError
from cheri_export.kernels import launch, table
from cheri_export.tolerance import block_limit


def run(x, conv, w1, w2, dilation, math, **options):
    """Output of `block_forward`."""
    return launch.block_forward(x, conv, w1, w2, dilation, SCALE, EPSILON, math, **options)[0]


@pytest.mark.parametrize("math", TIERS)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("n", "length", "channels", "hidden", "dilation"),
    [(3, 1, 3, 5, 1), (2, 63, 5, 20, 4), (2, 65, 16, 32, 200), (2, 130, 48, 50, 16)],
)
def test_error_is_within_the_tier(n, length, channels, hidden, dilation, trained, math):
    """Every element is written and lies within the published limit."""
    parts = make_block(n, length, channels, hidden, STREAM[math], trained)
    out = run(*parts, dilation, math)
    limit = block_limit(math, trained_scale=trained, max_abs_input=float(parts[0].abs().max()))
    assert out.dtype == STREAM[math]
    assert worst(out, reference_block(*in_double(*parts), dilation)) <= limit * slack(out.dtype)


@pytest.mark.parametrize("math", TIERS)
def test_default_shape_is_within_the_tier(math):
    """128 channels, 256 hidden, fp16 weights where the tier stores them."""
    x, conv, w1, w2 = make_block(1, 70, 128, 256, STREAM[math])
    if math in table.HALF_TIERS:
        w1, w2 = w1.half(), w2.half()
    out = run(x, conv, w1, w2, 4, math)
    limit = block_limit(math, trained_scale=True, max_abs_input=float(x.abs().max()))
    assert worst(out, reference_block(*in_double(x, conv, w1, w2), 4)) <= limit * slack(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("math", ["fp32", "mixed"])
def test_tier_and_stream_type_are_independent(math, dtype):
    """A 16-bit stream with float32-grade dots: only the output's rounding is left."""
    parts = make_block(2, 40, 16, 32, dtype)
    out = run(*parts, 2, math)
    exact = reference_block(*in_double(*parts), 2)
    rounding = worst(exact.to(dtype), exact)
    assert worst(out, exact) <= 1.1 * slack(dtype) * rounding + 1e-3 * (math == "mixed")


@pytest.mark.parametrize("channels", [13, 16])
def test_statistics_survive_a_mean_far_above_the_spread(channels):
    """With |mean| / std = 3000 the error is that of float32 arithmetic, not of cancellation."""
    x, conv, w1, w2 = make_block(2, 130, channels, 32, torch.float32)
    conv = torch.stack([torch.zeros(channels), torch.ones(channels), torch.zeros(channels)])
    x = x + 3000.0
    exact = reference_block(*in_double(x, conv, w1, w2), 4)
    strict = worst(reference_block(x, conv, w1, w2, 4), exact)
    assert worst(run(x, conv, w1, w2, 4, "fp32"), exact) <= 4 * strict + 1e-6


@pytest.mark.parametrize("math", TIERS)
def test_result_does_not_depend_on_the_batch(math):
    """An example gives the same bits alone and in the last place of three."""
    x, conv, w1, w2 = make_block(3, 70, 16, 32, STREAM[math])
    together = run(x, conv, w1, w2, 4, math)
    assert torch.equal(together[2:], run(x[2:], conv, w1, w2, 4, math))


@pytest.mark.parametrize("math", TIERS)
def test_zero_mlp_is_identity(math):
    """Without an MLP term x comes back bit for bit."""
    x, conv, w1, w2 = make_block(1, 20, 16, 32, STREAM[math])
    assert torch.equal(run(x, conv, w1, torch.zeros_like(w2), 4, math), x)


@pytest.mark.parametrize("math", TIERS)
def test_nan_stays_in_its_example_and_fills_it(math):
    """One NaN makes its whole example NaN, through the norm, and no other."""
    x, conv, w1, w2 = make_block(2, 70, 16, 32, STREAM[math])
    x[1, 65, 3] = float("nan")
    out = run(x, conv, w1, w2, 4, math)
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[0]).all()


@pytest.mark.parametrize("math", ["fp32", "mixed"])
@pytest.mark.parametrize(("first", "second"), [(1e6, 1e-8), (1e-6, 1e6), (3e4, 1e5)])
def test_weights_beyond_the_range_of_fp16_are_safe(first, second, math):
    """Scaled operands keep the relative error for weights that fp16 cannot hold."""
    x, conv, w1, w2 = make_block(1, 40, 16, 32, torch.float32)
    w1, w2 = first * w1, second * w2
    exact = reference_block(*in_double(x, conv, w1, w2), 4) - x.double()
    found = run(x, conv, w1, w2, 4, math).double() - x.double()
    limit = (2e-6 if math == "fp32" else 2e-3) * float(exact.abs().max())
    assert worst(found, exact) <= limit + 4e-7


def test_any_layout_and_any_weight_type_is_taken():
    """A transposed x and half weights give the bits of their contiguous copies."""
    x, conv, w1, w2 = make_block(2, 30, 5, 7, torch.float32)
    crooked = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not crooked.is_contiguous()
    assert torch.equal(run(crooked, conv, w1, w2, 4, "fp32"), run(x, conv, w1, w2, 4, "fp32"))
    shifted = torch.zeros(x.numel() + 1)[1:].view_as(x).copy_(x)
    assert shifted.data_ptr() % 16
    assert torch.equal(run(shifted, conv, w1, w2, 4, "fp32"), run(x, conv, w1, w2, 4, "fp32"))
    half = run(x, conv, w1.half(), w2.bfloat16(), 4, "fp32")
    assert torch.equal(half, run(x, conv, w1.half().float(), w2.bfloat16().float(), 4, "fp32"))


def test_weights_are_read_at_every_call():
    """Nothing of the weights is kept between calls."""
    x, conv, w1, w2 = make_block(1, 20, 16, 32, torch.float32)
    before = run(x, conv, w1, w2, 1, "fp32")
    w2.mul_(2.0)
    after = run(x, conv, w1, w2, 1, "fp32")
    assert worst(after - x, 2.0 * (before - x).double()) < 1e-5


@pytest.mark.parametrize("math", ["mixed", "fp16"])
def test_launch_form_does_not_change_the_bits(math):
    """Looping programs with resident weights compute what one program per tile computes."""
    x, conv, w1, w2 = make_block(2, 70, 16, 32, STREAM[math])
    arguments = (x, conv, w1, w2, 4, SCALE, EPSILON, math, False)
    plain = dataclasses.replace(table.forward_config(90, math, 16, 32), block_h=16)
    looping = dataclasses.replace(plain, persistent=1, resident=True)
    expected = launch.block_forward_launch(*arguments, plain)[0]
    assert torch.equal(launch.block_forward_launch(*arguments, looping)[0], expected)


def test_saved_statistics_are_those_of_the_convolution():
    """Mean and 1 / sqrt(variance + epsilon) as the backward pass reads them."""
    x, conv, w1, w2 = make_block(2, 130, 5, 8, torch.float32)
    _, mean, rstd = launch.block_forward(x, conv, w1, w2, 200, SCALE, EPSILON, "fp32", True)
    y = x.double() * conv[1].double()
    assert worst(mean, y.mean((1, 2))) < 1e-6
    alone = launch.block_statistics(x, conv, 200, EPSILON, "fp32", 8)
    assert torch.equal(alone[0], mean)
    assert torch.equal(alone[1], rstd)
    assert worst(rstd, (y.var((1, 2), unbiased=False) + EPSILON).rsqrt()) < 1e-5


def test_empty_input_gives_empty_output():
    """No example and no position are both valid."""
    x, conv, w1, w2 = make_block(1, 4, 5, 8, torch.float32)
    assert run(x[:0], conv, w1, w2, 1, "fp32").shape == (0, 4, 5)
    assert run(x[:, :0], conv, w1, w2, 1, "fp32").shape == (1, 0, 5)


def test_wrong_arguments_are_refused_with_a_reason():
    """Shapes, tiers and dilations that do not fit."""
    x, conv, w1, w2 = make_block(1, 4, 5, 8, torch.float32)
    with pytest.raises(InputError, match="math is 'tf32'"):
        run(x, conv, w1, w2, 1, "tf32")
    with pytest.raises(InputError, match="needs conv_weight"):
        run(x, conv, w1, w2.T, 1, "fp32")
    with pytest.raises(InputError, match="dilation is 0"):
        run(x, conv, w1, w2, 0, "fp32")
    with pytest.raises(InputError, match="at most 1024"):
        table.forward_config(90, "fp32", 1025, 64)
