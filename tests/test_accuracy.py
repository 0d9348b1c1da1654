"""The verdict: limits by hand, pooled floors, and results that must fail."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from cheri_export import accuracy, tolerance
from cheri_export.accuracy import Case, judge, judge_output, limits, worst
from cheri_export.spec import LOG_COUNTS, PRECISIONS, PROFILE_LOGITS

STD = tolerance.REFERENCE_STD[PROFILE_LOGITS]


def limit(value: float) -> tolerance.Limit:
    return tolerance.Limit(value, value, 0.0, value, "figure")


def test_every_tier_promises_both_outputs_and_gives_a_reason() -> None:
    pairs = [(t.tier, t.output) for t in tolerance.MODEL]
    assert len(set(pairs)) == len(pairs) == 8
    assert set(pairs) == {(p, o) for p in PRECISIONS for o in (PROFILE_LOGITS, LOG_COUNTS)}
    for row in tolerance.MODEL + tolerance.BLOCK:
        assert len(row.reason) > 20 and tolerance.figure(row.tier, row.output) == row.figure
    with pytest.raises(KeyError, match="no tolerance for tier 'fp8'"):
        tolerance.figure("fp8", PROFILE_LOGITS)
    with pytest.raises(KeyError, match="output 'profile'"):
        tolerance.figure("fp32", "profile")


def test_figures_are_the_contracts() -> None:
    published = {
        "fp32": (1e-4, 5e-6, 1e-5, 1e-5),
        "mixed": (5e-3, 2e-4, 2e-5, 1e-3),
        "fp16": (1e-2, 5e-4, 4e-3, 4e-3),
        "bf16": (6e-2, 1e-3, 3e-2, 3e-2),
    }
    for tier, figures in published.items():
        names = (PROFILE_LOGITS, LOG_COUNTS, "block, initial scale", "block, trained scale")
        assert tuple(tolerance.figure(tier, name) for name in names) == figures


def test_block_limit_grows_with_the_input_from_eight_on() -> None:
    for trained in (False, True):
        assert tolerance.block_limit("fp32", trained_scale=trained, max_abs_input=0.0) == 1e-5
        assert tolerance.block_limit("fp32", trained_scale=trained, max_abs_input=8.0) == 1e-5
    assert tolerance.block_limit("mixed", trained_scale=True, max_abs_input=80.0) == 1e-2
    assert tolerance.block_limit("mixed", trained_scale=False, max_abs_input=16.0) == 4e-5


@pytest.mark.parametrize(
    ("std", "floor", "scaled", "expected", "rule"),
    [
        (STD, 0.0, 1e-4, 1e-4, "figure"),
        (2 * STD, 3e-5, 1e-4, 1e-4, "figure"),  # a larger spread never loosens the figure
        (STD / 4, 0.0, 2.5e-5, 2.5e-5, "scaled figure"),
        (STD / 4, 8e-6, 2.5e-5, 2.5e-5, "scaled figure"),
        (STD / 4, 1e-5, 2.5e-5, 3e-5, "3 x floor"),
        (STD, 3.8e-4, 1e-4, 1.14e-3, "3 x floor"),
        (0.0, 0.0, 0.0, 0.0, "scaled figure"),
    ],
)
def test_the_three_rules_by_hand(std, floor, scaled, expected, rule) -> None:
    found = tolerance.limit_for("fp32", PROFILE_LOGITS, output_std=std, floor=floor)
    assert found.rule == rule and (found.figure, found.floor) == (1e-4, floor)
    assert found.scaled == pytest.approx(scaled, rel=1e-12)
    assert found.limit == pytest.approx(expected, rel=1e-12)


def test_errors_by_hand() -> None:
    reference = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    value = np.array([[[1.0, 2.5, 3.0, 3.0]]], dtype=np.float32)
    row = judge_output(reference, value, limit(2.0))
    assert row["max_abs"] == 1.0 and row["worst_index"] == [0, 0, 3]
    assert (row["worst_reference"], row["worst_value"]) == (4.0, 3.0)
    assert row["mean_abs"] == 0.375 and row["rms"] == pytest.approx((1.25 / 4) ** 0.5)
    assert row["ratio"] == 0.5 and row["passed"] is True and row["nonfinite"] == 0
    assert judge_output(reference, value, limit(1.0))["passed"] is True  # the limit itself passes
    assert judge_output(reference, value, limit(0.999))["passed"] is False
    exact = judge_output(reference, reference, limit(1e-9))
    assert exact["max_abs"] == 0.0 and exact["passed"] is True
    json.dumps(row, allow_nan=False)


def test_errors_are_taken_in_float64() -> None:
    """2**-30 beside 1 is invisible in float32."""
    reference = np.array([1.0 + 2.0**-30])
    row = judge_output(reference, np.array([1.0], dtype=np.float32), limit(1e-10))
    assert row["max_abs"] == 2.0**-30 and row["passed"] is False


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_fails(bad: float) -> None:
    reference = np.zeros((2, 1, 5))
    value = np.zeros((2, 1, 5), dtype=np.float32)
    value[1, 0, 3] = bad
    row = judge_output(reference, value, limit(1e9))
    assert row["passed"] is False and row["nonfinite"] == 1
    assert row["max_abs"] is None and row["ratio"] is None and row["worst_value"] is None
    assert row["worst_index"] == [1, 0, 3] and row["rms"] == 0.0
    json.dumps(row, allow_nan=False)
    value[:] = bad
    row = judge_output(reference, value, limit(1e9))
    assert row["nonfinite"] == 10 and row["rms"] is None and row["passed"] is False
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 1, 5), (2, 5), (2, 1, 5, 1)])
def test_a_wrong_shape_is_our_fault_and_raises(shape) -> None:
    with pytest.raises(RuntimeError, match="output has shape"):
        judge_output(np.zeros((2, 1, 5)), np.zeros(shape), limit(1.0))


def make_case(name="a", n=2, seed=0, floor_error=1e-6, count_floor=1e-7) -> Case:
    random = np.random.default_rng(seed)
    profile, counts = random.normal(size=(n, 1, 20)), random.normal(size=(n, 1))
    case = Case(name, "random", np.zeros((n, 4, 30), dtype=np.int8), seed=seed)
    case.reference = {PROFILE_LOGITS: profile, LOG_COUNTS: counts}
    case.floor = {PROFILE_LOGITS: profile.copy(), LOG_COUNTS: counts.copy()}
    case.floor[PROFILE_LOGITS][0, 0, 3] += floor_error
    case.floor[LOG_COUNTS][0, 0] += count_floor
    case.results["r"] = {k: v.astype(np.float32) for k, v in case.reference.items()}
    return case


def test_limits_are_pooled_over_the_cases() -> None:
    """One example's count may have no floor and no spread; the others lend theirs."""
    lucky = make_case("lucky", n=1, floor_error=0.0, count_floor=0.0)
    other = make_case("other", n=3, seed=1, floor_error=2e-5, count_floor=3e-6)
    found = limits("fp32", [lucky, other])
    assert found[PROFILE_LOGITS].floor == pytest.approx(2e-5, rel=1e-6)
    assert found[LOG_COUNTS].floor == pytest.approx(3e-6, rel=1e-6)
    pool = np.concatenate([c.reference[PROFILE_LOGITS].ravel() for c in (lucky, other)])
    share = min(1.0, pool.std() / STD)
    assert found[PROFILE_LOGITS].scaled == pytest.approx(1e-4 * share, rel=1e-12)
    assert found == limits("fp32", [other, lucky])


def test_floor_is_at_least_half_a_float32_step_of_the_output() -> None:
    """A float32 output cannot be nearer than that, whatever the model."""
    case = make_case(floor_error=0.0, count_floor=0.0)
    case.reference = {PROFILE_LOGITS: np.full((2, 1, 20), 100.0), LOG_COUNTS: np.full((2, 1), 7.0)}
    case.floor = {k: v.copy() for k, v in case.reference.items()}
    found = limits("fp32", [case])
    assert found[PROFILE_LOGITS].floor == 2.0**-18  # 64 to 128: steps of 2**-17
    assert found[LOG_COUNTS].floor == 2.0**-22  # 4 to 8: steps of 2**-21
    assert found[PROFILE_LOGITS].rule == "3 x floor"


def test_an_honest_result_passes_and_the_rows_say_so() -> None:
    cases = [make_case("a"), make_case("b", n=1, seed=5)]
    rows, failures = judge("fp32", cases)
    assert failures == []
    assert [(r["id"], r["batch"], r["length"], r["seed"]) for r in rows] == [
        ("a", 2, 30, 0),
        ("b", 1, 30, 5),
    ]
    for row, case in zip(rows, cases, strict=True):
        (run,) = row["runs"]
        assert run["runner"] == "r" and run["nonfinite"] == 0
        assert set(run["outputs"]) == {PROFILE_LOGITS, LOG_COUNTS}
        assert all(o["passed"] for o in run["outputs"].values())
        assert row["output_std"][PROFILE_LOGITS] == case.reference[PROFILE_LOGITS].std()
        assert row["floors"][PROFILE_LOGITS] == pytest.approx(1e-6, rel=1e-6)
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize(
    "sabotage", ["shift", "swap", "scale", "one logit", "one count", "nan", "zero"]
)
def test_a_sabotaged_result_fails(sabotage: str) -> None:
    cases = [make_case("good"), make_case("bad", n=3, seed=1)]
    result = cases[1].results["r"]
    profile, counts = result[PROFILE_LOGITS], result[LOG_COUNTS]
    if sabotage == "shift":
        result[PROFILE_LOGITS] = np.roll(profile, 1, axis=2)
    elif sabotage == "swap":
        result[PROFILE_LOGITS] = profile[::-1]
    elif sabotage == "scale":
        result[PROFILE_LOGITS] = profile * np.float32(1.001)
    elif sabotage == "one logit":
        profile[2, 0, 19] += 2e-4
    elif sabotage == "one count":
        counts[2, 0] += 5e-4
    elif sabotage == "nan":
        profile[0, 0, 0] = np.nan
    else:
        result[PROFILE_LOGITS] = np.zeros_like(profile)
    rows, failures = judge("fp32", cases)
    assert len(failures) == 1 and failures[0].startswith("r, bad, ")
    assert ("log_counts" in failures[0]) == (sabotage == "one count")
    assert ("1 values are NaN" in failures[0]) == (sabotage == "nan")
    passed = [all(o["passed"] for o in run["outputs"].values()) for r in rows for run in r["runs"]]
    assert passed == [True, False]
    json.dumps(rows, allow_nan=False)


def test_every_runner_is_judged() -> None:
    case = make_case()
    case.results["second"] = {k: v + 1 for k, v in case.results["r"].items()}
    _, failures = judge("bf16", [case])
    assert [f.split(",")[0] for f in failures] == ["second", "second"]


def test_a_missing_output_is_no_pass() -> None:
    case = make_case()
    del case.results["r"][LOG_COUNTS]
    with pytest.raises(KeyError):
        judge("fp32", [case])


def test_worst_example_is_found_and_nan_is_worse_than_anything() -> None:
    first, second = make_case("a"), make_case("b", n=3, seed=1)
    second.results["r"][PROFILE_LOGITS][1, 0, 7] += 0.5
    case, index = worst([first, second], "r")
    assert (case.id, index) == ("b", 1)
    first.results["r"][PROFILE_LOGITS][1, 0, 2] = np.nan
    case, index = worst([first, second], "r")
    assert (case.id, index) == ("a", 1)


def test_a_broken_reference_is_never_a_pass() -> None:
    """NaN in the judge must not turn every comparison into 'within'."""
    reference = np.array([[[1.0, np.nan]]])
    row = judge_output(reference, np.array([[[1.0, 1.0]]]), limit(1.0))
    assert row["passed"] is False


def test_limits_are_plain_values() -> None:
    found = dataclasses.asdict(limits("fp16", [make_case()])[PROFILE_LOGITS])
    assert set(found) == {"figure", "scaled", "floor", "limit", "rule"}
    assert accuracy.OUTPUTS == (PROFILE_LOGITS, LOG_COUNTS)
    json.dumps(found, allow_nan=False)
