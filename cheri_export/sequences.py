"""DNA sequences as a model sees them: FASTA files, one-hot arrays and seeded random examples."""

from __future__ import annotations

import gzip
import os
import string
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cheri_export.errors import EnvironmentProblem, InputError

LETTERS = "ACGT"
"""Rows of a one-hot array, in order."""

N_STRETCH = 50
"""Default length, in bases, of the all-zero stretches in random sequences."""

_NOT_A_LETTER, _OTHER_LETTER = 255, 4
# Sequences and controls draw from different streams of one seed; otherwise the controls would be
# a function of the bases.
_SEQUENCE_STREAM = 1


def _lookup_table() -> npt.NDArray[np.uint8]:
    """Row of every byte: 0-3 for ACGT, 4 for another ASCII letter, 255 for no letter."""
    table = np.full(256, _NOT_A_LETTER, dtype=np.uint8)
    table[[ord(letter) for letter in string.ascii_letters]] = _OTHER_LETTER
    for row, letter in enumerate(LETTERS):
        table[[ord(letter), ord(letter.lower())]] = row
    return table


_ROW_OF_BYTE = _lookup_table()
# Row 4 and above select the zero column.
_COLUMN_OF_ROW = np.vstack([np.eye(4, dtype=np.int8), np.zeros((1, 4), dtype=np.int8)])


def one_hot(sequences: Sequence[str], names: Sequence[str] | None = None) -> npt.NDArray[np.int8]:
    """Encode sequences of one length; every letter other than A, C, G, T is an all-zero column.

    Parameters
    ----------
    sequences: sequence of str, len=n
        Letters in either case. IUPAC codes and N become zero columns, as upstream does.

    names: sequence of str, len=n, or None
        Record names, used in error messages only.

    Returns
    -------
    X: numpy.ndarray, shape=(n, 4, L), dtype=int8
        Rows A, C, G, T.

    Raises
    ------
    InputError
        No sequence, an empty sequence, unequal lengths, or a character that is no ASCII letter
        (a gap, a stop, a digit, white space).
    """
    if isinstance(sequences, str):
        raise TypeError("one_hot takes a sequence of strings, not one string")
    if not sequences:
        raise InputError("no sequence given; at least one is needed")
    _check_lengths(names or [], sequences)
    # latin-1 keeps one byte per character, so that an offset in the bytes is one in the text;
    # whatever lies beyond it becomes '?', which is no letter either.
    text = "".join(sequences)
    rows = _ROW_OF_BYTE[np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)]
    wrong = rows == _NOT_A_LETTER
    if wrong.any():
        offset = int(wrong.argmax())
        record, position = divmod(offset, len(sequences[0]))
        raise InputError(
            f"{_record(names or [], record)} has {text[offset]!r} at position {position + 1}, "
            "which is no letter; write A, C, G, T or, for an unknown base, N"
        )
    columns = _COLUMN_OF_ROW[rows].reshape(len(sequences), len(sequences[0]), 4)
    return np.ascontiguousarray(columns.transpose(0, 2, 1))


def read_fasta(path: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """Read every record of a FASTA file, plain, gzip or bgzip. No index is read or written.

    Parameters
    ----------
    path: str or path-like
        The file. All records must have one length, since they become one array.

    Returns
    -------
    names: list of str, len=n
        Text between '>' and the first white space. Duplicates are kept.

    sequences: list of str, len=n
        Letters as they stand; :func:`one_hot` checks them.

    Raises
    ------
    InputError
        The file is missing, unreadable, empty, binary, truncated, FASTQ or otherwise not FASTA;
        a record has no sequence; two records differ in length.

    EnvironmentProblem
        pysam is not installed.
    """
    file = Path(path)
    _check_text(file)
    try:
        import pysam
    except ImportError as e:
        raise EnvironmentProblem(
            "reading FASTA needs pysam, which is not installed; run: pip install pysam"
        ) from e

    names: list[str] = []
    sequences: list[str] = []
    try:
        # An absolute path, or htslib would take a name such as "s3:x" for an address.
        with pysam.FastxFile(str(file.absolute())) as records:
            for record in records:
                names.append(record.name or "")
                sequences.append((record.sequence or "").replace("\r", ""))
    except UnicodeDecodeError as e:
        raise InputError(f"{file}: holds text that is not UTF-8; a FASTA file is needed") from e
    except (ValueError, OSError) as e:
        raise InputError(f"{file}: cannot be read as FASTA ({e}); check the file") from e
    if not sequences:
        raise InputError(f"{file}: holds no sequence; a FASTA file with records is needed")
    for i, sequence in enumerate(sequences):
        if not sequence:
            raise InputError(
                f"{file}: {_record(names, i)} has no sequence; remove the record or complete it"
            )
    _check_lengths(names, sequences, f"{file}: ")
    return names, sequences


def random_sequences(
    seed: int, n: int, length: int, n_stretch: int = N_STRETCH
) -> npt.NDArray[np.int8]:
    """Draw uniform random bases, with stretches of N in every second example.

    Examples 0, 2, 4, ... have none. Examples 1, 3, 5, ... have one stretch at an edge (left in 1,
    right in 3, and so on) and one in the middle, so two examples are enough to meet both.

    Parameters
    ----------
    seed: int
        Not negative. The same arguments give the same array on every platform.

    n, length: int
        Examples, and bases L of each; both at least 1.

    n_stretch: int
        Bases of each stretch, cut to a quarter of `length`. 0 for none. Default is 50.

    Returns
    -------
    X: numpy.ndarray, shape=(n, 4, L), dtype=int8

    Raises
    ------
    InputError
        A number is out of range.
    """
    if seed < 0 or n < 1 or length < 1 or n_stretch < 0:
        raise InputError(
            f"random sequences need seed >= 0, n >= 1, length >= 1 and n_stretch >= 0; "
            f"got {seed}, {n}, {length}, {n_stretch}"
        )
    # The raw stream of PCG64 is the same in every NumPy release; Generator's methods are not
    # promised to be. The top bits are its best.
    raw = np.random.PCG64([seed, _SEQUENCE_STREAM]).random_raw(n * length)
    rows = (raw >> np.uint64(62)).astype(np.intp).reshape(n, length)
    stretch = min(n_stretch, length // 4)
    middle = (length - stretch) // 2
    rows[1::2, middle : middle + stretch] = _OTHER_LETTER
    rows[1::4, :stretch] = _OTHER_LETTER
    rows[3::4, length - stretch :] = _OTHER_LETTER
    return np.ascontiguousarray(_COLUMN_OF_ROW[rows].transpose(0, 2, 1))


def _record(names: Sequence[str], i: int) -> str:
    """How a message names record i (from 0)."""
    return f"record {i + 1} ({names[i]})" if i < len(names) and names[i] else f"record {i + 1}"


def _check_lengths(names: Sequence[str], sequences: Sequence[str], prefix: str = "") -> None:
    """Raise unless all sequences have one length, which is not 0."""
    length = len(sequences[0])
    if length == 0:
        raise InputError(f"{prefix}{_record(names, 0)} is empty; at least one base is needed")
    for i, sequence in enumerate(sequences):
        if len(sequence) != length:
            raise InputError(
                f"{prefix}{_record(names, 0)} has {length} bases and {_record(names, i)} has "
                f"{len(sequence)}; all records must have one length: cut windows of equal width"
            )


def _check_text(path: Path) -> None:
    """Raise unless the file looks like FASTA from its first line to its last.

    kseq, the parser below pysam, skips whatever precedes the first '>' or '@' and starts a record
    at any later line with '@', both without a word.
    """
    # os.path rather than pathlib, whose questions raise where a folder may not be searched.
    if os.path.isdir(path):
        raise InputError(f"{path}: is a directory; a FASTA file is needed")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file; give the path of a FASTA file")
    if not os.path.isfile(path):
        raise InputError(f"{path}: is not a regular file (a pipe?); write it to a file first")
    needed = "a FASTA file is needed, whose first line starts with '>'"
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        started = False
        with gzip.open(path) if packed else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if b"\0" in line:
                    raise InputError(f"{path}: is a binary file; {needed}")
                # A byte-order mark, as Windows editors write it, does no harm before '>'.
                text = line if started else line.removeprefix(b"\xef\xbb\xbf").lstrip()
                if text[:1] == b"@" and not started:
                    raise InputError(
                        f"{path}: is FASTQ (line {number} starts with '@'); {needed}: convert it"
                    )
                if text[:1] in (b"@", b"+"):
                    raise InputError(
                        f"{path}: line {number} starts with {chr(text[0])!r}, as in FASTQ; {needed}"
                    )
                if not started and text:
                    if text[:1] != b">":
                        shown = text[:20].rstrip().decode("ascii", "backslashreplace")
                        raise InputError(f"{path}: line {number} starts with {shown!r}; {needed}")
                    started = True
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise InputError(f"{path}: damaged or truncated gzip file ({e}); copy it again") from e
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror or e}); check the file") from e
    if not started:
        raise InputError(f"{path}: is empty; {needed}")
