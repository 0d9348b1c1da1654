"""The head: profile logits by a convolution over the kept window, log counts from a mean.

Two launches. The first reads each row of x once, multiplies it with every tap of the profile weight
(a small matrix product) and sums it for the counts. The second adds the products along the taps,
which is a sum over diagonals, and finishes the counts. A direct convolution would read x once per
tap instead.
"""

import triton
import triton.language as tl

from cheri_export.kernels.numerics import scales_for, split

TAP_CHUNK = tl.constexpr(16)
TILE_CHUNK = tl.constexpr(16)
WINDOW_CHUNK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["L", "first_row", "tiles", "run", "runs", "profile_row",
                               "profile_rows", "count_start", "count_end"])  # fmt: skip
def head_project_kernel(
    x_ptr, weight_ptr, products_ptr, column_ptr,
    L, first_row, tiles, run, runs, profile_row, profile_rows, count_start, count_end,
    C: tl.constexpr, T: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Products of one tile of rows with all OUTPUTS * WIDTH taps, and its column sums.

    Grid: N * runs, runs = ceil(tiles / run); a program takes `run` tiles. Tile i holds rows
    first_row + i * BLOCK_L ..., which may lie outside 0..L-1.

    x_ptr: (N, L, C), fp32, fp16 or bf16. Input.
    weight_ptr: (OUTPUTS, C + T, WIDTH), fp32. Input; the T control rows are not used here.
    products_ptr: (N, OUTPUTS * WIDTH, profile_rows), fp32. Written here; row 0 is profile_row.
    column_ptr: (N, tiles, C), fp32. Written here: sums over rows count_start..count_end-1.
    SPLIT: x is fp32; a 16-bit x is exact in one fp16 operand, once scaled.
    """
    n = tl.program_id(0) // runs
    begin = (tl.program_id(0) - n * runs) * run
    cols = tl.arange(0, BLOCK_C)
    total: tl.constexpr = OUTPUTS * WIDTH
    for start in range(0, total, BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        output = q // WIDTH
        # The taps, which lie side by side in memory, in the last dimension.
        weight_offs = (output * (C + T) * WIDTH + (q - output * WIDTH))[None, :]
        weight_offs = weight_offs + cols[:, None] * WIDTH  # [BLOCK_C, BLOCK_Q]
        kept = (cols < C)[:, None] & (q < total)[None, :]
        weight = tl.load(weight_ptr + weight_offs, mask=kept, other=0.0).to(tl.float32)
        scale, inverse = scales_for(tl.max(tl.abs(weight), axis=0))  # [BLOCK_Q]
        hi, lo = split(weight * scale[None, :], True)
        for tile in tl.range(begin, tl.minimum(begin + run, tiles), num_stages=1):
            pos = first_row + tile * BLOCK_L + tl.arange(0, BLOCK_L)
            inside = ((pos >= 0) & (pos < L))[:, None] & (cols < C)[None, :]
            offs = (n.to(tl.int64) * L + pos)[:, None] * C + cols[None, :]
            x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_L, BLOCK_C]
            if start == 0:
                counted = ((pos >= count_start) & (pos < count_end))[:, None]
                column = tl.sum(tl.where(counted, x, 0.0), axis=0)
                slot = column_ptr + (n.to(tl.int64) * tiles + tile) * C
                tl.store(slot + cols, column, mask=cols < C)
            x_scale, x_inverse = scales_for(tl.max(tl.abs(x), axis=1))
            x_hi, x_lo = split(x * x_scale[:, None], SPLIT)
            at = pos - profile_row
            written = (at >= 0) & (at < profile_rows)
            acc = tl.zeros([BLOCK_Q, BLOCK_L], tl.float32)
            acc = tl.dot(tl.trans(lo), tl.trans(x_hi), acc)
            if SPLIT:
                acc = tl.dot(tl.trans(hi), tl.trans(x_lo), acc)
            acc = tl.dot(tl.trans(hi), tl.trans(x_hi), acc)
            acc = acc * inverse[:, None] * x_inverse[None, :]
            out_offs = (n.to(tl.int64) * total + q)[:, None] * profile_rows + at[None, :]
            tl.store(products_ptr + out_offs, acc, mask=(q < total)[:, None] & written[None, :])


@triton.jit(do_not_specialize=["L", "start", "length", "tiles", "profile_rows", "count_start",
                               "count_end", "column_tiles"])  # fmt: skip
def head_reduce_kernel(
    products_ptr, column_ptr, control_ptr, weight_ptr, bias_ptr, count_weight_ptr, count_bias_ptr,
    profile_ptr, counts_ptr,
    L, start, length, tiles, profile_rows, count_start, count_end, column_tiles,
    C: tl.constexpr, T: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Profile logits from the products (and the controls); log counts from the column sums.

    Grid: N * (OUTPUTS * tiles + 1); the last program of an example makes its counts.

    products_ptr, column_ptr: by `head_project_kernel`.
    control_ptr: (N, T, L), fp32. Input, read if T > 0.
    weight_ptr, bias_ptr: (OUTPUTS, C + T, WIDTH) and (OUTPUTS,), fp32. Inputs.
    count_weight_ptr, count_bias_ptr: (GROUPS, C [+ 1 if T]) and (GROUPS,), fp32. Inputs.
    profile_ptr: (N, OUTPUTS, length), fp32. Written here.
    counts_ptr: (N, GROUPS), fp32. Written here.
    start: first position of the profile window; length: its positions.
    """
    share = OUTPUTS * tiles + 1
    n = tl.program_id(0) // share
    part = tl.program_id(0) - n * share
    wide = n.to(tl.int64)
    if part < OUTPUTS * tiles:
        output = part // tiles
        at = (part - output * tiles) * BLOCK_L + tl.arange(0, BLOCK_L)
        taps = tl.arange(0, TAP_CHUNK)
        acc = tl.zeros([BLOCK_L], tl.float32)
        for first in range(0, WIDTH, TAP_CHUNK):
            j = first + taps
            kept = (j < WIDTH)[:, None] & (at < length)[None, :]
            row = wide * (OUTPUTS * WIDTH) + output * WIDTH + j
            offs = row[:, None] * profile_rows + (at[None, :] + j[:, None])
            acc += tl.sum(tl.load(products_ptr + offs, mask=kept, other=0.0), axis=0)
        for t in range(T):
            for first in range(0, WIDTH, TAP_CHUNK):
                j = first + taps
                weight_offs = (output * (C + T) + C + t) * WIDTH + j
                weight = tl.load(weight_ptr + weight_offs, mask=j < WIDTH, other=0.0)
                pos = start + at[None, :] + j[:, None] - WIDTH // 2
                kept = (j < WIDTH)[:, None] & (at < length)[None, :] & (pos >= 0) & (pos < L)
                control = tl.load(control_ptr + (wide * T + t) * L + pos, mask=kept, other=0.0)
                acc += tl.sum(control.to(tl.float32) * weight[:, None], axis=0)
        acc += tl.load(bias_ptr + output)
        tl.store(profile_ptr + (wide * OUTPUTS + output) * length + at, acc, mask=at < length)
    else:
        cols = tl.arange(0, BLOCK_C)
        total = tl.zeros([BLOCK_C], tl.float32)
        for first in range(0, column_tiles, TILE_CHUNK):
            i = first + tl.arange(0, TILE_CHUNK)
            offs = (wide * column_tiles + i)[:, None] * C + cols[None, :]
            kept = (i < column_tiles)[:, None] & (cols < C)[None, :]
            total += tl.sum(tl.load(column_ptr + offs, mask=kept, other=0.0), axis=0)
        mean = total / (count_end - count_start).to(tl.float32)
        seen = 0.0
        for t in range(T):
            for first in range(count_start, count_end, WINDOW_CHUNK):
                pos = first + tl.arange(0, WINDOW_CHUNK)
                offs = (wide * T + t) * L + pos
                control = tl.load(control_ptr + offs, mask=pos < count_end, other=0.0)
                seen += tl.sum(control.to(tl.float32), axis=0)
        row: tl.constexpr = C + 1 if T > 0 else C
        for group in range(GROUPS):
            weight = tl.load(count_weight_ptr + group * row + cols, mask=cols < C, other=0.0)
            count = tl.sum(mean * weight, axis=0) + tl.load(count_bias_ptr + group)
            if T > 0:
                count += tl.log(seen + 1.0) * tl.load(count_weight_ptr + group * row + C)
            tl.store(counts_ptr + wide * GROUPS + group, count)
