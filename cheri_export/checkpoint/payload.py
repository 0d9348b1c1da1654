"""From what a file holds to tensors and configuration."""

from __future__ import annotations

from typing import Any

from cheri_export.checkpoint.keys import is_ignored
from cheri_export.checkpoint.messages import KEYS, listing, problem, show
from cheri_export.checkpoint.names import Inert, StoredTensor


def split(payload: object) -> tuple[dict[str, Any], object, list[str]]:
    """Split a saved dictionary.

    Parameters
    ----------
    payload: object
        What was saved: ``{'config': ..., 'state_dict': ...}`` or a bare state dict.

    Returns
    -------
    tensors: dict of str to object
        The state dict; the values are not checked.

    config: object
        The configuration as found, None for a bare state dict.

    warnings: list of str

    Raises
    ------
    CheckpointError
        If it is no dictionary of this form.
    """
    if not isinstance(payload, dict):
        what = f"a {payload.label} object" if isinstance(payload, Inert) else None
        what = what or ("nothing (None)" if payload is None else f"a {type(payload).__name__}")
        raise problem(
            f"the file holds {show(what)}; a dictionary with 'config' and 'state_dict', a state "
            "dict or a pickled Cherimoya model is needed; give a file of Cherimoya.save()"
        )
    state = payload.get("state_dict")
    if not isinstance(state, dict):
        if "config" in payload or "state_dict" in payload:
            got = show(state) if "state_dict" in payload else "no 'state_dict'"
            raise problem(
                f"the file has a 'config' or 'state_dict' entry but no weights ({got}); both "
                "entries of Cherimoya.save() are needed; save the model again"
            )
        return named(payload), None, []
    extra = [k for k in payload if k not in ("config", "state_dict")]
    warnings = (
        [f"unknown entries beside the state dict are ignored: {listing(extra)}"] if extra else []
    )
    return named(state), payload.get("config"), warnings


def named(state: dict[Any, Any]) -> dict[str, Any]:
    """`state` itself, if it has entries and all of them have text keys.

    Raises
    ------
    CheckpointError
    """
    bad = [k for k in state if not isinstance(k, str)]
    if bad or not state:
        got = f"the key {show(bad[0])}" if bad else "no tensors"
        raise problem(f"the state dict has {got}; needed {KEYS}; give a file of Cherimoya.save()")
    return state


def check_stored(tensors: dict[str, Any]) -> None:
    """Refuse tensors that are not plain ones, before torch is asked to build them.

    Raises
    ------
    CheckpointError
        Names the tensor and how it is stored (sparse, quantised, meta, ...).
    """
    for key, value in tensors.items():
        if is_ignored(key):
            continue
        if isinstance(value, Inert) and value.label.startswith("torch._utils._rebuild"):
            how = value.label.rsplit("_rebuild_", 1)[-1]
            raise problem(
                f"{show(key)} is stored in a special form ({show(how)}); a dense floating-point "
                "tensor is needed; convert it with .dequantize(), .to_dense() or .float()"
            )
        if isinstance(value, StoredTensor) and value.storage.dtype is None:
            raise problem(
                f"{show(key)} is stored as {show(value.storage.kind)}; a dense floating-point "
                "tensor is needed; convert it with .dequantize() or .float()"
            )
