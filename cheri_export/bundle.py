"""The output folder: staged beside its destination, moved into place whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cheri_export.errors import InputError, OutputError

MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "weights.safetensors"
REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
FILES = (MODEL_FILE, WEIGHTS_FILE, REPORT_JSON, REPORT_HTML)

SUFFIX = ".cheri"
FAILED = ".failed"


def default_output(model: str | os.PathLike[str]) -> Path:
    """OUT when none is given: beside the model, its last extension replaced by ``.cheri``."""
    path = Path(model)
    if not path.name:
        raise InputError(f"{os.fspath(model)!r} names no file; give the path of a checkpoint")
    return path.with_name(path.stem + SUFFIX)


def sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_bundle(path: Path) -> bool:
    """Whether `path` is a folder that this tool wrote and that nobody added to."""
    report = path / REPORT_JSON
    if path.is_symlink() or not path.is_dir() or not report.is_file():
        return False
    try:
        tool = json.loads(report.read_text(encoding="utf-8"))["tool"]["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return tool == "cheri-export" and {entry.name for entry in path.iterdir()} <= set(FILES)


def check_replaceable(out: Path, *, force: bool, keep: Path | None = None) -> None:
    """Refuse to replace what is not ours.

    Parameters
    ----------
    out: Path
        The destination.

    force: bool
        The user said that anything there may go.

    keep: Path or None
        A file that must survive: the model.

    Raises
    ------
    OutputError
        `out` exists and may not be replaced, or lies in a folder that does not exist.
    """
    try:
        _check_replaceable(out, force=force, keep=keep)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"{out} cannot be used ({reason}); give another -o") from error


def _protected(keep: Path | None) -> list[Path]:
    """What a replaced OUT must not hold: the working folder, the home folder, the model."""
    found = [] if keep is None else [keep.resolve()]
    for place in (Path.cwd, Path.home):
        with contextlib.suppress(OSError, RuntimeError):  # deleted, or a user without a home
            found.append(place().resolve())
    return found


def _check_replaceable(out: Path, *, force: bool, keep: Path | None) -> None:
    parent = out.absolute().parent
    if not parent.is_dir():
        raise OutputError(
            f"{out}: the folder {parent} does not exist; create it, or give another -o"
        )
    if not os.path.lexists(out):
        return
    real = out.resolve()
    if any(real == path or real in path.parents for path in _protected(keep)):
        raise OutputError(f"{out} holds the model or the working folder; give another -o")
    if not force and not is_bundle(out):
        what = "a folder with other contents" if out.is_dir() else "no folder of this tool"
        raise OutputError(f"{out} exists and is {what}; give another -o, or --force to replace it")


def _problem(error: OSError, out: Path) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"{out}: the disk is full; free some space, or give another -o")
    reason = error.strerror or str(error)
    return OutputError(f"{out} cannot be written ({reason}); give another -o")


@contextlib.contextmanager
def staged(out: Path, *, force: bool = False, keep: Path | None = None) -> Iterator[Path]:
    """A temporary folder beside `out`; removed on leaving, unless `commit` moved it away.

    Raises
    ------
    OutputError
        `out` may not be replaced, cannot be written, or the disk is full.
    """
    check_replaceable(out, force=force, keep=keep)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    except OSError as error:
        raise _problem(error, out) from error
    try:
        yield folder
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(folder)):
            raise
        raise _problem(error, out) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def commit(folder: Path, out: Path) -> None:
    """Move a staged folder into place: the old `out` is moved aside first, then removed.

    Raises
    ------
    OutputError
        The move failed; the old `out` is back in its place.
    """
    mask = os.umask(0)
    os.umask(mask)
    try:
        folder.chmod(0o777 & ~mask)
        aside: Path | None = None
        try:
            if os.path.lexists(out):
                aside = Path(
                    tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.absolute().parent)
                )
                os.replace(out, aside / out.name)
            os.replace(folder, out)
        except BaseException:  # Ctrl-C between the two moves must not lose the old bundle
            if aside is not None and os.path.lexists(aside / out.name):
                os.replace(aside / out.name, out)
            raise
        finally:
            if aside is not None and os.path.lexists(out):
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise _problem(error, out) from error


def remove(path: Path) -> None:
    """Delete a bundle; a file that cannot be deleted stays."""
    shutil.rmtree(path, ignore_errors=True)
