"""The output folder appears whole, replaces only what is ours, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cheri_export import bundle
from cheri_export.errors import OutputError


def ours(path: Path, text: str = "old") -> Path:
    path.mkdir()
    report = {"tool": {"name": "cheri-export", "version": "0"}, "text": text}
    (path / "report.json").write_text(json.dumps(report))
    (path / "model.onnx").write_text(text)
    return path


def write(out: Path, text: str = "new", **options) -> None:
    with bundle.staged(out, **options) as folder:
        ours_in = {"tool": {"name": "cheri-export"}, "text": text}
        (folder / "report.json").write_text(json.dumps(ours_in))
        (folder / "model.onnx").write_text(text)
        bundle.commit(folder, out)


def listing(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize(
    ("model", "out"),
    [
        ("a/model.torch", "a/model.cheri"),
        ("model.pt", "model.cheri"),
        ("a.b/model", "a.b/model.cheri"),
        ("model.v1.torch", "model.v1.cheri"),
        ("./info", "info.cheri"),
        ("a/.hidden", "a/.hidden.cheri"),
        ("a/x.cheri", "a/x.cheri"),
    ],
)
def test_out_is_named_after_the_model_and_lies_beside_it(model: str, out: str) -> None:
    assert bundle.default_output(model) == Path(out)


def test_new_bundle_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "m.cheri"
    with bundle.staged(out) as folder:
        assert folder.parent == tmp_path and folder.name.startswith(".m.cheri.")
        assert not out.exists()
        (folder / "model.onnx").write_text("x")
        bundle.commit(folder, out)
        assert not folder.exists()
    assert listing(tmp_path) == ["m.cheri"] and listing(out) == ["model.onnx"]


def test_old_bundle_is_replaced_and_removed(tmp_path: Path) -> None:
    out = ours(tmp_path / "m.cheri")
    (out / "report.html").write_text("only in the old one")
    write(out)
    assert listing(tmp_path) == ["m.cheri"]
    assert listing(out) == ["model.onnx", "report.json"]
    assert (out / "model.onnx").read_text() == "new"


def test_is_bundle_wants_our_report_and_nothing_else(tmp_path: Path) -> None:
    out = ours(tmp_path / "m.cheri")
    assert bundle.is_bundle(out)
    (tmp_path / "link").symlink_to(out)
    assert not bundle.is_bundle(tmp_path / "link")
    (out / "notes.txt").write_text("the user's")
    assert not bundle.is_bundle(out)
    (out / "notes.txt").unlink()
    for text in ("", "[]", "{}", '{"tool": 1}', '{"tool": {"name": "other"}}', "\xff", "null"):
        (out / "report.json").write_text(text, encoding="latin-1")
        assert not bundle.is_bundle(out), text
    (out / "report.json").unlink()
    assert not bundle.is_bundle(out) and not bundle.is_bundle(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    assert not bundle.is_bundle(tmp_path / "file")


KINDS = ["file", "folder", "folder with a stray file", "symlink", "dangling symlink"]


def occupy(out: Path, kind: str) -> None:
    if kind == "file":
        out.write_text("precious")
    elif kind == "folder":
        out.mkdir()
    elif kind == "folder with a stray file":
        ours(out)
        (out / "notes.txt").write_text("precious")
    else:
        target = out.with_name("elsewhere")
        if kind == "symlink":
            ours(target)
        out.symlink_to(target)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_ours_is_refused(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "m.cheri"
    occupy(out, kind)
    before = listing(tmp_path)
    with pytest.raises(OutputError, match=r"exists and is .*--force"):
        write(out)
    assert listing(tmp_path) == before
    if kind == "file":
        assert out.read_text() == "precious"


@pytest.mark.parametrize("kind", KINDS)
def test_force_replaces_the_thing_itself_and_never_follows_a_link(kind, tmp_path) -> None:
    out = tmp_path / "m.cheri"
    occupy(out, kind)
    write(out, force=True)
    assert not out.is_symlink() and (out / "model.onnx").read_text() == "new"
    assert listing(tmp_path) == (["elsewhere", "m.cheri"] if kind == "symlink" else ["m.cheri"])
    if kind == "symlink":
        assert (tmp_path / "elsewhere" / "model.onnx").read_text() == "old"


def test_force_never_takes_the_model_or_the_working_folder(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    model = folder / "m.torch"
    model.write_text("weights")
    monkeypatch.chdir(tmp_path)
    for out in (folder, model, tmp_path, Path("."), Path("models")):
        with pytest.raises(OutputError, match="holds the model or the working folder"):
            write(out, force=True, keep=model)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OutputError, match="holds the model"):
        write(tmp_path / "link", force=True, keep=model)
    assert model.read_text() == "weights"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("old", [True, False])
def test_nothing_is_left_behind_when_the_work_fails(error, old: bool, tmp_path: Path) -> None:
    out = tmp_path / "m.cheri"
    if old:
        ours(out)

    def work() -> None:
        with bundle.staged(out) as folder:
            (folder / "model.onnx").write_text("half")
            (folder / "deeper").mkdir()
            raise error("stop")

    with pytest.raises(error):
        work()
    assert listing(tmp_path) == (["m.cheri"] if old else [])
    if old:
        assert (out / "model.onnx").read_text() == "old"


def test_a_failed_move_puts_the_old_bundle_back(tmp_path: Path, monkeypatch) -> None:
    out = ours(tmp_path / "m.cheri")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(bundle.os, "replace", replace)
    with pytest.raises(OutputError, match="Input/output error"):
        write(out)
    assert len(calls) == 3
    assert (out / "model.onnx").read_text() == "old" and listing(tmp_path) == ["m.cheri"]


def test_interrupted_between_the_moves_the_old_bundle_is_back(tmp_path, monkeypatch) -> None:
    """Ctrl-C after the old bundle was moved aside and before the new one is in place."""
    out = ours(tmp_path / "m.cheri")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(bundle.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write(out)
    assert listing(tmp_path) == ["m.cheri"]
    assert (out / "model.onnx").read_text() == "old"


def test_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere does not exist; create it"):
        write(tmp_path / "nowhere" / "m.cheri")
    assert listing(tmp_path) == []


def test_a_file_as_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"does not exist|Not a directory"):
        write(tmp_path / "file" / "m.cheri")
    assert listing(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EACCES, "cannot be written .Permission denied.; give another -o"),
        (errno.EROFS, "cannot be written .Read-only file system."),
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EDQUOT, "the disk is full"),
        (errno.ENAMETOOLONG, "cannot be written .File name too long."),
    ],
)
def test_a_folder_that_cannot_be_made_is_explained(number, message, tmp_path, monkeypatch) -> None:
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(bundle.tempfile, "mkdtemp", refuse)
    with pytest.raises(OutputError, match=message):
        write(tmp_path / "m.cheri")
    assert listing(tmp_path) == []


def test_a_name_too_long_for_the_file_system_is_explained(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="too long"):
        write(tmp_path / ("x" * 300))
    assert listing(tmp_path) == []


def test_a_full_disk_while_writing_is_explained(tmp_path: Path) -> None:
    """/dev/full gives a real ENOSPC; its name lies in the staged folder through a link."""
    out = ours(tmp_path / "m.cheri")

    def work() -> None:
        with bundle.staged(out) as folder:
            (folder / "model.onnx").symlink_to("/dev/full")
            (folder / "model.onnx").write_text("x" * 100_000)

    with pytest.raises(OutputError, match="the disk is full; free some space, or give another -o"):
        work()
    assert listing(tmp_path) == ["m.cheri"] and (out / "model.onnx").read_text() == "old"


def test_a_file_size_limit_while_writing_is_explained(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from cheri_export import bundle\n"
        "from cheri_export.errors import OutputError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with bundle.staged(Path(sys.argv[1])) as folder:\n"
        "        (folder / 'model.onnx').write_bytes(bytes(5000))\n"
        "except OutputError as error:\n"
        "    sys.exit(0 if 'File too large' in str(error) else str(error))\n"
        "sys.exit('no error')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.cheri")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert listing(tmp_path) == []


def test_another_files_error_is_not_blamed_on_out(tmp_path: Path) -> None:
    """A file of the user's that vanishes is no problem of OUT."""

    def work() -> None:
        with bundle.staged(tmp_path / "m.cheri"):
            (tmp_path / "missing.fa").read_text()

    with pytest.raises(FileNotFoundError, match=r"missing\.fa"):
        work()
    assert listing(tmp_path) == []


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(mask: int, tmp_path: Path) -> None:
    """mkdtemp makes private folders; a bundle is to be shared as any new folder would be."""
    before = os.umask(mask)
    try:
        write(tmp_path / "m.cheri")
        assert os.umask(mask) == mask, "the process's umask was changed"
    finally:
        os.umask(before)
    out = tmp_path / "m.cheri"
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~mask
    assert stat.S_IMODE((out / "model.onnx").stat().st_mode) == 0o666 & ~mask


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    assert bundle.sha256(path) == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_remove_deletes_a_bundle_and_bears_a_missing_one(tmp_path: Path) -> None:
    out = ours(tmp_path / "m.cheri")
    bundle.remove(out)
    bundle.remove(out)
    assert listing(tmp_path) == []
