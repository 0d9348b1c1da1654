"""Checkpoints of every release in the table of formats, made without cherimoya.

Keys, their order, shapes and configurations follow the releases' source; the values are random.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PICKLED = {
    "0.0.1": ("n_filters", "n_layers", "n_outputs", "n_control_tracks", "name", "trimming"),
    "0.1.0": (
        *("n_filters", "n_layers", "n_outputs", "n_control_tracks", "expansion"),
        *("residual_scale", "single_count_output", "name", "trimming"),
    ),
}
"""Attributes of the model object in the releases that could be pickled whole."""


def state_dict(
    *,
    filters: int = 16,
    layers: int = 3,
    outputs: int = 1,
    counts: int = 1,
    tracks: int = 0,
    expansion: int = 2,
    stem: int = 21,
    head: int = 75,
    gamma: bool = False,
    lw: tuple[int, int] = (1, 1),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> OrderedDict[str, torch.Tensor]:
    """A state dict with upstream's keys in upstream's order."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.1).to(dtype)

    out = OrderedDict(lw0=rand(lw[0]), lw1=rand(lw[1]))
    out["iconv.weight"], out["iconv.bias"] = rand(filters, 4, stem), rand(filters)
    for i in range(layers):
        out[f"blocks.{i}.conv_weight"] = rand(3, filters)
        if gamma:
            out[f"blocks.{i}.gamma"] = rand(1, filters)
        out[f"blocks.{i}.linear1.weight"] = rand(expansion * filters, filters)
        out[f"blocks.{i}.linear2.weight"] = rand(filters, expansion * filters)
    out["fconv.weight"], out["fconv.bias"] = rand(outputs, filters + tracks, head), rand(outputs)
    out["linear.weight"], out["linear.bias"] = rand(counts, filters + bool(tracks)), rand(counts)
    return out


def config(**changes: Any) -> dict[str, Any]:
    """Configuration of 0.1.1 to 0.3.1 for the default `state_dict`; None removes a key."""
    base: dict[str, Any] = {
        "n_filters": 16,
        "n_layers": 3,
        "signal_groups": [1],
        "n_control_tracks": 0,
        "expansion": 2,
        "residual_scale": 0.15,
        "name": "cherimoya.16.3",
        "trimming": 53,
        "verbose": False,
    }
    base.update(changes)
    return {k: v for k, v in base.items() if v is not None}


def release(name: str, **kw: Any) -> tuple[OrderedDict[str, torch.Tensor], dict[str, Any]]:
    """State dict and configuration of one release.

    `name` is a row of the table: "0.0.1", "0.1.0", "8b364ee", "1b730fa", "ce9bbac", "50563c0",
    "0.1.1" or "0.2.0". `kw`: groups (list), single (bool), and what `state_dict` takes.
    """
    groups = kw.pop("groups", [1])
    single = kw.pop("single", True)
    outputs = sum(groups)
    shape = {"outputs": outputs, **kw}
    tracks = kw.get("tracks", 0)
    old = {"signal_groups": None, "n_outputs": outputs, "single_count_output": single}
    ungrouped = 1 if single else outputs
    if name == "0.0.1":
        tensors = state_dict(counts=ungrouped, stem=19, gamma=True, **shape)
        drop = {"expansion": None, "residual_scale": None, "single_count_output": None}
        return tensors, config(n_control_tracks=tracks, **{**old, **drop})
    if name == "0.1.0":
        return state_dict(counts=ungrouped, head=1, **shape), config(n_control_tracks=tracks, **old)
    if name == "8b364ee":
        tensors = state_dict(counts=ungrouped, head=1, lw=(outputs, ungrouped), **shape)
        return tensors, config(n_control_tracks=tracks, **old)
    if name == "1b730fa":
        counts = 1 if single else len(groups)
        tensors = state_dict(counts=counts, head=1, lw=(outputs, counts), **shape)
        grouped = {"signal_groups": groups, "single_count_output": single}
        return tensors, config(n_control_tracks=tracks, **grouped)
    n = len(groups)
    head = 1 if name in ("ce9bbac", "50563c0") else 75
    lw = (outputs, n) if name == "ce9bbac" else (n, n)
    tensors = state_dict(counts=n, head=head, lw=lw, **shape)
    return tensors, config(n_control_tracks=tracks, signal_groups=groups)


def save(path: Path, tensors: Any, settings: Any = None, **kw: Any) -> Path:
    """torch.save as upstream does; without `settings` a bare state dict."""
    payload = tensors if settings is None else {"config": settings, "state_dict": tensors}
    torch.save(payload, path, **kw)
    return path


@contextlib.contextmanager
def fake_packages() -> Iterator[tuple[type, type, type]]:
    """Modules named cherimoya and bpnetlite in sys.modules, for as long as something is pickled."""
    names = ("cherimoya", "cherimoya.cherimoya", "bpnetlite", "bpnetlite.logging")
    before = {n: sys.modules.get(n) for n in names}
    modules = {n: types.ModuleType(n) for n in names}
    model = type("Cherimoya", (torch.nn.Module,), {"__module__": "cherimoya.cherimoya"})
    block = type("CheriBlock", (torch.nn.Module,), {"__module__": "cherimoya.cherimoya"})
    logger = type("Logger", (), {"__module__": "bpnetlite.logging"})
    vars(modules["cherimoya.cherimoya"]).update(Cherimoya=model, CheriBlock=block)
    vars(modules["bpnetlite.logging"]).update(Logger=logger)
    sys.modules.update(modules)
    try:
        yield model, block, logger
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def module(
    name: str, classes: tuple[type, type, type], **kw: Any
) -> tuple[torch.nn.Module, OrderedDict[str, torch.Tensor]]:
    """A model object of 0.0.1 or 0.1.0 with its submodules and attributes, and its state dict."""
    model_class, block_class, logger_class = classes
    tensors, settings = release(name, **kw)
    model = model_class()
    for key, value in tensors.items():
        *path, leaf = key.split(".")
        at = model
        for part in path:
            if part not in at._modules:
                linear = torch.nn.Linear(1, 1, bias=False)
                del linear._parameters["weight"]
                child = torch.nn.ModuleList() if part == "blocks" else linear
                at.add_module(part, block_class() if part.isdigit() else child)
            at = at._modules[part]
        at.register_parameter(leaf, torch.nn.Parameter(value.clone()))
    for i, block in enumerate(model.blocks):
        block.dilation, block.n_filters = 2**i, settings["n_filters"]
        if name == "0.1.0":
            block.residual_scale = 0.15
        block.register_buffer("cache", torch.zeros(2), persistent=False)
    for key in PICKLED[name]:
        setattr(model, key, settings[key])
    model.logger = logger_class()
    model.logger.names, model.logger.data = ["Epoch"], {"Epoch": [1, 2.5]}
    return model.eval(), tensors


def pickled(path: Path, name: str, protocol: int = 2, zipped: bool = True, **kw: Any) -> Path:
    """A model pickled whole. A NumPy scalar sits in the log, as after training."""
    import numpy

    with fake_packages() as classes:
        model, _ = module(name, classes, **kw)
        model.logger.data["loss"] = [numpy.float64(0.5)]
        torch.save(model, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    return path
