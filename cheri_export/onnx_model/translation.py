"""The public translation table: how `torch.onnx.export(dynamo=True)` writes the `cheri` ops.

Each torch op becomes one node in domain ``trt.plugins``. The function bodies are attached to the
finished model by `export.finish`, since the exporter would inline them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript import values

from cheri_export.ops import block, head, stem
from cheri_export.spec import (
    BLOCK,
    DOMAIN,
    HEAD,
    HEAD_CONTROL,
    OP_VERSION,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    STEM,
)

_ANY = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_FLOAT = ["tensor(float)"]
_KIND = onnx.defs.OpSchema.AttrType

WEIGHT_NAMES = "_weight_names"
"""Temporary attribute: the initializer of each weight input, in case the exporter merges equal
tensors. `export.finish` reads and removes it."""

_INT, _FLT, _STR = _KIND.INT, _KIND.FLOAT, _KIND.STRING
_WINDOWS = {"start": _INT, "end_trim": _INT, "count_start": _INT, "count_end_trim": _INT}
_HEAD_INPUTS = ("X", "profile_weight", "profile_bias", "count_weight", "count_bias")

ATTRIBUTES: dict[str, dict[str, Any]] = {
    STEM: {"out_dtype": _INT, "math": _STR},
    BLOCK: {"dilation": _INT, "residual_scale": _FLT, "epsilon": _FLT, "math": _STR},
    HEAD: {**_WINDOWS, "math": _STR},
    HEAD_CONTROL: {**_WINDOWS, "math": _STR},
}
INPUTS: dict[str, tuple[str, ...]] = {
    STEM: ("sequence", "weight", "bias"),
    BLOCK: ("X", "conv_weight", "w1", "w2"),
    HEAD: _HEAD_INPUTS,
    HEAD_CONTROL: (*_HEAD_INPUTS, "control"),
}
_OUTPUTS = {
    STEM: ("Y",),
    BLOCK: ("Y",),
    HEAD: ("profile_logits", "log_counts"),
    HEAD_CONTROL: ("profile_logits", "log_counts"),
}
# The stream may be any of the three types; the MLP matrices have a type of their own.
_TYPE_OF = {"X": "T", "Y": "T", "w1": "W", "w2": "W"}


@functools.cache
def _op(op_type: str) -> values.Op:
    schema_class = onnx.defs.OpSchema

    def parameter(name: str) -> Any:
        return schema_class.FormalParameter(name, _TYPE_OF.get(name, "F"))

    inputs = [parameter(n) for n in INPUTS[op_type]]
    outputs = [parameter(n) for n in _OUTPUTS[op_type]]
    used = {p.type_str for p in inputs + outputs}
    kinds = {"T": _ANY, "W": _ANY, "F": _FLOAT}
    common = {"plugin_version": _STR, "plugin_namespace": _STR, WEIGHT_NAMES: _STR}
    schema = schema_class(
        op_type,
        DOMAIN,
        OP_VERSION,
        inputs=inputs,
        outputs=outputs,
        type_constraints=[(name, kinds[name], "") for name in sorted(used)],
        attributes=[
            schema_class.Attribute(name, kind, required=False)
            for name, kind in {**ATTRIBUTES[op_type], **common}.items()
        ],
    )
    return values.Op(values.Opset(DOMAIN, OP_VERSION), op_type, schema)


def _emit(op_type: str, tensors: tuple[Any, ...], **attributes: Any) -> Any:
    return _op(op_type)(
        *tensors,
        **attributes,
        plugin_version=PLUGIN_VERSION,
        plugin_namespace=PLUGIN_NAMESPACE,
        **{WEIGHT_NAMES: "|".join(getattr(t, "name", None) or "" for t in tensors)},
    )


def _stem(sequence: Any, weight: Any, bias: Any, out_dtype: int, math: str) -> Any:
    return _emit(STEM, (sequence, weight, bias), out_dtype=int(out_dtype), math=math)


def _block(
    x: Any,
    conv_weight: Any,
    w1: Any,
    w2: Any,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
) -> Any:
    return _emit(
        BLOCK,
        (x, conv_weight, w1, w2),
        dilation=dilation,
        residual_scale=residual_scale,
        epsilon=epsilon,
        math=math,
    )


def _head(
    x: Any,
    control: Any,
    profile_weight: Any,
    profile_bias: Any,
    count_weight: Any,
    count_bias: Any,
    start: int,
    end_trim: int,
    count_start: int,
    count_end_trim: int,
    math: str,
) -> Any:
    tensors = (x, profile_weight, profile_bias, count_weight, count_bias)
    # Two op types of fixed arity: an empty optional input breaks ONNX Runtime's Concat and
    # TensorRT's parser.
    return _emit(
        HEAD if control is None else HEAD_CONTROL,
        tensors if control is None else (*tensors, control),
        start=start,
        end_trim=end_trim,
        count_start=count_start,
        count_end_trim=count_end_trim,
        math=math,
    )


def translation_table() -> dict[Any, Callable[..., Any]]:
    """What to pass as `custom_translation_table` to ``torch.onnx.export(..., dynamo=True)``.

    Returns
    -------
    table: dict
        Maps ``torch.ops.cheri.{stem,block,head}.default`` to their ONNX translation. Hand the
        resulting program to `cheri_export.finish_onnx`, which attaches the function bodies.
    """
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {
        stem.default: _stem,
        block.default: _block,
        head.default: _head,
    }
    return table
