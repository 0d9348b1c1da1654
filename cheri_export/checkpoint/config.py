"""The configuration: read as data, compared with the tensors, defaults stated when used."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from cheri_export.checkpoint.geometry import Geometry
from cheri_export.checkpoint.messages import listing, problem, show
from cheri_export.spec import DEFAULT_RESIDUAL_SCALE

KNOWN = (
    *("n_filters", "n_layers", "n_outputs", "signal_groups", "n_control_tracks", "expansion"),
    *("residual_scale", "name", "trimming", "single_count_output", "verbose"),
)
"""Every key that a release has written."""

_FLOAT32_MAX = 3.4028234e38
_MAX_TRIMMING = 2**31 - 1
COUNT_MARGIN = 37
"""Release 0.0.1 averages over 37 more positions at each end for the counts."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What only the configuration can say. `groups` is None where it says nothing."""

    trimming: int
    residual_scale: float
    groups: tuple[int, ...] | None
    single_count_output: bool | None
    has_n_outputs: bool
    name: str


def jsonable(value: object, depth: int = 4, budget: list[int] | None = None) -> Any:
    """A copy of `value` that json can write; what it cannot becomes a short description.

    Parameters
    ----------
    value: object

    depth: int, optional
        Deepest nesting kept.

    budget: list of int, optional
        Values left to copy. A small pickle can describe an exponentially large structure.
    """
    left = [10_000] if budget is None else budget
    left[0] -= 1
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if len(value) <= 10_000 else value[:10_000]
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 64 else show(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else show(value)
    if depth > 0 and left[0] > 0:
        if isinstance(value, dict):
            return {
                show(k): jsonable(v, depth - 1, left) for k, v in list(value.items())[: left[0]]
            }
        if isinstance(value, (list, tuple)):
            return [jsonable(v, depth - 1, left) for v in value[: left[0]]]
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return jsonable(value.item(), 0, left)  # a NumPy scalar or a 0-dimensional tensor
    return show(value)


def read_config(found: object) -> tuple[dict[str, Any], list[str]]:
    """The configuration with JSON-ready values, and warnings.

    Raises
    ------
    CheckpointError
        If it is no dictionary with text keys.
    """
    if found is None:
        return {}, []
    if not isinstance(found, dict) or not all(isinstance(k, str) for k in found):
        raise problem(
            f"'config' is {show(found)}; a dictionary of settings is needed; save the model again "
            "with Cherimoya.save()"
        )
    config = {show(k): jsonable(v) for k, v in found.items()}
    extra = [k for k in config if k not in KNOWN]
    warnings = []
    if extra:
        warnings.append(
            f"unknown settings in the configuration are ignored: {listing(extra)}; a release newer "
            "than 0.3.1 may have written the file"
        )
    return config, warnings


def settle(config: dict[str, Any], geometry: Geometry) -> tuple[Settings, list[str]]:
    """Compare the configuration with the tensors and take from it what they cannot say.

    Returns
    -------
    settings: Settings

    warnings: list of str
        Every value that was not in the file and was filled in or deduced.

    Raises
    ------
    CheckpointError
        If a value contradicts the tensors (both are named) or cannot be used.
    """
    _agree(config, "n_filters", geometry.n_filters, "iconv.weight")
    _agree(config, "n_layers", geometry.n_layers, "the list of blocks")
    _agree(config, "n_outputs", geometry.n_outputs, "fconv.weight")
    _agree(config, "n_control_tracks", geometry.n_control_tracks, "fconv.weight")
    _check_expansion(config, geometry)
    filled: list[str] = []
    trimming = _trimming(config, geometry, filled)
    scale = _residual_scale(config, geometry, filled)
    single = config.get("single_count_output")
    if single is not None and not isinstance(single, bool):
        raise problem(f"config single_count_output is {show(single)}; True or False is needed")
    groups = _groups(config, geometry)
    name = config.get("name")
    warnings = []
    if name is not None and not isinstance(name, str):
        warnings.append(f"the model's name in the configuration is {show(name)}; it is ignored")
    if filled:
        where = (
            "the file holds no configuration" if not config else "the configuration is incomplete"
        )
        warnings.append(f"{where}; not read from the file but assumed: {'; '.join(filled)}")
    if config:
        # Only the trimming, the scale and the groups cannot be read off the tensors.
        absent = [k for k in ("n_filters", "n_layers", "n_control_tracks") if k not in config]
        if absent:
            warnings.append(f"not in the configuration, taken from the tensors: {listing(absent)}")
    return Settings(
        trimming,
        scale,
        groups,
        single,
        "n_outputs" in config,
        name if isinstance(name, str) else "",
    ), warnings


def _integer(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if type(value) is not int:
        raise problem(f"config {key} is {show(value)}; an integer is needed; correct the file")
    return value


def _agree(config: dict[str, Any], key: str, actual: int, where: str) -> None:
    if key in config and _integer(config, key) != actual:
        raise problem(
            f"config {key} is {show(config[key])} but {where} says {actual}; they must agree; the "
            "file was changed after it was saved, so save the model again"
        )


def _check_expansion(config: dict[str, Any], geometry: Geometry) -> None:
    if "expansion" not in config:
        return
    value, actual = config["expansion"], geometry.hidden / geometry.n_filters
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise problem(f"config expansion is {show(value)}; a number is needed; correct the file")
    if value != actual:
        raise problem(
            f"config expansion is {show(value)} but blocks.0.linear1.weight says {actual:g} "
            f"({geometry.hidden} hidden / {geometry.n_filters} filters); they must agree; the file "
            "was changed after it was saved, so save the model again"
        )


def _trimming(config: dict[str, Any], geometry: Geometry, filled: list[str]) -> int:
    default = 46 + 2**geometry.n_layers - 1
    value = config.get("trimming")
    if value is None or (geometry.has_gamma and type(value) is int and value == 0):
        if "trimming" not in config:
            filled.append(f"trimming {default} (46 + the sum of the dilations)")
        return default
    value = _integer(config, "trimming")
    if not 0 <= value <= _MAX_TRIMMING:
        raise problem(
            f"config trimming is {show(value)}; 0 to {_MAX_TRIMMING} is needed; correct the file"
        )
    if geometry.has_gamma and value < COUNT_MARGIN:
        raise problem(
            f"config trimming is {value}; release 0.0.1 needs {COUNT_MARGIN} or more, since its "
            "count window would begin before the sequence and wrap round; train the model again"
        )
    return value


def _residual_scale(config: dict[str, Any], geometry: Geometry, filled: list[str]) -> float:
    value = config.get("residual_scale")
    if geometry.has_gamma:
        if value is not None:
            raise problem(
                f"config residual_scale is {show(value)} but the blocks have gamma, which takes "
                "its place; no release has both; remove the one that the model was not trained with"
            )
        return 1.0
    if value is None:
        if "residual_scale" in config:
            raise problem(
                "config residual_scale is None; a finite number is needed; correct the file"
            )
        filled.append(f"residual_scale {DEFAULT_RESIDUAL_SCALE}")
        return DEFAULT_RESIDUAL_SCALE
    # `jsonable` has turned NaN and infinity into text.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or abs(value) > _FLOAT32_MAX:
        raise problem(
            f"config residual_scale is {show(value)}; a finite number within float32 is needed; "
            "correct the file"
        )
    return float(value)


def _groups(config: dict[str, Any], geometry: Geometry) -> tuple[int, ...] | None:
    value = config.get("signal_groups")
    if value is None:
        return None
    if not isinstance(value, list) or not value or any(type(g) is not int or g < 1 for g in value):
        raise problem(
            f"config signal_groups is {show(value)}; a list of positive integers is needed; "
            "correct the file"
        )
    if sum(value) != geometry.n_outputs:
        raise problem(
            f"config signal_groups {show(value)} add up to {sum(value)} but fconv.weight has "
            f"{geometry.n_outputs} profile channels; they must agree; the file was changed after "
            "it was saved, so save the model again"
        )
    return tuple(value)
