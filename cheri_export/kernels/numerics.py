"""Device functions shared by the kernels: exact power-of-two scaling, split dots, GELU, the conv.

Three-product dots. A float32 value v, scaled by a power of two into the range of fp16, is held as
hi + lo with hi = fp16(v) and lo = fp16(v - hi): 22 bits. a*b is taken as lo*hi + hi*lo + hi*hi with
fp32 accumulation; the dropped lo*lo term is 2^-22 of the product. Scales are powers of two, so that
applying and undoing them never rounds.
"""

import triton
import triton.language as tl

# The largest magnitude of a scaled operand lies in [2**10, 2**11): far below the fp16 maximum, and
# the low half of any element above 2**-14 of the largest is still a normal number. `host.g_bound`
# relies on it: it bounds the hidden activations by the inverse scales times 2**11.
TARGET_EXPONENT = tl.constexpr(10)


@triton.jit
def scales_for(largest):
    """Power of two that brings `largest` (float32, >= 0) into [2**10, 2**11), and its inverse.

    Exponents are clamped so that both are normal numbers for zero, infinite and NaN input.
    """
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    exponent = tl.maximum(exponent, -100) - TARGET_EXPONENT
    scale = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def invert_pow2(value):
    """1 / value, exactly, for a power of two; the fast division may be off by an ulp."""
    return ((254 << 23) - value.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def split(value, SPLIT: tl.constexpr):
    """Return float32 `value` as fp16 (hi, lo); without SPLIT the second is a copy of the first."""
    hi = value.to(tl.float16)
    if SPLIT:
        lo = (value - hi.to(tl.float32)).to(tl.float16)
    else:
        lo = hi
    return hi, lo


@triton.jit
def dot_parts(
    a_hi, a_lo, a2_hi, a2_lo, b_hi, b_lo, b2_hi, b2_lo, acc,
    SPLIT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`dot_terms` of operands in one part, or in two along the dimension that is summed over."""
    acc = dot_terms(a_hi, a_lo, b_hi, b_lo, acc, SPLIT)
    if PARTS == 2:
        acc = dot_terms(a2_hi, a2_lo, b2_hi, b2_lo, acc, SPLIT)
    return acc


@triton.jit
def dot_terms(a_hi, a_lo, b_hi, b_lo, acc, SPLIT: tl.constexpr):
    """Return acc + a @ b, float32; with SPLIT as three products, the small ones first."""
    if SPLIT:
        acc = tl.dot(a_lo, b_hi, acc)
        acc = tl.dot(a_hi, b_lo, acc)
    return tl.dot(a_hi, b_hi, acc)


@triton.jit
def tanh_approx(u):
    """Take tanh by one hardware instruction (sm_75 and later), relative error about 2**-11."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def gelu_of_half(y, APPROX: tl.constexpr):
    """Return gelu_tanh(2y). Half of z is free (the norm holds the factor) and saves a product.

    APPROX 0: float32 by exp, for the fp32 tier and for the interpreter (no inline assembly).
    APPROX 1: float32 by tanh.approx. APPROX 2: two fp16 elements per instruction, result fp16;
    its square overflows for |y| > 255, which tanh turns into exactly 1.
    """
    if APPROX == 0:
        u2 = y * (3.1915382432114616 + 0.5708385301808020 * (y * y))
        return (2.0 * y) / (1.0 + tl.exp(-u2))
    elif APPROX == 1:
        u = y * (1.5957691216057308 + 0.28541926509040107 * (y * y))
        return y * tanh_approx(u) + y
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 h, t, p, u, c0, c1;
            mov.b32 c0, 0x3E623E62;
            mov.b32 c1, 0x34913491;
            cvt.rn.f16x2.f32 h, $2, $1;
            mul.rn.f16x2 t, h, h;
            fma.rn.f16x2 p, t, c1, c0;
            mul.rn.f16x2 u, h, p;
            tanh.approx.f16x2 t, u;
            fma.rn.f16x2 $0, h, t, h;
            }
            """,
            "=r,f,f",
            [y],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def gelu_and_slope(z, APPROX: tl.constexpr):
    """Return gelu_tanh(z) and its derivative, float32."""
    # Bounded so that the polynomial stays finite where the logistic factor is already 0: 0 * inf.
    z2 = tl.minimum(z * z, 1.0e6)
    u2 = z * (1.5957691216057308 + 0.07135481627260025 * z2)
    if APPROX == 0:
        sigmoid = 1.0 / (1.0 + tl.exp(-u2))
    else:
        sigmoid = 0.5 * tanh_approx(0.5 * u2) + 0.5
    g = z * sigmoid
    slope = sigmoid + g * (1.0 - sigmoid) * (1.5957691216057308 + 0.21406444881780074 * z2)
    # min() drops a NaN, and an infinite z is no valid activation: the first term keeps both.
    return g, slope


@triton.jit
def load_taps(x_ptr, row, pos, rows, cols, L, dilation, C: tl.constexpr):
    """The three rows pos - dilation, pos, pos + dilation of one example, zero outside 0..L-1.

    `row` (int64) is the flat index of the tile's first row, `pos` = the positions of its `rows`.
    Everything inside the tile is int32, everything before it int64.
    """
    offs = rows[:, None] * C + cols[None, :]  # [BLOCK_L, BLOCK_C]
    inside = (pos < L)[:, None] & (cols < C)[None, :]
    centre_ptr = x_ptr + row * C
    step = dilation.to(tl.int64) * C
    centre = tl.load(centre_ptr + offs, mask=inside, other=0.0)
    left = tl.load(centre_ptr - step + offs, mask=inside & (pos >= dilation)[:, None], other=0.0)
    right = tl.load(
        centre_ptr + step + offs, mask=inside & (pos < L - dilation)[:, None], other=0.0
    )
    return left.to(tl.float32), centre.to(tl.float32), right.to(tl.float32)


@triton.jit
def load_conv_weight(conv_ptr, cols, C: tl.constexpr):
    """The three taps of conv_weight (3, C), float32, zero in the padded channels."""
    inside = cols < C
    left = tl.load(conv_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    centre = tl.load(conv_ptr + C + cols, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(conv_ptr + 2 * C + cols, mask=inside, other=0.0).to(tl.float32)
    return left, centre, right  # [BLOCK_C] each


@triton.jit
def conv_tile(x_ptr, conv_ptr, row, pos, rows, cols, L, dilation, C: tl.constexpr):
    """The dilated depthwise convolution of one tile, float32; exact zeros outside (L, C)."""
    w_left, w_centre, w_right = load_conv_weight(conv_ptr, cols, C)
    left, centre, right = load_taps(x_ptr, row, pos, rows, cols, L, dilation, C)
    y = centre * w_centre[None, :]
    y += left * w_left[None, :]
    y += right * w_right[None, :]
    return y  # [BLOCK_L, BLOCK_C]
