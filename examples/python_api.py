"""The Python API: read a checkpoint, predict with torch, export a checked bundle, load it back.

python examples/python_api.py [CHECKPOINT [OUT]]
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import cheri_export

HERE = Path(__file__).parent


def main(checkpoint_path: str, out: str) -> None:
    checkpoint = cheri_export.read_checkpoint(checkpoint_path)
    spec = checkpoint.spec
    print(f"{checkpoint.release}: {spec.n_filters} filters, {spec.n_layers} layers")

    # Predict with torch. Rows are A, C, G, T; an all-zero column is an unknown base.
    model = cheri_export.load(checkpoint_path)
    generator = np.random.default_rng(0)
    sequence = np.eye(4, dtype=np.float32)[generator.integers(0, 4, (2, 2114))].transpose(0, 2, 1)
    profile_logits, log_counts = model(torch.from_numpy(sequence))
    print("profile logits", tuple(profile_logits.shape), "log counts", log_counts.ravel().tolist())

    # Export; the result says whether the file agrees with the float64 reference.
    options = cheri_export.ExportOptions(precision="fp32", force=True)
    result = cheri_export.export(checkpoint_path, out, options)
    print("passed:", result.passed, "in", result.path)

    # Load the bundle in plain ONNX Runtime.
    session = onnxruntime.InferenceSession(result.path / "model.onnx")
    again, _ = session.run(None, {"sequence": sequence})
    print("largest difference from torch:", float(np.abs(again - profile_logits.numpy()).max()))
    report = json.loads((result.path / "report.json").read_text())
    print(report["verdict"]["headline"])


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else str(HERE / "example_9x128.torch"),
        sys.argv[2] if len(sys.argv) > 2 else "example_9x128.cheri",
    )
