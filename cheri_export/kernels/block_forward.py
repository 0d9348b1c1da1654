"""The block's forward pass: statistics of the convolution, then norm, MLP and residual, fused.

A tile is BLOCK_L consecutive positions of one example and never straddles two, and every reduction
runs in a fixed order over fixed slots. So an example's result does not depend, in any bit, on the
batch size or on its place in the batch. L, N and the dilation are runtime values: one binary serves
all lengths.
"""

import triton
import triton.language as tl

from cheri_export.kernels.numerics import (
    conv_tile,
    dot_parts,
    dot_terms,
    gelu_of_half,
    invert_pow2,
    scales_for,
    split,
)

PREPARE_ROWS = tl.constexpr(8)
PREPARE_COLS = tl.constexpr(128)
# Partials merged at once: one warp's width, so that the reductions need no shared memory.
MERGE_CHUNK = tl.constexpr(32)


@triton.jit
def _prepare_rows(
    src_ptr, hi_ptr, lo_ptr, inverse_ptr, first,
    ROWS: tl.constexpr, COLS: tl.constexpr, ROWS_PAD: tl.constexpr, COLS_PAD: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Convert PREPARE_ROWS rows of one weight matrix to fp16, zero-padded to the tile sizes."""
    row = first + tl.arange(0, PREPARE_ROWS)
    col = tl.arange(0, PREPARE_COLS)
    if SCALED:
        largest = tl.zeros([PREPARE_ROWS], tl.float32)
        for start in range(0, COLS, PREPARE_COLS):
            inside = (row < ROWS)[:, None] & (start + col < COLS)[None, :]
            offs = row.to(tl.int64)[:, None] * COLS + (start + col)[None, :]
            w = tl.load(src_ptr + offs, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(w), axis=1))
        scale, inverse = scales_for(largest)
        tl.store(inverse_ptr + row, inverse, mask=row < ROWS_PAD)
    for start in range(0, COLS_PAD, PREPARE_COLS):
        inside = (row < ROWS)[:, None] & (start + col < COLS)[None, :]
        offs = row.to(tl.int64)[:, None] * COLS + (start + col)[None, :]
        w = tl.load(src_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            w = w * scale[:, None]
        hi, lo = split(w, SPLIT)
        kept = (row < ROWS_PAD)[:, None] & (start + col < COLS_PAD)[None, :]
        offs = row.to(tl.int64)[:, None] * COLS_PAD + (start + col)[None, :]
        tl.store(hi_ptr + offs, hi, mask=kept)
        if SPLIT:
            tl.store(lo_ptr + offs, lo, mask=kept)


@triton.jit
def prepare_weights(
    w1_ptr, w2_ptr, prepared_ptr, inverse_ptr, program,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, H_PAD: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Convert one slice of w1 or w2; `program` < prepare_programs of `launch_block`.

    prepared_ptr holds, one after the other, w1 hi (H_PAD, BLOCK_C), w2 hi (BLOCK_C, H_PAD), w1 lo,
    w2 lo; inverse_ptr the inverse row scales of w1 (H_PAD), then of w2 (BLOCK_C).
    """
    size: tl.constexpr = H_PAD * BLOCK_C
    w1_programs: tl.constexpr = (H_PAD + PREPARE_ROWS - 1) // PREPARE_ROWS
    if program < w1_programs:
        _prepare_rows(
            w1_ptr, prepared_ptr, prepared_ptr + 2 * size, inverse_ptr,
            program * PREPARE_ROWS, H, C, H_PAD, BLOCK_C, SCALED, SPLIT,
        )  # fmt: skip
    else:
        _prepare_rows(
            w2_ptr, prepared_ptr + size, prepared_ptr + 3 * size, inverse_ptr + H_PAD,
            (program - w1_programs) * PREPARE_ROWS, C, H, BLOCK_C, H_PAD, SCALED, SPLIT,
        )  # fmt: skip


@triton.jit
def _tile_stats(
    x_ptr, conv_ptr, partial_ptr, tile, L, dilation, tiles,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Mean, and sum of squared deviations from it, of one tile of the convolution."""
    n = tile // tiles
    first = (tile - n * tiles) * BLOCK_S
    rows = tl.arange(0, BLOCK_S)
    cols = tl.arange(0, BLOCK_C)
    pos = first + rows
    row = n.to(tl.int64) * L + first
    y = conv_tile(x_ptr, conv_ptr, row, pos, rows, cols, L, dilation, C)  # [BLOCK_S, BLOCK_C]
    # Deviations from the tile's own mean: E[y^2] - m^2 has no correct digit at |mean| >> std.
    mean = tl.sum(y) / (tl.minimum(L - first, BLOCK_S) * C).to(tl.float32)
    inside = (pos < L)[:, None] & (cols < C)[None, :]
    deviation = tl.where(inside, y - mean, 0.0)
    m2 = tl.sum(deviation * deviation)
    slot = partial_ptr + tile.to(tl.int64) * 2
    tl.store(slot, mean)
    tl.store(slot + 1, m2)


@triton.jit(do_not_specialize=["L", "dilation", "tiles", "prepare_programs"])
def conv_stats_kernel(
    x_ptr, conv_ptr, partial_ptr, w1_ptr, w2_ptr, prepared_ptr, inverse_ptr,
    L, dilation, tiles, prepare_programs,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, H_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr, PREPARE: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Mean and M2 of the convolution over each tile of BLOCK_S positions; weights, by the way.

    Grid: prepare_programs + N * tiles. The weights' conversion rides in this launch, so that they
    are read anew at every call and cost no launch of their own.

    x_ptr: (N, L, C), fp32, fp16 or bf16, contiguous. Input.
    conv_ptr: (3, C), fp32. Input.
    partial_ptr: (N, tiles, 2), fp32. Written here: mean, and sum of squared deviations from it.
    w1_ptr, w2_ptr: (H, C) and (C, H), any float type. Inputs, read if PREPARE.
    prepared_ptr, inverse_ptr: fp16 and fp32, see `prepare_weights`. Written here if PREPARE.
    tiles: ceil(L / BLOCK_S).
    """
    program = tl.program_id(0)
    tile = program - prepare_programs
    if PREPARE:
        if tile < 0:
            prepare_weights(
                w1_ptr, w2_ptr, prepared_ptr, inverse_ptr, program,
                C, H, BLOCK_C, H_PAD, SCALED, SPLIT,
            )  # fmt: skip
        else:
            _tile_stats(x_ptr, conv_ptr, partial_ptr, tile, L, dilation, tiles, C, BLOCK_C, BLOCK_S)
    else:
        _tile_stats(x_ptr, conv_ptr, partial_ptr, tile, L, dilation, tiles, C, BLOCK_C, BLOCK_S)


@triton.jit
def merge_partials(partial_ptr, n, tiles, L, epsilon, C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Mean and 1 / sqrt(variance + epsilon) of example n, from its tiles' means and M2.

    Chan's rule, in chunks of MERGE_CHUNK in the order of the tiles. Means are taken relative to the
    first tile's, which keeps their small differences exact.
    """
    base = partial_ptr + n.to(tl.int64) * tiles * 2
    pivot = tl.load(base)
    count = 0.0  # positions so far
    mean = 0.0
    m2 = 0.0
    for start in range(0, tiles, MERGE_CHUNK):
        i = start + tl.arange(0, MERGE_CHUNK)
        inside = i < tiles
        weight = tl.where(inside, tl.minimum(L - i * BLOCK_S, BLOCK_S), 0).to(tl.float32)
        shift = tl.load(base + 2 * i, mask=inside, other=0.0) - pivot
        within = tl.sum(tl.load(base + 2 * i + 1, mask=inside, other=0.0), axis=0)
        chunk = tl.sum(weight, axis=0)
        chunk_mean = tl.sum(weight * tl.where(inside, shift, 0.0), axis=0) / chunk
        between = tl.where(inside, shift - chunk_mean, 0.0)
        chunk_m2 = within + tl.sum(weight * between * between, axis=0) * C
        delta = chunk_mean - mean
        total = count + chunk
        m2 += chunk_m2 + delta * delta * (count * chunk / total) * C
        mean += delta * (chunk / total)
        count = total
    return pivot + mean, tl.rsqrt(m2 / (count * C) + epsilon)


@triton.jit(do_not_specialize=["L", "stat_tiles"])
def finish_stats_kernel(
    partial_ptr, mean_ptr, rstd_ptr, L, stat_tiles, epsilon,
    C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Mean and rstd of each example alone, for a backward pass without a saved forward.

    Grid: N. Same bits as `fused_block_kernel` with SAVE_STATS.

    partial_ptr: (N, stat_tiles, 2), fp32, by conv_stats_kernel.
    mean_ptr, rstd_ptr: (N,), fp32. Written here.
    """
    n = tl.program_id(0)
    mean, rstd = merge_partials(partial_ptr, n, stat_tiles, L, epsilon, C, BLOCK_S)
    tl.store(mean_ptr + n, mean)
    tl.store(rstd_ptr + n, rstd)


@triton.jit
def _hidden_chunk(
    z_hi, z_lo, z2_hi, z2_lo, w1_hi, w1_lo, w1b_hi, w1b_lo, w2_hi, w2_lo, acc, column, g_inverse,
    SCALED: tl.constexpr, SPLIT: tl.constexpr, APPROX: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return acc + gelu(z @ w1) @ w2 over one hidden chunk; z carries half the norm."""
    zero = tl.zeros([z_hi.shape[0], w1_hi.shape[1]], tl.float32)
    half = dot_parts(
        z_hi, z_lo, z2_hi, z2_lo, w1_hi, w1_lo, w1b_hi, w1b_lo, zero, SPLIT, PARTS
    )  # [BLOCK_L, BLOCK_H]
    if SCALED:
        half = half * column[None, :]
    g = gelu_of_half(half, APPROX)
    if SCALED:
        g = g.to(tl.float32) * g_inverse
        g_hi, g_lo = split(g, SPLIT)
    else:
        g_hi = g.to(tl.float16)
        g_lo = g_hi
    return dot_terms(g_hi, g_lo, w2_hi, w2_lo, acc, SPLIT)  # [BLOCK_L, BLOCK_C]


@triton.jit
def _w1_chunk(w_ptr, h, cols, BLOCK_C: tl.constexpr):
    """Columns h of w1 transposed, (BLOCK_C, BLOCK_H)."""
    return tl.load(w_ptr + h[None, :] * BLOCK_C + cols[:, None])


@triton.jit
def _w2_chunk(w_ptr, h, cols, H_PAD: tl.constexpr):
    """Rows h of w2 transposed, (BLOCK_H, BLOCK_C)."""
    return tl.load(w_ptr + cols[None, :] * H_PAD + h[:, None])


@triton.jit
def _normalise(
    y, mean, factor, cols, C: tl.constexpr, BLOCK_C: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """(y - mean) * factor as a GEMM operand, zero in the padded channels."""
    z = (y - mean) * factor
    if C != BLOCK_C:
        # A padded channel holds -mean * rstd, which may be infinite in fp16, and 0 * inf is NaN.
        z = tl.where((cols < C)[None, :], z, 0.0)
    return split(z, SPLIT)


@triton.jit
def _normalised_tile(
    tile, x_ptr, conv_ptr, partial_ptr, mean_ptr, rstd_ptr,
    L, dilation, tiles, stat_tiles, epsilon, z_scale,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr, SAVE_STATS: tl.constexpr, MERGE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Half the normalised convolution of one tile, as GEMM operands; also the tile's place.

    In PARTS along the channels, one after the other: the taps of all of them at once need more
    registers than everything that follows.
    """
    n = tile // tiles
    first = (tile - n * tiles) * BLOCK_L
    rows = tl.arange(0, BLOCK_L)
    cols = tl.arange(0, BLOCK_C // PARTS)
    row = n.to(tl.int64) * L + first
    # The taps are asked for before the statistics, so that both latencies overlap.
    y = conv_tile(x_ptr, conv_ptr, row, first + rows, rows, cols, L, dilation, C)
    if MERGE:
        mean, rstd = merge_partials(partial_ptr, n, stat_tiles, L, epsilon, C, BLOCK_S)
        if SAVE_STATS:
            if first == 0:
                tl.store(mean_ptr + n, mean)
                tl.store(rstd_ptr + n, rstd)
    else:
        mean = tl.load(mean_ptr + n)
        rstd = tl.load(rstd_ptr + n)
    if SCALED:
        factor = rstd * z_scale
    else:
        factor = rstd * 0.5
    z_hi, z_lo = _normalise(y, mean, factor, cols, C, BLOCK_C, SPLIT)
    if PARTS == 2:
        cols = BLOCK_C // 2 + cols
        y = conv_tile(x_ptr, conv_ptr, row, first + rows, rows, cols, L, dilation, C)
        z2_hi, z2_lo = _normalise(y, mean, factor, cols, C, BLOCK_C, SPLIT)
    else:
        z2_hi = z_hi
        z2_lo = z_lo
    return z_hi, z_lo, z2_hi, z2_lo, row, first + rows


@triton.jit
def _store_tile(
    x_ptr, out_ptr, row, pos, acc, factor,
    L, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Write out = x + factor * acc."""
    rows = tl.arange(0, BLOCK_L)
    cols = tl.arange(0, BLOCK_C)
    # Unlike the offsets of the taps, or they would be kept in registers from there to here.
    offs = row * C + (rows[:, None] * C + cols[None, :])
    inside = (pos < L)[:, None] & (cols < C)[None, :]
    x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    out = x + acc * factor
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["L", "dilation", "n_tiles", "tiles", "stat_tiles"])
def fused_block_kernel(
    x_ptr, conv_ptr, w1_ptr, w1_lo_ptr, w2_ptr, w2_lo_ptr, inverse_ptr, partial_ptr,
    out_ptr, mean_ptr, rstd_ptr,
    L, dilation, n_tiles, tiles, stat_tiles,
    residual_scale, epsilon, z_scale, undo, g_bound,
    C: tl.constexpr, H_PAD: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr,
    APPROX: tl.constexpr, SAVE_STATS: tl.constexpr, RESIDENT: tl.constexpr,
    PERSISTENT: tl.constexpr, MERGE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write x + residual_scale * w2 gelu(w1 norm(conv(x))), one tile of BLOCK_L positions a time.

    Grid: N * tiles, or with PERSISTENT any number: each program takes every grid-th tile. RESIDENT
    (needs PERSISTENT, H_PAD == 2 * BLOCK_H and PARTS == 1) loads the weights once per program.

    x_ptr, out_ptr: (N, L, C), fp32, fp16 or bf16, contiguous. Input; output, written here.
    conv_ptr: (3, C), fp32. Input.
    w1_ptr, w2_ptr: (H_PAD, BLOCK_C) and (BLOCK_C, H_PAD), fp16, zero-padded. Inputs or, if
        prepared, written by conv_stats_kernel.
    w1_lo_ptr, w2_lo_ptr: their low halves, likewise. Read if SPLIT.
    inverse_ptr: (H_PAD + BLOCK_C), fp32, by conv_stats_kernel. Read if SCALED.
    partial_ptr: (N, stat_tiles, 2), fp32, by conv_stats_kernel.
    mean_ptr, rstd_ptr: (N,), fp32. With MERGE written here if SAVE_STATS; without, inputs by
        finish_stats_kernel.
    tiles, stat_tiles: ceil(L / BLOCK_L) and ceil(L / BLOCK_S). n_tiles: N * tiles.
    z_scale: power of two with z_scale * sqrt(L * C) in the range of fp16. Read if SCALED.
    undo: 0.5 / z_scale; a scaled dot times this and the inverse scale of w1 is half a hidden value.
    g_bound: power of two; times an inverse scale of w1, a bound of the hidden values over 2**15.
    """
    cols = tl.arange(0, BLOCK_C)
    hs = tl.arange(0, BLOCK_H)
    factor = tl.full([1, 1], 1.0, tl.float32) * residual_scale
    g_inverse = 1.0
    column = hs.to(tl.float32)  # replaced where SCALED
    if SCALED:
        # Hidden values are scaled by one power of two that brings their bound to 2**15. The limit
        # keeps the scale finite for weights that are infinite or NaN.
        largest = 0.0
        for start in range(0, H_PAD, BLOCK_H):
            largest = tl.maximum(largest, tl.max(tl.load(inverse_ptr + start + hs), axis=0))
        g_scale = tl.minimum(largest, 1.0e27) * g_bound
        g_inverse = invert_pow2(g_scale)
        inverse2 = tl.load(inverse_ptr + H_PAD + cols)
        factor = (inverse2 * (residual_scale * g_scale))[None, :]  # [1, BLOCK_C]
    if RESIDENT:
        w1a = _w1_chunk(w1_ptr, hs, cols, BLOCK_C)
        w2a = _w2_chunk(w2_ptr, hs, cols, H_PAD)
        w1b = _w1_chunk(w1_ptr, BLOCK_H + hs, cols, BLOCK_C)
        w2b = _w2_chunk(w2_ptr, BLOCK_H + hs, cols, H_PAD)
    if PERSISTENT:
        step = tl.num_programs(0)
        last = n_tiles
    else:
        step = 1
        last = tl.program_id(0) + 1
    for tile in tl.range(tl.program_id(0), last, step, num_stages=1):
        z_hi, z_lo, z2_hi, z2_lo, row, pos = _normalised_tile(
            tile, x_ptr, conv_ptr, partial_ptr, mean_ptr, rstd_ptr,
            L, dilation, tiles, stat_tiles, epsilon, z_scale,
            C, BLOCK_C, BLOCK_L, BLOCK_S, SCALED, SPLIT, SAVE_STATS, MERGE, PARTS,
        )  # fmt: skip
        acc = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
        if RESIDENT:
            if SCALED:
                column = tl.load(inverse_ptr + hs) * undo
            acc = _hidden_chunk(
                z_hi, z_lo, z_hi, z_lo, w1a, w1a, w1a, w1a, w2a, w2a, acc, column, g_inverse,
                SCALED, False, APPROX, 1,
            )  # fmt: skip
            if SCALED:
                column = tl.load(inverse_ptr + BLOCK_H + hs) * undo
            acc = _hidden_chunk(
                z_hi, z_lo, z_hi, z_lo, w1b, w1b, w1b, w1b, w2b, w2b, acc, column, g_inverse,
                SCALED, False, APPROX, 1,
            )  # fmt: skip
        else:
            part_cols = tl.arange(0, BLOCK_C // PARTS)
            for start in range(0, H_PAD, BLOCK_H):
                h = start + hs
                w1 = _w1_chunk(w1_ptr, h, part_cols, BLOCK_C)
                w2 = _w2_chunk(w2_ptr, h, cols, H_PAD)
                if SPLIT:
                    w1_lo = _w1_chunk(w1_lo_ptr, h, part_cols, BLOCK_C)
                    w2_lo = _w2_chunk(w2_lo_ptr, h, cols, H_PAD)
                else:
                    w1_lo = w1
                    w2_lo = w2
                w1_next = w1
                w1_next_lo = w1_lo
                if PARTS == 2:
                    w1_next = _w1_chunk(w1_ptr, h, BLOCK_C // 2 + part_cols, BLOCK_C)
                    w1_next_lo = w1_next
                    if SPLIT:
                        w1_next_lo = _w1_chunk(w1_lo_ptr, h, BLOCK_C // 2 + part_cols, BLOCK_C)
                if SCALED:
                    column = tl.load(inverse_ptr + h) * undo
                acc = _hidden_chunk(
                    z_hi, z_lo, z2_hi, z2_lo, w1, w1_lo, w1_next, w1_next_lo, w2, w2_lo, acc,
                    column, g_inverse, SCALED, SPLIT, APPROX, PARTS,
                )  # fmt: skip
        _store_tile(x_ptr, out_ptr, row, pos, acc, factor, L, C, BLOCK_C, BLOCK_L)
