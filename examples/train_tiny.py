"""Train a small model on synthetic motif data, then export and check it.

Reads pile up around every GATAAG, and the total follows the number of motifs: a minute on a GPU,
a smaller model for about as long on a CPU.

python examples/train_tiny.py [OUT] [--steps N]
"""

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import cheri_export

MOTIF = np.array([2, 0, 3, 0, 0, 2])  # GATAAG
BASE_READS, READS_PER_MOTIF = 20.0, 60.0


def make_batch(generator, n, length, trimming, device):
    """Sequences (n, 4, length), and reads (n, 1, length - 2 * trimming)."""
    bases = generator.integers(0, 4, (n, length))
    kept = length - 2 * trimming
    rate = np.full((n, kept), BASE_READS / kept)
    bump = np.exp(-0.5 * (np.arange(-30, 31) / 8.0) ** 2)
    bump *= READS_PER_MOTIF / bump.sum()
    for row in range(n):
        for _ in range(generator.integers(0, 4)):
            at = int(generator.integers(40, kept - 40))
            bases[row, trimming + at : trimming + at + len(MOTIF)] = MOTIF
            rate[row, at + 3 - 30 : at + 3 + 31] += bump
    sequence = torch.nn.functional.one_hot(torch.from_numpy(bases), 4).transpose(1, 2)
    reads = torch.from_numpy(generator.poisson(rate)).unsqueeze(1)
    return sequence.float().contiguous().to(device), reads.float().to(device)


def loss_of(model, sequence, reads):
    """Multinomial loss of the profile per read, and squared error of the log counts."""
    logits, log_counts = model(sequence)
    log_p = F.log_softmax(logits.float().flatten(1), dim=1)
    profile = -(reads.flatten(1) * log_p).sum(1).mean() / reads.sum((1, 2)).mean()
    counts = F.mse_loss(log_counts[:, 0].float(), torch.log1p(reads.sum((1, 2))))
    return profile + counts, counts


def main(out, steps):
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    filters, layers, batch = (64, 6, 64) if on_gpu else (16, 4, 16)
    steps = steps or (1500 if on_gpu else 250)
    model = cheri_export.Cherimoya(filters, layers, random_state=0).to(device)
    length = 2 * model.trimming + 500
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    generator = np.random.default_rng(0)
    columns = (
        TextColumn("training on {task.fields[device]}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    first = None
    with Progress(*columns) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"), device=device)
        smooth = None
        for _ in range(steps):
            sequence, reads = make_batch(generator, batch, length, model.trimming, device)
            loss, _ = loss_of(model, sequence, reads)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
            first = smooth if first is None else first
            progress.update(task, advance=1, loss=smooth)
    model.eval()
    with torch.no_grad():
        sequence, reads = make_batch(generator, 256, length, model.trimming, device)
        _, counts = loss_of(model, sequence, reads)
    spread = torch.log1p(reads.sum((1, 2))).var()
    print(f"loss {first:.3f} -> {smooth:.3f}; log counts explained: {1 - counts / spread:.0%}")

    model.cpu().save(out + ".torch")
    options = cheri_export.ExportOptions(length=length, force=True)
    result = cheri_export.export(out + ".torch", out + ".cheri", options)
    print("exported to", result.path, "-", result.report["verdict"]["headline"])
    return 0 if result.passed else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", default="tiny", help="name of the files to write")
    parser.add_argument("--steps", type=int, help="training steps")
    arguments = parser.parse_args()
    raise SystemExit(main(os.fspath(arguments.out), arguments.steps))
