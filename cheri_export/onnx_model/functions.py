"""The ONNX function bodies of the four op types, in standard operators.

A file that carries them runs in plain ONNX Runtime, with no library of ours. Bodies compute in
float32 whatever the stream's type, and never use GroupNormalization or InstanceNormalization, whose
statistics some runtimes take in the stream's type.
"""

from __future__ import annotations

import functools

import onnx
import onnx.parser

from cheri_export.spec import BLOCK, DOMAIN, HEAD, HEAD_CONTROL, STEM

# SAME_UPPER on an odd kernel at stride 1 pads k // 2 at both ends, whatever k is.
_STEM = """
CheriStem <out_dtype, math, plugin_version, plugin_namespace> (sequence, weight, bias) => (Y)
{
  filtered = Conv <auto_pad = "SAME_UPPER"> (sequence, weight, bias)
  last = Transpose <perm = [0, 2, 1]> (filtered)
  active = Gelu <approximate = "tanh"> (last)
  Y = Cast <to: int = @out_dtype> (active)
}
"""

# From d = L on both side taps are outside the sequence, so d is cut to L: padding by it would cost
# memory that doubles with every layer. The three taps are slices of one padded copy: Conv takes its
# dilation only as a list of integers, which a function cannot make from the integer attribute.
# The mean is taken out twice: when it is far larger than the spread, the first pass leaves its
# rounding error behind. The variance is summed in two levels: ONNX Runtime's ReduceSumSquare adds
# one by one, and over a whole example (L * C terms) loses three digits.
_BLOCK = """
CheriBlock <dilation, residual_scale, epsilon, math, plugin_version, plugin_namespace>
  (X, conv_weight, w1, w2) => (Y)
{
  x = Cast <to = 1> (X)
  d_scalar = Constant <value_int: int = @dilation> ()
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  far = Constant <value_ints = [9223372036854775807]> ()
  plane = Constant <value_ints = [1, 2]> ()
  d_given = Reshape (d_scalar, one)
  length = Shape <start = 1, end = 2> (X)
  d = Min (d_given, length)
  d2 = Mul (d, two)
  back = Neg (d2)
  pads = Concat <axis = 0> (zero, d, zero, zero, d, zero)
  padded = Pad (x, pads)
  before = Slice (padded, zero, back, one)
  after = Slice (padded, d2, far, one)
  tap0, tap1, tap2 = Split <axis = 0, num_outputs = 3> (conv_weight)
  y0 = Mul (before, tap0)
  y1 = Mul (x, tap1)
  y2 = Mul (after, tap2)
  y01 = Add (y0, y1)
  y = Add (y01, y2)
  mean = ReduceMean (y, plane)
  shifted = Sub (y, mean)
  rest = ReduceMean (shifted, plane)
  centred = Sub (shifted, rest)
  row_energy = ReduceSumSquare (centred, two)
  channels = Shape <start = 2, end = 3> (X)
  width = Cast <to = 1> (channels)
  row_variance = Div (row_energy, width)
  variance = ReduceMean (row_variance, one)
  epsilon_value = Constant <value_float: float = @epsilon> ()
  raised = Add (variance, epsilon_value)
  deviation = Sqrt (raised)
  z = Div (centred, deviation)
  w1_wide = Cast <to = 1> (w1)
  w2_wide = Cast <to = 1> (w2)
  w1_t = Transpose <perm = [1, 0]> (w1_wide)
  w2_t = Transpose <perm = [1, 0]> (w2_wide)
  h = MatMul (z, w1_t)
  g = Gelu <approximate = "tanh"> (h)
  mlp = MatMul (g, w2_t)
  scale = Constant <value_float: float = @residual_scale> ()
  update = Mul (mlp, scale)
  sum = Add (x, update)
  Y = CastLike (sum, X)
}
"""

# The profile head is a matrix product over channels for every tap at once, (O * k, C) by (C, M),
# M = L_out + k - 1, whose diagonals are then summed: row j of each k x M block is shifted left by j
# by writing it with a row length of M + 1. A Conv of one output channel would copy its input k
# times.
_HEAD = """
{name} <start, end_trim, count_start, count_end_trim, math, plugin_version, plugin_namespace>
  (X, profile_weight, profile_bias, count_weight, count_bias{control_input})
  => (profile_logits, log_counts)
{{
  x = Cast <to = 1> (X)
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  three = Constant <value_ints = [3]> ()
  minus_one = Constant <value_ints = [-1]> ()
  start_scalar = Constant <value_int: int = @start> ()
  end_scalar = Constant <value_int: int = @end_trim> ()
  count_start_scalar = Constant <value_int: int = @count_start> ()
  count_end_scalar = Constant <value_int: int = @count_end_trim> ()
  first = Reshape (start_scalar, one)
  cut = Reshape (end_scalar, one)
  count_first = Reshape (count_start_scalar, one)
  count_cut = Reshape (count_end_scalar, one)
  batch = Shape <start = 0, end = 1> (X)
  length = Shape <start = 1, end = 2> (X)
  outputs = Shape <start = 0, end = 1> (profile_weight)
  channels = Shape <start = 1, end = 2> (profile_weight)
  taps = Shape <start = 2, end = 3> (profile_weight)
  half = Div (taps, two)
  last = Sub (length, cut)
  low = Sub (first, half)
  high = Add (last, half)
  from = Max (low, zero)
  to = Min (high, length)
  missing_low = Sub (from, low)
  missing_high = Sub (high, to)
  kept = Sub (last, first)
  kept_last = Slice (x, from, to, one)
  kept_x = Transpose <perm = [0, 2, 1]> (kept_last)
  {kept_control}
  pads = Concat <axis = 0> (zero, zero, missing_low, zero, zero, missing_high)
  window = Pad (kept_all, pads)
  by_tap = Transpose <perm = [0, 2, 1]> (profile_weight)
  rows = Mul (outputs, taps)
  matrix_shape = Concat <axis = 0> (rows, channels)
  matrix = Reshape (by_tap, matrix_shape)
  products = MatMul (matrix, window)
  skew_in_shape = Concat <axis = 0> (batch, outputs, minus_one)
  flat = Reshape (products, skew_in_shape)
  skew_pads = Concat <axis = 0> (zero, zero, zero, zero, zero, taps)
  longer = Pad (flat, skew_pads)
  skew_out_shape = Concat <axis = 0> (batch, outputs, taps, minus_one)
  skewed = Reshape (longer, skew_out_shape)
  diagonals = Slice (skewed, zero, kept, three)
  summed = ReduceSum <keepdims = 0> (diagonals, two)
  bias_shape = Concat <axis = 0> (outputs, one)
  bias = Reshape (profile_bias, bias_shape)
  profile_logits = Add (summed, bias)
  count_last = Sub (length, count_cut)
  counted = Slice (x, count_first, count_last, one)
  mean = ReduceMean <keepdims = 0> (counted, one)
  {count_control}
  log_counts = Gemm <transB = 1> (summary, count_weight, count_bias)
}}
"""

_PLAIN = {
    "name": HEAD,
    "control_input": "",
    "kept_control": "kept_all = Identity (kept_x)",
    "count_control": "summary = Identity (mean)",
}
_WITH_CONTROL = {
    "name": HEAD_CONTROL,
    "control_input": ", control",
    "kept_control": (
        "kept_tracks = Slice (control, from, to, two)\n"
        "  kept_all = Concat <axis = 1> (kept_x, kept_tracks)"
    ),
    "count_control": (
        "counted_tracks = Slice (control, count_first, count_last, two)\n"
        "  tracks_and_positions = Constant <value_ints = [1, 2]> ()\n"
        "  reads_3d = ReduceSum (counted_tracks, tracks_and_positions)\n"
        "  reads = Squeeze (reads_3d, two)\n"
        "  unit = Constant <value_float = 1.0> ()\n"
        "  raised = Add (reads, unit)\n"
        "  log_reads = Log (raised)\n"
        "  summary = Concat <axis = 1> (mean, log_reads)"
    ),
}

_TEXT = {
    STEM: _STEM,
    BLOCK: _BLOCK,
    HEAD: _HEAD.format(**_PLAIN),
    HEAD_CONTROL: _HEAD.format(**_WITH_CONTROL),
}


@functools.cache
def _parsed(op_type: str, opset: int) -> bytes:
    header = f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>'
    return onnx.parser.parse_function(header + _TEXT[op_type]).SerializeToString()


def function_body(op_type: str, opset: int) -> onnx.FunctionProto:
    """The local function of one op type.

    Parameters
    ----------
    op_type: str
        ``CheriStem``, ``CheriBlock``, ``CheriHead`` or ``CheriHeadControl``.

    opset: int
        Version of the default domain that the model imports (20 or newer).

    Returns
    -------
    function: onnx.FunctionProto
        A fresh copy, in domain ``trt.plugins``.
    """
    function = onnx.FunctionProto()
    function.ParseFromString(_parsed(op_type, opset))
    return function
