"""Models rather than dictionaries: whole-module pickles (taken apart) and modules in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cheri_export.checkpoint.messages import RESAVE, problem, show
from cheri_export.checkpoint.names import Inert, StoredTensor

ATTRIBUTES = (
    *("n_filters", "n_layers", "n_outputs", "signal_groups", "n_control_tracks", "expansion"),
    *("residual_scale", "name", "trimming", "single_count_output"),
)
"""Hyper-parameters that releases keep on the model object, named as in their configurations."""

MAX_DEPTH = 8


def is_module(tree: object) -> bool:
    """Whether a pickle's root stands for a model: Cherimoya, or a wrapper around one."""
    return isinstance(tree, Inert) and _core(tree) is not None


def _children(module: object, kind: str) -> dict[Any, Any]:
    found = module.state.get(kind) if isinstance(module, Inert) and module.state else None
    return found if isinstance(found, dict) else {}


def _core(module: Inert) -> Inert | None:
    """The Cherimoya object inside DataParallel or torch.compile wrappers."""
    current: object = module
    for _ in range(MAX_DEPTH):
        if not isinstance(current, Inert):
            return None
        if current.label.startswith("cherimoya.") and current.label.endswith(".Cherimoya"):
            return current
        inner = _children(current, "_modules")
        current = inner.get("module", inner.get("_orig_mod"))
    return None


def take_apart(
    tree: Inert, make: Callable[[StoredTensor], torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State dict and hyper-parameters of a pickled model.

    Parameters
    ----------
    tree: Inert
        Root of the pickle; `is_module` holds.

    make: callable
        Makes a tensor from a reference to it.

    Returns
    -------
    tensors: dict of str to torch.Tensor
        What ``state_dict()`` would have given.

    config: dict
        The hyper-parameters found on the object.

    Raises
    ------
    CheckpointError
        If a parameter is not a plain tensor, or the blocks contradict the model.
    """
    tensors: dict[str, torch.Tensor] = {}
    _collect(tree, "", make, tensors, 0)
    core = _core(tree)
    state = core.state if core is not None and core.state else {}
    config = {k: state[k] for k in ATTRIBUTES if k in state}
    blocks = _children(_children(core, "_modules").get("blocks"), "_modules")
    check_blocks({n: b.state or {} for n, b in blocks.items() if isinstance(b, Inert)}, config)
    return tensors, config


def _collect(
    module: object,
    prefix: str,
    make: Callable[[StoredTensor], torch.Tensor],
    out: dict[str, torch.Tensor],
    depth: int,
) -> None:
    # A module nested in itself would give endless names; no release nests deeper than four.
    if depth > MAX_DEPTH or len(out) > 100_000:
        raise problem(f"the pickled model nests too deeply at {show(prefix)}; {RESAVE}")
    saved = _children(module, "_parameters") | _children(module, "_buffers")
    skip = _unsaved(module)
    values = {name: value for name, value in saved.items() if name not in skip}
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, StoredTensor):
            what = value.label if isinstance(value, Inert) else type(value).__name__
            raise problem(
                f"{show(prefix + str(name))} is stored as {show(what)}; a dense floating-point "
                f"tensor is needed; {RESAVE}"
            )
        out[prefix + str(name)] = make(value)
    for name, child in _children(module, "_modules").items():
        _collect(child, f"{prefix}{name}.", make, out, depth + 1)


def _unsaved(module: object) -> set[str]:
    """Names of the buffers that ``state_dict()`` leaves out."""
    state = module.state if isinstance(module, Inert) else None
    found = state.get("_non_persistent_buffers_set") if state else None
    names = found.args[0] if isinstance(found, Inert) and found.args else ()
    return {n for n in names if isinstance(n, str)} if isinstance(names, (list, tuple)) else set()


def from_memory(model: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dict and hyper-parameters of a model in memory.

    Raises
    ------
    CheckpointError
        If `model` is no torch module, or its blocks contradict it.
    """
    if not isinstance(model, torch.nn.Module):
        raise problem(
            f"checkpoint_from_module got {show(model)}; a Cherimoya model is needed; for a file "
            "use read_checkpoint, for a state dict checkpoint_from_tensors"
        )
    core: Any = model
    for _ in range(MAX_DEPTH):
        inner = getattr(core, "_orig_mod", None)
        if inner is None and not hasattr(core, "iconv"):
            inner = getattr(core, "module", None)
        if not isinstance(inner, torch.nn.Module):
            break
        core = inner
    kwargs = getattr(core, "_init_kwargs", None)
    config = (
        kwargs()
        if callable(kwargs)
        else {k: getattr(core, k) for k in ATTRIBUTES if hasattr(core, k)}
    )
    blocks = getattr(core, "blocks", ())
    check_blocks({str(i): vars(b) for i, b in enumerate(blocks)}, config)
    return dict(model.state_dict()), dict(config)


def check_blocks(blocks: dict[Any, dict[Any, Any]], config: dict[str, Any]) -> None:
    """Hyper-parameters that blocks repeat must agree with the model.

    Raises
    ------
    CheckpointError
        If block i has another dilation than 2**i, or another residual scale than the model.
    """
    for name, state in blocks.items():
        dilation = state.get("dilation")
        known = isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 4
        if known and dilation is not None and dilation != 2 ** int(name):
            raise problem(
                f"blocks.{name} has dilation {show(dilation)}, every release has {2 ** int(name)} "
                "there; a model with other dilations cannot be exported"
            )
        scale, own = config.get("residual_scale"), state.get("residual_scale")
        if type(own) in (int, float) and type(scale) in (int, float) and own != scale:
            raise problem(
                f"blocks.{show(name)} has residual_scale {show(own)} and the model "
                f"{show(scale)}; set both to the value that was trained"
            )
