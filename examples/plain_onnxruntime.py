"""Use a bundle with nothing but ONNX Runtime and NumPy: no torch, no cheri-export.

python examples/plain_onnxruntime.py BUNDLE [SEQUENCE]
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def one_hot(sequence: str) -> np.ndarray:
    """(1, 4, L) float32, rows A, C, G, T; any other letter is an all-zero column."""
    letters = np.frombuffer(sequence.upper().encode(), dtype=np.uint8)
    return (letters[None, :] == np.frombuffer(b"ACGT", dtype=np.uint8)[:, None])[None].astype("f4")


def main(bundle: str, sequence: str | None) -> None:
    folder = Path(bundle)
    model = json.loads((folder / "report.json").read_text())["model"]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    if sequence is None:
        sequence = "".join(np.random.default_rng(0).choice(list("ACGT"), 2114))
    feed = {"sequence": one_hot(sequence)}
    if model["n_control_tracks"]:
        shape = (1, model["n_control_tracks"], len(sequence))
        feed["control"] = np.zeros(shape, dtype=np.float32)
    profile_logits, log_counts = session.run(["profile_logits", "log_counts"], feed)

    # Expected reads per base: softmax over each group's channels and positions, times its count.
    first = 0
    for group, width in enumerate(model["signal_groups"]):
        logits = profile_logits[0, first : first + width]
        p = np.exp(logits - logits.max())
        expected = p / p.sum() * np.expm1(log_counts[0, group])
        peak = np.unravel_index(expected.argmax(), expected.shape)
        print(f"group {group}: {expected.sum():.1f} reads, most at output position {peak[1]}")
        first += width


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
