"""Errors against the float64 reference, floors, limits and the verdict. Runs nothing itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cheri_export import tolerance
from cheri_export.spec import LOG_COUNTS, PROFILE_LOGITS

OUTPUTS = (PROFILE_LOGITS, LOG_COUNTS)

Array = np.ndarray[Any, Any]
Outputs = dict[str, Array]
"""``profile_logits`` (N, O, L_out) and ``log_counts`` (N, G)."""


@dataclasses.dataclass
class Case:
    """One input with what every runner made of it.

    Attributes
    ----------
    id, kind, file, seed, controls:
        Where the input came from; `kind` is ``random`` or ``fasta``.

    sequence: np.ndarray, shape=(N, 4, L), dtype=int8

    control: np.ndarray, shape=(N, T, L), dtype=float32, or None

    reference: dict of str to np.ndarray, float64
        The judge's outputs.

    floor: dict of str to np.ndarray, float64
        The outputs with nothing but the tier's unavoidable roundings.

    results: dict of str to Outputs
        By runner.
    """

    id: str
    kind: str
    sequence: Array
    control: Array | None = None
    file: str | None = None
    seed: int | None = None
    controls: str | None = None
    reference: Outputs = dataclasses.field(default_factory=dict)
    floor: Outputs = dataclasses.field(default_factory=dict)
    results: dict[str, Outputs] = dataclasses.field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Examples N."""
        return int(self.sequence.shape[0])

    @property
    def length(self) -> int:
        """Bases L."""
        return int(self.sequence.shape[2])


def _half_spacing(values: Array) -> float:
    """Half the float32 spacing at the largest value: outputs are float32 in every tier."""
    return float(np.spacing(np.float32(np.abs(values).max()))) / 2.0


def limits(tier: str, cases: list[Case]) -> dict[str, tolerance.Limit]:
    """One limit per output, over all cases together.

    Pooled, because the floor of a single log count can be zero by luck, which would condemn every
    honest float32 result, and because the spread of one number is none.

    Parameters
    ----------
    tier: str
        The precision tier.

    cases: list of Case
        With `reference` and `floor` filled in.

    Returns
    -------
    limits: dict of str to tolerance.Limit
    """
    found = {}
    for output in OUTPUTS:
        reference = [case.reference[output] for case in cases]
        floor = max(
            (f for f in (_floor(tier, c, output) for c in cases) if f is not None), default=0
        )
        floor = max(floor, max(_half_spacing(values) for values in reference))
        spread = float(np.concatenate([values.ravel() for values in reference]).std())
        found[output] = tolerance.limit_for(tier, output, output_std=spread, floor=floor)
    return found


def _raw_floor(case: Case, output: str) -> float:
    return float(np.abs(case.floor[output] - case.reference[output]).max())


def _floor(tier: str, case: Case, output: str) -> float | None:
    """Largest unavoidable error of one case; None where the tier itself breaks down.

    A tier that overflows must not buy itself a limit as wide as its own failure.
    """
    floor, values = _raw_floor(case, output), case.reference[output]
    if not np.isfinite(floor):
        return None
    size = max(float(values.std()), 1e-2 * float(np.abs(values).max()))
    honest = floor <= _half_spacing(values) or tolerance.usable_floor(tier, floor, size)
    return floor if honest else None


def judge_output(reference: Array, value: Array, limit: tolerance.Limit) -> dict[str, Any]:
    """Compare one output with the reference.

    Returns
    -------
    row: dict
        The fields of ``runs[].outputs[]`` in `report/schema.json`. A NaN or an infinity anywhere
        fails, as does a wrong shape.
    """
    base: dict[str, Any] = {
        "limit": limit.limit,
        "rule": limit.rule,
        "figure": limit.figure,
        "scaled": limit.scaled,
        "floor": limit.floor,
    }
    if value.shape != reference.shape:
        raise RuntimeError(f"output has shape {value.shape}, the reference {reference.shape}")
    wide = value.astype(np.float64)
    bad = int(np.size(wide) - np.isfinite(wide).sum())
    error = np.abs(wide - reference)
    error = np.where(np.isfinite(error), error, np.inf)
    index = np.unravel_index(int(error.argmax()), error.shape)
    finite = error[np.isfinite(error)]
    worst = float(error[index])
    return {
        **base,
        "max_abs": worst if bad == 0 else None,
        "rms": float(np.sqrt(np.mean(finite**2))) if finite.size else None,
        "mean_abs": float(finite.mean()) if finite.size else None,
        "worst_index": [int(i) for i in index],
        "worst_reference": float(reference[index]),
        "worst_value": float(wide[index]) if np.isfinite(wide[index]) else None,
        "ratio": worst / limit.limit if bad == 0 else None,
        "nonfinite": bad,
        "passed": bad == 0 and worst <= limit.limit,
    }


def judge(tier: str, cases: list[Case]) -> tuple[list[dict[str, Any]], list[str]]:
    """Judge every runner on every case.

    Returns
    -------
    rows: list of dict
        ``accuracy.cases`` of the report.

    failures: list of str
        One sentence for each output out of its limit; empty when all is well.
    """
    found = limits(tier, cases)
    rows, failures = [], []
    for case in cases:
        for output in OUTPUTS:
            if _floor(tier, case, output) is None:
                failures.append(_breakdown(tier, case, output))
                break
        runs = []
        for runner, outputs in case.results.items():
            judged = {
                output: judge_output(case.reference[output], outputs[output], found[output])
                for output in OUTPUTS
            }
            runs.append(
                {
                    "runner": runner,
                    "outputs": judged,
                    "nonfinite": sum(row["nonfinite"] for row in judged.values()),
                }
            )
            failures += [
                _sentence(case, runner, output, row)
                for output, row in judged.items()
                if not row["passed"]
            ]
        rows.append(
            {
                "id": case.id,
                "kind": case.kind,
                "length": case.length,
                "batch": case.batch,
                "seed": case.seed,
                "file": case.file,
                "controls": case.controls,
                "output_std": {o: float(case.reference[o].std()) for o in OUTPUTS},
                "floors": {output: _floor(tier, case, output) for output in OUTPUTS},
                "runs": runs,
            }
        )
    return rows, failures


def _breakdown(tier: str, case: Case, output: str) -> str:
    advice = (
        "float32 does not hold this model: look for extreme weights or controls"
        if tier == "fp32"
        else "use --precision fp32" + ("" if tier == "mixed" else " or mixed")
    )
    size = _raw_floor(case, output)
    how = f"is off by {size:.2g}" if np.isfinite(size) else "leaves the range"
    return f"{case.id}, {output}: tier {tier} itself {how} on this input; {advice}"


def _sentence(case: Case, runner: str, output: str, row: dict[str, Any]) -> str:
    where = f"{runner}, {case.id}, {output}"
    if row["nonfinite"]:
        return f"{where}: {row['nonfinite']} values are NaN or infinite"
    return (
        f"{where}: error {row['max_abs']:.2e} at {row['worst_index']} exceeds {row['limit']:.2e} "
        f"({row['rule']})"
    )


def worst(cases: list[Case], runner: str) -> tuple[Case, int]:
    """The case and the example with the largest profile error (NaN counts as largest)."""
    best: tuple[float, Case, int] | None = None
    for case in cases:
        error = np.abs(case.results[runner][PROFILE_LOGITS] - case.reference[PROFILE_LOGITS])
        per_example = np.where(np.isfinite(error), error, np.inf).max((1, 2))
        index = int(per_example.argmax())
        if best is None or per_example[index] > best[0]:
            best = (float(per_example[index]), case, index)
    assert best is not None
    return best[1], best[2]
