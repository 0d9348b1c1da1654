"""The report as one self-contained page: no script, no font and no address from outside."""

from __future__ import annotations

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
    runners = [run["runner"] for run in report["accuracy"]["cases"][0]["runs"]]
    exported = next((r for r in runners if r != REFERENCE_RUNNER), runners[0])
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
        n_runs=len(runners),
        rule=_rule,
        profile=_profile(arrays),
        histogram=_histogram(report, arrays),
        scope=scope(report, arrays),
        snippet=load_snippet(report) if kept else None,
    )
    # A file name that is not UTF-8 arrives with lone surrogates, which no file can hold.
    return page.encode("utf-8", "replace").decode("utf-8")


def number(value: float | None) -> str:
    """A number with few digits, or words where there is none."""
    if value is None:
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
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
    return f"3 × {number(row['floor'])}, the error that this tier cannot avoid here"


def _profile(arrays: ReportArrays) -> dict[str, Any]:
    """The profile figure in two widths, and its caption."""
    reference, predicted, unit = plots.expected_profiles(arrays)
    with np.errstate(invalid="ignore"):
        difference = np.abs(predicted - reference)
    finite = difference[np.isfinite(difference)]
    example = f"example {arrays.example_index + 1} of “{arrays.case_id}”"
    sentences = [f"The example with the largest profile error: {example}."]
    if unit.startswith("expected"):
        totals = [
            np.expm1(counts).sum()
            for counts in (arrays.reference_log_counts, arrays.predicted_log_counts)
        ]
        sentences.append(
            f"Expected reads in the window: {totals[0]:,.2f} by the reference, {totals[1]:,.2f} by "
            "the exported model."
        )
    if finite.size:
        where = number(float(finite.max()))
        sentences.append(f"The two curves differ by at most {where} ({unit}).")
    missing = int(difference.size - finite.size)
    if missing:
        sentences.append(f"{missing:,} positions have no finite value and are left out.")
    if len(reference) > plots.MAX_CHANNELS:
        sentences.append(f"Drawn: the first {plots.MAX_CHANNELS} of {len(reference)} channels.")
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
    notes = []
    for runner, by_output in arrays.errors.items():
        for output, errors in by_output.items():
            zero = int((errors == 0).sum())
            broken = int(errors.size - np.isfinite(errors).sum())
            found = [f"{errors.size:,} values"]
            found += [f"{zero:,} exactly equal"] if zero else []
            found += [f"{broken:,} NaN or infinite"] if broken else []
            notes.append(f"{runner}, {OUTPUT_NAMES[output].lower()}: {', '.join(found)}")
    label = "Histogram of absolute errors on a logarithmic axis. " + "; ".join(notes) + "."
    return {
        "notes": notes,
        "wide": Markup(plots.error_figure(arrays.errors, limits, plots.WIDE, label)),
        "narrow": Markup(plots.error_figure(arrays.errors, limits, plots.NARROW, label)),
    }
