"""Run an exported file beside the references: which inputs, which runners, what they gave."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cheri_export import controls as control_tracks
from cheri_export import reference, sequences
from cheri_export.accuracy import Array, Case, Outputs
from cheri_export.checkpoint import Checkpoint
from cheri_export.errors import EnvironmentProblem, InputError
from cheri_export.modules import Cherimoya
from cheri_export.spec import CONTROL, LOG_COUNTS, PROFILE_LOGITS, SEQUENCE, ModelSpec
from cheri_export.strict import strict_fp32

ORT_CPU = "onnxruntime-cpu"
TORCH = "torch-fp32"

_OTHER_LENGTH = 301
"""Distance of the second checked length from the first; odd, so that no tile size divides both."""

_MOST_BASES = 50_000_000
"""Bases in one random input: beyond, its float64 reference would take hours and all memory."""

_TORCH_CHUNK = 8
"""Examples per torch call: bounds the memory of long checks."""


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """What to check on.

    Attributes
    ----------
    length: int
        L of the first two random cases; the others use another length.

    batch: int
        N of the larger random cases; the smaller ones have one example.

    seed: int
        Seed of the random sequences and controls.

    fasta: str or None
        A FASTA file with sequences of the user's own.

    controls: str or None
        ``zero``, an .npz file, or bigWig files; None draws random controls where the model has any.
    """

    length: int
    batch: int
    seed: int = 0
    fasta: str | None = None
    controls: str | None = None


def other_length(spec: ModelSpec, length: int) -> int:
    """A second length to check: shorter where the model allows it, else longer."""
    shorter = length - _OTHER_LENGTH
    return shorter if shorter >= spec.min_length else length + _OTHER_LENGTH


def make_cases(spec: ModelSpec, options: CheckOptions) -> list[Case]:
    """The inputs: seeded random one-hot with N-stretches at two lengths and two batch sizes.

    Parameters
    ----------
    spec: ModelSpec
        The geometry.

    options: CheckOptions
        What to check on.

    Returns
    -------
    cases: list of Case
        Random ones first, then the user's sequences.

    Raises
    ------
    InputError
        Too short a length, controls missing or not wanted, or a file that cannot be used.
    """
    if options.seed < 0:
        raise InputError(f"--seed {options.seed} is not usable; give 0 or more")
    if options.batch < 1:
        raise InputError(f"--batch {options.batch} is not usable; give 1 or more")
    if options.length < spec.min_length:
        raise InputError(
            f"--length {options.length} leaves no output: the model trims {spec.trimming} bases "
            f"from each end; give at least {spec.min_length}"
        )
    if options.batch * options.length > _MOST_BASES:
        raise InputError(
            f"--batch {options.batch} x --length {options.length} is more than the {_MOST_BASES:,} "
            "bases that a check takes at once; give smaller ones"
        )
    tracks = spec.n_control_tracks
    if options.controls is not None and tracks == 0:
        raise InputError(
            f"--controls {options.controls} was given, but the model has no control tracks; "
            "leave it out"
        )
    given = (
        control_tracks.parse_control_spec(options.controls)
        if options.controls is not None
        else None
    )
    if given is not None and given.kind != "zero" and options.fasta is None:
        raise InputError(
            f"--controls {options.controls} belongs to sequences of yours; give them with "
            "--check-sequences, or use --controls zero"
        )
    zero = given is not None and given.kind == "zero"
    cases: list[Case] = []
    for length in (options.length, other_length(spec, options.length)):
        for batch in sorted({1, max(2, options.batch)}):
            seed = options.seed + len(cases)
            one_hot = sequences.random_sequences(
                seed, batch, length, n_stretch=max(1, length // 10)
            )
            control = None
            if tracks:
                control = control_tracks.random_controls(seed, batch, tracks, length)
                if zero:
                    control = np.zeros_like(control)
            cases.append(
                Case(
                    f"random {batch} x {length}",
                    "random",
                    one_hot,
                    control,
                    seed=seed,
                    controls=("zero" if zero else "random") if tracks else None,
                )
            )
    if options.fasta is not None:
        cases.append(_fasta_case(spec, options, given))
    return cases


def _fasta_case(
    spec: ModelSpec, options: CheckOptions, given: control_tracks.ControlSpec | None
) -> Case:
    assert options.fasta is not None
    names, letters = sequences.read_fasta(options.fasta)
    length = len(letters[0])
    if length < spec.min_length:
        raise InputError(
            f"{options.fasta}: the sequences have {length} bases; the model trims {spec.trimming} "
            f"from each end, so give at least {spec.min_length}"
        )
    control = None
    if spec.n_control_tracks:
        if given is None:
            raise InputError(
                f"the model has {spec.n_control_tracks} control tracks and {options.fasta} holds "
                "none; give them with --controls FILE.bw, FILE.npz or zero"
            )
        control = control_tracks.load_controls(
            given, n_tracks=spec.n_control_tracks, names=names, length=length, n=len(names)
        )
    name = Path(options.fasta).name
    try:
        one_hot = sequences.one_hot(letters, names=names)
    except InputError as error:
        raise InputError(f"{options.fasta}: {error}") from error
    return Case(
        f"{name} {len(names)} x {length}",
        "fasta",
        one_hot,
        control,
        file=name,
        controls=options.controls,
    )


def _tensors(case: Case, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
    control = None if case.control is None else torch.from_numpy(case.control[rows])
    return torch.from_numpy(case.sequence[rows]), control


def _gather(call: Callable[[slice], tuple[Any, Any]], n: int, chunk: int) -> Outputs:
    parts = [call(slice(i, min(i + chunk, n))) for i in range(0, n, chunk)]
    return {
        PROFILE_LOGITS: np.concatenate([np.asarray(p) for p, _ in parts]),
        LOG_COUNTS: np.concatenate([np.asarray(c) for _, c in parts]),
    }


def run_references(checkpoint: Checkpoint, tier: str, cases: list[Case]) -> dict[str, Any]:
    """Fill in each case's float64 reference and floor.

    Returns
    -------
    settings: dict
        Precision settings of torch during the runs.
    """
    with torch.no_grad(), strict_fp32() as settings:
        for case in cases:

            def exact(rows: slice, case: Case = case) -> tuple[Any, Any]:
                return reference.forward(checkpoint.weights, checkpoint.spec, *_tensors(case, rows))

            def floor(rows: slice, case: Case = case) -> tuple[Any, Any]:
                inputs = _tensors(case, rows)
                if tier == "fp32":
                    return reference.forward(
                        checkpoint.weights, checkpoint.spec, *inputs, dtype=torch.float32
                    )
                return reference.forward(checkpoint.weights, checkpoint.spec, *inputs, tier=tier)

            case.reference = _gather(exact, case.batch, _TORCH_CHUNK)
            case.floor = _gather(floor, case.batch, _TORCH_CHUNK)
    return settings


def run_torch(module: Cherimoya, cases: list[Case]) -> dict[str, Any]:
    """Run the strict-fp32 torch module on every case, as runner ``torch-fp32``.

    Returns
    -------
    record: dict
        Version and settings, for the report.
    """
    with torch.no_grad(), strict_fp32() as settings:
        for case in cases:

            def call(rows: slice, case: Case = case) -> tuple[Any, Any]:
                sequence, control = _tensors(case, rows)
                profile, counts = module(sequence.float(), control)
                return profile.numpy(), counts.numpy()

            case.results[TORCH] = _gather(call, case.batch, _TORCH_CHUNK)
    return {"version": torch.__version__, "settings": settings}


def require_onnxruntime() -> None:
    """Raise EnvironmentProblem where onnxruntime cannot be imported."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            "onnxruntime is not installed, so the exported file cannot be checked; "
            "pip install 'cheri-export[cpu]'"
        ) from error


def open_session(model: bytes | str | os.PathLike[str]) -> Any:
    """An ONNX Runtime session on the CPU, for a file or its bytes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Keep freed blocks from piling up between cases of different shape.
    options.enable_mem_pattern = False
    # Bytes, since ONNX Runtime takes no path that is not UTF-8.
    source = model if isinstance(model, bytes) else Path(model).read_bytes()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_onnxruntime(
    path: str | os.PathLike[str], cases: list[Case], batch: int | None = None
) -> dict[str, Any]:
    """Run the exported file in ONNX Runtime on every case, as runner ``onnxruntime-cpu``.

    Parameters
    ----------
    path: path
        The .onnx file, as written to disk.

    cases: list of Case
        Random cases run whole, since their batch sizes are what is tested.

    batch: int or None
        Examples per call on the user's sequences; None runs them whole.

    Returns
    -------
    record: dict
        Version, providers and settings, for the report.
    """
    import onnxruntime

    session = open_session(path)
    wanted = {i.name for i in session.get_inputs()}
    for case in cases:

        def call(rows: slice, case: Case = case) -> tuple[Array, Array]:
            feed = {SEQUENCE: case.sequence[rows].astype(np.float32)}
            if case.control is not None:
                feed[CONTROL] = case.control[rows]
            assert set(feed) == wanted, (set(feed), wanted)
            profile, counts = session.run([PROFILE_LOGITS, LOG_COUNTS], feed)
            return profile, counts

        chunk = case.batch if batch is None or case.kind == "random" else batch
        case.results[ORT_CPU] = _gather(call, case.batch, chunk)
    return {
        "version": onnxruntime.__version__,
        "providers": session.get_providers(),
        "settings": {"graph_optimization_level": "all", "intra_op_threads": "default"},
    }
