"""The report as one self-contained page: no script, no font and no address from outside."""

from __future__ import annotations

import dataclasses
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from cheri_export.report import plots
from cheri_export.report.facts import load_snippet, scope
from cheri_export.report.record import ReportArrays, sanitise
from cheri_export.spec import LOG_COUNTS, PROFILE_LOGITS

OUTPUT_NAMES = {PROFILE_LOGITS: "Profile logits", LOG_COUNTS: "Log counts"}
REFERENCE_RUNNER = "torch-fp32"
"""Runs the checkpoint rather than the exported file, for comparison."""


def render_html(report: dict[str, Any], arrays: ReportArrays) -> str:
    """Render the page.

    Parameters
    ----------
    report: dict
        As `schema.json` describes it. NaN and infinity are shown as missing; ``timings_s`` may be
        empty.

    arrays: ReportArrays
        What the figures draw.

    Returns
    -------
    page: str
        HTML. Every text from outside is escaped.
    """
    report, _ = sanitise(report)
    # The exported file first, wherever runners are listed or coloured.
    for case in report["accuracy"]["cases"]:
        case["runs"].sort(key=lambda run: run["runner"] == REFERENCE_RUNNER)
    errors = dict(sorted(arrays.errors.items(), key=lambda item: item[0] == REFERENCE_RUNNER))
    arrays = dataclasses.replace(arrays, errors=errors)
    exported = report["accuracy"]["cases"][0]["runs"][0]["runner"]
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, size=size, commas=commas, show=show)
    kept = report["verdict"]["passed"] or report["verdict"]["allow_mismatch"]
    page = environment.get_template("template.html").render(
        r=report,
        style=Markup(_read("style.css")),
        title=report["checkpoint"]["path"] or report["model"]["name"] or "model in memory",
        output_names=OUTPUT_NAMES,
        exported=exported,
        cards=_cards(report, exported),
        compared_with=REFERENCE_RUNNER if REFERENCE_RUNNER in errors else None,
        rule=_rule,
        short_rule=_short_rule,
        profile=_profile(arrays),
        histogram=_histogram(report, arrays),
        scope=scope(report, arrays),
        snippet=load_snippet(report) if kept else None,
    )
    # A file name that is not UTF-8 arrives with lone surrogates, which no file can hold.
    return page.encode("utf-8", "replace").decode("utf-8")


def number(value: float | None) -> str:
    """A number with two or three digits, or words where there is none."""
    if value is None:
        return "not finite"
    if abs(value) >= 1000 and abs(value) < 1e6:
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    return f"{value:.1e}"


def size(value: int | None) -> str:
    """A file size in decimal units."""
    if value is None:
        return "unknown"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value} bytes"


def commas(value: int) -> str:
    """An integer with its thousands apart."""
    return f"{value:,}"


def show(value: Any) -> str:
    """A setting or a configuration value as text."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(show(item) for item in value) or "none"
    return str(value)


def _read(name: str) -> str:
    """A file shipped beside this module."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _cards(report: dict[str, Any], runner: str) -> list[dict[str, Any]]:
    """The largest error of each output of the exported file, against its limit."""
    cards = []
    for output, name in OUTPUT_NAMES.items():
        rows = [
            run["outputs"][output]
            for case in report["accuracy"]["cases"]
            for run in case["runs"]
            if run["runner"] == runner
        ]
        worst = max(rows, key=lambda row: np.inf if row["ratio"] is None else row["ratio"])
        ratio = worst["ratio"]
        cards.append(
            {
                "name": name,
                "worst": worst,
                "passed": all(row["passed"] for row in rows),
                "percent": 100.0 if ratio is None else min(100.0, 100.0 * ratio),
            }
        )
    return cards


def _rule(row: dict[str, Any]) -> str:
    """How a limit came about, in words."""
    if row["rule"] == "figure":
        return "the tier's figure"
    if row["rule"] == "scaled figure":
        return f"the tier's figure, {number(row['figure'])}, scaled to this output's spread"
    return f"three times {number(row['floor'])}, the error that this tier cannot avoid here"


def _short_rule(row: dict[str, Any]) -> str:
    """The same for a narrow column."""
    if row["rule"] == "figure":
        return "figure"
    if row["rule"] == "scaled figure":
        return "figure, scaled"
    return f"3 x floor {number(row['floor'])}"


def _profile(arrays: ReportArrays) -> dict[str, Any]:
    """The profile figure in two widths, and its caption."""
    reference, predicted, unit = plots.expected_profiles(arrays)
    with np.errstate(invalid="ignore"):
        difference = np.abs(predicted - reference)
    finite = difference[np.isfinite(difference)]
    example = f"example {arrays.example_index + 1} of “{arrays.case_id}”"
    sentences = [f"The example with the largest profile error: {example}."]
    if unit.startswith("expected"):
        by_reference, by_export = (
            float(np.expm1(counts.astype(np.float64)).sum())
            for counts in (arrays.reference_log_counts, arrays.predicted_log_counts)
        )
        form = ",.2f" if max(abs(by_reference), abs(by_export)) < 1e6 else ".4g"
        sentences.append(
            f"Expected reads in the window: {by_reference:{form}} by the reference, "
            f"{by_export:{form}} by the exported model."
        )
    if finite.size:
        largest = number(float(finite.max()))
        sentences.append(
            f"The curves differ by at most {largest} {unit.removesuffix(' per base')} at any base."
        )
    missing = int(difference.size - finite.size)
    if missing:
        sentences.append(f"{missing:,} positions have no finite value and are left out.")
    if len(reference) > plots.MAX_CHANNELS:
        sentences.append(f"Drawn: the first {plots.MAX_CHANNELS} of {len(reference)} channels.")
    step = plots.thinning(reference.shape[1])
    if step > 1:
        sentences.append(f"Each point is the largest of {step} neighbouring bases.")
    caption = " ".join(sentences)
    return {
        "unit": unit,
        "caption": caption,
        "wide": Markup(plots.profile_figure(arrays, plots.WIDE, caption)),
        "narrow": Markup(plots.profile_figure(arrays, plots.NARROW, caption)),
    }


def _histogram(report: dict[str, Any], arrays: ReportArrays) -> dict[str, Any]:
    """The error figure in two widths, and its caption."""
    limits = {
        output: min(
            run["outputs"][output]["limit"]
            for case in report["accuracy"]["cases"]
            for run in case["runs"]
        )
        for output in OUTPUT_NAMES
    }
    sentences = []
    for runner, by_output in arrays.errors.items():
        parts = []
        for output, errors in by_output.items():
            zero = int((errors == 0).sum())
            broken = int(errors.size - np.isfinite(errors).sum())
            left_out = [f"{zero:,} exactly equal"] if zero else []
            left_out += [f"{broken:,} NaN or infinite"] if broken else []
            note = f" ({' and '.join(left_out)}, not drawn)" if left_out else ""
            parts.append(f"{errors.size:,} {OUTPUT_NAMES[output].lower()}{note}")
        sentences.append(f"{runner}: {', '.join(parts)}.")
    caption = " ".join(sentences)
    label = "Histogram of absolute errors on a logarithmic axis. " + caption
    return {
        "caption": caption,
        "wide": Markup(plots.error_figure(arrays.errors, limits, plots.WIDE, label)),
        "narrow": Markup(plots.error_figure(arrays.errors, limits, plots.NARROW, label)),
    }
