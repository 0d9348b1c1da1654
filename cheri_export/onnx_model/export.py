"""torch module to ONNX file: a node per op, function bodies attached, weights by their names."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir
import torch

from cheri_export.errors import InputError
from cheri_export.onnx_model.functions import function_body
from cheri_export.onnx_model.translation import WEIGHT_NAMES, translation_table
from cheri_export.spec import (
    CONTROL,
    DOMAIN,
    LOG_COUNTS,
    OPSETS,
    PROFILE_LOGITS,
    SEQUENCE,
)

IR_VERSION = 10
"""Newest that ONNX Runtime 1.20 and TensorRT 10.6 read."""

_EXAMPLE_BATCH, _EXAMPLE_SPARE = 2, 64


def _disk_name(name: str) -> str:
    """A parameter's name as `state_dict` and checkpoints spell it."""
    return name.replace(".conv.conv_weight", ".conv_weight")


def export_onnx(
    module: torch.nn.Module,
    *,
    opset: int = 20,
    length: int | None = None,
    control_tracks: int | None = None,
    output_names: tuple[str, ...] = (PROFILE_LOGITS, LOG_COUNTS),
    metadata: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """Export a module that maps ``sequence`` [, ``control``] through the `cheri` ops.

    Parameters
    ----------
    module: torch.nn.Module
        `Cherimoya`, or any module over the ops (an average of folds, of both strands, ...) that is
        called with sequence (N, 4, L) and, with control tracks, control (N, T, L).

    opset: int
        20 or 21.

    length: int or None
        L of the example input with which the module is traced; None takes the smallest that the
        module's `trimming` allows, plus 64. The file has dynamic N and L in any case.

    control_tracks: int or None
        T; None reads ``module.n_control_tracks`` (0 where there is none).

    output_names: tuple of str
        Names of the graph's outputs.

    metadata: mapping of str to str, or None
        Written to the model's metadata_props.

    Returns
    -------
    model: onnx.ModelProto
        Checked by onnx.checker; IR version 10; every parameter that is used has an initializer of
        its own, named as in ``module.state_dict()``.

    Raises
    ------
    InputError
        An opset that is not supported.

    RuntimeError
        The exporter merged or renamed a weight: later weight swapping would be wrong.
    """
    if opset not in OPSETS:
        raise InputError(
            f"opset {opset} is not supported; use one of {', '.join(map(str, OPSETS))}"
        )
    tracks = getattr(module, "n_control_tracks", 0) if control_tracks is None else control_tracks
    if length is None:
        length = 2 * int(getattr(module, "trimming", 0)) + _EXAMPLE_SPARE

    def example(channels: int) -> torch.Tensor:
        # Float32 on the CPU, whatever the process's defaults are.
        shape = (_EXAMPLE_BATCH, channels, length)
        return torch.zeros(shape, dtype=torch.float32, device="cpu")

    arguments = [example(4)]
    names = [SEQUENCE]
    if tracks:
        arguments.append(example(tracks))
        names.append(CONTROL)
    n, span = torch.export.Dim("N", min=1), torch.export.Dim("L", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = logging.getLogger("torch.onnx")
        level = quiet.level
        quiet.setLevel(logging.ERROR)
        try:
            program = torch.onnx.export(
                module,
                tuple(arguments),
                dynamo=True,
                opset_version=opset,
                input_names=names,
                output_names=list(output_names),
                dynamic_shapes=tuple({0: n, 2: span} for _ in arguments),
                custom_translation_table=translation_table(),
                # Merges equal tensors (two folds' zero biases, say); finish() tidies instead.
                optimize=False,
                verbose=False,
            )
        finally:
            quiet.setLevel(level)
    assert program is not None
    return finish_onnx(program, metadata=metadata)


def _parameters(program: torch.onnx.ONNXProgram) -> dict[str, torch.Tensor]:
    exported = program.exported_program
    if exported is None:
        raise RuntimeError("the ONNX program carries no exported torch program to take names from")
    return {name: t for name, t in exported.state_dict.items() if isinstance(t, torch.Tensor)}


def _restore_merged(program: torch.onnx.ONNXProgram, parameters: dict[str, torch.Tensor]) -> None:
    """Give weights that the exporter's optimizer merged their own initializers again.

    While the ops were translated, weights went by the names of the traced graph's inputs; its
    signature says which parameter each of those is.
    """
    exported, graph = program.exported_program, program.model.graph
    assert exported is not None
    signature = exported.graph_signature
    parameter_of = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node in graph:
        traced = node.attributes.pop(WEIGHT_NAMES, None)
        if traced is None:
            continue
        for index, placeholder in enumerate(traced.as_string().split("|")):
            name, value = parameter_of.get(placeholder), node.inputs[index]
            if name is None or value is None or value.name == name:
                continue
            if name not in graph.initializers:
                constant = _ir_tensor(parameters[name].detach().cpu().contiguous(), name)
                fresh = ir.Value(name=name, const_value=constant)
                fresh.dtype, fresh.shape = constant.dtype, ir.Shape(parameters[name].shape)
                graph.register_initializer(fresh)
            node.replace_input_with(index, graph.initializers[name])


def _ir_tensor(tensor: torch.Tensor, name: str) -> ir.TensorProtocol:
    from onnx_ir import tensor_adapters

    return tensor_adapters.TorchTensor(tensor, name)


def finish_onnx(
    program: torch.onnx.ONNXProgram, *, metadata: Mapping[str, str] | None = None
) -> onnx.ModelProto:
    """Make a program exported with `translation_table` self-contained.

    Attaches the function bodies of the ops that are used, gives weights that the exporter merged
    their own initializers back, names initializers as ``state_dict`` does, pins the IR version and
    removes the exporter's notes (they hold paths of the machine).

    Parameters
    ----------
    program: torch.onnx.ONNXProgram
        What ``torch.onnx.export(..., dynamo=True, custom_translation_table=translation_table())``
        returned. Changed in place.

    metadata: mapping of str to str, or None
        Written to metadata_props.

    Returns
    -------
    model: onnx.ModelProto

    Raises
    ------
    RuntimeError
        A weight of one of our nodes has no initializer of its own name.
    """
    from onnx_ir.passes import common

    model = program.model
    parameters = _parameters(program)
    _restore_merged(program, parameters)
    common.RemoveUnusedNodesPass()(model)
    for value in list(model.graph.initializers.values()):
        assert value.name is not None
        wanted = _disk_name(value.name)
        if wanted != value.name:
            model.graph.initializers.pop(value.name)
            value.name = wanted
            model.graph.initializers[wanted] = value
    proto = ir.serde.serialize_model(model)
    _strip_notes(proto)
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    used = sorted({node.op_type for node in proto.graph.node if node.domain == DOMAIN})
    del proto.functions[:]
    proto.functions.extend(function_body(op_type, opset) for op_type in used)
    if used and DOMAIN not in {o.domain for o in proto.opset_import}:
        proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    proto.ir_version = IR_VERSION
    proto.producer_name = "cheri-export"
    proto.ClearField("producer_version")
    onnx.helper.set_model_props(proto, dict(metadata or {}))
    _assert_own_initializers(proto, {_disk_name(name) for name in _used_parameters(program)})
    onnx.checker.check_model(proto, full_check=False)
    return proto


def _strip_notes(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    for item in [*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer]:
        item.ClearField("doc_string")
        del item.metadata_props[:]
    del graph.metadata_props[:]
    del graph.value_info[:]
    graph.ClearField("doc_string")
    graph.name = "cherimoya"


def _used_parameters(program: torch.onnx.ONNXProgram) -> set[str]:
    """Parameters that one of our ops reads in the traced graph, which nothing has merged yet."""
    exported = program.exported_program
    assert exported is not None
    parameter_of = exported.graph_signature.inputs_to_parameters
    ours = {getattr(torch.ops.cheri, name).default for name in ("stem", "block", "head")}
    return {
        parameter_of[argument.name]
        for node in exported.graph.nodes
        if node.op == "call_function" and node.target in ours
        for argument in node.all_input_nodes
        if argument.name in parameter_of
    }


def _assert_own_initializers(proto: onnx.ModelProto, used: set[str]) -> None:
    """Refuse a file in which two weights share an initializer or one lost its name."""
    initializers = [i.name for i in proto.graph.initializer]
    read = {
        name for node in proto.graph.node if node.domain == DOMAIN for name in node.input
    } & set(initializers)
    if len(initializers) != len(set(initializers)) or not used <= read:
        lost = sorted(used - read)
        raise RuntimeError(
            f"the exporter merged or renamed weights, so they could not be swapped by name: {lost}"
        )


def node_counts(model: onnx.ModelProto) -> dict[str, int]:
    """How many nodes of each op type the graph holds, by name."""
    counts: dict[str, int] = {}
    for node in model.graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return dict(sorted(counts.items()))


def save_onnx(model: onnx.ModelProto, path: Any) -> None:
    """Write one file, with the weights inside."""
    onnx.save_model(model, path, save_as_external_data=False)
