"""What a model takes and gives, in words and numbers: for ONNX metadata, report and `info`."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import Any

from cheri_export.checkpoint import Checkpoint
from cheri_export.spec import CONTROL, LOG_COUNTS, PROFILE_LOGITS, SEQUENCE, ModelSpec

_PACKAGES = (
    "cheri-export",
    "torch",
    "triton",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "numpy",
    "safetensors",
    "tensorrt",
    "polygraphy",
)


def version() -> str:
    """The version of this package."""
    from cheri_export import __version__

    return __version__


def inputs(spec: ModelSpec) -> list[dict[str, Any]]:
    """The graph's inputs: name, shape, dtype and meaning."""
    rows: list[dict[str, Any]] = [
        {
            "name": SEQUENCE,
            "shape": ["N", 4, "L"],
            "dtype": "float32",
            "meaning": f"one-hot DNA, rows A, C, G, T; an all-zero column is an unknown base; "
            f"L >= {spec.min_length}",
        }
    ]
    if spec.n_control_tracks:
        rows.append(
            {
                "name": CONTROL,
                "shape": ["N", spec.n_control_tracks, "L"],
                "dtype": "float32",
                "meaning": "control reads per base over the whole input window; not negative",
            }
        )
    return rows


def outputs(spec: ModelSpec) -> list[dict[str, Any]]:
    """The graph's outputs: name, shape, dtype and meaning."""
    kept = f"L - {2 * spec.trimming}" if spec.trimming else "L"
    return [
        {
            "name": PROFILE_LOGITS,
            "shape": ["N", spec.n_outputs, kept],
            "dtype": "float32",
            "meaning": "profile logits; a softmax over each signal group's channels and positions "
            "together gives the expected distribution of reads",
        },
        {
            "name": LOG_COUNTS,
            "shape": ["N", spec.n_count_outputs],
            "dtype": "float32",
            "meaning": "natural log of (1 + reads in the output window), one per signal group",
        },
    ]


def model_section(spec: ModelSpec) -> dict[str, Any]:
    """The ``model`` section of the report."""
    return {
        **spec.to_dict(),
        "receptive_field": spec.receptive_field,
        "min_length": spec.min_length,
        "inputs": inputs(spec),
        "outputs": outputs(spec),
    }


def onnx_metadata(
    checkpoint: Checkpoint, precision: str, source: str | None, license_: str | None
) -> dict[str, str]:
    """The model's metadata_props: where it came from and what its tensors mean."""
    pairs = {
        "cheri_export_version": version(),
        "checkpoint_sha256": checkpoint.source_sha256 or checkpoint.sha256 or "",
        "checkpoint_release": checkpoint.release,
        "config": json.dumps(checkpoint.config, sort_keys=True),
        "model": json.dumps(checkpoint.spec.to_dict(), sort_keys=True),
        "precision": precision,
        "inputs": json.dumps(inputs(checkpoint.spec)),
        "outputs": json.dumps(outputs(checkpoint.spec)),
        "warnings": json.dumps(list(checkpoint.warnings)),
    }
    if source is not None:
        pairs["source"] = source
    if license_ is not None:
        pairs["license"] = license_
    return pairs


def environment() -> dict[str, Any]:
    """Python, platform, processor and the versions of the packages that matter."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(affinity(0)) if affinity is not None else (os.cpu_count() or 1),
        "packages": packages,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def info(checkpoint: Checkpoint) -> dict[str, Any]:
    """What ``cheri-export info`` says of a checkpoint, JSON-ready."""
    return {
        "file": None if checkpoint.path is None else os.path.basename(checkpoint.path),
        "sha256": checkpoint.sha256,
        "release": checkpoint.release,
        "release_reason": checkpoint.release_reason,
        "n_parameters": checkpoint.n_parameters,
        "model": model_section(checkpoint.spec),
        "config": checkpoint.config,
        "warnings": list(checkpoint.warnings),
    }
