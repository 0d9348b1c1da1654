"""The block's kernels on a GPU against float64: `pytest -m gpu`."""

from __future__ import annotations

import hashlib
import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cheri_export.kernels import launch
from cheri_export.tolerance import block_limit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROOT = pathlib.Path(__file__).parent.parent
EPSILON, SCALE = 1e-3, 0.15
STREAM = {
    "fp32": torch.float32,
    "mixed": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
TIERS = tuple(STREAM)
# Largest error of a gradient (x, conv_weight, w1, w2) over its largest element.
GRADIENT_LIMITS = {
    "fp32": (2e-6, 5e-6, 5e-6, 5e-6),
    "mixed": (1e-3, 5e-3, 3e-3, 3e-3),
    "fp16": (2e-3, 5e-3, 3e-3, 3e-3),
    "bf16": (1e-2, 2e-2, 4e-3, 4e-3),
}


def reference(x: Tensor, conv: Tensor, w1: Tensor, w2: Tensor, dilation: int) -> Tensor:
    """The block in the type of its arguments."""
    length = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, dilation, dilation))
    y = padded[:, :length] * conv[0] + x * conv[1] + padded[:, 2 * dilation :] * conv[2]
    y = y - y.mean((1, 2), keepdim=True)
    z = y / torch.sqrt((y * y).mean((1, 2), keepdim=True) + EPSILON)
    return x + SCALE * (torch.nn.functional.gelu(z @ w1.T, approximate="tanh") @ w2.T)


def make(n: int, length: int, channels: int, hidden: int, tier: str, seed: int = 0):
    """Random x and trained-scale weights on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    return (
        normal(n, length, channels).to(STREAM[tier]),
        0.3 * normal(3, channels),
        0.1 * normal(hidden, channels),
        0.1 * normal(channels, hidden),
    )


def forward(parts, dilation: int, tier: str, **options):
    """`block_forward` with the constants of these tests."""
    return launch.block_forward(*parts, dilation, SCALE, EPSILON, tier, **options)


def backward(grad: Tensor, parts, mean: Tensor, rstd: Tensor, dilation: int, tier: str):
    """`block_backward`, likewise."""
    return launch.block_backward(grad, *parts, mean, rstd, dilation, SCALE, tier)


def worst(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    difference = (found.double() - expected.detach()).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every fresh allocation with NaN, so that an element that is not written is seen."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(
        torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan"))
    )


def check(n: int, length: int, channels: int, hidden: int, dilation: int, tier: str) -> None:
    """Output and the four gradients of one case against float64."""
    label = f"{tier} ({n}, {length}, {channels}) hidden {hidden} dilation {dilation}"
    parts = make(n, length, channels, hidden, tier, seed=length)
    exact = [part.double().requires_grad_() for part in parts]
    expected = reference(*exact, dilation)
    out, mean, rstd = forward(parts, dilation, tier, save_stats=True)
    # The figures are for unit-scale outputs of up to 128 channels.
    wide = max(1.0, channels * hidden / (128 * 256))
    limit = wide * block_limit(
        tier, trained_scale=True, max_abs_input=float(expected.detach().abs().max())
    )
    assert worst(out, expected) <= limit, label
    grad = torch.randn(parts[0].shape, device="cuda", generator=torch.Generator("cuda")).to(
        parts[0].dtype
    )
    found = backward(grad, parts, mean, rstd, dilation, tier)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for i, (have, want) in enumerate(zip(found, wanted, strict=True)):
        # Few terms, which may cancel: the sum is small beside each of them.
        few = 1.0 if n * length >= 256 else 4.0
        most = float(want.abs().max())
        if channels < 16:  # the norm takes away nearly all that is common to few channels
            most = max(most, 0.1)
        assert worst(have, want) <= few * GRADIENT_LIMITS[tier][i] * most + 1e-30, (label, i)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shape", [(4, 1024, 128, 256, 4), (3, 2114, 128, 256, 256)])
def test_real_sizes_agree_with_float64(shape, tier):
    """Forward and backward, every element written; also the first backward at a new shape."""
    check(*shape, tier)


SIZES = (
    (1, 4), (3, 5), (16, 64), (31, 62), (48, 96), (64, 128), (96, 193), (128, 512), (200, 200),
)  # fmt: skip
CASES = [(size, TIERS[i % 4]) for i, size in enumerate(SIZES)] + [
    ((128, 256), tier) for tier in TIERS
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("size", "tier"), CASES, ids=str)
def test_random_shapes_agree_with_float64(size, tier):
    """Sixteen batches, lengths and dilations for each of 13 sizes and tiers: 208 shapes."""
    draw = random.Random(f"{size} {tier}")
    for _ in range(16):
        length = draw.choice([draw.randint(2, 300), draw.randint(2, 300), 1, 64, 2114])
        dilation = draw.choice([1, 4, 64, draw.randint(1, length + 50)])
        check(draw.randint(1, 5), length, *size, dilation, tier)


@pytest.mark.parametrize("tier", TIERS)
def test_an_example_does_not_depend_on_its_batch(tier):
    """Output and dx: alone, and in the last place of a batch on either side of MERGE_BELOW."""
    parts = make(150, 1024, 128, 256, tier)
    out, mean, rstd = forward(parts, 4, tier, save_stats=True)
    grad = torch.randn_like(parts[0])
    dx = backward(grad, parts, mean, rstd, 4, tier)[0]
    alone = (parts[0][-1:].clone(), *parts[1:])
    out_alone, mean_alone, rstd_alone = forward(alone, 4, tier, save_stats=True)
    assert torch.equal(out[-1:], out_alone)
    assert torch.equal(mean[-1:], mean_alone) and torch.equal(rstd[-1:], rstd_alone)
    assert torch.equal(
        dx[-1:], backward(grad[-1:].clone(), alone, mean_alone, rstd_alone, 4, tier)[0]
    )
    statistics = launch.block_statistics(parts[0], parts[1], 4, EPSILON, tier, 256)
    assert torch.equal(statistics[0], mean) and torch.equal(statistics[1], rstd)


def digest() -> str:
    """Hash of output and gradients in every tier."""
    found = hashlib.sha256()
    for tier in TIERS:
        parts = make(5, 700, 128, 256, tier)
        out, mean, rstd = forward(parts, 16, tier, save_stats=True)
        grads = backward(parts[0].flip(1).contiguous(), parts, mean, rstd, 16, tier)
        for tensor in (out, *grads):
            found.update(tensor.float().cpu().numpy().tobytes())
    return found.hexdigest()


def start() -> subprocess.Popen[str]:
    """Another process that prints `digest`."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_kernels_gpu as t; print(t.digest())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )


def test_bits_repeat_across_processes_that_run_at_once():
    """Two other processes, at the same time, and this one twice."""
    others = [start(), start()]
    here = digest()
    assert digest() == here
    for other in others:
        assert other.communicate(timeout=300)[0].strip() == here
        assert other.returncode == 0


def test_more_than_two_to_the_31_elements():
    """The last example of a tensor that int32 cannot address, forward and backward."""
    need = 9000 * 2114 * 128 * 2
    if torch.cuda.mem_get_info()[0] < 5 * need:
        pytest.skip("needs 25 GB of GPU memory")
    small = make(1, 2114, 128, 256, "fp16")
    x = torch.zeros(9000, 2114, 128, device="cuda", dtype=torch.float16)
    x[-1] = small[0][0]
    x[0] = small[0][0].flip(0)
    out, mean, rstd = forward((x, *small[1:]), 64, "fp16", save_stats=True)
    alone, mean_alone, rstd_alone = forward(small, 64, "fp16", save_stats=True)
    assert torch.equal(out[-1], alone[0])
    del out
    found = backward(x, (x, *small[1:]), mean, rstd, 64, "fp16")[0][-1]
    assert torch.equal(found, backward(small[0], small, mean_alone, rstd_alone, 64, "fp16")[0][0])


@pytest.mark.parametrize("tier", TIERS)
def test_graph_replay_reads_the_weights_anew(tier):
    """A captured forward and backward follow weights that are edited between replays."""
    parts = make(2, 300, 128, 256, tier)
    grad = torch.randn_like(parts[0])

    def run():
        out, mean, rstd = forward(parts, 4, tier, save_stats=True)
        return out, *backward(grad, parts, mean, rstd, 4, tier)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for factor in (1.0, 1.5):
        for weight in parts[1:]:
            weight.data.mul_(factor)
        graph.replay()
        for have, want in zip(captured, run(), strict=True):
            assert torch.equal(have, want)


def test_side_stream_and_any_layout():
    """Work goes to the current stream; a transposed or unaligned input gives the same bits."""
    x, *weights = make(3, 301, 96, 192, "fp32")
    expected = forward((x, *weights), 4, "fp32")[0]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = x.neg().neg_()
        found = forward((late, *weights), 4, "fp32")[0]
    side.synchronize()
    assert torch.equal(found, expected)
    crooked = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(forward((crooked, *weights), 4, "fp32")[0], expected)
    shifted = torch.zeros(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)
    assert torch.equal(forward((shifted, *weights), 4, "fp32")[0], expected)


@pytest.mark.parametrize("tier", ["fp32", "mixed"])
def test_statistics_survive_a_mean_far_above_the_spread(tier):
    """With |mean| / std = 3000 the error stays that of float32 arithmetic."""
    x, conv, w1, w2 = make(2, 1024, 128, 256, tier)
    conv = torch.zeros_like(conv)
    conv[1] = 1.0
    x = x + 3000.0
    exact = reference(x.double(), conv.double(), w1.double(), w2.double(), 4)
    strict = worst(reference(x, conv, w1, w2, 4), exact)
    assert worst(forward((x, conv, w1, w2), 4, tier)[0], exact) <= 4 * strict + 1e-3 * (
        tier == "mixed"
    )
