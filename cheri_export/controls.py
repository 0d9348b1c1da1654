"""Control tracks as a model sees them: where they come from, and float32 arrays (n, T, L)."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cheri_export.errors import EnvironmentProblem, InputError
from cheri_export.spec import CONTROL

FORMS = "zero, FILE.npz, or bigWig files as a.bw,b.bw (separate) or plus.bw+minus.bw (stranded)"

_BIGWIG_SUFFIXES = (".bw", ".bigwig")
# Greedy, so that contigs with colons of their own (HLA-A*01:01) keep them.
_WINDOW = re.compile(
    r"(?:.*::)?(?P<chrom>.+):(?P<start>\d+)-(?P<end>\d+)(?:\((?P<strand>[+.-])\))?"
)

_BIGWIG_MAGIC = b"\x26\xfc\x8f\x88"

_CONTROL_STREAM = 2
# Cumulative probabilities of 0, 1, 2, ... counts at rate 0.5. Literals, because exp may differ in
# its last bit between platforms.
_POISSON_HALF = (
    0.6065306597126334,
    0.9097959895689501,
    0.9856123220330293,
    0.9982483774437092,
    0.9998278843700441,
    0.9999858350626776,
    0.9999989976203971,
    0.9999999378030915,
)


@dataclasses.dataclass(frozen=True)
class ControlSpec:
    """Where control tracks come from.

    Attributes
    ----------
    kind: 'zero', 'npz' or 'bigwig'

    groups: tuple of tuple of str, or None
        bigWig files per signal group, in track order; None for the other kinds, which say nothing
        about grouping.

    text: str
        As the user wrote it; for 'npz' the path.
    """

    kind: Literal["zero", "npz", "bigwig"]
    groups: tuple[tuple[str, ...], ...] | None
    text: str


def parse_control_spec(text: str) -> ControlSpec:
    """Read the value of ``--controls``, without touching any file.

    Parameters
    ----------
    text: str
        ``zero``; ``FILE.npz``; or bigWig files, with a comma between groups and ``+`` between the
        two strands of a stranded group. Paths cannot hold either character.

    Returns
    -------
    spec: ControlSpec

    Raises
    ------
    InputError
        The text has none of these forms.
    """
    if text == "zero":
        return ControlSpec("zero", None, text)
    groups = tuple(tuple(group.split("+")) for group in text.split(","))
    files = [file for group in groups for file in group]
    if "" in files:
        raise InputError(f"controls {text!r}: a file name is missing; give {FORMS}")
    if text.lower().endswith(".npz") and not any(
        file.lower().endswith(_BIGWIG_SUFFIXES) for file in files
    ):
        return ControlSpec("npz", None, text)
    for file in files:
        if not file.lower().endswith(_BIGWIG_SUFFIXES):
            raise InputError(f"controls {text!r}: cannot tell what {file!r} is; give {FORMS}")
    for group in groups:
        if len(group) > 2:
            raise InputError(
                f"controls {text!r}: {'+'.join(group)} joins {len(group)} files, but a stranded "
                "group has two, plus and minus; put commas between separate groups"
            )
    return ControlSpec("bigwig", groups, text)


def load_controls(
    spec: ControlSpec, *, n_tracks: int, names: Sequence[str] | None, length: int, n: int
) -> npt.NDArray[np.float32]:
    """Read the control counts of n examples.

    Parameters
    ----------
    spec: ControlSpec

    n_tracks: int
        Control tracks T of the model.

    names: sequence of str, len=n, or None
        Record names. For bigWig files each gives the window, ``chrom:start-end``, 0-based and
        half-open as ``bedtools getfasta`` writes it; ``name::`` before and ``(+)`` after are
        allowed. For ``(-)`` positions are reversed, and so are the tracks inside each group.

    length, n: int
        Bases L of each example, and examples.

    Returns
    -------
    X_ctl: numpy.ndarray, shape=(n, T, L), dtype=float32
        Counts, finite and not negative. Bases that a bigWig file does not cover are 0.

    Raises
    ------
    InputError
        The model takes no controls; a file is missing or damaged; numbers of tracks, examples or
        positions differ; a value is negative or not finite; a name gives no window, or one
        outside its contig or of another length.

    EnvironmentProblem
        pyBigWig is needed and not installed.
    """
    if n_tracks == 0:
        raise InputError(
            f"controls {spec.text!r} given, but this model takes no control tracks; "
            "leave the option out"
        )
    shape = (n, n_tracks, length)
    if spec.kind == "zero":
        return np.zeros(shape, dtype=np.float32)
    if spec.kind == "npz":
        return _load_npz(_existing(spec.text, spec), shape, names)
    return _load_bigwigs(spec, shape, names)


def random_controls(seed: int, n: int, tracks: int, length: int) -> npt.NDArray[np.float32]:
    """Draw counts from a Poisson distribution of rate 0.5 (cut at 8), independent of the bases.

    Parameters
    ----------
    seed: int
        Not negative. The same arguments give the same array on every platform.

    n, tracks, length: int
        Examples, tracks T and bases L.

    Returns
    -------
    X_ctl: numpy.ndarray, shape=(n, T, L), dtype=float32

    Raises
    ------
    InputError
        A number is out of range.
    """
    if seed < 0 or n < 1 or tracks < 1 or length < 1:
        raise InputError(
            "random controls need seed >= 0 and n, tracks, length >= 1; "
            f"got {seed}, {n}, {tracks}, {length}"
        )
    # As in random_sequences, but with a stream of its own.
    raw = np.random.PCG64([seed, _CONTROL_STREAM]).random_raw(n * tracks * length)
    uniform = (raw >> np.uint64(11)) * 2.0**-53
    counts = np.searchsorted(np.array(_POISSON_HALF), uniform, side="right")
    return counts.astype(np.float32).reshape(n, tracks, length)


def _existing(file: str, spec: ControlSpec) -> Path:
    """The path of a file of `spec`, or an error that says what may be wrong."""
    path = Path(file)
    if os.path.isfile(path):  # pathlib's question raises where a folder may not be searched
        return path
    found = "is a directory" if os.path.isdir(path) else "no such file"
    hint = " (',' and '+' separate files)" if file != spec.text else ""
    raise InputError(f"controls: {file}: {found}; give {FORMS}{hint}")


def _load_npz(
    path: Path, shape: tuple[int, int, int], names: Sequence[str] | None
) -> npt.NDArray[np.float32]:
    """The one array of an .npz file, or the one named 'control', after checks."""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path}: is a single array; write it with numpy.savez(control=...)")
        with archive:
            keys = archive.files
            if CONTROL not in keys and len(keys) != 1:
                raise InputError(
                    f"{path}: holds {len(keys)} arrays ({', '.join(keys[:5])}); "
                    f"one array, or one named '{CONTROL}', is needed"
                )
            array = archive[CONTROL if CONTROL in keys else keys[0]]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise InputError(
            f"{path}: cannot be read ({e}); a NumPy .npz file without pickled objects is needed"
        ) from e
    if array.dtype.kind not in "buif":
        raise InputError(f"{path}: holds {array.dtype} values; real numbers are needed")
    if array.shape != shape:
        raise InputError(
            f"{path}: the array has shape {array.shape}; {shape} is needed: examples, control "
            "tracks, bases"
        )
    with np.errstate(over="ignore"):
        counts = np.ascontiguousarray(array, dtype=np.float32)
    wrong = ~(np.isfinite(counts) & (counts >= 0))
    if wrong.any():
        example, track, position = (int(i) for i in np.unravel_index(wrong.argmax(), shape))
        name = f" ({names[example]})" if names and example < len(names) else ""
        raise InputError(
            f"{path}: example {example + 1}{name}, track {track + 1}, position {position + 1} is "
            f"{array[example, track, position]}; controls must be finite and not negative"
        )
    return counts


def _load_bigwigs(
    spec: ControlSpec, shape: tuple[int, int, int], names: Sequence[str] | None
) -> npt.NDArray[np.float32]:
    """Counts of every window from every file, tracks in the order in which files are named."""
    n, n_tracks, length = shape
    groups = spec.groups or ()
    files = [file for group in groups for file in group]
    if len(files) != n_tracks:
        raise InputError(
            f"controls {spec.text!r} name {len(files)} bigWig file(s), but this model takes "
            f"{n_tracks} control track(s); give one file per track"
        )
    if names is None:
        raise InputError(
            f"controls {spec.text!r} need sequences with genome positions; "
            "give a FASTA file whose records are named chrom:start-end"
        )
    if len(names) != n:
        raise InputError(f"{len(names)} record names for {n} examples; one name each is needed")
    windows = [_window(name, length) for name in names]
    counts = np.zeros(shape, dtype=np.float32)
    for track, file in enumerate(files):
        with _open_bigwig(_existing(file, spec)) as bigwig:
            sizes: dict[str, int] = bigwig.chroms()
            for example, (chrom, start, end, _) in enumerate(windows):
                _check_on_contig(file, sizes, chrom, start, end)
                values = _values(bigwig, file, chrom, start, end)
                wrong = ~(np.isfinite(values) & (values >= 0))
                if wrong.any():
                    at = int(wrong.argmax())
                    raise InputError(
                        f"{file}: {chrom} position {start + at} (0-based) is {values[at]}; "
                        "controls must be finite and not negative, on the minus strand too"
                    )
                counts[example, track] = values
    # The reverse strand's window: both axes of every group turn round, as upstream augments.
    order: list[int] = []
    for group in groups:
        first = len(order)
        order += reversed(range(first, first + len(group)))
    reverse = [i for i, window in enumerate(windows) if window[3] == "-"]
    counts[reverse] = counts[reverse][:, order, ::-1]
    return counts


def _open_bigwig(path: Path) -> Any:
    """An open bigWig file."""
    try:
        import pyBigWig
    except ImportError as e:
        raise EnvironmentProblem(
            "bigWig controls need pyBigWig, which is not installed; run: pip install pyBigWig"
        ) from e
    try:
        _check_bigwig(path)
        # An absolute path, or libBigWig would take a name such as "http:x" for an address.
        return pyBigWig.open(str(path.absolute()))
    except (RuntimeError, OSError) as e:
        raise InputError(f"{path}: cannot be read as bigWig ({e}); check the file") from e


def _check_bigwig(path: Path) -> None:
    """Raise unless the file is bigWig, with every section that its header points to.

    libBigWig crashes on truncated files, and writes to stderr on other formats.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if header[:4] != _BIGWIG_MAGIC:
            raise InputError(f"{path}: is not a bigWig file; give {FORMS}")
        n_zooms = int.from_bytes(header[6:8], "little")
        zooms = file.read(24 * n_zooms)
        size = file.seek(0, 2)
    complete = len(header) == 64 and len(zooms) == 24 * n_zooms
    if complete:
        sections = list(struct.unpack_from("<3Q", header, 8))
        for i in range(n_zooms):
            sections += struct.unpack_from("<2Q", zooms, 24 * i + 8)
        complete = max(sections) < size
    if not complete:
        raise InputError(f"{path}: is truncated; copy the bigWig file again")


def _values(bigwig: Any, file: str, chrom: str, start: int, end: int) -> npt.NDArray[np.float32]:
    """Values of one window, 0 where the file has none."""
    try:
        found = bigwig.values(chrom, start, end, numpy=True)
    except RuntimeError as e:
        raise InputError(f"{file}: cannot read {chrom}:{start}-{end} ({e}); check the file") from e
    values = np.asarray(found, dtype=np.float32)
    values[np.isnan(values)] = 0.0
    return values


def _window(name: str, length: int) -> tuple[str, int, int, str]:
    """Chromosome, start, end and strand that a record name gives."""
    match = _WINDOW.fullmatch(name)
    if match is None:
        raise InputError(
            f"record {name!r}: bigWig controls need names chrom:start-end, 0-based and half-open, "
            "as 'bedtools getfasta' writes them"
        )
    start, end = int(match["start"]), int(match["end"])
    if end - start != length:
        hint = ""
        if end - start + 1 == length:
            hint = "; 1-based inclusive, as samtools faidx writes? Subtract 1 from every start"
        raise InputError(
            f"record {name!r}: end - start is {end - start}, but the sequence has {length} bases"
            f"{hint or '; names must be 0-based and half-open'}"
        )
    return match["chrom"], start, end, match["strand"] or "+"


def _check_on_contig(file: str, sizes: dict[str, int], chrom: str, start: int, end: int) -> None:
    """Raise unless the window lies on a contig of the file."""
    if chrom not in sizes:
        other = chrom.removeprefix("chr") if chrom.startswith("chr") else f"chr{chrom}"
        if other in sizes:
            hint = f"it has {other!r}: only the prefix 'chr' differs, so rename one of them"
        else:
            hint = f"it has {', '.join(list(sizes)[:5])}{', ...' if len(sizes) > 5 else ''}"
        raise InputError(f"{file}: has no chromosome {chrom!r}; {hint}")
    if end > sizes[chrom]:
        raise InputError(
            f"{file}: window {chrom}:{start}-{end} leaves its contig of {sizes[chrom]} bases; "
            "remove the record or use the same assembly"
        )
