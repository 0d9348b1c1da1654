"""Bytes of a file, taken without being fooled by what the path points at."""

from __future__ import annotations

import os
import stat

from cheri_export.checkpoint.messages import problem, show

MAX_BYTES = 1 << 30
"""Largest file read. A released model holds 2.5 MB; 1 GiB leaves room for any that trains."""


def read_bytes(path: str) -> bytes:
    """Read a regular file whole, so that the hash and the contents belong to the same bytes.

    Raises
    ------
    CheckpointError
        If the path is missing, unreadable, empty, too large or not a regular file. FIFOs and
        devices are refused before they are opened: opening one can block or act on it.
    """
    where = show(path, limit=300)
    try:
        _require_regular(os.stat(path).st_mode, where)
        # The path may be swapped between the two calls; O_NONBLOCK keeps a FIFO from blocking.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags), "rb") as handle:
            info = os.fstat(handle.fileno())
            _require_regular(info.st_mode, where)
            if info.st_size > MAX_BYTES:
                raise problem(
                    f"{where}: {info.st_size} bytes, more than the {MAX_BYTES} that a Cherimoya "
                    "checkpoint can plausibly need; give the model file itself"
                )
            data = handle.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise problem(f"{where}: no such file; give the path of a checkpoint") from None
    except PermissionError:
        raise problem(f"{where}: not readable by this user; change its permissions") from None
    except ValueError:
        raise problem(f"{where}: not a usable path; give the path of a checkpoint") from None
    except OSError as error:
        raise problem(
            f"{where}: cannot be read ({error.strerror or type(error).__name__}); "
            "give the path of a checkpoint"
        ) from None
    if not data:
        raise problem(f"{where}: the file is empty; copy or download the checkpoint again")
    return data


def _require_regular(mode: int, where: str) -> None:
    if stat.S_ISDIR(mode):
        raise problem(f"{where}: a directory; give the checkpoint file inside it")
    if not stat.S_ISREG(mode):
        raise problem(f"{where}: not a regular file (a pipe, socket or device); copy it to a file")


_KINDS = (
    (b"\x89PNG", "a PNG image"),
    (b"\x93NUMPY", "a NumPy array file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip file (decompress it first)"),
    (b"BZh", "a bzip2 file (decompress it first)"),
    (b"\xfd7zXZ", "an xz file (decompress it first)"),
    (b"\x7fELF", "a compiled program"),
    (b"%PDF", "a PDF document"),
    (b"version https://git-lfs", "a Git LFS pointer (run 'git lfs pull')"),
    (b"<!DOCTYPE", "a web page (a failed download?)"),
    (b"<html", "a web page (a failed download?)"),
)


def describe(data: bytes) -> str:
    """What a file that is no checkpoint seems to be, for error messages."""
    for magic, kind in _KINDS:
        if data[: len(magic)].lower() == magic.lower():
            return kind
    if data[257:262] == b"ustar":
        return "a tar archive"
    head = data[:512]
    if all(byte in b"\t\n\r\f" or 32 <= byte < 127 for byte in head):
        return "text"
    return "binary data of an unknown kind"
