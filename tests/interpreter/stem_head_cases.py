"""The stem's and the head's kernels in Triton's interpreter against float64."""

from __future__ import annotations

import pytest
import torch
from common import STREAM, TIERS, in_double, slack, worst
from common import poisoned as poisoned
from torch import Tensor
from torch.nn.functional import conv1d, gelu

from cheri_export.errors import InputError
from cheri_export.kernels import launch


def stem(sequence: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The stem in the type of its arguments."""
    out = conv1d(sequence, weight, bias, padding=weight.shape[2] // 2)
    return gelu(out, approximate="tanh").transpose(1, 2)


def head(x, control, weight, bias, count_weight, count_bias, start, end, count_start, count_end):
    """The head in the type of its arguments."""
    x = x.transpose(1, 2)
    length = x.shape[2]
    both = x if control is None else torch.cat([x, control], dim=1)
    profile = conv1d(both, weight, bias, padding=weight.shape[2] // 2)[:, :, start : length - end]
    mean = x[:, :, count_start : length - count_end].mean(2)
    if control is not None:
        seen = control[:, :, count_start : length - count_end].sum((1, 2))
        mean = torch.cat([mean, torch.log(seen + 1)[:, None]], dim=1)
    return profile, mean @ count_weight.T + count_bias


def make_stem(n: int, length: int, channels: int, width: int, one_hot: bool):
    """Sequence, weight and bias."""
    torch.manual_seed(length)
    if one_hot:
        sequence = torch.eye(5)[torch.randint(5, (n, length)), :4].transpose(1, 2).contiguous()
    else:
        sequence = 100 * torch.randn(n, 4, length)
    return sequence, 0.2 * torch.randn(channels, 4, width), 0.1 * torch.randn(channels)


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize(
    ("n", "length", "channels", "width"), [(2, 1, 3, 19), (3, 65, 16, 21), (1, 70, 130, 21)]
)
def test_stem_is_as_accurate_as_strict_float32(n, length, channels, width, one_hot):
    """For any values, with an all-zero column where the base is unknown."""
    parts = make_stem(n, length, channels, width, one_hot)
    exact = stem(*in_double(*parts))
    found = launch.stem_forward(*parts, torch.float32, "fp32")
    assert worst(found, exact) <= 2 * worst(stem(*parts), exact) + 1e-7


@pytest.mark.parametrize("math", TIERS)
def test_stem_writes_every_stream_type(math):
    """Only the output's rounding remains in the 16-bit tiers."""
    parts = make_stem(2, 33, 16, 21, True)
    exact = stem(*in_double(*parts))
    found = launch.stem_forward(*parts, STREAM[math], math)
    assert found.dtype == STREAM[math]
    rounding = worst(exact.to(STREAM[math]), exact)
    assert worst(found, exact) <= 1.01 * slack(found.dtype) * rounding + 1e-6


CASES = [
    # n, L, C, T, O, k, G, start, end_trim, count_start, count_end_trim
    (2, 130, 16, 0, 1, 75, 1, 20, 25, 10, 12),
    (3, 65, 5, 2, 2, 75, 2, 3, 3, 3, 3),
    (2, 200, 48, 1, 3, 1, 1, 70, 70, 33, 33),
    (1, 1, 3, 0, 1, 1, 1, 0, 0, 0, 0),
]


def make_head(case, dtype):
    """Arguments of the head, without the tier."""
    n, length, channels, tracks, outputs, width, groups, *windows = case
    torch.manual_seed(length)
    control = 5 * torch.rand(n, tracks, length) if tracks else None
    return (
        torch.randn(n, length, channels).to(dtype),
        control,
        0.1 * torch.randn(outputs, channels + tracks, width),
        torch.randn(outputs),
        torch.randn(groups, channels + (tracks > 0)),
        torch.randn(groups),
        *windows,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_head_is_as_accurate_as_strict_float32(case, dtype):
    """Profile and counts for every stream type, with and without controls."""
    tensors, windows = make_head(case, dtype)[:6], make_head(case, dtype)[6:]
    exact = head(*[t if t is None else t.double() for t in tensors], *windows)
    strict = head(*[t if t is None else t.float() for t in tensors], *windows)
    found = launch.head_forward(*tensors, *windows, "fp32")
    for have, floor, want in zip(found, strict, exact, strict=True):
        assert have.dtype == torch.float32
        assert worst(have, want) <= 2 * worst(floor, want) + 1e-6


def test_head_does_not_depend_on_the_batch():
    """An example gives the same bits alone and in the last place."""
    arguments = make_head(CASES[1], torch.float32)
    x, control, *rest = arguments
    together = launch.head_forward(*arguments, "fp32")
    alone = launch.head_forward(x[2:], control[2:], *rest, "fp32")
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one[2:], other)


def test_nan_reaches_the_logits_and_counts_of_its_example_only():
    """A NaN is never lost in a scale, a mask or a maximum."""
    x, control, *rest = make_head(CASES[1], torch.float32)
    x[1, 30, 2] = float("nan")
    profile, counts = launch.head_forward(x, control, *rest, "fp32")
    assert torch.isnan(profile[1, :, 27]).all()
    assert torch.isnan(counts[1]).all()
    assert torch.isfinite(profile[0]).all()
    assert torch.isfinite(counts[2]).all()
    sequence, weight, bias = make_stem(2, 33, 16, 21, True)
    sequence[1, 2, 16] = float("nan")
    out = launch.stem_forward(sequence, weight, bias, torch.float32, "fp32")
    assert torch.isnan(out[1, 6:27]).all()
    assert torch.isfinite(out[0]).all()


def test_a_window_that_leaves_nothing_is_refused():
    """Trims longer than the input."""
    arguments = list(make_head(CASES[0], torch.float32))
    arguments[6] = 130
    with pytest.raises(InputError, match="leave nothing"):
        launch.head_forward(*arguments, "fp32")
