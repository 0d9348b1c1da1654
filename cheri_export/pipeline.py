"""The main command: checkpoint in, checked bundle out."""

from __future__ import annotations

import dataclasses
import datetime
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from cheri_export import accuracy, bundle, check, describe, ranges, report, tolerance
from cheri_export.accuracy import Case
from cheri_export.checkpoint import (
    Checkpoint,
    checkpoint_from_module,
    read_checkpoint,
    write_weights,
)
from cheri_export.errors import InputError
from cheri_export.modules import build_module
from cheri_export.onnx_model import export_onnx, node_counts, save_onnx
from cheri_export.progress import Progress
from cheri_export.spec import (
    BLOCK,
    DEFAULT_LENGTH,
    HEAD,
    HEAD_CONTROL,
    LOG_COUNTS,
    OPSETS,
    PRECISIONS,
    PROFILE_LOGITS,
    STEM,
)
from cheri_export.strict import neutral

DEFAULT_BATCH = 4

_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Options of the main command; the field names are the command line's."""

    precision: str = "fp32"
    opset: int = 20
    length: int | None = None
    batch: int = DEFAULT_BATCH
    seed: int = 0
    check_sequences: str | None = None
    controls: str | None = None
    source: str | None = None
    license: str | None = None
    force: bool = False
    allow_mismatch: bool = False


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """Where the bundle (or, after a failed verdict, the reports) went, and what was found."""

    passed: bool
    path: Path
    report: dict[str, Any]


def _validate(options: ExportOptions) -> None:
    if options.precision not in PRECISIONS:
        raise InputError(
            f"--precision {options.precision} is unknown; use one of {', '.join(PRECISIONS)}"
        )
    if options.opset not in OPSETS:
        raise InputError(
            f"--opset {options.opset} is not supported; use {' or '.join(map(str, OPSETS))}"
        )
    for name, text in (("--source", options.source), ("--license", options.license)):
        try:
            (text or "").encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{name} is no valid text ({error.reason}); give it in UTF-8"
            ) from None


def _default_length(checkpoint: Checkpoint) -> int:
    """2114, or the shortest length that leaves as many outputs as 2114 does with nine layers."""
    spec = checkpoint.spec
    return DEFAULT_LENGTH if spec.min_length <= DEFAULT_LENGTH else spec.min_length + 999


def export(
    model: str | os.PathLike[str] | Any,
    out: str | os.PathLike[str] | None = None,
    options: ExportOptions | None = None,
    *,
    progress: Progress | None = None,
    command: list[str] | None = None,
) -> ExportResult:
    """Turn a checkpoint into a bundle: ONNX file, weights, and a report of its accuracy.

    Parameters
    ----------
    model: path, or a cherimoya model in memory
        The checkpoint.

    out: path or None
        Folder to write; None puts it beside the model's file. Required for a model in memory.

    options: ExportOptions or None
        None takes the defaults.

    progress: Progress or None
        None is silent.

    command: list of str or None
        What to record as the command line.

    Returns
    -------
    result: ExportResult
        `passed` is False when the verdict failed: then `path` is OUT.failed with the reports only,
        or OUT itself where `allow_mismatch` was asked for.

    Raises
    ------
    CheriError
        The input, an option, the environment or the destination is not usable. Nothing is written.
    """
    # One at a time: torch's exporter, its precision settings and the umask belong to the process.
    with _LOCK, neutral():
        return _export(model, out, options, progress, command)


def _export(
    model: str | os.PathLike[str] | Any,
    out: str | os.PathLike[str] | None,
    options: ExportOptions | None,
    progress: Progress | None,
    command: list[str] | None,
) -> ExportResult:
    options = options or ExportOptions()
    progress = progress or Progress(quiet=True)
    _validate(options)
    in_memory = not isinstance(model, (str, os.PathLike))
    if in_memory and out is None:
        raise InputError("a model in memory has no name to derive a folder from; give `out`")
    target = Path(out) if out is not None else bundle.default_output(model)
    keep = None if in_memory else Path(model)
    # Before any work: an OUT that cannot be written must not cost the user half a minute.
    bundle.check_replaceable(target, force=options.force)
    with progress.step("read", "reading the checkpoint"):
        checkpoint = checkpoint_from_module(model) if in_memory else read_checkpoint(model)
        bundle.check_replaceable(target, force=options.force, keep=keep)
        length = options.length if options.length is not None else _default_length(checkpoint)
        warnings = ranges.check_weights(checkpoint, options.precision)
        check_options = check.CheckOptions(
            length, options.batch, options.seed, options.check_sequences, options.controls
        )
        cases = check.make_cases(checkpoint.spec, check_options)
        longest = max(case.length for case in cases)
        warnings += ranges.check_activations(checkpoint, options.precision, longest)
        check.require_onnxruntime()
    with bundle.staged(target, force=options.force, keep=keep) as folder:
        with progress.step(
            "export", f"exporting ONNX ({options.precision}, opset {options.opset})"
        ):
            module = build_module(checkpoint.spec, checkpoint.weights, options.precision)
            proto = export_onnx(
                module,
                opset=options.opset,
                metadata=describe.onnx_metadata(
                    checkpoint, options.precision, options.source, options.license
                ),
            )
            _assert_nodes(node_counts(proto), checkpoint)
            save_onnx(proto, folder / bundle.MODEL_FILE)
            write_weights(checkpoint, folder / bundle.WEIGHTS_FILE)
        runners: dict[str, Any] = {}
        with progress.step("reference", "computing the float64 reference"):
            settings = check.run_references(checkpoint, options.precision, cases)
        with progress.step("torch", "running torch in strict float32"):
            strict = build_module(checkpoint.spec, checkpoint.weights, "fp32")
            runners[check.TORCH] = check.run_torch(strict, cases)
        with progress.step("onnxruntime", "running the file in ONNX Runtime"):
            path = folder / bundle.MODEL_FILE
            runners[check.ORT_CPU] = check.run_onnxruntime(path, cases, options.batch)
        with progress.step("report", "writing the report"):
            rows, failures = accuracy.judge(options.precision, cases)
            passed = not failures
            document = {
                "schema_version": 1,
                "tool": {"name": "cheri-export", "version": describe.version()},
                "created": datetime.datetime.now(datetime.timezone.utc).isoformat(
                    timespec="seconds"
                ),
                "command": command or [],
                "verdict": {
                    "passed": passed,
                    "headline": _headline(options.precision, rows, passed),
                    "allow_mismatch": options.allow_mismatch,
                    "failures": failures,
                },
                "checkpoint": _checkpoint_section(checkpoint, options),
                "model": describe.model_section(checkpoint.spec),
                "export": {
                    "precision": options.precision,
                    "opset": options.opset,
                    "ir_version": proto.ir_version,
                    **_file(folder, bundle.MODEL_FILE),
                    "node_counts": node_counts(proto),
                    "initializers": len(proto.graph.initializer),
                    "torch_exporter": "torch.onnx.export(dynamo=True)",
                    "warnings": warnings,
                },
                "weights": _file(folder, bundle.WEIGHTS_FILE),
                "accuracy": {
                    "judge": "float64 reference from the checkpoint's tensors",
                    "reference_settings": settings,
                    "cases": rows,
                    "runners": runners,
                    "tolerances": [
                        {"tier": t.tier, "output": t.output, "figure": t.figure, "reason": t.reason}
                        for t in tolerance.MODEL
                        if t.tier == options.precision
                    ],
                },
                "environment": describe.environment(),
                "timings_s": {},
            }
            document["timings_s"] = {k: round(v, 3) for k, v in progress.timings.items()}
            page = report.render_html(document, _arrays(cases, checkpoint))
        document["timings_s"] = {k: round(v, 3) for k, v in progress.timings.items()}
        (folder / bundle.REPORT_HTML).write_text(page, encoding="utf-8")
        (folder / bundle.REPORT_JSON).write_text(report.to_json(document), encoding="utf-8")
        return _finish(folder, target, passed, options, document)


def _finish(
    folder: Path, target: Path, passed: bool, options: ExportOptions, document: dict[str, Any]
) -> ExportResult:
    failed = target.with_name(target.name + bundle.FAILED)
    if passed or options.allow_mismatch:
        bundle.commit(folder, target)
        if passed and bundle.is_bundle(failed):
            # The reports of an earlier failed run would contradict the good bundle beside them.
            bundle.remove(failed)
        return ExportResult(passed, target, document)
    (folder / bundle.MODEL_FILE).unlink()
    (folder / bundle.WEIGHTS_FILE).unlink()
    bundle.check_replaceable(failed, force=options.force)
    bundle.commit(folder, failed)
    return ExportResult(passed, failed, document)


def _assert_nodes(counts: dict[str, int], checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    head = HEAD_CONTROL if spec.n_control_tracks else HEAD
    wanted = {STEM: 1, BLOCK: spec.n_layers, head: 1}
    if counts != dict(sorted(wanted.items())):
        raise RuntimeError(f"the exported graph has nodes {counts}, expected {wanted}")


def _file(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return {"file": name, "sha256": bundle.sha256(path), "bytes": path.stat().st_size}


def _checkpoint_section(checkpoint: Checkpoint, options: ExportOptions) -> dict[str, Any]:
    size = None if checkpoint.path is None else os.path.getsize(checkpoint.path)
    return {
        "path": None if checkpoint.path is None else os.path.basename(checkpoint.path),
        "sha256": checkpoint.source_sha256 or checkpoint.sha256,
        "bytes": size,
        "release": checkpoint.release,
        "release_reason": checkpoint.release_reason,
        "config": checkpoint.config,
        "warnings": list(checkpoint.warnings),
        "n_parameters": checkpoint.n_parameters,
        "source": options.source,
        "license": options.license,
    }


def _headline(precision: str, rows: list[dict[str, Any]], passed: bool) -> str:
    """One sentence for a reader who wants no table: the output nearest to, or past, its limit."""
    names = {
        PROFILE_LOGITS: "profile error is {:.1e} logits",
        LOG_COUNTS: "log count error is {:.1e}",
    }
    worst: tuple[float, str, float] | None = None
    for row in rows:
        for run in row["runs"]:
            for output, found in run["outputs"].items():
                if found["nonfinite"]:
                    return "The exported model gives NaN or infinite values: do not use it."
                if passed and (run["runner"] != check.ORT_CPU or output != PROFILE_LOGITS):
                    continue
                if worst is None or found["ratio"] > worst[0]:
                    worst = (found["ratio"], output, found["max_abs"])
    assert worst is not None
    ratio, output, error = worst
    verdict = "matches" if passed else "does NOT match"
    return (
        f"The exported model {verdict} the exact calculation: the largest "
        f"{names[output].format(error)}, {ratio:.2g} of what the {precision} tier allows."
    )


def _arrays(cases: list[Case], checkpoint: Checkpoint) -> report.ReportArrays:
    case, example = accuracy.worst(cases, check.ORT_CPU)
    errors: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for runner in cases[0].results:
        errors[runner] = {
            output: np.concatenate(
                [np.abs(c.results[runner][output] - c.reference[output]).ravel() for c in cases]
            )
            for output in accuracy.OUTPUTS
        }
    groups = checkpoint.spec.signal_groups
    result = case.results[check.ORT_CPU]
    return report.ReportArrays(
        reference_profile=case.reference[PROFILE_LOGITS][example],
        predicted_profile=result[PROFILE_LOGITS][example].astype(np.float64),
        reference_log_counts=case.reference[LOG_COUNTS][example],
        predicted_log_counts=result[LOG_COUNTS][example].astype(np.float64),
        case_id=case.id,
        example_index=example,
        signal_groups=groups if groups is not None else (1,) * checkpoint.spec.n_outputs,
        errors=errors,
    )
