"""Every tolerance of the project, each with its reason. No other file may state one.

Rule for a whole model (`limit_for`): an absolute error is within its tier when it is no larger than

    max(figure * min(1, output std / std of the reference sample), 3 * floor)

`figure` is what the tier promises on the reference sample (`default_9x128_trained`: nine layers,
128 filters, trained-scale weights, profile logits of std 1.83). `floor` is the error that the same
model makes on the same input when everything is computed in float64 except the roundings that the
tier cannot avoid (`reference.forward` with a tier; in the fp32 tier a strict float32 run). The
floor is there because honest models exceed fixed figures: the sample with its profile head times
ten has a strict float32 error of 3.8e-4. On the reference sample and its stored input the figure
alone counts.
"""

from __future__ import annotations

import dataclasses

from cheri_export.spec import LOG_COUNTS, PROFILE_LOGITS


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """One promise: largest absolute error of `output` in tier `tier`, and why it is that large."""

    tier: str
    output: str
    figure: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Limit:
    """The limit for one output of one model, with the three numbers that it came from."""

    figure: float
    scaled: float
    floor: float
    limit: float
    rule: str


REFERENCE_STD = {PROFILE_LOGITS: 1.8327232203063166, LOG_COUNTS: 0.02381617488615432}
"""Standard deviations of the reference sample's float64 outputs on its stored input (4 x 2114)."""

FLOOR_FACTOR = 3.0
"""Headroom over the floor: another order of summation moves a maximum by up to about this much."""

FLOOR_SHARE = {"fp32": 1e-2, "mixed": 0.1, "fp16": 0.1, "bf16": 0.3}
"""Largest floor that counts, as a share of the output's size. Beyond it the tier has broken down on
the model (float32's variance overflowed, say), and three times a breakdown is no limit. Honest
floors are far below: on the sample 2e-5, 2e-3, 4e-3 and 3e-2 of the profile's std."""

MODEL = (
    Tolerance("fp32", PROFILE_LOGITS, 1e-4, "strict float32 measures 3.8e-5 on the sample"),
    Tolerance(
        "fp32", LOG_COUNTS, 5e-6, "strict float32 measures 3.1e-7; the mean adds order effects"
    ),
    Tolerance("mixed", PROFILE_LOGITS, 5e-3, "fp16 operands on a float32 stream emulate to 2.8e-3"),
    Tolerance("mixed", LOG_COUNTS, 2e-4, "fp16 operands on a float32 stream emulate to 5.8e-5"),
    Tolerance("fp16", PROFILE_LOGITS, 1e-2, "an fp16 stream with fp16 operands emulates to 7.5e-3"),
    Tolerance("fp16", LOG_COUNTS, 5e-4, "an fp16 stream with fp16 operands emulates to 6.4e-5"),
    Tolerance("bf16", PROFILE_LOGITS, 6e-2, "a bf16 stream with fp16 operands emulates to 4.6e-2"),
    Tolerance("bf16", LOG_COUNTS, 1e-3, "a bf16 stream with fp16 operands emulates to 2.7e-4"),
)

BLOCK = (
    Tolerance(
        "fp32", "block, initial scale", 1e-5, "the published fp32 tolerance of the CheriBlock"
    ),
    Tolerance("fp32", "block, trained scale", 1e-5, "three fp16 products measure 3.5e-6"),
    Tolerance("mixed", "block, initial scale", 2e-5, "fp16 operands measure 9e-6 to 1.1e-5"),
    Tolerance("mixed", "block, trained scale", 1e-3, "fp16 operands measure 4.4e-4"),
    Tolerance(
        "fp16", "block, initial scale", 4e-3, "the published fp16 tolerance of the CheriBlock"
    ),
    Tolerance(
        "fp16", "block, trained scale", 4e-3, "the published fp16 tolerance of the CheriBlock"
    ),
    Tolerance(
        "bf16", "block, initial scale", 3e-2, "the published bf16 tolerance of the CheriBlock"
    ),
    Tolerance(
        "bf16", "block, trained scale", 3e-2, "the published bf16 tolerance of the CheriBlock"
    ),
)
"""Block limits at unit-scale outputs: initial scale = linear and conv std 0.02, trained scale =
linear std 0.1, conv std 0.3. They grow with max(1, max|X| / 8), the spacing of the input."""


def figure(tier: str, output: str) -> float:
    """The promise of `tier` for `output` on the reference sample.

    Raises
    ------
    KeyError
        There is no such tier or output.
    """
    for row in MODEL + BLOCK:
        if (row.tier, row.output) == (tier, output):
            return row.figure
    raise KeyError(f"no tolerance for tier {tier!r}, output {output!r}")


def block_limit(tier: str, *, trained_scale: bool, max_abs_input: float) -> float:
    """Largest absolute error of one block's output in `tier` for inputs up to `max_abs_input`."""
    row = figure(tier, f"block, {'trained' if trained_scale else 'initial'} scale")
    return row * max(1.0, max_abs_input / 8.0)


def usable_floor(tier: str, floor: float, size: float) -> bool:
    """Whether `floor` is the rounding of a working tier for outputs of this size.

    Parameters
    ----------
    tier: str
        The precision tier.

    floor: float
        Largest unavoidable error.

    size: float
        The output's standard deviation, or a hundredth of its largest magnitude where that is more.
    """
    return floor <= FLOOR_SHARE[tier] * size


def limit_for(tier: str, output: str, *, output_std: float, floor: float) -> Limit:
    """The limit for one output of any model and input.

    Parameters
    ----------
    tier: str
        One of ``fp32``, ``mixed``, ``fp16``, ``bf16``.

    output: str
        ``profile_logits`` or ``log_counts``.

    output_std: float
        Standard deviation of the float64 reference's output over everything that is judged.

    floor: float
        Unavoidable error of this model and input in this tier (see the module's text).

    Returns
    -------
    limit: Limit
        `rule` is ``figure``, ``scaled figure`` or ``3 x floor``.
    """
    promised = figure(tier, output)
    share = min(1.0, output_std / REFERENCE_STD[output])
    scaled = promised * share
    raised = FLOOR_FACTOR * floor
    if raised > scaled:
        return Limit(promised, scaled, floor, raised, "3 x floor")
    return Limit(promised, scaled, floor, scaled, "figure" if share == 1.0 else "scaled figure")
