"""Benchmark rows: one JSON line each, with what is needed to read it years later."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def provenance(*packages: str) -> dict:
    """Commit, Python, processor and package versions."""
    here = Path(__file__).parent
    # A copy of the tree without its history says its commit in the environment.
    commit = os.environ.get("CHERI_EXPORT_COMMIT") or (
        subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    )
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {"commit": commit, "python": platform.python_version(), "cpu": cpu, "versions": versions}


def append(name: str, rows: list[dict]) -> Path:
    """Append rows to results/`name`.jsonl; nothing is overwritten."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, sort_keys=True) + "\n")
    return path
