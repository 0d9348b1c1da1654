"""FASTA files, one-hot arrays and random sequences."""

from __future__ import annotations

import gzip
import hashlib
import string
from pathlib import Path

import numpy as np
import pysam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cheri_export.errors import InputError
from cheri_export.sequences import one_hot, random_sequences, read_fasta


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_are_acgt_in_either_case_and_other_letters_are_zero():
    """A, C, G, T are rows 0 to 3; N and IUPAC codes leave their column empty."""
    X = one_hot(["ACGTN", "tgcaR"])
    assert X.dtype == np.int8
    assert X.flags.c_contiguous
    np.testing.assert_array_equal(
        X[0], [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    )
    np.testing.assert_array_equal(X[1], X[0][::-1])


@given(
    st.integers(1, 30).flatmap(
        lambda length: st.lists(
            st.text(string.ascii_letters, min_size=length, max_size=length), min_size=1, max_size=5
        )
    )
)
def test_every_column_follows_its_letter(sequences: list[str]):
    """Column sums are 1 at ACGT and 0 elsewhere, and the row is the letter's, letter by letter."""
    X = one_hot(sequences)
    assert X.shape == (len(sequences), 4, len(sequences[0]))
    for i, sequence in enumerate(sequences):
        for j, letter in enumerate(sequence):
            assert X[i, :, j].tolist() == [int(letter.upper() == base) for base in "ACGT"]


@given(st.text(string.ascii_letters, min_size=1, max_size=20), st.characters(), st.data())
def test_a_character_that_is_no_letter_is_named(sequence: str, character: str, data):
    """Whatever the character, the message gives the record, the place from 1 and the character."""
    if character in string.ascii_letters:
        return
    at = data.draw(st.integers(0, len(sequence) - 1))
    bad = sequence[:at] + character + sequence[at + 1 :]
    with pytest.raises(InputError) as error:
        one_hot([sequence, bad], names=["good", "bad"])
    assert f"record 2 (bad) has {character!r} at position {at + 1}" in one_line(error)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "no sequence given"),
        (["", ""], "record 1 is empty"),
        (["ACGT", "ACG"], "record 1 has 4 bases and record 2 has 3"),
    ],
)
def test_arrays_that_cannot_be_built_are_refused(sequences: list[str], message: str):
    """None, empty and unequal sequences have no array."""
    with pytest.raises(InputError, match=message):
        one_hot(sequences)


def test_a_single_string_is_a_programming_error():
    """One string would otherwise be taken for a list of one-base sequences."""
    with pytest.raises(TypeError):
        one_hot("ACGT")


@pytest.mark.parametrize("packing", ["plain", "gzip", "bgzip", "crlf", "bom", "wrapped"])
def test_fasta_reads_the_same_however_it_is_packed(tmp_path: Path, packing: str):
    """Line ends, wrapping, compression and a byte-order mark change nothing; no index appears."""
    text = ">chr1:0-6 first\nACGTNn\n\n>chr1:0-6\nttttta\n"
    path = tmp_path / "x.fa"
    if packing == "gzip":
        write(path, gzip.compress(text.encode()))
    elif packing == "bgzip":
        with pysam.BGZFile(str(path), "wb") as handle:
            handle.write(text.encode())
    elif packing == "crlf":
        write(path, text.replace("\n", "\r\n"))
    elif packing == "bom":
        write(path, b"\xef\xbb\xbf" + text.encode())
    elif packing == "wrapped":
        write(path, "\n" + text.replace("ACG", "ACG\n").rstrip())
    else:
        write(path, text)
    assert read_fasta(path) == (["chr1:0-6", "chr1:0-6"], ["ACGTNn", "ttttta"])
    assert [p.name for p in tmp_path.iterdir()] == ["x.fa"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"chr1\t100\t200\n", "line 1 starts with 'chr1"),
        (b"ACGT\n>a\nACGT\n", "line 1 starts with 'ACGT'"),
        (b"@r\nACGT\n+\nIIII\n", "is FASTQ"),
        (b">a\nACGT\n@b\nACGT\n", "line 3 starts with '@'"),
        (b">a\nACGT\n+\nIIII\n", "line 3 starts with '\\+'"),
        (b"\x89PNG\x00\x01", "is a binary file"),
        (b">a\nAC\x00T\n", "is a binary file"),
        (">a\nACGT\n".encode("utf-16"), "is a binary file"),
        (b">a\nACGT\n>b\n>c\nACGT\n", "record 2 \\(b\\) has no sequence"),
        (b">a\nACGT\n>b\nACG\n", "record 1 \\(a\\) has 4 bases and record 2 \\(b\\) has 3"),
        (b">\nACGT\n>b\n", "record 2 \\(b\\) has no sequence"),
        (b">\xe5\nACGT\n", "not UTF-8"),
        (gzip.compress(b">a\nACGT\n", mtime=0)[:20], "damaged or truncated gzip"),
        (b"\x1f\x8bnonsense", "damaged or truncated gzip"),
        (gzip.compress(b"", mtime=0), "is empty"),
    ],
)
def test_what_is_not_fasta_is_named(tmp_path: Path, data: bytes, message: str):
    """Each is one line that starts with the path and says what was found."""
    path = write(tmp_path / "x.fa", data)
    with pytest.raises(InputError, match=message) as error:
        read_fasta(path)
    assert one_line(error).startswith(str(path))


def test_missing_file_and_directory_are_told_apart(tmp_path: Path):
    """Neither reaches htslib, which would take some names for addresses."""
    with pytest.raises(InputError, match="no such file"):
        read_fasta(tmp_path / "x.fa")
    with pytest.raises(InputError, match="no such file"):
        read_fasta("https://example.invalid/x.fa")
    with pytest.raises(InputError, match="is a directory"):
        read_fasta(tmp_path)


def test_a_local_file_whose_name_looks_like_an_address_is_read(tmp_path: Path, monkeypatch):
    """htslib would open 's3:x.fa' over the network."""
    write(tmp_path / "s3:x.fa", ">a\nACGT\n")
    monkeypatch.chdir(tmp_path)
    assert read_fasta("s3:x.fa") == (["a"], ["ACGT"])


def test_random_sequences_hold_stretches_at_edges_and_in_the_middle():
    """Odd examples have a stretch at one edge and one in the middle; even ones are full."""
    X = random_sequences(3, 4, 200, n_stretch=20)
    assert X.shape == (4, 4, 200)
    assert X.dtype == np.int8
    full = np.ones(200, dtype=int)
    left, right = full.copy(), full.copy()
    left[:20] = left[90:110] = 0
    right[180:] = right[90:110] = 0
    for example, expected in zip(X.sum(1), [full, left, full, right], strict=True):
        np.testing.assert_array_equal(example, expected)


def test_random_sequences_never_change():
    """The bytes for a seed are fixed for ever, since reports name the seed."""
    X = random_sequences(0, 3, 1000)
    assert (
        hashlib.sha256(X.tobytes()).hexdigest()
        == "fa401de9fc8401a9945bc282eb547ff3cf0e1a9807079ee1ddb818ab6615d193"
    )
    assert not np.array_equal(X, random_sequences(1, 3, 1000))
    frequencies = random_sequences(0, 1, 40000).mean((0, 2))
    np.testing.assert_allclose(frequencies, 0.25, atol=0.01)


def test_random_sequences_at_the_smallest_sizes():
    """A single base has no room for a stretch."""
    assert random_sequences(0, 2, 1).sum() == 2
    assert random_sequences(0, 2, 8, n_stretch=0).sum() == 16
    with pytest.raises(InputError, match="seed >= 0"):
        random_sequences(-1, 1, 1)
