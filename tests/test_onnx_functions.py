"""The ONNX function bodies against float64, over everything a checkpoint or an input may hold."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from close import assert_within
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from cheri_export import reference, tolerance
from cheri_export.onnx_model import function_body
from cheri_export.onnx_model.translation import ATTRIBUTES, INPUTS
from cheri_export.spec import (
    BLOCK,
    DOMAIN,
    EPSILON,
    HEAD,
    HEAD_CONTROL,
    OP_TYPES,
    OPSETS,
    PRECISIONS,
    STEM,
)

STREAM = {
    "fp32": (torch.float32, TensorProto.FLOAT),
    "mixed": (torch.float32, TensorProto.FLOAT),
    "fp16": (torch.float16, TensorProto.FLOAT16),
    "bf16": (torch.bfloat16, TensorProto.BFLOAT16),
}
RELAXED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,  # a gate must not depend on luck
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@functools.lru_cache(maxsize=64)
def one_node(
    op: str, opset: int, casts: tuple[tuple[str, int], ...], attributes
) -> onnx.ModelProto:
    """A graph of one node. Inputs are float32 and cast to `casts`; a narrow result is cast back.

    The node's own input types are what is tested: NumPy has no bfloat16 to feed.
    """
    narrow = dict(casts)
    names = INPUTS[op]
    outputs = ["profile_logits", "log_counts"] if op in (HEAD, HEAD_CONTROL) else ["Y"]
    nodes = [
        helper.make_node("Cast", [name], [name + "_cast"], to=narrow.get(name, TensorProto.FLOAT))
        for name in names
    ]
    nodes.append(
        helper.make_node(
            op,
            [name + "_cast" for name in names],
            outputs,
            domain=DOMAIN,
            plugin_version="1",
            plugin_namespace="",
            **dict(attributes),
        )
    )
    nodes += [helper.make_node("Cast", [o], [o + "_wide"], to=TensorProto.FLOAT) for o in outputs]
    graph = helper.make_graph(
        nodes,
        "one_node",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        [helper.make_tensor_value_info(o + "_wide", TensorProto.FLOAT, None) for o in outputs],
    )
    return helper.make_model(
        graph,
        functions=[function_body(op, opset)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        ir_version=10,
    )


def run(op, opset, feed, attributes, casts=()):
    assert set(attributes) == set(ATTRIBUTES[op])
    model = one_node(op, opset, tuple(casts), tuple(sorted(attributes.items())))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {k: v.float().numpy() for k, v in feed.items()})


def half_step(dtype: torch.dtype, reference_values: torch.Tensor) -> float:
    """Half the spacing of `dtype` at the largest value: the one rounding of a stored result."""
    largest = float(reference_values.abs().max())
    exponent = np.floor(np.log2(max(largest, 1e-30)))
    return 0.5 * float(torch.finfo(dtype).eps) * float(2.0**exponent)


@st.composite
def geometry(draw):
    length = draw(st.one_of(st.sampled_from([1, 2, 63, 65]), st.integers(1, 140)))
    channels = draw(st.integers(3, 40).filter(lambda c: c & (c - 1)))
    return draw(st.integers(1, 3)), length, channels, draw(st.integers(0, 2**31))


def generator(seed: int):
    source = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(*size, generator=source)


@RELAXED
@given(
    geometry(),
    st.integers(1, 90),
    st.one_of(st.sampled_from([1, 2, 64, 128, 300]), st.integers(1, 200)),
    st.sampled_from([0.0, 1.0, 50.0, 3000.0]),
    st.sampled_from([0.05, 1.0]),
    st.sampled_from(PRECISIONS),
    st.sampled_from(OPSETS),
    st.booleans(),
    st.sampled_from([0.15, 1.0, -0.4]),
    st.booleans(),
)
def test_block_body(shape, hidden, dilation, offset, std, tier, opset, trained, scale, mean_taps):
    n, length, c, seed = shape
    randn = generator(seed)
    stream, stream_number = STREAM[tier]
    x = (std * (randn(n, length, c) + offset)).to(stream)
    conv = randn(3, c) * (0.3 if trained else 0.02)
    if mean_taps:  # the mean reaches the norm whole, far above the spread
        conv = torch.tensor([[0.0], [1.0], [0.0]]).expand(3, c)
    w1, w2 = (randn(*s) * (0.1 if trained else 0.02) for s in ((hidden, c), (c, hidden)))
    weights = torch.float16 if tier in ("fp16", "bf16") else torch.float32
    w1, w2 = w1.to(weights), w2.to(weights)
    casts = [("X", stream_number)]
    if weights == torch.float16:
        casts += [("w1", TensorProto.FLOAT16), ("w2", TensorProto.FLOAT16)]
    (found,) = run(
        BLOCK,
        opset,
        {"X": x, "conv_weight": conv, "w1": w1, "w2": w2},
        {"dilation": dilation, "residual_scale": scale, "epsilon": EPSILON, "math": tier},
        casts,
    )
    wide = [t.double() for t in (conv, w1, w2)]
    factor = float(np.float32(scale)), float(np.float32(EPSILON))
    wanted = torch.stack([reference.block(one.double(), *wide, dilation, *factor) for one in x])
    limit = tolerance.block_limit(
        tier, trained_scale=trained, max_abs_input=float(x.double().abs().max())
    )
    if stream != torch.float32:
        # bf16's own spacing passes its published 3e-2 just above a power of two.
        limit = max(limit, half_step(stream, wanted) * 1.001)
        assert np.array_equal(found, torch.from_numpy(found).to(stream).float().numpy())
    assert_within(f"block {tier} opset {opset}", found, wanted, limit)


@RELAXED
@given(
    geometry(),
    st.sampled_from([1, 3, 19, 21]),
    st.sampled_from(["fp32", "fp16", "bf16"]),
    st.sampled_from(OPSETS),
    st.booleans(),
)
def test_stem_body(shape, k, tier, opset, one_hot):
    n, length, c, seed = shape
    randn = generator(seed)
    stream, number = STREAM[tier]
    sequence = randn(n, 4, length)
    if one_hot:
        # An all-zero column is an unknown base.
        sequence = (sequence == sequence.max(1, keepdim=True).values).float()
        sequence[:, :, length // 3 : length // 2] = 0
    weight, bias = randn(c, 4, k) * 0.3, randn(c)
    (found,) = run(
        STEM,
        opset,
        {"sequence": sequence, "weight": weight, "bias": bias},
        {"out_dtype": number, "math": tier},
    )
    y = torch.nn.functional.conv1d(
        sequence.double(), weight.double(), bias.double(), padding=k // 2
    ).transpose(1, 2)
    wanted = 0.5 * y * (1 + torch.tanh(0.7978845608028654 * (y + 0.044715 * y**3)))
    limit = tolerance.block_limit("fp32", trained_scale=True, max_abs_input=float(y.abs().max()))
    if stream != torch.float32:
        limit += half_step(stream, wanted)
        # Rounded to the stream's type, or the next op would read something else.
        assert np.array_equal(found, torch.from_numpy(found).to(stream).float().numpy())
    assert_within(f"stem {tier} opset {opset}", found, wanted, limit)


@st.composite
def windows(draw, length):
    start = draw(st.integers(0, length - 1))
    end = draw(st.one_of(st.just(0), st.integers(0, length - 1 - start))) if length > 1 else 0
    end = min(end, length - 1 - start)
    count_start = draw(st.integers(0, start))
    return start, end, count_start, draw(st.integers(0, end))


@RELAXED
@given(
    st.data(),
    geometry(),
    st.sampled_from([1, 3, 75]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(PRECISIONS),
    st.sampled_from(OPSETS),
    st.sampled_from([0.0, 30.0]),
)
def test_head_bodies(data, shape, k, tracks, outputs, groups, tier, opset, offset):
    bounds = data.draw(windows(shape[1]))
    check_head(shape, bounds, k, tracks, outputs, groups, tier, opset, offset)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("tracks", [0, 2])
@pytest.mark.parametrize("k", [1, 3, 75])
@pytest.mark.parametrize(
    "bounds",
    # Both ends padded, one of them, neither; the count window wider than the profile's.
    [(0, 0, 0, 0), (40, 0, 3, 0), (0, 40, 0, 3), (1, 1, 0, 1), (36, 36, 0, 0), (40, 45, 3, 8)],
)
def test_head_bodies_at_every_kind_of_edge(bounds, k, tracks, opset) -> None:
    check_head((2, 100, 7, 0), bounds, k, tracks, 2, 1, "fp32", opset, 0.0)


def check_head(shape, bounds, k, tracks, outputs, groups, tier, opset, offset) -> None:
    """Windows may begin within k // 2 of an edge, and then the convolution is padded."""
    n, length, c, seed = shape
    start, end, count_start, count_end = bounds
    randn = generator(seed)
    stream, number = STREAM[tier]
    x = (randn(n, length, c) + offset).to(stream)
    feed = {
        "X": x,
        "profile_weight": randn(outputs, c + tracks, k) * 0.1,
        "profile_bias": randn(outputs),
        "count_weight": randn(groups, c + bool(tracks)),
        "count_bias": randn(groups),
    }
    op = HEAD_CONTROL if tracks else HEAD
    if tracks:
        feed["control"] = torch.floor(randn(n, tracks, length).abs() * 40)
    attributes = {
        "start": start,
        "end_trim": end,
        "count_start": count_start,
        "count_end_trim": count_end,
    }
    profile, counts = run(op, opset, feed, {**attributes, "math": tier}, [("X", number)])

    wide = {name: t.double() for name, t in feed.items()}
    channels = wide["X"].transpose(1, 2)
    summary = channels[:, :, count_start : length - count_end].mean(2)
    if tracks:
        channels = torch.cat([channels, wide["control"]], 1)
        reads = wide["control"][:, :, count_start : length - count_end].sum((1, 2))
        summary = torch.cat([summary, torch.log1p(reads)[:, None]], 1)

    def conv(a, w, b):
        return torch.nn.functional.conv1d(a, w, b, padding=k // 2)[:, :, start : length - end]

    wanted = conv(channels, wide["profile_weight"], wide["profile_bias"])
    # Rounding errors of a sum follow the sum of its terms' magnitudes.
    size = conv(channels.abs(), wide["profile_weight"].abs(), wide["profile_bias"].abs())
    limit = tolerance.block_limit("fp32", trained_scale=True, max_abs_input=float(size.max()))
    assert profile.shape == (n, outputs, length - start - end)
    assert_within(f"profile opset {opset}", profile, wanted, limit)
    wanted = summary @ wide["count_weight"].T + wide["count_bias"]
    size = summary.abs() @ wide["count_weight"].abs().T + wide["count_bias"].abs()
    limit = tolerance.block_limit("fp32", trained_scale=True, max_abs_input=float(size.max()))
    assert counts.shape == (n, groups)
    assert_within(f"counts opset {opset}", counts, wanted, limit)


@pytest.mark.parametrize("tier", PRECISIONS)
@pytest.mark.parametrize("opset", OPSETS)
def test_block_body_at_nine_layer_size(tier: str, opset: int) -> None:
    """L * C = 250,000 terms in the statistics, with a mean 3000 times the spread."""
    randn = generator(0)
    stream, number = STREAM[tier]
    offset = 3000.0 if stream == torch.float32 else 100.0
    x = (randn(1, 2114, 120) + offset).to(stream)
    conv = torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 120)
    weights = torch.float16 if tier in ("fp16", "bf16") else torch.float32
    w1, w2 = (randn(240, 120) * 0.1).to(weights), (randn(120, 240) * 0.1).to(weights)
    casts = [("X", number)]
    if weights == torch.float16:
        casts += [("w1", TensorProto.FLOAT16), ("w2", TensorProto.FLOAT16)]
    (found,) = run(
        BLOCK,
        opset,
        {"X": x, "conv_weight": conv, "w1": w1, "w2": w2},
        {"dilation": 256, "residual_scale": 0.15, "epsilon": EPSILON, "math": tier},
        casts,
    )
    wanted = reference.block(
        x[0].double(), *(t.double() for t in (conv, w1, w2)), 256, 0.15, EPSILON
    )[None]
    limit = tolerance.block_limit(
        tier, trained_scale=True, max_abs_input=float(x.double().abs().max())
    )
    assert_within("block", found, wanted, max(limit, half_step(stream, wanted) * 1.001))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("op", OP_TYPES)
def test_bodies_have_the_contracts_form(op: str, opset: int) -> None:
    body = function_body(op, opset)
    assert (body.name, body.domain) == (op, DOMAIN)
    assert list(body.input) == list(INPUTS[op])
    assert set(body.attribute) == {*ATTRIBUTES[op], "plugin_version", "plugin_namespace"}
    assert [(o.domain, o.version) for o in body.opset_import] == [("", opset)]
    types = {node.op_type for node in body.node}
    assert {node.domain for node in body.node} == {""}
    assert not types & {"GroupNormalization", "InstanceNormalization", "LayerNormalization"}
    known = onnx.defs.get_all_schemas_with_history()
    standard = {s.name for s in known if s.domain == "" and s.since_version <= opset}
    assert types <= standard
    if op == BLOCK:
        # float32 inside: whatever feeds the statistics and the products has been cast.
        assert "ReduceMean" in types
        cast = {n.input[0] for n in body.node if n.op_type == "Cast"}
        assert {"X", "w1", "w2"} <= cast
        others = {
            i for n in body.node if n.op_type not in ("Cast", "CastLike", "Shape") for i in n.input
        }
        assert not others & {"X", "w1", "w2"}


def test_function_body_is_a_fresh_copy() -> None:
    first = function_body(BLOCK, 20)
    first.name = "changed"
    assert function_body(BLOCK, 20).name == BLOCK
