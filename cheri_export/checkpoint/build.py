"""From tensors and a configuration, whatever they came from, to a checked `Checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cheri_export.checkpoint.config import COUNT_MARGIN, read_config, settle
from cheri_export.checkpoint.geometry import check_tensor, check_values, is_plain, measure
from cheri_export.checkpoint.keys import is_ignored, plain, resolve
from cheri_export.checkpoint.messages import problem, show
from cheri_export.checkpoint.modules import from_memory
from cheri_export.checkpoint.payload import named
from cheri_export.checkpoint.record import Checkpoint
from cheri_export.checkpoint.releases import identify
from cheri_export.spec import ModelSpec


def checkpoint_from_tensors(
    tensors: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    *,
    path: str | None = None,
    sha256: str | None = None,
) -> Checkpoint:
    """Check a state dict and make a `Checkpoint` of it.

    Parameters
    ----------
    tensors: mapping of str to torch.Tensor
        A state dict of any release. Wrappers' prefixes (``module.``, ``_orig_mod.``) are allowed
        anywhere in the keys. Tensors are copied.

    config: mapping or None
        As `Cherimoya.save` writes it; None for a bare state dict.

    path, sha256: str, optional
        Where it came from, for the record.

    Raises
    ------
    CheckpointError
        If tensors are missing, unexpected, of the wrong shape or kind or not finite, or
        contradict the configuration.
    """
    return assemble(tensors, config, path=path, sha256=sha256)


def checkpoint_from_module(model: object) -> Checkpoint:
    """Make a `Checkpoint` of a Cherimoya model in memory, of any release.

    Parameters
    ----------
    model: torch.nn.Module
        Also inside torch.compile's or DataParallel's wrapper. Its weights are copied.

    Raises
    ------
    CheckpointError
        If it is no Cherimoya model, or contradicts itself.
    """
    tensors, config = from_memory(model)
    return assemble(tensors, config)


def assemble(
    tensors: Mapping[str, Any],
    config: object,
    *,
    path: str | None = None,
    sha256: str | None = None,
    notes: Iterable[str] = (),
    source_sha256: str | None = None,
) -> Checkpoint:
    """The shared core; `notes` are warnings from earlier steps."""
    if not isinstance(tensors, Mapping):
        raise problem(f"the state dict is {show(tensors)}; a dictionary of tensors is needed")
    values = named(dict(tensors))
    found, doubled, n_layers = resolve(values)
    checked = {name: check_tensor(key, values[key]) for name, key in found.items()}
    geometry = measure(checked, n_layers)
    for name, value in checked.items():
        check_values(name, value)
    warnings = list(notes)
    settings_in, messages = read_config(dict(config) if isinstance(config, Mapping) else config)
    warnings += messages
    settings, messages = settle(settings_in, geometry)
    warnings += messages

    losers = {key: check_tensor(key, values[key]) for key in doubled.values()}
    kept: dict[str, torch.Tensor] = {}
    for key, value in (values | losers).items():
        if is_ignored(key) and not is_plain(value):
            warnings.append(f"{show(key)}, which is not used, is no dense tensor and was left out")
        else:
            kept[key] = value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
    for name, key in doubled.items():
        if not _equal(kept[key], kept[found[name]]):
            warnings.append(
                f"{show(key)} and {show(found[name])} differ; the second was used, as the "
                "submodule's spelling is the current one"
            )
    shapes = {plain(k): v.shape for k, v in kept.items() if is_ignored(k)}
    origin = identify(geometry, settings, shapes)
    warnings += origin.warnings
    weights = {name: kept[key] for name, key in found.items()}
    weights = {n: w.reshape(-1) if n.endswith(".gamma") else w for n, w in weights.items()}
    spec = ModelSpec(
        n_filters=geometry.n_filters,
        hidden=geometry.hidden,
        n_layers=n_layers,
        n_outputs=geometry.n_outputs,
        n_count_outputs=geometry.n_count_outputs,
        signal_groups=origin.groups,
        n_control_tracks=geometry.n_control_tracks,
        stem_kernel=geometry.stem_kernel,
        profile_kernel=geometry.profile_kernel,
        trimming=settings.trimming,
        count_margin=COUNT_MARGIN if geometry.has_gamma else 0,
        residual_scale=settings.residual_scale,
        has_gamma=geometry.has_gamma,
        name=settings.name,
    )
    return Checkpoint(
        spec=spec,
        weights=weights,
        tensors=kept,
        config=settings_in,
        release=origin.release,
        release_reason=origin.reason,
        warnings=tuple(dict.fromkeys(warnings)),
        path=path,
        sha256=sha256,
        n_parameters=sum(w.numel() for w in weights.values()),
        source_sha256=source_sha256,
    )


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.double(), second.double())
