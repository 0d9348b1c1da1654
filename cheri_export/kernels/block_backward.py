"""Gradients of the block for x, conv_weight, w1 and w2, from x and each example's mean and rstd.

Everything between is computed again: the convolution, the hidden values and their slope. No float
atomics: partial results go to fixed slots and are added in a fixed order, so that two runs give the
same bits, and an example's gradient for x does not depend on the rest of the batch.

Notation: z the normalised convolution, a = z w1', g = gelu(a), out = x + s g w2'. A d in front of a
name is the gradient with respect to it. dw1 = s da' z and dw2' = s g' dout sum over all positions:
`mlp_backward_kernel` writes their operands, `weight_grad_kernel` is a plain matrix product of them.

Gradients may have any magnitude, so their fp16 operands are scaled by powers of two: per position
within `mlp_backward_kernel`. The sums over positions need a common scale: tiers fp32 and mixed take
one for the whole batch; in the 16-bit tiers, whose dout needs none, da keeps its scale per
position, z carries its inverse, and both together one scale per tile.
"""

import triton
import triton.language as tl

from cheri_export.kernels.block_forward import prepare_weights
from cheri_export.kernels.numerics import (
    conv_tile,
    dot_terms,
    gelu_and_slope,
    invert_pow2,
    load_conv_weight,
    scales_for,
    split,
)

# Undoes the target of scales_for: the largest magnitude then lies in [1, 2). The tiers without
# scaled weights need that room for the sums over channels.
TO_ONE = tl.constexpr(1.0 / 1024.0)
SUM_CHUNK = tl.constexpr(32)
SLOT_CHUNK = tl.constexpr(16)
CONV_SLOTS = tl.constexpr(256)
CONV_COLS = tl.constexpr(16)


@triton.jit
def prepare_weights_kernel(
    w1_ptr, w2_ptr, prepared_ptr, inverse_ptr,
    C: tl.constexpr, H: tl.constexpr, BLOCK_C: tl.constexpr, H_PAD: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The weights' conversion of `conv_stats_kernel` on its own.

    Grid: `prepare_programs` of `launch_block`.

    w1_ptr, w2_ptr: (H, C) and (C, H), any float type. Inputs.
    prepared_ptr, inverse_ptr: fp16 and fp32, see `block_forward.prepare_weights`. Written here.
    """
    prepare_weights(
        w1_ptr, w2_ptr, prepared_ptr, inverse_ptr, tl.program_id(0),
        C, H, BLOCK_C, H_PAD, SCALED, SPLIT,
    )  # fmt: skip


@triton.jit
def operand_scale(
    largest_ptr, inverse_ptr, H_PAD: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Scales that bring dout, and da, into the range of fp16 over the whole batch.

    largest_ptr holds the largest |dout|. Returns the scale of dout and its inverse, then the
    largest inverse scale of w2 and 1 / it. Their use: |da| <= 1.13 sum_c |dout| |w2|, where |w2| is
    at most 2**11 times its inverse scale. All are powers of two.
    """
    scale, inverse = scales_for(tl.load(largest_ptr))
    widest = tl.max(tl.load(inverse_ptr + H_PAD + tl.arange(0, BLOCK_C)), axis=0)
    # The limit keeps the inverse a normal number for weights that are infinite or NaN.
    widest = tl.minimum(widest, 1.0e27)
    return scale, inverse, widest, invert_pow2(widest)


@triton.jit
def _store_operand(ptr, offs, size, hi, lo, SPLIT: tl.constexpr):
    """Write a weight-gradient operand, and its low half `size` elements further on."""
    tl.store(ptr + offs, hi)
    if SPLIT:
        tl.store(ptr + size + offs, lo)


@triton.jit(do_not_specialize=["L", "dilation", "tiles", "first_tile", "z_size16", "h_size16"])
def mlp_backward_kernel(
    grad_ptr, x_ptr, conv_ptr, w1_ptr, w1_lo_ptr, w2_ptr, w2_lo_ptr, inverse_ptr,
    mean_ptr, rstd_ptr, largest_ptr, dz_ptr, sums_ptr, z_ptr, g_ptr, da_ptr, dout_ptr, scale_ptr,
    L, dilation, tiles, first_tile, z_size16, h_size16, residual_scale, z_scale, undo, g_bound,
    C: tl.constexpr, H_PAD: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, APPROX: tl.constexpr,
    STORE: tl.constexpr, DA_SCALE: tl.constexpr,
):  # fmt: skip
    """One tile of dz = s ((dout w2) * gelu'(a)) w1, two sums for the norm, and GEMM operands.

    Grid: the tiles of one run of examples; first_tile is the first of them.

    grad_ptr: (N, L, C), type of x. Input: dout.
    x_ptr: (N, L, C), fp32, fp16 or bf16. Input.
    conv_ptr: (3, C), fp32. Input.
    w1_ptr, w1_lo_ptr, w2_ptr, w2_lo_ptr, inverse_ptr: as `fused_block_kernel`.
    mean_ptr, rstd_ptr: (N,), fp32, saved by the forward pass.
    largest_ptr: (1,), fp32: the largest |dout|. Read if SCALED and STORE.
    dz_ptr: (N, L, C), fp32, or the type of a 16-bit x. Written here: dz * rstd, which has about the
        magnitude of dx.
    sums_ptr: (N, tiles, 2), fp32. Written here: the sums of rstd dz and of rstd dz * z of the tile.
    z_ptr, dout_ptr: (1 or 2, rows, BLOCK_C), fp16, rows = BLOCK_L per tile of the run, zero outside
        L; with SPLIT low halves follow. Written here if STORE, dout only if SCALED.
    g_ptr, da_ptr: (1 or 2, rows, H_PAD), fp16, or for g the type of a 16-bit x. Likewise.
    scale_ptr: (tiles of the run,), fp32. Written here if STORE and not SCALED: da z times this is
        in the units of dw1 / s.
    z_size16, h_size16: elements of z and of g without their low halves, over 16.
    undo: 0.5 / z_scale. g_bound: as `fused_block_kernel`.
    DA_SCALE: power of two that completes the scale of da, see `operand_scale`.
    """
    local = tl.program_id(0)
    tile = first_tile + local
    n = tile // tiles
    first = (tile - n * tiles) * BLOCK_L
    rows = tl.arange(0, BLOCK_L)
    cols = tl.arange(0, BLOCK_C)
    hs = tl.arange(0, BLOCK_H)
    pos = first + rows
    row = n.to(tl.int64) * L + first
    # Unlike the offsets of the taps, or they would be kept in registers to the end.
    offs = row * C + (rows[:, None] * C + cols[None, :])
    inside = (pos < L)[:, None] & (cols < C)[None, :]
    if not SCALED:
        # Read for its maximum first and again below, from the cache: it would not fit in registers
        # beside the taps.
        early = tl.load(grad_ptr + offs, mask=inside, other=0.0, eviction_policy="evict_last")
        largest_grad = tl.max(tl.abs(early.to(tl.float32)), axis=1)
    rstd = tl.load(rstd_ptr + n)
    y = conv_tile(x_ptr, conv_ptr, row, pos, rows, cols, L, dilation, C)
    z = (y - tl.load(mean_ptr + n)) * rstd  # [BLOCK_L, BLOCK_C]
    if SCALED:
        z = z * z_scale
    # Outside, z is -mean * rstd, which may be infinite in fp16, and 0 * inf is NaN.
    z_hi, z_lo = split(tl.where(inside, z, 0.0), SPLIT)
    operand = local.to(tl.int64) * BLOCK_L
    narrow = rows[:, None] * BLOCK_C + cols[None, :]
    z_size = z_size16.to(tl.int64) * 16
    h_size = h_size16.to(tl.int64) * 16
    if SCALED and STORE:
        _store_operand(z_ptr + operand * BLOCK_C, narrow, z_size, z_hi, z_lo, SPLIT)
    grad = tl.load(grad_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        if STORE:
            all_scale, _, _, all_narrow = operand_scale(largest_ptr, inverse_ptr, H_PAD, BLOCK_C)
            dout_hi, dout_lo = split(grad * all_scale, SPLIT)
            _store_operand(dout_ptr + operand * BLOCK_C, narrow, z_size, dout_hi, dout_lo, SPLIT)
            largest = 0.0
            for start in range(0, H_PAD, BLOCK_H):
                largest = tl.maximum(largest, tl.max(tl.load(inverse_ptr + start + hs), axis=0))
            g_inverse = invert_pow2(tl.minimum(largest, 1.0e27) * g_bound)
        # w2's rows were multiplied by a scale per channel, the index that is summed over here.
        grad = grad * tl.load(inverse_ptr + H_PAD + cols)[None, :]
        largest_grad = tl.max(tl.abs(grad), axis=1)
    scale, inverse = scales_for(largest_grad)  # [BLOCK_L]
    if not SCALED:
        scale = scale * TO_ONE
        inverse = inverse / TO_ONE
        if STORE:
            tile_scale = tl.max(inverse, axis=0)
            tl.store(scale_ptr + local, tile_scale)
            factor = inverse * invert_pow2(tile_scale)
            tl.store(z_ptr + operand * BLOCK_C + narrow, (z_hi * factor[:, None]).to(tl.float16))
    da_factor = inverse
    if SCALED:
        if STORE:
            # One factor after the other: their products may leave the range of float32.
            da_factor = inverse * all_scale * all_narrow * DA_SCALE
    grad_hi, grad_lo = split(grad * scale[:, None], SPLIT)
    g_base = g_ptr + operand * H_PAD
    da_base = da_ptr + operand * H_PAD
    dz = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
    dzz = tl.zeros([BLOCK_L, 1], tl.float32)
    for start in range(0, H_PAD, BLOCK_H):
        h = start + hs
        w1 = tl.load(w1_ptr + h[None, :] * BLOCK_C + cols[:, None])  # [BLOCK_C, BLOCK_H]
        w2 = tl.load(w2_ptr + cols[:, None] * H_PAD + h[None, :])  # [BLOCK_C, BLOCK_H]
        if SPLIT:
            w1_lo = tl.load(w1_lo_ptr + h[None, :] * BLOCK_C + cols[:, None])
            w2_lo = tl.load(w2_lo_ptr + cols[:, None] * H_PAD + h[None, :])
        else:
            w1_lo = w1
            w2_lo = w2
        zero = tl.zeros([BLOCK_L, BLOCK_H], tl.float32)
        a = dot_terms(z_hi, z_lo, w1, w1_lo, zero, SPLIT)
        if SCALED:
            inverse1 = tl.load(inverse_ptr + h)
            a = a * (inverse1 * (2.0 * undo))[None, :]
        g, slope = gelu_and_slope(a, APPROX)
        da = dot_terms(grad_hi, grad_lo, w2, w2_lo, zero, SPLIT) * slope  # [BLOCK_L, BLOCK_H]
        # sum_c dz z = sum_h da a, because a = z w1': no second pass over z.
        dzz += tl.sum(da * a, axis=1, keep_dims=True)
        if STORE:
            wide = rows[:, None] * H_PAD + h[None, :]
            if SCALED:
                g = g * g_inverse
            if SPLIT:
                g_hi, g_lo = split(g, SPLIT)
                _store_operand(g_base, wide, h_size, g_hi, g_lo, SPLIT)
                da_hi, da_lo = split(da * da_factor[:, None], SPLIT)
                _store_operand(da_base, wide, h_size, da_hi, da_lo, SPLIT)
            else:
                tl.store(g_base + wide, g.to(g_ptr.dtype.element_ty))
                if SCALED:
                    da_hi = (da * da_factor[:, None]).to(tl.float16)
                else:
                    da_hi = da.to(tl.float16)
                tl.store(da_base + wide, da_hi)
        if SCALED:
            da = da * inverse1[None, :]
            da_scale, da_inverse = scales_for(tl.max(tl.abs(da), axis=1))
            da_hi, da_lo = split(da * da_scale[:, None], SPLIT)
            part = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
            part = dot_terms(da_hi, da_lo, tl.trans(w1), tl.trans(w1_lo), part, SPLIT)
            dz += part * da_inverse[:, None]
        else:
            da_hi, da_lo = split(da, SPLIT)
            dz = dot_terms(da_hi, da_lo, tl.trans(w1), tl.trans(w1_lo), dz, SPLIT)
    back = inverse * (residual_scale * rstd)  # [BLOCK_L]
    dz = dz * back[:, None]
    tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=inside)
    slot = sums_ptr + tile.to(tl.int64) * 2
    # Two-dimensional to the end: triton 3.6 cannot compile a rank-1 reduction of an accumulator
    # for sm_100.
    one = tl.arange(0, 1)
    tl.store(slot + one, tl.sum(tl.sum(dz, axis=1, keep_dims=True), axis=0))
    tl.store(slot + 1 + one, tl.sum(dzz * back[:, None], axis=0))


@triton.jit(
    do_not_specialize=[
        "L",
        "tiles",
        "first_tile",
        "n_tiles",
        "tiles_per_split",
        "first_slot",
        "left_size16",
        "right_size16",
    ]
)
def weight_grad_kernel(
    left_ptr, right_ptr, scale_ptr, slots_ptr,
    L, tiles, first_tile, n_tiles, tiles_per_split, first_slot, left_size16, right_size16,
    C: tl.constexpr, H_PAD: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STREAM: tl.constexpr, TILE_SCALE: tl.constexpr,
    SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sum left' right over a fixed run of tiles, for one (BLOCK_M, BLOCK_N) part of (H_PAD, C).

    Grid: splits * (H_PAD / BLOCK_M) * (BLOCK_C / BLOCK_N), the parts fastest: the programs that
    read the same rows run together.

    left_ptr: (1 or 2, rows, H_PAD), da or g, by `mlp_backward_kernel`.
    right_ptr: (1 or 2, rows, BLOCK_C), z or dout, by `mlp_backward_kernel`; or, with STREAM,
        (N, L, C), dout as it came.
    slots_ptr: (slots, H_PAD, BLOCK_C), fp32. Slot first_slot + split is written here.
    n_tiles: tiles of this run of examples; tiles_per_split: ceil(n_tiles / splits).
    scale_ptr: (n_tiles,), fp32, by `mlp_backward_kernel`. Read with TILE_SCALE: factor of a tile.
    left_size16, right_size16: elements before the low halves, over 16.
    WIDEN: multiply in float32, for the interpreter, which cannot multiply bf16.
    """
    parts_n: tl.constexpr = BLOCK_C // BLOCK_N
    parts: tl.constexpr = (H_PAD // BLOCK_M) * parts_n
    split_id = tl.program_id(0) // parts
    part = tl.program_id(0) - split_id * parts
    part_m = part // parts_n
    h = part_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (part - part_m * parts_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_L)
    begin = split_id * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, n_tiles)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    left_offs = rows[:, None] * H_PAD + h[None, :]
    right_offs = rows[:, None] * BLOCK_C + cols[None, :]
    for step in range(0, end - begin):
        i = begin + step
        row = i.to(tl.int64) * BLOCK_L
        left = tl.load(left_ptr + row * H_PAD + left_offs)  # [BLOCK_L, BLOCK_M]
        if STREAM:
            tile = first_tile + i
            n = tile // tiles
            first = (tile - n * tiles) * BLOCK_L
            inside = (first + rows < L)[:, None] & (cols < C)[None, :]
            right_base = right_ptr + (n.to(tl.int64) * L + first) * C
            offs = rows[:, None] * C + cols[None, :]
            right = tl.load(right_base + offs, mask=inside, other=0.0)  # [BLOCK_L, BLOCK_N]
        else:
            right_base = right_ptr + row * BLOCK_C
            right = tl.load(right_base + right_offs)
        if SPLIT:
            left_size = left_size16.to(tl.int64) * 16
            right_size = right_size16.to(tl.int64) * 16
            left_lo = tl.load(left_ptr + left_size + row * H_PAD + left_offs)
            right_lo = tl.load(right_base + right_size + right_offs)
            acc = tl.dot(tl.trans(left_lo), right, acc)
            acc = tl.dot(tl.trans(left), right_lo, acc)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        if TILE_SCALE:
            acc += tl.dot(tl.trans(left), right) * tl.load(scale_ptr + i)
        else:
            acc = tl.dot(tl.trans(left), right, acc)
    slot = (first_slot + split_id).to(tl.int64) * H_PAD
    tl.store(slots_ptr + (slot + h)[:, None] * BLOCK_C + cols[None, :], acc)


@triton.jit(do_not_specialize=["slots", "conv_slots"])
def sum_grads_kernel(
    slots_ptr, dconv_slots_ptr, inverse_ptr, largest_ptr, dconv_ptr, dw1_ptr, dw2_ptr,
    slots, conv_slots, residual_scale, z_scale, g_bound,
    C: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr, BLOCK_C: tl.constexpr,
    SUM_BLOCK: tl.constexpr, SCALED: tl.constexpr, DA_SCALE: tl.constexpr,
):  # fmt: skip
    """Add the slots in their order, undo the scales, and convert to the weights' types.

    Grid: ceil(H * C / SUM_BLOCK) programs for dw1, as many for dw2, ceil(3 * C / CONV_COLS) for
    dconv.

    slots_ptr: (2, slots, H_PAD, BLOCK_C), fp32, by `weight_grad_kernel`: dw1, then dw2 transposed.
    dconv_slots_ptr: (conv_slots, 3, C), fp32, by `conv_backward_kernel`.
    inverse_ptr, largest_ptr: see `operand_scale`. Read if SCALED.
    dconv_ptr, dw1_ptr, dw2_ptr: (3, C), (H, C), (C, H), types of the weights. Written here.
    """
    share: tl.constexpr = (H * C + SUM_BLOCK - 1) // SUM_BLOCK
    program = tl.program_id(0)
    slot = tl.arange(0, SLOT_CHUNK)
    element = tl.arange(0, SUM_BLOCK)
    parts = tl.zeros([SLOT_CHUNK, SUM_BLOCK], tl.float32)
    if program < 2 * share:
        which = program // share
        i = (program - which * share) * SUM_BLOCK + element
        h = i // C
        c = i - h * C
        kept = i < H * C
        base = which.to(tl.int64) * slots * (H_PAD * BLOCK_C)
        for start in range(0, slots, SLOT_CHUNK):
            at = (start + slot).to(tl.int64) * (H_PAD * BLOCK_C) + base
            offs = at[:, None] + (h * BLOCK_C + c)[None, :]
            inside = (start + slot < slots)[:, None] & kept[None, :]
            parts += tl.load(slots_ptr + offs, mask=inside, other=0.0)
        total = tl.sum(parts, axis=0) * residual_scale
        if SCALED:
            _, inverse, widest, _ = operand_scale(largest_ptr, inverse_ptr, H_PAD, BLOCK_C)
            if which == 0:
                total = total * inverse * widest * (1.0 / DA_SCALE) * (1.0 / z_scale)
            else:
                largest = 0.0
                hs = tl.arange(0, 16)
                for start in range(0, H_PAD, 16):
                    largest = tl.maximum(largest, tl.max(tl.load(inverse_ptr + start + hs), axis=0))
                total = total * inverse * (tl.minimum(largest, 1.0e27) * g_bound)
        if which == 0:
            tl.store(dw1_ptr + i, total.to(dw1_ptr.dtype.element_ty), mask=kept)
        else:
            tl.store(dw2_ptr + c * H + h, total.to(dw2_ptr.dtype.element_ty), mask=kept)
    else:
        j = (program - 2 * share) * CONV_COLS + tl.arange(0, CONV_COLS)
        conv_slot = tl.arange(0, CONV_SLOTS)
        conv_kept = j < 3 * C
        conv_parts = tl.zeros([CONV_SLOTS, CONV_COLS], tl.float32)
        for start in range(0, conv_slots, CONV_SLOTS):
            conv_offs = (start + conv_slot).to(tl.int64)[:, None] * (3 * C) + j[None, :]
            conv_inside = (start + conv_slot < conv_slots)[:, None] & conv_kept[None, :]
            conv_parts += tl.load(dconv_slots_ptr + conv_offs, mask=conv_inside, other=0.0)
        conv_total = tl.sum(conv_parts, axis=0)
        tl.store(dconv_ptr + j, conv_total.to(dconv_ptr.dtype.element_ty), mask=conv_kept)


@triton.jit
def _load_shifted(ptr, row, shift, pos, rows, cols, L, C: tl.constexpr):
    """Rows pos + shift of one example, float32, zero outside 0..L-1."""
    at = pos + shift
    inside = ((at >= 0) & (at < L) & (pos < L))[:, None] & (cols < C)[None, :]
    offs = rows[:, None] * C + cols[None, :]
    return tl.load(ptr + (row + shift) * C + offs, mask=inside, other=0.0).to(
        tl.float32
    )  # [BLOCK_L, BLOCK_C]


@triton.jit
def _norm_backward(dz, x_l, x_c, x_r, w_l, w_c, w_r, at, L, shift):
    """Gradient with respect to the convolution's output, zero outside 0..L-1.

    That is dz - mean(dz) - z mean(dz z) in units of rstd; w holds the taps times rstd mean(dz z),
    `shift` the two constants.
    """
    dy = (dz + shift) - x_l * w_l[None, :] - x_c * w_c[None, :] - x_r * w_r[None, :]
    return tl.where(((at >= 0) & (at < L))[:, None], dy, 0.0)


@triton.jit(do_not_specialize=["L", "dilation", "runs", "sum_tiles"])
def conv_backward_kernel(
    grad_ptr, x_ptr, conv_ptr, mean_ptr, rstd_ptr, dz_ptr, sums_ptr, dx_ptr, dconv_ptr,
    L, dilation, runs, sum_tiles,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, RUN: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Compute dx and a part of dconv_weight of RUN tiles, through the norm and the convolution.

    The gradient at the convolution's output is needed at three positions; each is computed from x
    and dz again, which caches better than writing it out.

    Grid: N * runs, runs = ceil(L / (RUN * BLOCK_L)).

    grad_ptr, x_ptr, conv_ptr, mean_ptr, rstd_ptr: as `mlp_backward_kernel`.
    dz_ptr, sums_ptr: (N, L, C) and (N, sum_tiles, 2), by `mlp_backward_kernel`.
    dx_ptr: (N, L, C), type of x. Written here.
    dconv_ptr: (N * runs, 3, C), fp32. Written here if WEIGHTS.
    """
    run = tl.program_id(0)
    n = run // runs
    begin = (run - n * runs) * (RUN * BLOCK_L)
    rows = tl.arange(0, BLOCK_L)
    cols = tl.arange(0, BLOCK_C)
    d = dilation
    w_l, w_c, w_r = load_conv_weight(conv_ptr, cols, C)
    mean = tl.load(mean_ptr + n)
    rstd = tl.load(rstd_ptr + n)
    sum_dz = 0.0
    sum_dzz = 0.0
    base = sums_ptr + n.to(tl.int64) * sum_tiles * 2
    for start in range(0, sum_tiles, SUM_CHUNK):
        i = start + tl.arange(0, SUM_CHUNK)
        sum_dz += tl.sum(tl.load(base + 2 * i, mask=i < sum_tiles, other=0.0), axis=0)
        sum_dzz += tl.sum(tl.load(base + 2 * i + 1, mask=i < sum_tiles, other=0.0), axis=0)
    count = L.to(tl.float32) * C
    z_factor = rstd * (sum_dzz / count)
    shift = mean * z_factor - sum_dz / count
    z_l = w_l * z_factor
    z_c = w_c * z_factor
    z_r = w_r * z_factor
    if WEIGHTS:
        dconv_l = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
        dconv_c = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
        dconv_r = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + RUN * BLOCK_L, L), BLOCK_L, num_stages=1):
        pos = first + rows
        row = n.to(tl.int64) * L + first
        x_ll = _load_shifted(x_ptr, row, -2 * d, pos, rows, cols, L, C)
        x_l = _load_shifted(x_ptr, row, -d, pos, rows, cols, L, C)
        x_c = _load_shifted(x_ptr, row, 0, pos, rows, cols, L, C)
        x_r = _load_shifted(x_ptr, row, d, pos, rows, cols, L, C)
        x_rr = _load_shifted(x_ptr, row, 2 * d, pos, rows, cols, L, C)
        dz_l = _load_shifted(dz_ptr, row, -d, pos, rows, cols, L, C)
        dz_c = _load_shifted(dz_ptr, row, 0, pos, rows, cols, L, C)
        dz_r = _load_shifted(dz_ptr, row, d, pos, rows, cols, L, C)
        offs = rows[:, None] * C + cols[None, :]
        inside = (pos < L)[:, None] & (cols < C)[None, :]
        dx = tl.load(grad_ptr + row * C + offs, mask=inside, other=0.0).to(tl.float32)
        dy = _norm_backward(dz_c, x_l, x_c, x_r, z_l, z_c, z_r, pos, L, shift)
        if WEIGHTS:
            dconv_l += dy * x_l
            dconv_c += dy * x_c
            dconv_r += dy * x_r
        dx += dy * w_c[None, :]
        dy = _norm_backward(dz_r, x_c, x_r, x_rr, z_l, z_c, z_r, pos + d, L, shift)
        dx += dy * w_l[None, :]
        dy = _norm_backward(dz_l, x_ll, x_l, x_c, z_l, z_c, z_r, pos - d, L, shift)
        dx += dy * w_r[None, :]
        tl.store(dx_ptr + row * C + offs, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHTS:
        slot = dconv_ptr + run.to(tl.int64) * (3 * C) + cols
        tl.store(slot, tl.sum(dconv_l, axis=0), mask=cols < C)
        tl.store(slot + C, tl.sum(dconv_c, axis=0), mask=cols < C)
        tl.store(slot + 2 * C, tl.sum(dconv_r, axis=0), mask=cols < C)
