"""Figures of the report as inline SVG, drawn without pyplot and with the page's own colours."""

from __future__ import annotations

import html
import io
import itertools
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cheri_export.report.record import Array, ReportArrays
from cheri_export.spec import LOG_COUNTS, PROFILE_LOGITS

WIDE, NARROW = 7.4, 3.7
"""Widths in inches. The page shows the narrow drawing on a phone, where the wide one's text would
be too small to read."""

MAX_CHANNELS = 4
"""Profile channels drawn; a model with more gets its first ones."""

MAX_POINTS = 2500
"""Positions drawn; of longer profiles, the largest value of every few neighbours."""

# Drawn in these colours, then replaced by CSS so that the page's light and dark themes apply.
_INK, _FAINT = "#010101", "#020202"
_REFERENCE, _EXPORTED, _DIFFERENCE, _LIMIT = "#030303", "#040404", "#050505", "#060606"
_RUNNERS = ("#040404", "#070707", "#080808", "#090909")
_CSS = {
    _INK: "currentColor",
    _FAINT: "var(--rule)",
    _REFERENCE: "var(--reference)",
    _EXPORTED: "var(--exported)",
    _DIFFERENCE: "var(--difference)",
    _LIMIT: "var(--bad)",
    _RUNNERS[1]: "var(--runner-2)",
    _RUNNERS[2]: "var(--runner-3)",
    _RUNNERS[3]: "var(--runner-4)",
}
_TITLES = {PROFILE_LOGITS: "profile logits", LOG_COUNTS: "log counts"}


def expected_profiles(arrays: ReportArrays) -> tuple[Array, Array, str]:
    """Turn the example's logits into what a biologist reads.

    Returns
    -------
    reference, predicted: np.ndarray, shape=(O, L_out), dtype=float64
        Expected reads per base where there is a finite log count for every group, otherwise
        probabilities. NaN where a logit is not finite.

    unit: str
        ``expected reads per base`` or ``probability per base``.
    """
    groups = arrays.signal_groups
    logits = [
        np.where(np.isfinite(values), values, np.nan).astype(np.float64)
        for values in (arrays.reference_profile, arrays.predicted_profile)
    ]
    with np.errstate(over="ignore"):
        reads = [
            np.expm1(values.astype(np.float64))
            for values in (arrays.reference_log_counts, arrays.predicted_log_counts)
        ]
    counted = all(len(n) == len(groups) and np.isfinite(n).all() for n in reads)
    # Both share out their reads among the same positions, or one NaN would shift every other
    # position of its curve.
    shared = np.isfinite(logits[0]) & np.isfinite(logits[1])
    profiles = [np.full(values.shape, np.nan) for values in logits]
    first = 0
    for g, channels in enumerate(groups):
        rows = slice(first, first + channels)
        first += channels
        for profile, values, n in zip(profiles, logits, reads, strict=True):
            profile[rows] = _softmax(values[rows], shared[rows])
            if counted:
                profile[rows] *= n[g]
    unit = "expected reads per base" if counted else "probability per base"
    return profiles[0], profiles[1], unit


def profile_figure(arrays: ReportArrays, width: float, label: str) -> str:
    """Draw the example's profile, exported over reference, with the difference below.

    Parameters
    ----------
    arrays: ReportArrays

    width: float
        In inches.

    label: str
        Text for readers who cannot see the figure.

    Returns
    -------
    svg: str
    """
    reference, predicted, unit = expected_profiles(arrays)
    drawn = min(len(reference), MAX_CHANNELS)
    narrow = width < 5

    def draw(figure: Figure) -> None:
        axes = figure.subplots(
            2 * drawn, 1, sharex=True, squeeze=False, height_ratios=[3, 1.15] * drawn
        )[:, 0]
        step = thinning(reference.shape[1])
        positions = np.arange(0, reference.shape[1], step)
        for channel in range(drawn):
            top, bottom = axes[2 * channel], axes[2 * channel + 1]
            expected, given = reference[channel], predicted[channel]
            top.plot(
                positions, _thin(expected, step), color=_REFERENCE, lw=3.2,
                label="float64 reference",
            )  # fmt: skip
            top.plot(positions, _thin(given, step), color=_EXPORTED, lw=0.9, label="exported model")
            difference = _thin(given - expected, step)
            bottom.axhline(0, color=_FAINT, lw=0.8)
            bottom.plot(positions, difference, color=_DIFFERENCE, lw=0.8)
            if not np.isfinite(difference).any():
                bottom.text(
                    0.5, 0.5, "no finite value", ha="center", va="center", color=_LIMIT,
                    transform=bottom.transAxes,
                )  # fmt: skip
            else:
                size = 1.15 * float(np.nanmax(np.abs(difference)))
                bottom.set_ylim((-size, size) if size > 0 else (-1e-12, 1e-12))
            top.set_ylabel(unit.replace(" per", "\nper") if narrow else unit)
            if len(reference) > 1:
                top.set_title(_channel_name(arrays.signal_groups, channel), loc="left")
            bottom.set_ylabel("difference")
            bottom.yaxis.set_major_locator(MaxNLocator(3, symmetric=True))
            bottom.yaxis.set_major_formatter(FuncFormatter(_short))
            top.yaxis.set_major_locator(MaxNLocator(4))
            top.yaxis.set_major_formatter(FuncFormatter(_short))
            top.margins(x=0)
            bottom.margins(x=0)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper left", ncols=2, frameon=False, handlelength=1.4
        )
        axes[-1].set_xlabel("position in the output window (bases)")
        axes[-1].xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True))
        figure.align_ylabels()

    return _svg(draw, width, 0.7 + 2.75 * drawn, f"profile-{width:g}".replace(".", "-"), label)


def error_figure(
    errors: dict[str, dict[str, Array]], limits: dict[str, float], width: float, label: str
) -> str:
    """Draw how large the errors are, on a logarithmic axis, by output and runner.

    Parameters
    ----------
    errors: dict of str to dict of str to np.ndarray
        As in `ReportArrays`. Zeros have no logarithm and are left out, as are NaN and infinity;
        the page gives their numbers.

    limits: dict of str to float
        By output.

    width: float
        In inches.

    label: str
        Text for readers who cannot see the figure.

    Returns
    -------
    svg: str
    """
    outputs = (PROFILE_LOGITS, LOG_COUNTS)
    narrow = width < 5
    limit_style: dict[str, Any] = {"color": _LIMIT, "lw": 1.4, "ls": (0, (4, 2))}

    def draw(figure: Figure) -> None:
        shape = (2, 1) if narrow else (1, 2)
        axes = figure.subplots(*shape, squeeze=False).ravel()
        for ax, output in zip(axes, outputs, strict=True):
            logs = {runner: _log10(by_output[output]) for runner, by_output in errors.items()}
            limit = np.log10(limits[output])
            every = np.concatenate([*logs.values(), [limit]])
            low, high = np.floor(every.min()), np.ceil(every.max() + 0.2)
            # Ten bars to a decade for many values, fewer where there are few.
            per_decade = 10 if max(map(len, logs.values())) >= 1000 else 4
            bins = np.linspace(low, high, round(high - low) * per_decade + 1)
            for color, values in zip(itertools.cycle(_RUNNERS), logs.values()):
                if len(values):
                    shares = np.full(len(values), 100 / len(values))
                    ax.hist(values, bins, weights=shares, histtype="step", color=color, lw=1.4)
            ax.axvline(limit, **limit_style)
            ax.set_title(_TITLES[output], loc="left")
            ax.set_xlabel("absolute error (natural log)")
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            ax.xaxis.set_major_formatter(FuncFormatter(_power))
            ax.set_xlim(low, high)
        for ax in axes[: 2 if narrow else 1]:
            ax.set_ylabel("share of values (%)")
        handles = [
            Line2D([], [], color=color, lw=1.4, label=_plain(runner))
            for color, runner in zip(itertools.cycle(_RUNNERS), errors)
        ]
        handles.append(Line2D([], [], label="limit", **limit_style))
        figure.legend(
            handles=handles, loc="outside upper left", ncols=1 if narrow else len(handles),
            frameon=False, handlelength=2,
        )  # fmt: skip

    name = f"errors-{width:g}".replace(".", "-")
    return _svg(draw, width, 5.2 if narrow else 2.9, name, label)


def thinning(length: int) -> int:
    """Neighbouring positions that share one drawn point."""
    return -(-length // MAX_POINTS)


def _thin(values: Array, step: int) -> Array:
    """The value of largest magnitude of every `step` neighbours; NaN where all are."""
    if step == 1:
        return values
    padded = np.pad(values, (0, -len(values) % step), constant_values=np.nan).reshape(-1, step)
    largest = np.where(np.isnan(padded), -1.0, np.abs(padded)).argmax(1)
    return np.asarray(padded[np.arange(len(padded)), largest])


def _softmax(logits: Array, counted: npt.NDArray[np.bool_]) -> Array:
    """Softmax over all `counted` entries together; the others are put on the same scale."""
    if not counted.any():
        return np.full(logits.shape, np.nan)
    with np.errstate(over="ignore"):
        weights = np.exp(logits - logits[counted].max())
    return np.asarray(weights / weights[counted].sum())


def _channel_name(groups: tuple[int, ...], channel: int) -> str:
    """Which channel of which signal group, counted from 1."""
    first = 0
    for g, channels in enumerate(groups):
        if channel < first + channels:
            part = f", channel {channel - first + 1} of {channels}" if channels > 1 else ""
            return f"signal group {g + 1}{part}"
        first += channels
    return f"channel {channel + 1}"


def _log10(errors: Array) -> Array:
    """Logarithms of what has one."""
    usable = errors[np.isfinite(errors) & (errors > 0)]
    return np.log10(usable.astype(np.float64))


def _short(value: float, _: object = None) -> str:
    """A tick label without an offset: 0.002, 3e-06."""
    text = f"{value:.3g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def _power(value: float, _: object = None) -> str:
    """10 to a whole power, in letters that need no TeX."""
    return "10" + f"{value:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _plain(text: str) -> str:
    """Text that matplotlib takes literally: no TeX, and no leading underscore (hidden label)."""
    return text.replace("$", r"\$").lstrip("_")


def _svg(draw: Callable[[Figure], None], width: float, height: float, name: str, label: str) -> str:
    """Run `draw` on a fresh figure and return SVG that can stand in a page with others.

    matplotlib's settings are put back afterwards; the user's own style does not leak in.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                # Letters stay letters: selectable, searchable, in the page's font.
                "svg.fonttype": "none",
                "svg.hashsalt": name,
                "font.family": "sans-serif",
                "font.sans-serif": ["DejaVu Sans"],
                "font.size": 9,
                "axes.titlesize": 9.5,
                "axes.titleweight": "bold",
                "axes.labelsize": 9,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.edgecolor": _INK,
                "axes.labelcolor": _INK,
                "text.color": _INK,
                "xtick.color": _INK,
                "ytick.color": _INK,
                "axes.linewidth": 0.7,
                "xtick.major.width": 0.7,
                "ytick.major.width": 0.7,
                "figure.constrained_layout.use": True,
            }
        )
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _embed(text.getvalue(), name, label)


def _embed(svg: str, name: str, label: str) -> str:
    """Cut a stand-alone SVG file down to an element of a page."""
    svg = svg[svg.index("<svg") :]
    # The metadata names outside addresses; the style sheet would apply to the whole page.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    # Ids are global in a page, and every matplotlib figure has an "axes_1".
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    # A hundredth of a point is enough, and halves the page.
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)
    for drawn, css in _CSS.items():
        svg = svg.replace(drawn, css)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font: (?:bold|700) ([\d.]+px) [^;\"]*", r"font-weight: 600; font-size: \1", svg)
    view = re.search(r'viewBox="[^"]+"', svg)
    assert view is not None
    start = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{view[0]} role="img" aria-label="{html.escape(label)}">'
    )
    return start + svg[svg.index(">") + 1 :].rstrip()
