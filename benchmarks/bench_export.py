"""Measure the main command on this machine: errors, time, memory, ONNX Runtime speed, file size.

python benchmarks/bench_export.py [errors] [command] [speed] [size]      (default: all four)

Rows go to benchmarks/results/bench_export.jsonl. Speeds are ratios: the runners take turns within
one process, on the same fresh random sequences, and the median of the turns is taken.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import rows
import torch
from plain_model import export_plain

from cheri_export import accuracy, check, loading, onnx_model
from cheri_export.checkpoint import read_checkpoint
from cheri_export.modules import build_module
from cheri_export.spec import LOG_COUNTS, PRECISIONS, PROFILE_LOGITS

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "example_9x128.torch"
SAMPLES = ROOT / "tests" / "data"


def errors() -> list[dict]:
    """Every sample in every tier: ONNX Runtime against float64, on inputs as the command makes."""
    found = []
    print(f"{'sample':32}{'tier':7}{'profile':>10}{'limit':>10}{'counts':>11}{'limit':>10}")
    for path in sorted(SAMPLES.glob("*.torch")):
        if "truncated" in path.name:
            continue
        checkpoint = read_checkpoint(path)
        for tier in PRECISIONS:
            options = check.CheckOptions(max(600, checkpoint.spec.min_length + 999), 4)
            cases = check.make_cases(checkpoint.spec, options)
            check.run_references(checkpoint, tier, cases)
            model = onnx_model.export_onnx(
                build_module(checkpoint.spec, checkpoint.weights, tier), opset=20
            )
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "model.onnx"
                onnx_model.save_onnx(model, file)
                check.run_onnxruntime(file, cases)
            judged, failures = accuracy.judge(tier, cases)
            runs = [case["runs"][0]["outputs"] for case in judged]
            row = {"bench": "errors", "sample": path.stem, "tier": tier, "passed": not failures}
            for output in (PROFILE_LOGITS, LOG_COUNTS):
                row[output] = max(run[output]["max_abs"] for run in runs)
                row[output + "_limit"] = runs[0][output]["limit"]
                row[output + "_rule"] = runs[0][output]["rule"]
            found.append(row)
            print(
                f"{path.stem:32}{tier:7}{row[PROFILE_LOGITS]:10.1e}"
                f"{row[PROFILE_LOGITS + '_limit']:10.1e}{row[LOG_COUNTS]:11.1e}"
                f"{row[LOG_COUNTS + '_limit']:10.1e}{'' if row['passed'] else '  FAILED'}",
                flush=True,
            )
    return found


def command() -> list[dict]:
    """Wall time and peak memory of the main command on the 9 x 128 example, three fresh runs."""
    found = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "cheri_export", str(EXAMPLE), "-o", f"{folder}/out", "-q"]
            )
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - started
            timings = json.loads(Path(folder, "out", "report.json").read_text())["timings_s"]
        peak = usage.ru_maxrss / 2**20
        found.append(
            {
                "bench": "command",
                "wall_s": round(seconds, 2),
                "peak_gib": round(peak, 3),
                "cores": len(os.sched_getaffinity(0)),
                "exit": os.waitstatus_to_exitcode(status),
                "timings_s": timings,
            }
        )
        print(f"main command: {seconds:.1f} s, peak {peak:.2f} GiB, {timings}", flush=True)
    return found


def speed() -> list[dict]:
    """ONNX Runtime on our file and on the plain export, and eager torch: 1 and 32 sequences."""
    model = loading.load(EXAMPLE)
    sessions = {
        "ours": check.open_session(onnx_model.export_onnx(model).SerializeToString()),
        "plain export": check.open_session(export_plain(model, 2114)),
    }
    generator = np.random.default_rng()
    found = []
    for batch, turns in ((1, 31), (32, 9)):
        times: dict[str, list[float]] = {"ours": [], "plain export": [], "eager torch": []}
        for _ in range(turns):
            bases = generator.integers(0, 4, (batch, 2114))
            x = np.eye(4, dtype=np.float32)[bases].transpose(0, 2, 1).copy()
            for name, session in sessions.items():
                started = time.perf_counter()
                session.run(None, {"sequence": x})
                times[name].append(time.perf_counter() - started)
            started = time.perf_counter()
            with torch.no_grad():
                model(torch.from_numpy(x))
            times["eager torch"].append(time.perf_counter() - started)
        medians = {name: float(np.median(t[2:])) for name, t in times.items()}
        for name, t in times.items():
            found.append(
                {
                    "bench": "speed",
                    "runner": name,
                    "batch": batch,
                    "length": 2114,
                    "ms": round(1e3 * medians[name], 2),
                    "spread": [round(1e3 * float(q), 2) for q in np.quantile(t[2:], [0.2, 0.8])],
                    "ratio_to_plain_export": round(medians[name] / medians["plain export"], 3),
                }
            )
            print(
                f"batch {batch:3}  {name:13}{1e3 * medians[name]:9.1f} ms  "
                f"{found[-1]['ratio_to_plain_export']:.2f} of the plain export",
                flush=True,
            )
    return found


def size() -> list[dict]:
    """Bytes of the exported file against the checkpoint's, in every tier."""
    found = []
    for tier in PRECISIONS:
        exported = onnx_model.export_onnx(loading.load(EXAMPLE, precision=tier)).ByteSize()
        stored = EXAMPLE.stat().st_size
        found.append({"bench": "size", "tier": tier, "onnx": exported, "checkpoint": stored})
        print(f"size {tier:6} {exported:,} bytes, {exported / stored:.3f} of the checkpoint's")
    return found


if __name__ == "__main__":
    parts = {"errors": errors, "command": command, "speed": speed, "size": size}
    chosen = sys.argv[1:] or list(parts)
    stamp = rows.provenance("torch", "onnx", "onnxruntime", "onnxscript", "numpy")
    for part in chosen:
        result = [{**row, **stamp} for row in parts[part]()]
        print("->", rows.append("bench_export", result))
