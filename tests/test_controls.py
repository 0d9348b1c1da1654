"""Control tracks: the option's grammar, .npz arrays, bigWig windows and random counts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyBigWig
import pytest

from cheri_export.controls import ControlSpec, load_controls, parse_control_spec, random_controls
from cheri_export.errors import InputError
from cheri_export.sequences import random_sequences


def bigwig(path: Path, values: dict[int, float], chrom: str = "chr1", size: int = 20) -> str:
    """Write a bigWig file with the given values, each at one base."""
    with pyBigWig.open(str(path), "w") as file:
        file.addHeader([(chrom, size)])
        starts = sorted(values)
        file.addEntries(
            [chrom] * len(starts),
            starts,
            ends=[s + 1 for s in starts],
            values=[float(values[s]) for s in starts],
        )
    return str(path)


def load(text: str, names: list[str] | None, tracks: int = 1, length: int = 5) -> np.ndarray:
    return load_controls(
        parse_control_spec(text),
        n_tracks=tracks,
        names=names,
        length=length,
        n=len(names) if names else 1,
    )


@pytest.mark.parametrize(
    ("text", "kind", "groups"),
    [
        ("zero", "zero", None),
        ("some dir/x.NPZ", "npz", None),
        ("a,b.npz", "npz", None),
        ("a.bw", "bigwig", (("a.bw",),)),
        ("a.bw,b.bigWig", "bigwig", (("a.bw",), ("b.bigWig",))),
        ("p.bw+m.bw", "bigwig", (("p.bw", "m.bw"),)),
        ("p.bw+m.bw,a.bw", "bigwig", (("p.bw", "m.bw"), ("a.bw",))),
    ],
)
def test_the_grammar(text: str, kind: str, groups):
    """A comma separates groups, a plus joins the two strands of one."""
    assert parse_control_spec(text) == ControlSpec(kind, groups, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a file name is missing"),
        ("a.bw,", "a file name is missing"),
        ("a.bw++b.bw", "a file name is missing"),
        ("Zero", "cannot tell what 'Zero' is"),
        ("a.wig", "cannot tell what 'a.wig' is"),
        ("a.bw,x.npz", "cannot tell what 'x.npz' is"),
        ("a.bw+b.bw+c.bw", "joins 3 files"),
    ],
)
def test_other_text_is_refused(text: str, message: str):
    """The message lists the forms that exist."""
    with pytest.raises(InputError, match=message):
        parse_control_spec(text)


def test_a_model_without_controls_takes_none():
    """Silence would hide a mistake: the user thinks that the tracks were used."""
    with pytest.raises(InputError, match="takes no control tracks"):
        load("zero", None, tracks=0)


def test_zero_is_an_array_of_zeros():
    """Upstream's ControlWrapper."""
    X = load("zero", ["a", "b"], tracks=2)
    assert X.shape == (2, 2, 5)
    assert X.dtype == np.float32
    assert not X.any()


@pytest.mark.parametrize("dtype", ["float64", "float32", "int16", "uint8", "bool"])
def test_npz_of_any_real_type(tmp_path: Path, dtype: str):
    """A single array counts under any name; among several, the one named control."""
    array = np.array([[[0, 1, 1, 0, 1]]]).astype(dtype)
    np.savez(tmp_path / "one.npz", anything=array)
    np.savez_compressed(tmp_path / "two.npz", control=array, other=np.zeros(3))
    for name in ("one.npz", "two.npz"):
        X = load(str(tmp_path / name), ["a"])
        assert X.dtype == np.float32
        np.testing.assert_array_equal(X, [[[0, 1, 1, 0, 1]]])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1.5, "example 2 \\(b\\), track 1, position 4 is -1.5"),
        (np.nan, "position 4 is nan"),
        (np.inf, "position 4 is inf"),
        (1e300, "position 4 is 1e\\+300"),
    ],
)
def test_npz_values_that_are_no_counts_are_named(tmp_path: Path, value: float, message: str):
    """A value beyond float32 would become infinite, so it is refused too."""
    array = np.zeros((2, 1, 5))
    array[1, 0, 3] = value
    np.savez(tmp_path / "x.npz", array)
    with pytest.raises(InputError, match=message):
        load(str(tmp_path / "x.npz"), ["a", "b"])


def test_npz_files_that_cannot_be_used(tmp_path: Path):
    """Wrong shapes, several arrays, objects, text, other formats and damage."""
    path = tmp_path / "x.npz"
    cases: list[tuple[dict[str, np.ndarray], str]] = [
        ({"control": np.zeros((1, 5))}, "shape \\(1, 5\\); \\(1, 1, 5\\) is needed"),
        ({"control": np.zeros((1, 1, 6))}, "shape \\(1, 1, 6\\)"),
        ({"a": np.zeros(1), "b": np.zeros(1)}, "holds 2 arrays \\(a, b\\)"),
        ({}, "holds 0 arrays"),
        ({"control": np.array([[[None] * 5]])}, "without pickled objects"),
        ({"control": np.array([[["x"] * 5]])}, "real numbers are needed"),
        ({"control": np.zeros((1, 1, 5), dtype=complex)}, "real numbers are needed"),
    ]
    for arrays, message in cases:
        np.savez(path, **arrays)
        with pytest.raises(InputError, match=message):
            load(str(path), ["a"])
    np.savez(path, np.zeros((1, 1, 5)))
    whole = path.read_bytes()
    for damaged in (b"", whole[:60], whole[:-30], b"not a zip file at all", b"PK\x03\x04junk"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read"):
            load(str(path), ["a"])
    with path.open("wb") as file:
        np.save(file, np.zeros((1, 1, 5)))
    with pytest.raises(InputError, match="is a single array"):
        load(str(path), ["a"])
    path.unlink()
    with pytest.raises(InputError, match="no such file"):
        load(str(path), ["a"])
    path.mkdir()
    with pytest.raises(InputError, match="is a directory"):
        load(str(path), ["a"])


def test_bigwig_windows_by_hand(tmp_path: Path):
    """0-based half-open windows; bases without a value are 0; tracks in the order given."""
    a = bigwig(tmp_path / "a.bw", {0: 7, 3: 1, 4: 2, 7: 5, 8: 9})
    b = bigwig(tmp_path / "b.bw", {5: 4, 19: 6})
    X = load(f"{a},{b}", ["chr1:3-8", "chr1:0-5", "peak::chr1:15-20(+)"], tracks=2)
    assert X.dtype == np.float32
    np.testing.assert_array_equal(
        X,
        [
            [[1, 2, 0, 0, 5], [0, 0, 4, 0, 0]],
            [[7, 0, 0, 1, 2], [0, 0, 0, 0, 0]],
            [[0, 0, 0, 0, 0], [0, 0, 0, 0, 6]],
        ],
    )


def test_the_minus_strand_turns_positions_and_the_tracks_of_each_group(tmp_path: Path):
    """A stranded pair swaps, separate groups do not; positions run backwards in both."""
    p = bigwig(tmp_path / "p.bw", {3: 1, 4: 2})
    m = bigwig(tmp_path / "m.bw", {7: 3})
    c = bigwig(tmp_path / "c.bw", {5: 4})
    stranded = load(f"{c},{p}+{m}", ["chr1:3-8(-)", "chr1:3-8"], tracks=3)
    forward = [[0, 0, 4, 0, 0], [1, 2, 0, 0, 0], [0, 0, 0, 0, 3]]
    np.testing.assert_array_equal(stranded[1], forward)
    np.testing.assert_array_equal(stranded[0], [[0, 0, 4, 0, 0], [3, 0, 0, 0, 0], [0, 0, 0, 2, 1]])
    separate = load(f"{c},{p},{m}", ["chr1:3-8(-)"], tracks=3)
    np.testing.assert_array_equal(separate[0], [row[::-1] for row in forward])


def test_contig_names_may_hold_colons(tmp_path: Path):
    """HLA contigs do."""
    path = bigwig(tmp_path / "a.bw", {2: 3}, chrom="HLA-A*01:01")
    np.testing.assert_array_equal(load(path, ["HLA-A*01:01:0-5"]), [[[0, 0, 3, 0, 0]]])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("peak1", "need names chrom:start-end"),
        ("chr1:a-b", "need names chrom:start-end"),
        ("chr1:-5-0", "need names chrom:start-end"),
        ("chr1:3-9", "end - start is 6, but the sequence has 5 bases; names must be 0-based"),
        ("chr1:4-8", "1-based inclusive, as samtools faidx"),
        ("chr1:16-21", "leaves its contig of 20 bases"),
        ("1:3-8", "it has 'chr1': only the prefix 'chr' differs"),
        ("chr2:3-8", "has no chromosome 'chr2'; it has chr1"),
    ],
)
def test_windows_that_do_not_fit_are_named(tmp_path: Path, name: str, message: str):
    """The record or the file is in the message, and what to do about it."""
    path = bigwig(tmp_path / "a.bw", {3: 1})
    with pytest.raises(InputError, match=message) as error:
        load(path, [name])
    assert "\n" not in str(error.value)


def test_the_prefix_hint_works_both_ways(tmp_path: Path):
    """'chr1' in the FASTA file and '1' in the bigWig file."""
    path = bigwig(tmp_path / "a.bw", {3: 1}, chrom="1")
    with pytest.raises(InputError, match="it has '1': only the prefix"):
        load(path, ["chr1:3-8"])


@pytest.mark.parametrize("value", [-2.0, float("inf")])
def test_bigwig_values_that_are_no_counts_are_named(tmp_path: Path, value: float):
    """Minus-strand files are often stored negative, which the model's log1p turns to NaN."""
    path = bigwig(tmp_path / "a.bw", {4: value})
    with pytest.raises(InputError, match=f"chr1 position 4 \\(0-based\\) is {value}"):
        load(path, ["chr1:3-8"])


def test_bigwig_counts_and_names_must_match(tmp_path: Path):
    """One file per track, and names that say where."""
    path = bigwig(tmp_path / "a.bw", {3: 1})
    with pytest.raises(InputError, match=r"name 1 bigWig file.* takes 2 control track"):
        load(path, ["chr1:3-8"], tracks=2)
    with pytest.raises(InputError, match="need sequences with genome positions"):
        load(path, None)
    with pytest.raises(InputError, match="1 record names for 2 examples"):
        load_controls(parse_control_spec(path), n_tracks=1, names=["chr1:3-8"], length=5, n=2)


def test_files_that_are_no_bigwig_are_named(tmp_path: Path, capfd):
    """Nothing but the message: libBigWig's own complaints do not reach the terminal."""
    path = tmp_path / "a.bw"
    for data in (b"", b"track type=wiggle_0\n" * 99):
        path.write_bytes(data)
        with pytest.raises(InputError, match="is not a bigWig file"):
            load(str(path), ["chr1:3-8"])
    assert capfd.readouterr().err == ""
    good = Path(bigwig(tmp_path / "b.bw", {3: 1})).read_bytes()
    for size in (4, 63, 70, 200, len(good) // 2):
        path.write_bytes(good[:size])
        with pytest.raises(InputError, match="is truncated"):
            load(str(path), ["chr1:3-8"])
    with pytest.raises(InputError, match=r"no such file.*',' and '\+' separate files"):
        load("no.bw,such.bw", ["chr1:3-8"], tracks=2)


def test_random_controls_never_change():
    """Poisson at rate 0.5; the bytes for a seed are fixed for ever."""
    X = random_controls(0, 3, 2, 10000)
    assert X.shape == (3, 2, 10000)
    assert X.dtype == np.float32
    assert (
        hashlib.sha256(X.tobytes()).hexdigest()
        == "b47e642d25db0fa7772c5f027b63c357cb444117b7bc04df2dbd544ed70f04f8"
    )
    assert not np.array_equal(X, random_controls(1, 3, 2, 10000))
    assert abs(X.mean() - 0.5) < 0.01
    assert abs(X.var() - 0.5) < 0.02
    with pytest.raises(InputError, match="tracks, length >= 1"):
        random_controls(0, 1, 0, 5)


def test_random_controls_do_not_depend_on_the_bases():
    """One seed serves both; if they shared a stream, every base would fix its count."""
    X = random_sequences(5, 1, 40000)[0]
    counts = random_controls(5, 1, 1, 40000)[0, 0]
    for row in X:
        assert abs(counts[row == 1].mean() - 0.5) < 0.03
