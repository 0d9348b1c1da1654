"""A module of your own that contains the ops, exported with the translation table.

Averages two folds over both strands: logits and log counts, as cherimoya's `evaluate` does.

python examples/own_module.py [OUT.onnx]
"""

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

import cheri_export

HERE = Path(__file__).parent


class FoldsAndStrands(torch.nn.Module):
    """Mean over folds and over both strands of a model with one unstranded signal."""

    def __init__(self, folds: list[torch.nn.Module]) -> None:
        super().__init__()
        self.folds = torch.nn.ModuleList(folds)

    def forward(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence (N, 4, L) to profile logits (N, O, L_out) and log counts (N, G)."""
        profiles, counts = [], []
        for fold in self.folds:
            for strand in (sequence, sequence.flip(-1, -2)):
                profile, count = fold(strand)
                profiles.append(profile if strand is sequence else profile.flip(-1))
                counts.append(count)
        return torch.stack(profiles).mean(0), torch.stack(counts).mean(0)


def main(out: str) -> None:
    folds = [cheri_export.load(HERE / "example_9x128.torch") for _ in range(2)]
    folds[1].linear.bias += 0.1  # stands for a second fold; its other weights equal the first's
    module = FoldsAndStrands(folds).eval()

    # torch's own exporter with our table, then finish_onnx, which attaches the function bodies.
    # (cheri_export.export_onnx(module, length=2114) does both.)
    n, length = torch.export.Dim("N"), torch.export.Dim("L", min=1115)
    program = torch.onnx.export(
        module,
        (torch.zeros(2, 4, 2114),),
        dynamo=True,
        opset_version=20,
        input_names=["sequence"],
        output_names=["profile_logits", "log_counts"],
        dynamic_shapes=({0: n, 2: length},),
        custom_translation_table=cheri_export.translation_table(),
        verbose=False,
    )
    model = cheri_export.finish_onnx(program)
    onnx.save(model, out)

    generator = np.random.default_rng(0)
    sequence = np.eye(4, dtype=np.float32)[generator.integers(0, 4, (3, 1500))].transpose(0, 2, 1)
    profile, counts = onnxruntime.InferenceSession(out).run(None, {"sequence": sequence})
    with torch.no_grad():
        wanted, wanted_counts = module(torch.from_numpy(sequence))
    print("profile difference", float(np.abs(profile - wanted.numpy()).max()))
    print("log count difference", float(np.abs(counts - wanted_counts.numpy()).max()))
    names = [i.name for i in model.graph.initializer]
    print("weights:", sum(name.startswith("folds.") for name in names), "e.g.", names[0])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "folds_and_strands.onnx")
