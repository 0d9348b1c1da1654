"""Check the Triton kernels on a GPU against float64, then time them beside cherimoya.

    python benchmarks/check_kernels_gpu.py [--budget 170] [--upstream none|train|all]

Refuses to time what is wrong. Prints one compact table last. Times are GPU microseconds: CUDA graph
of 10 calls over rotating buffers, median of 20 replays; rows marked eager are wall time per call.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import math as _math
import statistics
import sys
import time

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu

from cheri_export.kernels import launch, launch_block, table
from cheri_export.tolerance import block_limit

EPSILON, SCALE = 1e-3, 0.15
STREAM = {
    "fp32": torch.float32,
    "mixed": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
GRADIENT_LIMITS = {
    "fp32": (2e-6, 5e-6, 5e-6, 5e-6),
    "mixed": (1e-3, 5e-3, 3e-3, 3e-3),
    "fp16": (2e-3, 5e-3, 3e-3, 3e-3),
    "bf16": (1e-2, 2e-2, 4e-3, 4e-3),
}
C, H, LENGTH, DILATION = 128, 256, 1024, 4
START = time.monotonic()
LINES: list[str] = []
FAILURES: list[str] = []

F = table.ForwardConfig
FORWARD_CANDIDATES = {
    "half": [
        F(64, 64, 4, 2, 2, stats_warps=8), F(64, 64, 4, 3, 2, stats_warps=8),
        F(64, 32, 4, 3, 2, stats_warps=8), F(64, 64, 8, 2, 2, stats_warps=8),
        F(64, 32, 8, 3, 2, stats_warps=8), F(128, 64, 8, 2, 2, stats_warps=8),
        F(128, 32, 8, 3, 2, stats_warps=8), F(64, 128, 8, 1, 2, True, 1, stats_warps=8),
        F(64, 128, 4, 1, 2, True, 1, stats_warps=8), F(128, 128, 8, 1, 2, True, 1, stats_warps=8),
        F(64, 64, 4, 2, 1, stats_warps=8), F(64, 64, 4, 2, 2, stats_l=32, stats_warps=4),
        F(64, 64, 4, 2, 2, stats_l=128, stats_warps=8),
    ],
    "mixed": [
        F(64, 64, 8, 2, 1, stats_warps=8), F(64, 32, 8, 2, 1, stats_warps=8),
        F(128, 64, 8, 2, 1, stats_warps=8), F(64, 32, 4, 2, 1, stats_warps=8),
        F(32, 64, 4, 2, 1, stats_warps=8), F(64, 128, 8, 1, 1, True, 1, stats_warps=8),
    ],
    "fp32": [
        F(64, 32, 8, 2, 0, stats_warps=8), F(64, 64, 8, 1, 0, stats_warps=8),
        F(64, 32, 4, 2, 0, stats_warps=8), F(128, 32, 8, 2, 0, stats_warps=8),
        F(64, 64, 8, 2, 0, stats_warps=8), F(64, 32, 8, 2, 0, stats_l=32, stats_warps=4),
    ],
}  # fmt: skip
BACKWARD_CANDIDATES = [
    {"splits": 128}, {"grad_stages": 3},
    {"splits": 32}, {"splits": 132},
    {"mlp_l": 64, "mlp_h": 64, "mlp_warps": 8}, {"mlp_l": 64, "mlp_h": 32, "mlp_warps": 4},
    {"mlp_l": 64, "mlp_h": 16, "mlp_warps": 8}, {"mlp_l": 32, "mlp_h": 32, "mlp_warps": 4},
    {"conv_l": 8}, {"conv_l": 32, "conv_warps": 8},
]  # fmt: skip


def say(text: str) -> None:
    """Progress on stderr."""
    print(f"[{time.monotonic() - START:6.1f}s] {text}", file=sys.stderr, flush=True)


def reference(x: Tensor, conv: Tensor, w1: Tensor, w2: Tensor, dilation: int) -> Tensor:
    """The block in the type of its arguments."""
    length = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, dilation, dilation))
    y = padded[:, :length] * conv[0] + x * conv[1] + padded[:, 2 * dilation :] * conv[2]
    y = y - y.mean((1, 2), keepdim=True)
    z = y / torch.sqrt((y * y).mean((1, 2), keepdim=True) + EPSILON)
    return x + SCALE * (gelu(z @ w1.T, approximate="tanh") @ w2.T)


def make(n: int, length: int, channels: int, hidden: int, tier: str, trained: bool = True):
    """Random x and weights on the GPU."""
    torch.manual_seed(length)
    conv_std, std = (0.3, 0.1) if trained else (0.02, 0.02)
    cuda = {"device": "cuda"}
    return (
        torch.randn(n, length, channels, **cuda).to(STREAM[tier]),
        conv_std * torch.randn(3, channels, **cuda),
        std * torch.randn(hidden, channels, **cuda),
        std * torch.randn(channels, hidden, **cuda),
    )


def judge(label: str, found: Tensor, expected: Tensor, limit: float) -> float:
    """Largest error; a failure is recorded."""
    error = float(torch.nan_to_num((found.double() - expected.detach()).abs(), nan=_math.inf).max())
    if not error <= limit:
        FAILURES.append(f"{label}: error {error:.3g} > {limit:.3g}")
    return error


def same(label: str, one: Tensor, other: Tensor) -> None:
    """Bitwise equality; a failure is recorded."""
    if not torch.equal(one, other):
        FAILURES.append(f"{label}: bits differ")


def check_block(tier: str) -> None:
    """Forward and backward of one tier at several shapes."""
    worst_out, worst_grad = 0.0, [0.0] * 4
    shapes = [
        (4, 1024, C, H, 4, True), (4, 1024, C, H, 256, False), (2, 2114, C, H, 64, True),
        (2, 130, 48, 100, 200, True),
    ]  # fmt: skip
    for n, length, channels, hidden, dilation, trained in shapes:
        label = f"{tier} {n}x{length}x{channels} d={dilation}"
        parts = make(n, length, channels, hidden, tier, trained)
        arguments = (dilation, SCALE, EPSILON, tier)
        out, mean, rstd = launch.block_forward(*parts, *arguments, save_stats=True)
        exact = [part.double().requires_grad_() for part in parts]
        expected = reference(*exact, dilation)
        limit = block_limit(tier, trained_scale=trained, max_abs_input=float(parts[0].abs().max()))
        worst_out = max(worst_out, judge(f"out {label}", out, expected, limit) / limit)
        same(f"repeat {label}", out, launch.block_forward(*parts, *arguments)[0])
        alone = launch.block_forward(parts[0][-1:].clone(), *parts[1:], *arguments)[0]
        same(f"alone {label}", out[-1:], alone)
        if tier in table.HALF_TIERS:
            halves = (parts[0], parts[1], parts[2].half(), parts[3].half())
            same(f"fp16 weights {label}", out, launch.block_forward(*halves, *arguments)[0])
        grad = torch.randn_like(parts[0]) * (1.0 if tier == "fp16" else 1e-6)
        back = (dilation, SCALE, tier)
        found = launch.block_backward(grad, *parts, mean, rstd, *back)
        wanted = torch.autograd.grad(expected, exact, grad.double())
        for i, (have, want) in enumerate(zip(found, wanted, strict=True)):
            most = float(want.abs().max())
            error = judge(f"grad {i} {label}", have, want, GRADIENT_LIMITS[tier][i] * most)
            worst_grad[i] = max(worst_grad[i], error / most)
        again = launch.block_backward(grad, *parts, mean, rstd, *back)
        for i in range(4):
            same(f"grad {i} repeat {label}", found[i], again[i])
        alone = launch.block_backward(
            grad[-1:].clone(), parts[0][-1:].clone(), *parts[1:], mean[-1:], rstd[-1:], *back
        )
        same(f"dx alone {label}", found[0][-1:], alone[0])
    grads = " ".join(f"{value:.1e}" for value in worst_grad)
    LINES.append(f"check {tier:5s} out/limit {worst_out:.2f}  grad rel (x conv w1 w2) {grads}")
    say(LINES[-1])


def check_ends() -> None:
    """Stem and head at real sizes."""
    torch.manual_seed(0)
    index = torch.randint(4, (4, 2114), device="cuda")
    sequence = torch.eye(4, device="cuda")[index].transpose(1, 2).contiguous()
    weight, bias = 0.1 * torch.randn(C, 4, 21, device="cuda"), torch.randn(C, device="cuda")
    for name, value in (("one-hot", sequence), ("any", 10 * torch.randn_like(sequence))):
        exact = gelu(
            conv1d(value.double(), weight.double(), bias.double(), padding=10), approximate="tanh"
        ).transpose(1, 2)
        out = launch.stem_forward(value, weight, bias, torch.float32, "fp32")
        limit = 1e-6 * max(1.0, float(exact.abs().max()))
        LINES.append(f"check stem {name} error {judge(f'stem {name}', out, exact, limit):.1e}")
    for tracks, outputs, width, start in ((0, 1, 75, 557), (2, 2, 75, 557), (0, 2, 1, 520)):
        x = torch.randn(4, 2114, C, device="cuda")
        control = torch.rand(4, tracks, 2114, device="cuda") if tracks else None
        parts = (
            0.02 * torch.randn(outputs, C + tracks, width, device="cuda"),
            torch.randn(outputs, device="cuda"),
            torch.randn(1, C + (tracks > 0), device="cuda"),
            torch.randn(1, device="cuda"),
        )
        profile, counts = launch.head_forward(
            x, control, *parts, start, start, start - 37, start - 37, "fp32"
        )
        both = x.double().transpose(1, 2)
        inner = slice(start - 37, 2114 - start + 37)
        mean = both[:, :, inner].mean(2)
        if control is not None:
            both = torch.cat([both, control.double()], 1)
            seen = control[:, :, inner].double().sum((1, 2))
            mean = torch.cat([mean, torch.log(seen + 1)[:, None]], 1)
        exact = conv1d(both, parts[0].double(), parts[1].double(), padding=width // 2)
        label = f"head T={tracks} O={outputs} k={width}"
        first = judge(f"{label} profile", profile, exact[:, :, start : 2114 - start], 2e-5)
        second = judge(f"{label} counts", counts, mean @ parts[2].double().T + parts[3], 1e-5)
        LINES.append(f"check {label} profile {first:.1e} counts {second:.1e}")


def graph_us(call, calls: int = 10, replays: int = 20) -> float:
    """GPU time of one call; `call(i)` takes the number of a rotating buffer."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [one.elapsed_time(two) for one, two in itertools.pairwise(marks)]
    return 1000 * statistics.median(times) / calls


def eager_us(call, calls: int = 10, repeats: int = 7) -> float:
    """Wall time of one eager call."""
    call(0)
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / calls)
    return 1e6 * statistics.median(times)


def buffers(n: int, tier: str):
    """Weights as the tier stores them, and enough inputs and outputs to leave the L2 cache."""
    x, conv, w1, w2 = make(n, LENGTH, C, H, tier)
    if tier in table.HALF_TIERS:
        w1, w2 = w1.half(), w2.half()
    count = max(2, min(8, 400_000_000 // (2 * x.nbytes)))
    return [x.clone() for _ in range(count)], [torch.empty_like(x) for _ in range(count)], (
        conv, w1, w2,
    )  # fmt: skip


def forward_us(n: int, tier: str, config: table.ForwardConfig) -> float:
    """GPU time of the inference forward with one configuration."""
    xs, outs, weights = buffers(n, tier)
    arguments = (*weights, DILATION, SCALE, EPSILON, tier, False, config)

    def call(i: int) -> None:
        launch.block_forward_launch(xs[i % len(xs)], *arguments, out=outs[i % len(xs)])

    return graph_us(call)


def eager_forward_us(n: int, tier: str) -> float:
    """Eager wall time of the inference forward."""
    xs, _, weights = buffers(n, tier)
    arguments = (*weights, DILATION, SCALE, EPSILON, tier)
    return eager_us(lambda i: launch.block_forward(xs[i % len(xs)], *arguments), calls=20)


def ends_us(tier: str) -> tuple[float, float]:
    """GPU time of the stem (k = 21) and of the head (k = 75, one output) at 64 x 2114."""
    cuda = {"device": "cuda"}
    index = torch.randint(4, (64, 2114), **cuda)
    sequence = torch.eye(4, **cuda)[index].transpose(1, 2).contiguous()
    weight, bias = 0.1 * torch.randn(C, 4, 21, **cuda), torch.randn(C, **cuda)
    x = torch.randn(64, 2114, C, **cuda).to(STREAM[tier])
    parts = (
        0.02 * torch.randn(1, C, 75, **cuda), torch.randn(1, **cuda),
        torch.randn(1, C, **cuda), torch.randn(1, **cuda),
    )  # fmt: skip
    return (
        graph_us(lambda i: launch.stem_forward(sequence, weight, bias, STREAM[tier], tier)),
        graph_us(lambda i: launch.head_forward(x, None, *parts, 557, 557, 520, 520, tier)),
    )


def training_us(
    n: int, tier: str, config: table.BackwardConfig
) -> tuple[float, float, float, float]:
    """GPU time of the training forward and of the backward; eager wall times.

    The third figure is eager forward + backward, the fourth the eager forward alone.
    """
    xs, grads, _ = buffers(n, tier)
    weights = make(1, 8, C, H, tier)[1:]
    _, mean, rstd = launch.block_forward(xs[0], *weights, DILATION, SCALE, EPSILON, tier, True)
    for grad in grads:
        grad.normal_()

    def forward(i: int) -> None:
        x = xs[i % len(xs)]
        launch.block_forward(x, *weights, DILATION, SCALE, EPSILON, tier, True)

    def backward(i: int) -> None:
        i %= len(xs)
        launch_block.block_backward_launch(
            grads[i], xs[i], *weights, mean, rstd, DILATION, SCALE, tier, True, config
        )

    def both(i: int) -> None:
        forward(i)
        backward(i)

    return (
        graph_us(forward), graph_us(backward, calls=5),
        eager_us(both, calls=5), eager_us(forward, calls=5),
    )  # fmt: skip


def upstream_us(n: int, tier: str, inference: bool) -> list[float]:
    """cherimoya: inference under a graph, training forward and forward + backward eager."""
    from cherimoya.cheri import CheriBlock

    xs, _, _ = buffers(n, tier)
    block = CheriBlock(C, DILATION).cuda()
    half = tier in table.HALF_TIERS
    times = [_math.nan, _math.nan]
    if inference:
        frozen = (block.to(STREAM[tier]) if half else block).eval()
        with torch.no_grad():
            times = [graph_us(lambda i: frozen(xs[i % len(xs)]))]
            times.append(eager_us(lambda i: frozen(xs[i % len(xs)]), calls=20))
        block = CheriBlock(C, DILATION).cuda()
    block = (block.to(STREAM[tier]) if half else block).train()
    grad = torch.randn_like(xs[0])
    inputs = [x.requires_grad_() for x in xs]
    times.append(eager_us(lambda i: block(inputs[i % len(xs)]), calls=5))
    times.append(eager_us(lambda i: block(inputs[i % len(xs)]).backward(grad), calls=5))
    return times


def main() -> int:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=170.0, help="seconds; 170 by default")
    parser.add_argument("--upstream", choices=("none", "train", "all"), default="train")
    parser.add_argument("--candidates", choices=("none", "forward", "all"), default="all")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    arch = table.nearest_architecture(
        int("{}{}".format(*torch.cuda.get_device_capability()))  # e.g. 90
    )
    poison, poison_like = torch.empty, torch.empty_like
    torch.empty = lambda *a, **k: poison(*a, **k).fill_(float("nan"))
    torch.empty_like = lambda *a, **k: poison_like(*a, **k).fill_(float("nan"))
    for tier in STREAM:
        check_block(tier)
    check_ends()
    torch.empty, torch.empty_like = poison, poison_like

    def left() -> bool:
        return time.monotonic() - START < options.budget

    if not FAILURES:
        for n in (16, 64, 512):
            for tier in STREAM:
                time_us = forward_us(n, tier, table.forward_config(arch, tier, C, H))
                eager = eager_forward_us(n, tier)
                LINES.append(f"infer N={n:3d} {tier:5s} {time_us:8.1f} eager {eager:8.1f}")
        for tier in ("fp32", "fp16"):
            stem, head = ends_us(tier)
            LINES.append(f"ends 64 x 2114 {tier:5s} stem {stem:8.1f} head {head:8.1f}")
        say("inference timed")
        for n in (16, 64, 512):
            for tier in STREAM:
                row = training_us(n, tier, table.backward_config(arch, tier, C, H))
                LINES.append(
                    f"train N={n:3d} {tier:5s} forward {row[0]:8.1f} backward {row[1]:8.1f} "
                    f"eager forward {row[3]:8.1f} forward+backward {row[2]:8.1f}"
                )
        say("training timed")
        if options.upstream != "none" and importlib.util.find_spec("cherimoya"):
            for n, tier in itertools.product((512, 64, 16), ("bf16", "fp32")):
                if left():
                    row = upstream_us(n, tier, options.upstream == "all")
                    LINES.append(
                        f"cherimoya N={n:3d} {tier:5s} infer {row[0]:8.1f} eager {row[1]:8.1f}; "
                        f"train eager forward {row[2]:8.1f} forward+backward {row[3]:8.1f}"
                    )
                    say(LINES[-1])
        if options.candidates != "none":
            for tier, kind in (("bf16", "half"), ("fp32", "fp32"), ("mixed", "mixed")):
                for config in FORWARD_CANDIDATES[kind] if left() else ():
                    if left():
                        values = ", ".join(str(v) for v in dataclasses.astuple(config))
                        try:
                            row = [forward_us(n, tier, config) for n in (64, 512)]
                            text = f"N=64 {row[0]:8.1f} N=512 {row[1]:8.1f}"
                        except Exception as error:  # a candidate may ask for too much
                            text = type(error).__name__
                        LINES.append(f"try {tier:5s} ({values}) {text}")
            say("forward candidates timed")
        if options.candidates == "all":
            for tier in ("bf16", "fp32"):
                base = table.backward_config(arch, tier, C, H)
                for change in BACKWARD_CANDIDATES:
                    if left():
                        try:
                            row = training_us(512, tier, dataclasses.replace(base, **change))
                            text = f"{row[1]:8.1f}"
                        except Exception as error:  # as above
                            text = type(error).__name__
                        LINES.append(f"try backward {tier:5s} {change} {text}")
        if not left():
            LINES.append(f"stopped after {options.budget:.0f} s: some rows were not measured")
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; C={C} H={H} L={LENGTH} d={DILATION}, microseconds")
    print("\n".join(LINES))
    for failure in FAILURES:
        print("FAIL", failure)
    print("FAILED" if FAILURES else "ALL CHECKS PASSED")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
