"""The sample checkpoints, what they must give, and what several tests compute once."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported, and for the processes that tests start: the models are small, and two
# threads that wait for each other on a shared machine take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

from cheri_export import reference
from cheri_export.checkpoint import Checkpoint, read_checkpoint
from cheri_export.modules import Cherimoya, build_module
from cheri_export.strict import strict_fp32

DATA = Path(__file__).parent / "data"
TRUNCATED = "variant_truncated_4x32"
GOOD = sorted(path.stem for path in DATA.glob("*.torch") if path.stem != TRUNCATED)
BASE = {
    "variant_fp64stored_4x32": "small_4x32_trained",
    "variant_submodule_keys_4x32": "small_4x32_trained",
}
"""Variants of one file: other storage, the same weights, hence the same outputs."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One checkpoint with an input and the float64 outputs that cherimoya gave for it."""

    name: str
    path: Path
    checkpoint: Checkpoint
    sequence: torch.Tensor
    control: torch.Tensor | None
    profile: np.ndarray
    counts: np.ndarray
    stored: dict[str, np.ndarray]

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.sequence.float(), self.control

    def module(self, precision: str = "fp32") -> Cherimoya:
        return build_module(self.checkpoint.spec, self.checkpoint.weights, precision)


@functools.cache
def load_sample(name: str) -> Sample:
    with np.load(DATA / f"{BASE.get(name, name)}.npz") as file:
        stored = {key: file[key] for key in file.files}
    path = DATA / f"{name}.torch"
    control = stored.get("X_ctl")
    return Sample(
        name,
        path,
        read_checkpoint(path),
        torch.from_numpy(stored["X"]),
        None if control is None else torch.from_numpy(control),
        stored["y_profile_f64"],
        stored["y_counts_f64"],
        stored,
    )


@functools.cache
def run_reference(name: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """`mode` is ``float64``, ``strict`` or a tier to emulate. Read-only, since it is shared."""
    found = load_sample(name)
    how: dict[str, Any] = {"tier": mode}
    if mode in ("float64", "strict"):
        how = {"dtype": torch.float64 if mode == "float64" else torch.float32}
    with torch.no_grad(), strict_fp32():
        outputs = reference.forward(
            found.checkpoint.weights, found.checkpoint.spec, found.sequence, found.control, **how
        )
    profile, counts = (t.numpy() for t in outputs)
    profile.flags.writeable = counts.flags.writeable = False
    return profile, counts


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return DATA


@pytest.fixture(scope="session")
def sample() -> Callable[[str], Sample]:
    return load_sample


@pytest.fixture(params=GOOD)
def good(request: pytest.FixtureRequest) -> Sample:
    """Each of the 15 good samples."""
    return load_sample(request.param)


@pytest.fixture(scope="session")
def reference_run() -> Callable[[str, str], tuple[np.ndarray, np.ndarray]]:
    return run_reference
