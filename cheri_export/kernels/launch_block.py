"""Host side of the block: checks, workspace, grids and launches.

Everything here may run inside a CUDA graph capture: no synchronisation, no host copy, and weights
are read from their tensors at every call.
"""

from __future__ import annotations

import math as _math

import torch
from torch import Tensor

from cheri_export.errors import InputError
from cheri_export.kernels import block_backward as block_backward_kernels
from cheri_export.kernels import block_forward as block_forward_kernels
from cheri_export.kernels import table
from cheri_export.kernels.host import (
    STREAM_DTYPES,
    aligned,
    check_math,
    g_bound,
    guard,
    launch,
    target,
    z_scale,
)

OPERAND_BYTES = 512 * 2**20
"""Memory of the weight gradients' operands; more examples than fit take another run."""

MERGE_BELOW = 2048
"""From this many tiles on, a launch of its own merges the statistics once per example; below, every
tile merges them, which costs less than a launch. Both give the same bits."""

SUM_BLOCK = 256
"""Elements of one program of `sum_grads_kernel`."""


def _check_block(x: Tensor, conv_weight: Tensor, w1: Tensor, w2: Tensor, dilation: int) -> None:
    if x.ndim != 3 or x.dtype not in STREAM_DTYPES:
        raise InputError(f"x is {tuple(x.shape)} {x.dtype}; expected (N, L, C), fp32, fp16 or bf16")
    channels = x.shape[2]
    hidden = w1.shape[0] if w1.ndim == 2 else 0
    if (
        tuple(conv_weight.shape) != (3, channels)
        or tuple(w1.shape) != (hidden, channels)
        or tuple(w2.shape) != (channels, hidden)
        or hidden < 1
        or channels < 1
    ):
        raise InputError(
            f"x {tuple(x.shape)} needs conv_weight (3, C), w1 (H, C), w2 (C, H); found "
            f"{tuple(conv_weight.shape)}, {tuple(w1.shape)}, {tuple(w2.shape)}"
        )
    if dilation < 1:
        raise InputError(f"dilation is {dilation}; expected at least 1")
    for tensor in (conv_weight, w1, w2):
        if tensor.device != x.device or not tensor.is_floating_point():
            raise InputError(
                f"weights must be floating point on {x.device}; "
                f"found {tensor.dtype} on {tensor.device}"
            )


def prepare_programs(block_c: int, hidden_pad: int) -> int:
    """Programs that `block_forward.prepare_weights` needs."""
    rows = block_forward_kernels.PREPARE_ROWS.value
    return -(-hidden_pad // rows) + -(-block_c // rows)


def block_forward_launch(
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
    save_stats: bool,
    config: table.ForwardConfig,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`block_forward` with a given configuration; for the tuner, which tries several."""
    n_examples, length, channels = x.shape
    hidden = w1.shape[0]
    _, processors, assembly = target(x)
    x, conv_weight, w1, w2 = aligned(x), aligned(conv_weight), aligned(w1), aligned(w2)
    out = torch.empty_like(x) if out is None else out
    mean = rstd = None
    if save_stats:
        mean = torch.empty(n_examples, dtype=torch.float32, device=x.device)
        rstd = torch.empty_like(mean)
    if x.numel() == 0:
        return out, mean, rstd
    block_c = table.power_of_two(channels)
    hidden_pad = -(-hidden // config.block_h) * config.block_h
    size = hidden_pad * block_c
    scaled, split = math in table.SCALED_TIERS, math in table.SPLIT_TIERS
    ready = (
        not scaled
        and w1.dtype == w2.dtype == torch.float16
        and (channels, hidden) == (block_c, hidden_pad)
    )
    stat_tiles = -(-length // config.stats_l)
    tiles = -(-length // config.block_l)
    partial = torch.empty((n_examples, stat_tiles, 2), dtype=torch.float32, device=x.device)
    if ready:
        prepared, inverse, programs = w1, partial, 0
        terms = (w1, w1, w2, w2)
    else:
        count = 4 if split else 2
        prepared = torch.empty((count, size), dtype=torch.float16, device=x.device)
        inverse = (
            torch.empty(hidden_pad + block_c, dtype=torch.float32, device=x.device)
            if scaled
            else partial
        )
        programs = prepare_programs(block_c, hidden_pad)
        terms = (prepared[0], prepared[2 % count], prepared[1], prepared[3 % count])
    dilation = min(dilation, length)  # at the length both side taps are outside, as beyond it
    scale = z_scale(length, channels)
    n_tiles = n_examples * tiles
    merge = n_tiles < MERGE_BELOW
    if mean is None or rstd is None:
        mean = rstd = partial
        if not merge:
            mean = torch.empty(n_examples, dtype=torch.float32, device=x.device)
            rstd = torch.empty_like(mean)
    grid = n_tiles if not config.persistent else min(n_tiles, config.persistent * processors)
    with guard(x):
        launch(
            block_forward_kernels.conv_stats_kernel,
            programs + n_examples * stat_tiles,
            (x, conv_weight, partial, w1, w2, prepared, inverse),
            (length, dilation, stat_tiles, programs),
            (channels, hidden, block_c, hidden_pad, config.stats_l, not ready, scaled, split),
            num_warps=config.stats_warps,
        )
        if not merge:
            launch(
                block_forward_kernels.finish_stats_kernel,
                n_examples,
                (partial, mean, rstd),
                (length, stat_tiles, epsilon),
                (channels, config.stats_l),
                num_warps=1,
            )
        launch(
            block_forward_kernels.fused_block_kernel,
            grid,
            (x, conv_weight, *terms, inverse, partial, out, mean, rstd),
            (
                length, dilation, n_tiles, tiles, stat_tiles,
                residual_scale, epsilon, scale, 0.5 / scale, g_bound(length, channels),
            ),
            (
                channels, hidden_pad, block_c, config.block_l, config.block_h, config.stats_l,
                scaled, split, config.approx if assembly else 0, save_stats,
                config.resident, config.persistent > 0, merge, config.parts,
            ),
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.registers,
        )  # fmt: skip
    return (out, mean, rstd) if save_stats else (out, None, None)


def block_forward(
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
    save_stats: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The block, out = x + residual_scale * w2 gelu(w1 norm(conv(x))), in two launches.

    Parameters
    ----------
    x: torch.Tensor, shape=(N, L, C), dtype=float32, float16 or bfloat16
        Input; made contiguous if it is not.

    conv_weight: torch.Tensor, shape=(3, C), any float dtype
        Taps at i - dilation, i and i + dilation.

    w1, w2: torch.Tensor, shape=(H, C) and (C, H), any float dtype
        Read anew at every call. fp16 weights are used without conversion in the 16-bit tiers.

    dilation, residual_scale, epsilon, math
        See `spec`; `math` is the tier.

    save_stats: bool, optional
        Also return what `block_backward` needs. Default is False.

    Returns
    -------
    out: torch.Tensor, shape=(N, L, C), dtype of x

    mean, rstd: torch.Tensor, shape=(N,), dtype=float32, or None
        Statistics of each example's convolution.

    Raises
    ------
    InputError
        Shapes, types or devices do not match, or no kernel exists for this shape or GPU.
    """
    check_math(math)
    _check_block(x, conv_weight, w1, w2, dilation)
    config = table.forward_config(target(x)[0], math, x.shape[2], w1.shape[0])
    return block_forward_launch(
        x, conv_weight, w1, w2, dilation, residual_scale, epsilon, math, save_stats, config
    )


def block_statistics(
    x: Tensor, conv_weight: Tensor, dilation: int, epsilon: float, math: str, hidden: int
) -> tuple[Tensor, Tensor]:
    """Mean and rstd as `block_forward` saves them, without the rest of the forward pass.

    Parameters
    ----------
    x, conv_weight, dilation, epsilon, math
        As for `block_forward`.

    hidden: int
        H of the block; it selects the configuration and with it the order of the sums.
    """
    check_math(math)
    n_examples, length, channels = x.shape
    mean = torch.empty(n_examples, dtype=torch.float32, device=x.device)
    rstd = torch.empty(n_examples, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return mean, rstd
    config = table.forward_config(target(x)[0], math, channels, hidden)
    x, conv_weight = aligned(x), aligned(conv_weight)
    tiles = -(-length // config.stats_l)
    partial = torch.empty((n_examples, tiles, 2), dtype=torch.float32, device=x.device)
    block_c = table.power_of_two(channels)
    with guard(x):
        launch(
            block_forward_kernels.conv_stats_kernel,
            n_examples * tiles,
            (x, conv_weight, partial, x, x, x, partial),
            (length, min(dilation, length), tiles, 0),
            (channels, hidden, block_c, hidden, config.stats_l, False, False, False),
            num_warps=config.stats_warps,
        )
        launch(
            block_forward_kernels.finish_stats_kernel,
            n_examples,
            (partial, mean, rstd),
            (length, tiles, epsilon),
            (channels, config.stats_l),
            num_warps=1,
        )
    return mean, rstd


def block_backward_launch(
    grad_out: Tensor,
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dilation: int,
    residual_scale: float,
    math: str,
    needs_weights: bool,
    config: table.BackwardConfig,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`block_backward` with a given configuration; for the tuner, which tries several."""
    n_examples, length, channels = x.shape
    hidden = w1.shape[0]
    device = x.device
    x, grad_out, taps = aligned(x), aligned(grad_out.to(x.dtype)), aligned(conv_weight)
    first, second, mean, rstd = aligned(w1), aligned(w2), aligned(mean), aligned(rstd)
    dx = torch.empty_like(x)
    if x.numel() == 0:
        empty = [torch.zeros_like(weight) for weight in (conv_weight, w1, w2)]
        return dx, *(empty if needs_weights else (None, None, None))
    block_c = table.power_of_two(channels)
    unit = max(config.mlp_h, config.grad_m)
    hidden_pad = -(-hidden // unit) * unit
    scaled, split = math in table.SCALED_TIERS, math in table.SPLIT_TIERS
    approx = config.approx if target(x)[2] else 0
    g_dtype = torch.float16 if scaled else x.dtype
    count = 2 if split else 1
    tiles, runs = -(-length // config.mlp_l), -(-length // (config.conv_l * config.conv_run))
    dilation = min(dilation, length)
    scale, bound = z_scale(length, channels), g_bound(length, channels)
    da_scale = 2.0 ** -(8 + _math.ceil(_math.log2(block_c)))

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    prepared = scratch(2 * count, hidden_pad * block_c, dtype=torch.float16)
    terms = (prepared[0], prepared[2 % (2 * count)], prepared[1], prepared[3 % (2 * count)])
    inverse = scratch(hidden_pad + block_c)
    dz = scratch(*x.shape, dtype=x.dtype)
    sums = scratch(n_examples, tiles, 2)
    # Examples of one run: their operands stay within a fixed amount of memory.
    rows = tiles * config.mlp_l
    narrow = 2 if scaled else 1
    bytes_each = 2 * count * rows * (narrow * block_c + 2 * hidden_pad)
    run = min(n_examples, max(1, OPERAND_BYTES // bytes_each)) if needs_weights else n_examples
    size_z, size_h = run * rows * block_c, run * rows * hidden_pad
    splits = min(config.splits, run * tiles)
    chunks = range(0, n_examples, run)
    largest = z = g = da = dout = tile_scales = slots = dconv = sums
    if needs_weights:
        z = scratch(count, size_z, dtype=torch.float16)
        g = scratch(count, size_h, dtype=g_dtype)
        da = scratch(count, size_h, dtype=torch.float16)
        dout = scratch(count, size_z, dtype=torch.float16) if scaled else grad_out
        tile_scales = scratch(run * tiles)
        slots = scratch(2, len(chunks) * splits, hidden_pad * block_c)
        dconv = scratch(n_examples * runs, 3, channels)
        if scaled:
            largest = torch.linalg.vector_norm(grad_out, _math.inf, dtype=torch.float32)
    kept = [torch.empty_like(weight) for weight in (taps, first, second)] if needs_weights else []
    with guard(x):
        launch(
            block_backward_kernels.prepare_weights_kernel,
            prepare_programs(block_c, hidden_pad),
            (first, second, prepared, inverse),
            (),
            (channels, hidden, block_c, hidden_pad, scaled, split),
            num_warps=4,
        )
        for number, begin in enumerate(chunks):
            n_tiles = min(run, n_examples - begin) * tiles
            launch(
                block_backward_kernels.mlp_backward_kernel,
                n_tiles,
                (
                    grad_out, x, taps, *terms, inverse, mean, rstd, largest, dz, sums,
                    z, g, da, dout, tile_scales,
                ),
                (
                    length, dilation, tiles, begin * tiles, size_z // 16, size_h // 16,
                    residual_scale, scale, 0.5 / scale, bound,
                ),
                (
                    channels, hidden_pad, block_c, config.mlp_l, config.mlp_h, scaled, split,
                    approx, needs_weights, da_scale,
                ),
                num_warps=config.mlp_warps, num_stages=config.mlp_stages,
            )  # fmt: skip
            if not needs_weights:
                continue
            block_n = min(config.grad_n, block_c)
            grid = splits * (hidden_pad // config.grad_m) * (block_c // block_n)
            for left, right, out, stream, tile_scale in (
                (da, z, slots[0], False, not scaled),
                (g, dout, slots[1], not scaled, False),
            ):
                launch(
                    block_backward_kernels.weight_grad_kernel,
                    grid,
                    (left, right, tile_scales, out),
                    (
                        length, tiles, begin * tiles, n_tiles, -(-n_tiles // splits),
                        number * splits, size_h // 16, size_z // 16,
                    ),
                    (
                        channels, hidden_pad, block_c, config.mlp_l, config.grad_m, block_n,
                        stream, tile_scale, split, not target(x)[2],
                    ),
                    num_warps=config.grad_warps, num_stages=config.grad_stages,
                )  # fmt: skip
        launch(
            block_backward_kernels.conv_backward_kernel,
            n_examples * runs,
            (grad_out, x, taps, mean, rstd, dz, sums, dx, dconv),
            (length, dilation, runs, tiles),
            (channels, block_c, config.conv_l, config.conv_run, needs_weights),
            num_warps=config.conv_warps, maxnreg=config.conv_registers,
        )  # fmt: skip
        if not needs_weights:
            return dx, None, None, None
        dconv_weight, dw1, dw2 = kept
        share = -(-hidden * channels // SUM_BLOCK)
        launch(
            block_backward_kernels.sum_grads_kernel,
            2 * share + -(-3 * channels // block_backward_kernels.CONV_COLS.value),
            (slots, dconv, inverse, largest, dconv_weight, dw1, dw2),
            (len(chunks) * splits, n_examples * runs, residual_scale, scale, bound),
            (channels, hidden, hidden_pad, block_c, SUM_BLOCK, scaled, da_scale),
            num_warps=4,
        )
    return dx, dconv_weight, dw1, dw2


def block_backward(
    grad_out: Tensor,
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dilation: int,
    residual_scale: float,
    math: str,
    needs_weights: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `block_forward` for x, conv_weight, w1 and w2, each in its tensor's type.

    Parameters
    ----------
    grad_out: torch.Tensor, shape=(N, L, C)
        Gradient with respect to the output.

    x, conv_weight, w1, w2, dilation, residual_scale, math
        As they were given to `block_forward`.

    mean, rstd: torch.Tensor, shape=(N,), dtype=float32
        As `block_forward` returned them; they hold epsilon.

    needs_weights: bool, optional
        False leaves out the weights' gradients (None), for attribution. Default is True.
    """
    check_math(math)
    _check_block(x, conv_weight, w1, w2, dilation)
    config = table.backward_config(target(x)[0], math, x.shape[2], w1.shape[0])
    return block_backward_launch(
        grad_out, x, conv_weight, w1, w2, mean, rstd, dilation, residual_scale, math,
        needs_weights, config,
    )  # fmt: skip
