"""What a report is made of: the arrays behind the figures, and JSON that any parser accepts."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class ReportArrays:
    """The numbers that the page draws and the JSON file does not hold.

    Attributes
    ----------
    reference_profile, predicted_profile: np.ndarray, shape=(O, L_out)
        Profile logits of one example, the judge's and the exported file's.

    reference_log_counts, predicted_log_counts: np.ndarray, shape=(G,)
        Log counts of that example.

    case_id: str
        Input that the example belongs to.

    example_index: int
        Place in it, from 0.

    signal_groups: tuple of int
        Channels of each signal group, summing to O.

    errors: dict of str to dict of str to np.ndarray
        Absolute errors by runner and output, 1-D; may hold NaN and infinity.
    """

    reference_profile: Array
    predicted_profile: Array
    reference_log_counts: Array
    predicted_log_counts: Array
    case_id: str
    example_index: int
    signal_groups: tuple[int, ...]
    errors: dict[str, dict[str, Array]]


def sanitise(value: Any) -> tuple[Any, int]:
    """Make a value fit for JSON: null for NaN and infinity, plain types for NumPy's.

    Parameters
    ----------
    value: object
        Dictionaries, lists, tuples, arrays and scalars, nested at will.

    Returns
    -------
    clean: object
        A copy with plain Python types.

    nonfinite: int
        Numbers that became null.
    """
    if isinstance(value, dict):
        pairs = {str(key): sanitise(item) for key, item in value.items()}
        return {key: clean for key, (clean, _) in pairs.items()}, sum(c for _, c in pairs.values())
    if isinstance(value, (list, tuple)):
        items = [sanitise(item) for item in value]
        return [clean for clean, _ in items], sum(count for _, count in items)
    if isinstance(value, (np.ndarray, np.generic)):
        return sanitise(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None, 1
    return value, 0


def to_json(report: dict[str, Any]) -> str:
    """Write a report as JSON text.

    Parameters
    ----------
    report: dict
        As `schema.json` describes it.

    Returns
    -------
    text: str
        Indented, UTF-8 safe, with a final line break.

    Raises
    ------
    ValueError
        A number is NaN or infinite, which JSON cannot hold; the message names the field. Such a
        number must be counted in ``nonfinite`` and become null (`sanitise`) where it arises.

    TypeError
        A value has no JSON form.
    """
    bad = _find_nonfinite(report, "report")
    if bad:
        raise ValueError(f"{bad} is not finite; JSON has no such number")
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # A file name that is not UTF-8 arrives with lone surrogates, which no file can hold.
    return text.encode("utf-8", "replace").decode("utf-8")


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of ``report.json``."""
    text = resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def validate(report: dict[str, Any]) -> None:
    """Check a report against the schema. Needs jsonschema, which only the tests install.

    Raises
    ------
    jsonschema.ValidationError
        A field is missing, unknown, or of the wrong type.
    """
    import jsonschema

    jsonschema.Draft202012Validator(schema()).validate(report)


def _find_nonfinite(value: Any, path: str) -> str | None:
    """Path of the first number that JSON cannot hold."""
    if isinstance(value, dict):
        children = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    else:
        return path if isinstance(value, float) and not math.isfinite(value) else None
    return next((found for p, item in children if (found := _find_nonfinite(item, p))), None)
