"""The exported file: nodes, attributes, types, names, and what ONNX Runtime makes of it."""

from __future__ import annotations

import copy
import functools
import json
import logging
import tempfile
from pathlib import Path

import checkpoint_makers as make
import numpy as np
import onnx
import pytest
import torch
from close import assert_within
from conftest import DATA, GOOD, load_sample, run_reference
from onnx import TensorProto, numpy_helper

from cheri_export import describe, tolerance
from cheri_export.check import open_session
from cheri_export.checkpoint import checkpoint_from_tensors
from cheri_export.errors import CheriError, InputError
from cheri_export.modules import Cherimoya, build_module
from cheri_export.onnx_model import (
    export_onnx,
    finish_onnx,
    node_counts,
    save_onnx,
    translation_table,
)
from cheri_export.onnx_model.translation import ATTRIBUTES
from cheri_export.spec import (
    BLOCK,
    DOMAIN,
    EPSILON,
    HEAD,
    HEAD_CONTROL,
    LOG_COUNTS,
    OP_TYPES,
    PRECISIONS,
    PROFILE_LOGITS,
    STEM,
)

STREAM = {
    "fp32": TensorProto.FLOAT,
    "mixed": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}
OUTPUTS = (PROFILE_LOGITS, LOG_COUNTS)
QUICK = ("default_9x128_trained", "stranded2_ctl2_5x48", "v0.0.1_pickle_4x32")
"""Judged in every tier in the default selection; the other samples in the slow one."""


@functools.cache
def exported(name: str, precision: str = "fp32", opset: int = 20) -> bytes:
    found = load_sample(name)
    metadata = describe.onnx_metadata(found.checkpoint, precision, "https://example.org/x", "MIT")
    model = export_onnx(found.module(precision), opset=opset, metadata=metadata)
    return model.SerializeToString()


def parsed(data: bytes) -> onnx.ModelProto:
    return onnx.load_from_string(data)


def run(data: bytes, sequence: torch.Tensor, control: torch.Tensor | None = None):
    feed = {"sequence": sequence.float().numpy()}
    if control is not None:
        feed["control"] = control.numpy()
    return open_session(data).run(None, feed)


def attributes_of(node: onnx.NodeProto) -> dict:
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def check_form(model: onnx.ModelProto, spec, precision: str, opset: int) -> None:
    """Everything about the file that does not need running it."""
    head = HEAD_CONTROL if spec.n_control_tracks else HEAD
    nodes = list(model.graph.node)
    assert [n.op_type for n in nodes] == [STEM, *[BLOCK] * spec.n_layers, head]
    assert node_counts(model) == {BLOCK: spec.n_layers, head: 1, STEM: 1}
    assert {n.domain for n in nodes} == {DOMAIN} == {"trt.plugins"}
    for node in nodes:
        found = attributes_of(node)
        assert set(found) == {*ATTRIBUTES[node.op_type], "plugin_version", "plugin_namespace"}
        assert found["plugin_version"] == "1" and found["plugin_namespace"] == ""
        assert found["math"] == precision
        assert all(node.input), "an empty optional input"
    assert attributes_of(nodes[0])["out_dtype"] == STREAM[precision]
    for i, node in enumerate(nodes[1:-1]):
        found = attributes_of(node)
        assert found["dilation"] == 2**i
        scale = 1.0 if spec.has_gamma else spec.residual_scale
        assert found["residual_scale"] == np.float32(scale)
        assert found["epsilon"] == np.float32(EPSILON)
    found = attributes_of(nodes[-1])
    assert (found["start"], found["end_trim"]) == (spec.trimming, spec.trimming)
    margin = spec.trimming - spec.count_margin
    assert (found["count_start"], found["count_end_trim"]) == (margin, margin)

    assert model.ir_version == 10
    assert {o.domain: o.version for o in model.opset_import} == {"": opset, DOMAIN: 1}
    assert sorted(f.name for f in model.functions) == sorted({BLOCK, STEM, head})
    for function in model.functions:
        assert function.domain == DOMAIN
        assert {o.domain: o.version for o in function.opset_import} == {"": opset}

    def shape(value):
        assert value.type.tensor_type.elem_type == TensorProto.FLOAT
        dims = value.type.tensor_type.shape.dim
        return [d.dim_param if d.HasField("dim_param") else d.dim_value for d in dims]

    inputs = [(i.name, shape(i)) for i in model.graph.input]
    wanted = [("sequence", ["N", 4, "L"])]
    if spec.n_control_tracks:
        wanted.append(("control", ["N", spec.n_control_tracks, "L"]))
    assert inputs == wanted
    (profile, p_shape), (counts, c_shape) = ((o.name, shape(o)) for o in model.graph.output)
    assert (profile, counts) == OUTPUTS
    assert p_shape[:2] == ["N", spec.n_outputs] and isinstance(p_shape[2], str)
    assert c_shape == ["N", spec.n_count_outputs]


def check_weights(model: onnx.ModelProto, state: dict, precision: str) -> None:
    """Names are the state dict's, types the tier's, values the module's."""
    tensors = {i.name: i for i in model.graph.initializer}
    assert len(tensors) == len(model.graph.initializer)
    assert set(tensors) == set(state) - {"lw0", "lw1"}
    for name, tensor in tensors.items():
        mlp = name.endswith(("linear1.weight", "linear2.weight"))
        narrow = mlp and precision in ("fp16", "bf16")
        assert tensor.data_type == (TensorProto.FLOAT16 if narrow else TensorProto.FLOAT), name
        assert tensor.data_location == TensorProto.DEFAULT and not tensor.external_data
        assert np.array_equal(numpy_helper.to_array(tensor), state[name].numpy()), name
    for i, node in enumerate(model.graph.node[1:-1]):
        assert list(node.input)[1:] == [
            f"blocks.{i}.conv_weight",
            f"blocks.{i}.linear1.weight",
            f"blocks.{i}.linear2.weight",
        ]


def test_every_sample_has_the_contracts_form(good) -> None:
    model = parsed(exported(good.name))
    check_form(model, good.checkpoint.spec, "fp32", 20)
    check_weights(model, good.module().state_dict(), "fp32")
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(
    ("precision", "opset"),
    [
        *((p, 20) for p in PRECISIONS),
        ("fp32", 21),
        pytest.param("mixed", 21, marks=pytest.mark.slow),
        pytest.param("fp16", 21, marks=pytest.mark.slow),
        ("bf16", 21),
    ],
)
def test_every_tier_and_opset_has_the_contracts_form(precision, opset, sample) -> None:
    name = "stranded2_ctl2_5x48"
    found = sample(name)
    model = parsed(exported(name, precision, opset))
    check_form(model, found.checkpoint.spec, precision, opset)
    check_weights(model, found.module(precision).state_dict(), precision)


def test_metadata_say_where_the_file_came_from(good) -> None:
    model = parsed(exported(good.name))
    pairs = {p.key: p.value for p in model.metadata_props}
    assert pairs["checkpoint_sha256"] == good.checkpoint.sha256
    assert json.loads(pairs["config"]) == good.checkpoint.config
    assert pairs["cheri_export_version"] == describe.version()
    assert (pairs["source"], pairs["license"]) == ("https://example.org/x", "MIT")
    assert pairs["precision"] == "fp32"
    names = [t["name"] for t in json.loads(pairs["inputs"]) + json.loads(pairs["outputs"])]
    assert names == [v.name for v in [*model.graph.input, *model.graph.output]]
    assert model.producer_name == "cheri-export"


def test_the_file_holds_nothing_of_the_machine(tmp_path: Path) -> None:
    model = parsed(exported("stranded2_ctl2_5x48"))
    assert not model.doc_string and not model.graph.doc_string
    for item in [*model.graph.node, *model.graph.input, *model.graph.output, *model.functions]:
        assert not item.doc_string
    for node in model.graph.node:
        assert not node.metadata_props
    data = exported("stranded2_ctl2_5x48")
    path = tmp_path / "model.onnx"
    save_onnx(model, path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    for where in (Path(torch.__file__).parent, DATA.parent, Path.cwd(), tempfile.gettempdir()):
        assert str(where).encode() not in data
        assert str(where).encode() not in path.read_bytes()
    for word in ("site-packages", "Traceback", ".py", "torch/", "/home"):
        assert word.encode() not in data, word


def test_exporting_twice_gives_the_same_bytes_and_changes_nothing() -> None:
    module = small()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    level = logging.getLogger("torch.onnx").level
    first, second = (export_onnx(module).SerializeToString() for _ in range(2))
    assert first == second
    assert logging.getLogger("torch.onnx").level == level
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


def test_stored_inputs_stay_within_the_limits_in_float32(good, reference_run) -> None:
    judge_file(good, "fp32", run(exported(good.name), *good.inputs))


@pytest.mark.parametrize("precision", ["mixed", "fp16", "bf16"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in GOOD],
)
def test_stored_inputs_stay_within_the_limits_in_every_tier(name, precision, sample) -> None:
    found = sample(name)
    judge_file(found, precision, run(exported(name, precision), *found.inputs))


def judge_file(found, precision: str, outputs) -> None:
    """The reference sample by its figure alone, the others by the rule for any model."""
    name = found.name
    for index, (output, stored) in enumerate(
        zip(OUTPUTS, (found.profile, found.counts), strict=True)
    ):
        assert outputs[index].dtype == np.float32
        limit = tolerance.figure(precision, output)
        if name != "default_9x128_trained":
            mode = "strict" if precision == "fp32" else precision
            floor = float(np.abs(run_reference(name, mode)[index] - stored).max())
            floor = max(floor, float(np.spacing(np.float32(np.abs(stored).max()))) / 2)
            limit = tolerance.limit_for(
                precision, output, output_std=float(stored.std()), floor=floor
            ).limit
        assert_within(f"{name} {precision} {output}", outputs[index], stored, limit)


@pytest.mark.parametrize("name", ["small_4x32_trained", "stranded2_ctl2_5x48", "trim0_2x16"])
def test_one_file_serves_every_batch_and_length(name, sample) -> None:
    found = sample(name)
    module, session = found.module(), open_session(exported(name))
    spec = found.checkpoint.spec
    generator = torch.Generator().manual_seed(0)
    for n, length in ((1, spec.min_length), (1, 401), (5, 333), (2, spec.min_length + 1)):
        x = torch.randn(n, 4, length, generator=generator)
        control = torch.rand(n, 2, length, generator=generator) if spec.n_control_tracks else None
        feed = {"sequence": x.numpy()} | ({} if control is None else {"control": control.numpy()})
        profile, counts = session.run(None, feed)
        wanted = module(x, control)
        assert profile.shape == (n, spec.n_outputs, spec.output_length(length))
        assert_within("profile", profile, wanted[0], 2e-5)
        assert_within("counts", counts, wanted[1], 5e-6)


def test_unsupported_opsets_are_refused(sample) -> None:
    module = sample("small_4x32_init").module()
    for opset in (19, 22, 0):
        with pytest.raises(InputError, match=f"opset {opset} is not supported; use one of 20, 21"):
            export_onnx(module, opset=opset)
    assert issubclass(InputError, CheriError)


# Equal tensors: two folds, a model used twice, biases that are all zero.


class Mean(torch.nn.Module):
    """Average of several folds."""

    def __init__(self, models) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)
        self.trimming = models[0].trimming
        self.n_control_tracks = models[0].n_control_tracks

    def forward(self, X, X_ctl=None):
        outputs = [m(X, X_ctl) for m in self.models]
        profile = torch.stack([p for p, _ in outputs]).mean(0)
        return profile, torch.stack([c for _, c in outputs]).mean(0)


class BothStrands(torch.nn.Module):
    """Average over a sequence and its reverse complement; rows A, C, G, T turn into T, G, C, A."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model
        self.trimming = model.trimming

    def forward(self, X):
        profile, counts = self.model(X)
        turned, others = self.model(X.flip((-1, -2)))
        return (profile + turned.flip(-1)) / 2, (counts + others) / 2


def small(seed: int = 1) -> Cherimoya:
    """Random biases as well, so that every weight of one model differs from every other."""
    model = Cherimoya(n_filters=8, n_layers=2, random_state=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=generator)
    return model.eval().requires_grad_(False)


def zeros_everywhere() -> Cherimoya:
    model = small()
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def all_zero_biases() -> Cherimoya:
    model = Cherimoya(8, 2, [1, 1], random_state=1).eval().requires_grad_(False)
    assert torch.equal(model.fconv.bias, model.linear.bias), "equal tensors of one shape"
    return model


def twice_the_same_weights() -> Mean:
    model = small()
    return Mean([model, copy.deepcopy(model)])


def twice_the_same_object() -> Mean:
    model = small()
    return Mean([model, model])


def two_folds() -> Mean:
    return Mean([small(1), small(2), small(3)])


def both_strands() -> BothStrands:
    return BothStrands(small())


MODULES = {
    f.__name__: f
    for f in (
        all_zero_biases,
        zeros_everywhere,
        twice_the_same_weights,
        twice_the_same_object,
        two_folds,
        both_strands,
    )
}


def directly(module) -> onnx.ModelProto:
    """As a user's own script would do it, with the exporter's optimizer on."""
    length = 2 * module.trimming + 64
    n, span = torch.export.Dim("N", min=1), torch.export.Dim("L", min=1)
    program = torch.onnx.export(
        module,
        (torch.zeros(2, 4, length),),
        dynamo=True,
        opset_version=20,
        input_names=["sequence"],
        output_names=list(OUTPUTS),
        dynamic_shapes=({0: n, 2: span},),
        custom_translation_table=translation_table(),
        verbose=False,
    )
    return finish_onnx(program)


def own_weights(module: torch.nn.Module) -> dict[frozenset[str], torch.Tensor]:
    """Every parameter that the forward pass reads, under all its names in the state dict."""
    state, aliases = module.state_dict(keep_vars=True), {}
    for name, value in state.items():
        if not name.endswith(("lw0", "lw1")):
            aliases.setdefault(id(value), []).append(name)
    return {frozenset(names): state[names[0]].detach() for names in aliases.values()}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "torch.onnx.export") for name in MODULES),
        ("all_zero_biases", "export_onnx"),
        ("twice_the_same_weights", "export_onnx"),
        *(
            pytest.param(name, "export_onnx", marks=pytest.mark.slow)
            for name in MODULES
            if name not in ("all_zero_biases", "twice_the_same_weights")
        ),
    ],
)
def test_equal_tensors_keep_separate_initializers(name: str, way: str) -> None:
    module = MODULES[name]().eval()
    model = export_onnx(module) if way == "export_onnx" else directly(module)
    wanted = own_weights(module)
    tensors = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    ours = [n for n in model.graph.node if n.domain == DOMAIN]
    read = {i for n in ours for i in n.input if i in tensors}
    assert len(read) == len(wanted)
    for names, value in wanted.items():
        (key,) = names & read
        assert np.array_equal(tensors[key], value.numpy()), key
    copies = len(module.models) if isinstance(module, Mean) else 1 + isinstance(module, BothStrands)
    # One object called twice on one input may share its first nodes; distinct folds never do.
    assert len(ours) == 4 * copies or (name == "twice_the_same_object" and len(ours) < 4 * copies)
    assert {n.op_type for n in ours} <= set(OP_TYPES)
    for node in ours:
        assert "_weight_names" not in attributes_of(node)
    x = torch.randn(3, 4, 201, generator=torch.Generator().manual_seed(0))
    profile, counts = run(model.SerializeToString(), x)
    with torch.no_grad():
        outputs = module(x)
    assert_within("profile", profile, outputs[0], 1e-5)
    assert_within("counts", counts, outputs[1], 1e-5)


@pytest.mark.parametrize("way", ["export_onnx", "torch.onnx.export"])
def test_each_initializer_feeds_its_own_fold(way: str) -> None:
    """Weights that were equal can be swapped by name: changing one changes its fold alone."""
    module = twice_the_same_weights().eval()
    model = export_onnx(module) if way == "export_onnx" else directly(module)
    x = torch.randn(1, 4, 150, generator=torch.Generator().manual_seed(0))
    changed = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(9)
    state = changed.models[1].state_dict()
    for key in ("iconv.bias", "blocks.1.conv_weight", "blocks.0.linear2.weight", "fconv.weight"):
        fresh = torch.randn(state[key].shape, generator=generator)
        state[key].copy_(fresh)
        tensor = next(i for i in model.graph.initializer if i.name == f"models.1.{key}")
        tensor.CopyFrom(numpy_helper.from_array(fresh.numpy(), tensor.name))
    profile, counts = run(model.SerializeToString(), x)
    with torch.no_grad():
        wanted, before = changed(x), module(x)
    assert (wanted[0] - before[0]).abs().max() > 0.1
    assert_within("profile", profile, wanted[0], 1e-4)
    assert_within("counts", counts, wanted[1], 1e-4)


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_cast_weights_keep_their_names_in_a_wrapper(precision: str) -> None:
    module = Mean([small(1).set_precision(precision) for _ in range(2)]).eval()
    types = {i.name: i.data_type for i in directly(module).graph.initializer}
    for names in own_weights(module):
        (key,) = names
        narrow = "linear1" in key or "linear2" in key
        assert types[key] == (TensorProto.FLOAT16 if narrow else TensorProto.FLOAT)


def test_both_strands_are_turned_rightly() -> None:
    """The wrapper's prediction for the reverse complement is its prediction turned round."""
    data = export_onnx(both_strands()).SerializeToString()
    x = torch.randn(2, 4, 155, generator=torch.Generator().manual_seed(0))
    profile, counts = run(data, x)
    turned, others = run(data, x.flip((-1, -2)))
    assert_within("profile", turned[..., ::-1], profile, 1e-5)
    assert_within("counts", others, counts, 1e-5)


def test_controls_pass_through_a_wrapper(sample) -> None:
    found = sample("stranded2_ctl2_5x48")
    module = Mean([found.module(), found.module()])
    model = export_onnx(module)
    assert [i.name for i in model.graph.input] == ["sequence", "control"]
    profile, counts = run(model.SerializeToString(), *found.inputs)
    assert_within("profile", profile, found.profile, tolerance.figure("fp32", PROFILE_LOGITS))
    assert_within("counts", counts, found.counts, tolerance.figure("fp32", LOG_COUNTS))


def test_a_lost_weight_is_an_error(monkeypatch) -> None:
    """The assertion at export is alive: without the repair, merged tensors are refused."""
    from cheri_export.onnx_model import export

    monkeypatch.setattr(export, "_restore_merged", lambda *_: None)
    with pytest.raises(RuntimeError, match="merged or renamed weights"):
        directly(twice_the_same_weights().eval())


@pytest.mark.parametrize(
    "name",
    [
        "0.0.1",
        "1b730fa",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("0.1.0", "8b364ee", "ce9bbac", "0.2.0")
        ),
    ],
)
def test_every_release_exports_with_groups_and_controls(name: str) -> None:
    tensors, config = make.release(name, groups=[2], tracks=1)
    found = checkpoint_from_tensors(tensors, config)
    module = build_module(found.spec, found.weights)
    model = export_onnx(module)
    check_form(model, found.spec, "fp32", 20)
    x = torch.randn(2, 4, 180, generator=torch.Generator().manual_seed(0))
    control = torch.ones(2, 1, 180)
    profile, counts = run(model.SerializeToString(), x, control)
    wanted = module(x, control)
    assert_within("profile", profile, wanted[0], 3e-5)
    assert_within("counts", counts, wanted[1], 3e-5)
