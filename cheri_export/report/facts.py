"""What the page says in words: what was checked, what was not, and how to load the file."""

from __future__ import annotations

from typing import Any

from cheri_export.report.record import ReportArrays
from cheri_export.spec import CONTROL, LOG_COUNTS, PROFILE_LOGITS, SEQUENCE


def scope(report: dict[str, Any], arrays: ReportArrays) -> dict[str, list[str]]:
    """Say what the verdict rests on, and what it says nothing about.

    Parameters
    ----------
    report: dict
        As `schema.json` describes it.

    arrays: ReportArrays
        For the number of values compared.

    Returns
    -------
    lists: dict of str to list of str
        ``checked`` and ``unchecked``, plain sentences.
    """
    cases = report["accuracy"]["cases"]
    runners = report["accuracy"]["runners"]
    lengths = sorted({case["length"] for case in cases})
    batches = sorted({case["batch"] for case in cases})
    random = [case for case in cases if case["kind"] == "random"]
    files = [case for case in cases if case["kind"] == "fasta"]
    n_profile, n_counts = (
        max(by_output[output].size for by_output in arrays.errors.values())
        for output in (PROFILE_LOGITS, LOG_COUNTS)
    )
    nonfinite = sum(run["nonfinite"] for case in cases for run in case["runs"])
    checked = [
        f"Every value: {n_profile:,} profile logits and {n_counts:,} log counts per runner, each "
        f"against the {report['accuracy']['judge']}.",
        f"Inputs of {_join(lengths)} bases, in batches of {_join(batches)}.",
        "No value is NaN or infinite."
        if not nonfinite
        else f"{nonfinite:,} NaN or infinite values.",
    ]
    if any(case["batch"] > 1 for case in random):
        checked.append("Random sequences, some with stretches of unknown bases (N).")
    checked += [f"{case['batch']:,} sequences of yours, from {case['file']}." for case in files]

    unchecked = [
        "Whether the model predicts the biology well. The report compares the exported file with "
        "its checkpoint, not with an experiment."
    ]
    names = " ".join(runners).lower()
    if not any(word in names for word in ("cuda", "tensorrt", "gpu")):
        unchecked.append("No GPU engine was run. The numbers hold for the runners listed here.")
    if not files:
        unchecked.append("Random sequences were used, not your data.")
    tracks = report["model"]["n_control_tracks"]
    if tracks:
        kinds = {case["controls"] for case in cases}
        if kinds <= {"zero", "random", None}:
            used = _join(sorted(kind for kind in kinds if kind))
            unchecked.append(f"Control tracks were {used}, not your data.")
    unchecked.append(
        f"Other lengths. The file accepts any length from {report['model']['min_length']:,} bases."
    )
    unchecked.append("Speed and memory.")
    return {"checked": checked, "unchecked": unchecked}


def load_snippet(report: dict[str, Any]) -> str:
    """Python that loads the exported file in ONNX Runtime and gives expected reads.

    Parameters
    ----------
    report: dict
        As `schema.json` describes it.

    Returns
    -------
    code: str
        Runs as it stands beside the file, with numpy and onnxruntime installed.
    """
    model = report["model"]
    length = report["accuracy"]["cases"][0]["length"]
    tracks, groups = model["n_control_tracks"], model["signal_groups"]
    lines = [
        "import numpy as np",
        "import onnxruntime as ort",
        "",
        f'session = ort.InferenceSession("{report["export"]["file"]}", '
        'providers=["CPUExecutionProvider"])',
        "",
        f"# your sequence, at least {model['min_length']} bases",
        f'dna = "ACGT" * {length // 4}' + (f' + "{"ACGT"[: length % 4]}"' if length % 4 else ""),
        f"{SEQUENCE} = np.zeros((1, 4, len(dna)), dtype=np.float32)",
        'for row, base in enumerate("ACGT"):',
        f"    {SEQUENCE}[0, row] = [letter == base for letter in dna.upper()]",
    ]
    feed = f'{{"{SEQUENCE}": {SEQUENCE}}}'
    if tracks:
        lines += [
            "",
            f"# control reads per base, {tracks} track{'s' if tracks > 1 else ''}; zeros here",
            f"{CONTROL} = np.zeros((1, {tracks}, len(dna)), dtype=np.float32)",
        ]
        feed = f'{{"{SEQUENCE}": {SEQUENCE}, "{CONTROL}": {CONTROL}}}'
    lines += [
        "",
        f"{PROFILE_LOGITS}, {LOG_COUNTS} = session.run(",
        f'    ["{PROFILE_LOGITS}", "{LOG_COUNTS}"], {feed}',
        ")",
    ]
    if groups is not None and len(groups) == model["n_count_outputs"]:
        lines += [
            "",
            "# Expected reads per base: one softmax over all channels and positions of a group.",
            "first = 0",
            f"for group, channels in enumerate({groups}):",
            f"    logits = {PROFILE_LOGITS}[:, first : first + channels]",
            "    p = np.exp(logits - logits.max(axis=(1, 2), keepdims=True))",
            "    p /= p.sum(axis=(1, 2), keepdims=True)",
            f"    reads = p * np.expm1({LOG_COUNTS}[:, group, None, None])",
            '    print(f"group {group + 1}: {reads.sum():.1f} reads, shape {reads.shape}")',
            "    first += channels",
        ]
    return "\n".join(lines) + "\n"


def _join(items: list[Any]) -> str:
    """Enumerate in words: 1, 2 and 3."""
    words = [f"{item:,}" if isinstance(item, int) else str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
