"""One CheriBlock, ours beside cherimoya 0.3.1's: the table of its README, with errors, on a GPU.

python benchmarks/bench_block.py [--sizes 16 64 512] [--rounds 9] [--no-upstream] [--out DIR]

L=1024, C=128, dilation 4; training forward, forward + backward, inference with and without eval();
each by CUDA events around eager calls and by CUDA graph. The runners take turns within one process
on fresh random inputs at trained-scale weights (linear std 0.1, conv std 0.3); medians with the
20 % and 80 % quantiles. The largest error against float64 is beside every time. Rows go to
results/bench_block.jsonl.
"""

import argparse
import importlib.util
import itertools
import os
from pathlib import Path

import numpy as np
import rows
import torch

import cheri_export
from cheri_export.reference import block as block64

C, LENGTH, DILATION = 128, 1024, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CALLS = 10


def randomise(block):
    """Weights of trained scale, the same for every runner."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            std = 0.3 if "conv_weight" in name else 0.1
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return block


def runners(dtype_name, upstream):
    """Label, tier and block of every runner for one type."""
    dtype = DTYPES[dtype_name]
    tiers = ("fp32", "mixed") if dtype_name == "fp32" else (dtype_name,)
    found = []
    for tier in tiers:
        block = randomise(cheri_export.CheriBlock(C, DILATION, math=tier)).cuda().to(dtype)
        found.append(("cheri-export", tier, block))
    if upstream:
        from cherimoya import CheriBlock

        found.append(("cherimoya", dtype_name, randomise(CheriBlock(C, DILATION)).cuda().to(dtype)))
    return found


def column_call(column, block, inputs, grad):
    """The call that a column times; argument: number of a rotating input."""
    block.train(column != "inference eval")
    if column.startswith("inference"):

        def call(i):
            with torch.no_grad():
                return block(inputs[i % len(inputs)])

    elif column == "training forward":

        def call(i):
            return block(inputs[i % len(inputs)])

    else:

        def call(i):
            x = inputs[i % len(inputs)]
            x.grad = None
            block.zero_grad(set_to_none=True)
            block(x).backward(grad)
            return x.grad

    return call


def eager_ms(call):
    """Events around CALLS eager calls, per call."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for i in range(CALLS):
        call(i)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / CALLS


def capture(call):
    """A CUDA graph of CALLS calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    return graph


def graph_ms(graph):
    """One replay, per call."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / CALLS


def expected(block, x):
    """The block in float64, example by example."""
    weights = [p.detach().double() for p in (block.conv_weight, block.linear1.weight)]
    w2 = block.linear2.weight.detach().double()
    return [block64(row.double(), *weights, w2, DILATION, 0.15, 1e-3) for row in x.detach()]


def error_of(found, wanted):
    """Largest absolute error; NaN counts as infinite."""
    errors = [
        (f.detach().double() - w).abs().max().item() for f, w in zip(found, wanted, strict=True)
    ]
    return float("inf") if np.isnan(errors).any() else max(errors)


def peak_mib(call):
    """Memory that one call needs beyond what is held before it."""
    call(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(n, dtype_name, rounds, upstream):
    """All columns of all runners for one N and type."""
    nbytes = n * LENGTH * C * DTYPES[dtype_name].itemsize
    count = max(2, min(8, 400_000_000 // (2 * nbytes)))
    inputs = [
        torch.randn(n, LENGTH, C, device="cuda").to(DTYPES[dtype_name]).requires_grad_()
        for _ in range(count)
    ]
    grad = torch.randn_like(inputs[0])
    found = []
    columns = ("training forward", "training forward + backward", "inference eval", "inference")
    for column in columns:
        entries = []
        for runner, tier, block in runners(dtype_name, upstream):
            call = column_call(column, block, inputs, grad)
            result = call(0)
            wrong = None
            if "backward" not in column:
                wrong = error_of(result, expected(block, inputs[0]))
            del result
            peak = peak_mib(call)
            for i in range(3):
                call(i)
            try:
                graph = None if "backward" in column else capture(call)
            except RuntimeError as problem:
                print(f"{runner} {column}: no CUDA graph ({str(problem)[:80]})")
                graph = None
            entries.append((runner, tier, call, graph, wrong, peak, [], []))
        for _ in range(rounds):
            for _, _, call, graph, _, _, eager, graphed in entries:
                eager.append(eager_ms(call))
                if graph is not None:
                    graphed.append(graph_ms(graph))
        for runner, tier, _, _, wrong, peak, eager, graphed in entries:
            for way, times in (("eager", eager), ("graph", graphed)):
                if not times:
                    continue
                row = {
                    "runner": runner,
                    "dtype": dtype_name,
                    "tier": tier,
                    "N": n,
                    "L": LENGTH,
                    "C": C,
                    "dilation": DILATION,
                    "column": column,
                    "timing": way,
                    "ms": round(float(np.median(times)), 5),
                    "spread": [round(float(q), 5) for q in np.quantile(times, [0.2, 0.8])],
                    "max_abs": wrong,
                    "peak_mib": round(peak, 1),
                }
                found.append(row)
                print(
                    f"N={n:<4}{dtype_name:5}{column:28}{way:6}{runner:13}{tier:6}"
                    f"{row['ms']:9.4f} ms  "
                    f"{'' if wrong is None else f'error {wrong:.1e}'}  {row['peak_mib']:.0f} MiB",
                    flush=True,
                )
    return found


def ratios(found):
    """Ours over cherimoya's, for every cell that both have."""
    print("\nratio to cherimoya in this run")
    base = {}
    for row in found:
        if row["runner"] == "cherimoya":
            base[row["N"], row["dtype"], row["column"], row["timing"]] = row["ms"]
    for row in found:
        key = row["N"], row["dtype"], row["column"], row["timing"]
        if row["runner"] != "cherimoya" and key in base:
            label = f"N={key[0]:<4}{key[1]:5}{key[2]:28}{key[3]:6}{row['tier']:6}"
            print(f"{label}{row['ms'] / base[key]:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-upstream", action="store_true")
    parser.add_argument("--out", help="write the rows to this folder instead of results/")
    options = parser.parse_args()
    upstream = not options.no_upstream and importlib.util.find_spec("cherimoya") is not None
    stamp = rows.provenance("torch", "triton", "cherimoya")
    stamp["gpu"] = torch.cuda.get_device_name()
    found = []
    for n, dtype_name in itertools.product(options.sizes, options.dtypes):
        found += measure(n, dtype_name, options.rounds, upstream)
    ratios(found)
    if options.out:
        rows.RESULTS = Path(os.fspath(options.out))
    print("->", rows.append("bench_block", [{**row, **stamp} for row in found]))


if __name__ == "__main__":
    main()
