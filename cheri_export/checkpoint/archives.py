"""The two containers that torch.save has written: zip archives and the older plain form."""

from __future__ import annotations

import dataclasses
import io
import struct
import zipfile
from typing import Any

import torch

from cheri_export.checkpoint import pickles
from cheri_export.checkpoint.messages import RESAVE, listing, problem, show
from cheri_export.checkpoint.names import Storage, StoredTensor

_ZIP_ERRORS = (
    *(zipfile.BadZipFile, ValueError, OverflowError, OSError, EOFError),
    *(NotImplementedError, RuntimeError, KeyError, struct.error),
)
ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19."
"""End of the first pickle of the older form: torch's magic number, for any pickle protocol."""

MAX_PICKLE = 16 << 20
"""Longest pickle inside an archive. Tensor data lie outside it, so a few kilobytes are usual."""


@dataclasses.dataclass(frozen=True)
class Archive:
    """A torch.save file taken apart.

    Attributes
    ----------
    tree: object
        What was saved, as `pickles.load` gives it.

    records: dict of str to bytes-like
        Raw little-endian data of every storage.
    """

    tree: Any
    records: dict[str, memoryview]

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Make the tensor: a copy, with the stored dtype, of the shape stated."""
        dtype = stored.storage.dtype
        if dtype is None:
            raise problem(
                f"a tensor is stored as {show(stored.storage.kind)}; a floating-point tensor is "
                f"needed; {RESAVE}"
            )
        if 0 in stored.size:
            return torch.empty(stored.size, dtype=dtype)
        raw = bytearray(self.records[stored.storage.key][: stored.storage.numel * dtype.itemsize])
        flat = torch.frombuffer(raw, dtype=dtype)
        return flat.as_strided(stored.size, stored.stride, stored.offset).clone().contiguous()


def open_archive(data: bytes) -> Archive | None:
    """Take a file apart; None if it is neither of torch.save's forms.

    Raises
    ------
    CheckpointError
        If it is one of them but damaged, hostile, or holds something else (TorchScript).
    """
    if data.startswith(ZIP_MAGIC):
        return _open_zip(data)
    if data[:1] == b"\x80" and LEGACY_MAGIC in data[:32]:
        return _open_legacy(data)
    return None


def _damaged(what: str) -> Exception:
    return problem(f"the file is damaged or was tampered with ({what}); copy or download it again")


def _open_zip(data: bytes) -> Archive:
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        entries = archive.infolist()
    except _ZIP_ERRORS:
        raise _damaged("a zip archive without its directory, so probably truncated") from None
    # torch.save stores its entries as they are. Packed ones could grow without limit, and
    # entries that share a name could differ between two readers of the same file.
    names = [e.filename for e in entries]
    packed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
    pickle_names = [n for n in names if n.count("/") == 1 and n.endswith("/data.pkl")]
    if len(pickle_names) != 1:
        raise problem(
            "a zip archive that torch.save did not write: one data.pkl was needed, found "
            f"{listing(names, 3) or 'nothing'}; give a file of Cherimoya.save()"
        )
    root = pickle_names[0][: -len("data.pkl")]
    if any(n == root + "constants.pkl" or n.startswith(root + "code/") for n in names):
        raise problem(
            "a TorchScript archive, which holds code; a state dict is needed; "
            "export from the checkpoint that Cherimoya.save() wrote"
        )
    if packed:
        raise problem(
            f"the zip entry {show(packed[0])} is compressed, which torch.save never does; it was "
            "not unpacked; give the original file"
        )
    if len(set(names)) != len(names) or any(not n.startswith(root) for n in names):
        raise _damaged("zip entries under two names or outside the archive's folder")
    if sum(e.file_size for e in entries) > len(data) or any(e.flag_bits & 1 for e in entries):
        raise _damaged("zip entries larger than the file, or encrypted")
    sizes = {n[len(root + "data/") :]: n for n in names if n.startswith(root + "data/")}
    info = {n: e for n, e in zip(names, entries, strict=True)}

    def read(name: str) -> bytes:
        try:
            return archive.read(name)
        except _ZIP_ERRORS:
            raise _damaged(f"zip entry {show(name)} cannot be read") from None

    def room(key: str) -> int | None:
        return info[sizes[key]].file_size if key in sizes else None

    order = root + "byteorder"
    if order in info and read(order) != b"little":
        raise problem(f"the tensors are stored big-endian, little-endian is needed; {RESAVE}")
    if info[pickle_names[0]].file_size > MAX_PICKLE:
        raise _damaged(f"a pickle of more than {MAX_PICKLE} bytes")
    tree, _ = _load(io.BytesIO(read(pickle_names[0])), room)
    return Archive(tree, {key: memoryview(read(name)) for key, name in sizes.items()})


def _load(stream: io.BytesIO, room: pickles.Room) -> tuple[Any, dict[str, Storage]]:
    try:
        return pickles.load(stream, room)
    except pickles.Malformed as error:
        raise _damaged(str(error)) from None


def _open_legacy(data: bytes) -> Archive:
    stream = io.BytesIO(data)

    def nothing(_: str) -> None:
        return None

    def room(_: str) -> int:
        return len(data)

    _load(stream, nothing)
    if _load(stream, nothing)[0] != 1001:
        raise _damaged("unknown protocol of an old torch file")
    system = _load(stream, nothing)[0]
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise problem(f"the tensors are stored big-endian, little-endian is needed; {RESAVE}")
    start = stream.tell()
    tree, storages = _load(stream, room)
    if stream.tell() - start > MAX_PICKLE:
        raise _damaged(f"a pickle of more than {MAX_PICKLE} bytes")
    keys = _load(stream, nothing)[0]
    if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys):
        raise _damaged("no list of storages")
    records: dict[str, memoryview] = {}
    for key in keys:
        storage, head = storages.get(key), stream.read(8)
        if storage is None or len(head) < 8:
            raise _damaged(f"tensor data {show(key)} missing, so probably truncated")
        width = storage.dtype.itemsize if storage.dtype is not None else 1
        raw = memoryview(data)[stream.tell() : stream.tell() + storage.numel * width]
        if struct.unpack("<q", head)[0] != storage.numel or len(raw) < storage.numel * width:
            raise _damaged(f"tensor data {show(key)} too short, so probably truncated")
        records[key] = raw
        stream.seek(len(raw), io.SEEK_CUR)
    if set(storages) - set(records):
        raise _damaged("tensor data missing")
    return Archive(tree, records)
