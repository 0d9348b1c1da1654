"""The stem: a convolution over the sequence's four channels, bias, GELU, channels last.

Done as one matrix product per tile, (BLOCK_L, 4 k) by (4 k, BLOCK_C), in three fp16 products with
fp32 accumulation and exact power-of-two scales: within 2**-22 of the largest term, that is float32
accuracy for any input, not TF32. A one-hot input is exact in fp16, so there only the weights split.
"""

import triton
import triton.language as tl

from cheri_export.kernels.numerics import dot_terms, gelu_of_half, scales_for, split


@triton.jit(do_not_specialize=["L", "tiles", "run", "runs"])
def stem_kernel(
    sequence_ptr, weight_ptr, bias_ptr, out_ptr, L, tiles, run, runs,
    C: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """Out[n, i, c] = gelu(bias[c] + sum_{b, j} sequence[n, b, i + j - WIDTH // 2] weight[c, b, j]).

    Grid: N * runs * ceil(C / BLOCK_C), the channel block fastest; a program takes `run` tiles of
    BLOCK_L positions one after the other, runs = ceil(tiles / run).

    sequence_ptr: (N, 4, L), any float type. Input; any values, not only one-hot ones.
    weight_ptr: (C, 4, WIDTH), fp32. Input.
    bias_ptr: (C,), fp32. Input.
    out_ptr: (N, L, C), fp32, fp16 or bf16. Written here.
    TAPS: power of two >= 4 * WIDTH.
    """
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0) // blocks
    cols = (tl.program_id(0) - program * blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = program // runs
    first = (program - n * runs) * run
    taps = tl.arange(0, TAPS)
    base = taps // WIDTH  # which of A, C, G, T
    shift = taps - base * WIDTH - WIDTH // 2
    offs = cols[None, :] * (4 * WIDTH) + taps[:, None]
    kept = (taps < 4 * WIDTH)[:, None] & (cols < C)[None, :]
    weight = tl.load(weight_ptr + offs, mask=kept, other=0.0).to(tl.float32)  # [TAPS, BLOCK_C]
    weight_scale, weight_inverse = scales_for(tl.max(tl.abs(weight), axis=0))
    weight_hi, weight_lo = split(weight * weight_scale[None, :], True)
    bias = tl.load(bias_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    sequence = sequence_ptr + n.to(tl.int64) * 4 * L
    for tile in tl.range(first, tl.minimum(first + run, tiles), num_stages=1):
        pos = tile * BLOCK_L + tl.arange(0, BLOCK_L)
        at = pos[:, None] + shift[None, :]  # [BLOCK_L, TAPS]
        inside = (at >= 0) & (at < L) & (taps < 4 * WIDTH)[None, :]
        value = tl.load(sequence + base.to(tl.int64)[None, :] * L + at, mask=inside, other=0.0)
        value = value.to(tl.float32)
        value_scale, value_inverse = scales_for(tl.max(tl.abs(value), axis=1))
        value_hi, value_lo = split(value * value_scale[:, None], True)
        acc = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
        acc = dot_terms(value_hi, value_lo, weight_hi, weight_lo, acc, True)
        # One factor after the other: their product may leave the range of float32.
        z = acc * weight_inverse[None, :] * value_inverse[:, None] + bias[None, :]
        out = gelu_of_half(0.5 * z, APPROX)
        out_offs = (n.to(tl.int64) * L + pos)[:, None] * C + cols[None, :]
        written = (pos < L)[:, None] & (cols < C)[None, :]
        tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=written)
