"""Bad and hostile files give one clear line, take no memory and execute nothing."""

from __future__ import annotations

import collections
import io
import os
import pickle
import random
import re
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import checkpoint_makers as make
import numpy
import pytest
import torch

from cheri_export.checkpoint import checkpoint_from_tensors, read_checkpoint
from cheri_export.errors import CheckpointError

TRAP: list[str] = []


def spring(*args: object) -> str:
    """What hostile pickles try to call. Also reachable as a class's constructor."""
    TRAP.append("executed")
    return "sprung"


class Reducer:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def refusal(path: Path) -> str:
    """The message that reading `path` gives: one printable line, nothing executed."""
    TRAP.clear()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text and text.isprintable() and len(text) < 1500
    assert ";" in text and str(path.name) in text
    assert caught.value.__cause__ is None and not TRAP
    return text


def refusal_of(tensors: Any, config: Any = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint_from_tensors(tensors, config)
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()
    return str(caught.value)


def npz() -> bytes:
    buffer = io.BytesIO()
    numpy.savez(buffer, a=numpy.zeros(3))
    return buffer.getvalue()


def npy() -> bytes:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.zeros(3))
    return buffer.getvalue()


BYTES = {
    "empty": (b"", "empty"),
    "full stop": (b". text", "text"),
    "text": (b"n_filters: 128\n\nn_layers: 9\n", "text"),
    "csv": (b"chrom\nstart\nend\n", "text"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(50), "PNG"),
    "random": (random.Random(1).randbytes(5000), "not a checkpoint"),
    "html": (b"<!doctype html><html></html>", "web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "npy": (npy(), "NumPy"),
    "npz": (npz(), "torch.save did not write"),
    "gzip": (b"\x1f\x8b\x08" + bytes(20), "gzip"),
    "half zip": (b"PK\x03\x04" + bytes(100), "truncated"),
    "empty zip": (b"PK\x05\x06" + bytes(18), "zip"),
    "list": (pickle.dumps([1]), "plain Python pickle"),
    "none": (pickle.dumps(None), "plain Python pickle of None"),
    "int": (pickle.dumps(3), "plain Python pickle of 3"),
    "old int": (pickle.dumps(3, protocol=0), "plain Python pickle of 3"),
    "header": (struct.pack("<Q", 1 << 60) + b"{" + bytes(90), "not a checkpoint"),
}


@pytest.mark.parametrize("name", BYTES)
def test_file_that_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    data, text = BYTES[name]
    path = tmp_path / "m.torch"
    path.write_bytes(data)
    assert text in refusal(path)


def test_path_that_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in refusal(tmp_path / "missing.torch")
    assert "a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in refusal(tmp_path / "fifo")
    assert "not a regular file" in refusal(Path("/dev/null"))
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be read" in refusal(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="not a usable path"):
        read_checkpoint("a\0b")
    with pytest.raises(CheckpointError, match=r"a\\x0ab"):
        read_checkpoint("a\nb")

    def deny(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    path = make.save(tmp_path / "m.torch", make.state_dict())
    monkeypatch.setattr(os, "open", deny)
    assert "not readable" in refusal(path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("payload", [None, 3, [1], "text", {}, {"config": {}}, {"state_dict": {}}])
def test_torch_file_of_something_else(payload: Any, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.torch"
    torch.save(payload, path, _use_new_zipfile_serialization=zipped)
    assert "needed" in refusal(path)


# Functions by their true names, and the traps: none may run.
HOSTILE = {
    "system": (Reducer(os.system, "echo sprung > SPRUNG"), rf"{os.name}\.system"),
    "eval": (Reducer(eval, "print('sprung')"), r"builtins\.eval"),
    "getattr": (Reducer(getattr, "x", "upper"), r"builtins\.getattr"),
    "trap": (Reducer(spring), rf"{__name__}\.spring"),
    "import": (Reducer(__import__, "antigravity"), r"builtins\.__import__"),
    "torch.load": (Reducer(torch.load, "x"), r"torch\.\w*\.?load"),
    "tensor": (Reducer(torch.hub.load, "x"), r"torch\.hub\.load"),
    "partial": (Reducer(__import__("functools").partial, spring), r"functools\.partial"),
    "open": (Reducer(open, "SPRUNG", "w"), r"(builtins|_?io)\.open"),
}


@pytest.mark.parametrize("form", ["raw0", "raw2", "raw4", "zip", "legacy", "inside"])
@pytest.mark.parametrize("name", HOSTILE)
def test_reducer_is_refused_by_name(name, form, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    payload, needed = HOSTILE[name]
    path = tmp_path / "m.torch"
    if form.startswith("raw"):
        path.write_bytes(pickle.dumps(payload, protocol=int(form[3])))
    elif form == "inside":
        tensors = make.state_dict()
        torch.save({"config": {"name": payload}, "state_dict": tensors}, path)
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=form == "zip")
    text = refusal(path)
    assert re.search(needed, text) and "nothing was executed" in text
    assert not (tmp_path / "SPRUNG").exists() and "antigravity" not in sys.modules


def repack(source: Path, program: bytes | None = None, **kw: Any) -> bytes:
    """The archive with another data.pkl, other compression or additional entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(out, "w", kw.get("how", 0)) as new:
        for name in old.namelist():
            swap = program is not None and name.endswith("/data.pkl")
            new.writestr(name, program if swap else old.read(name))
            root = name.split("/")[0]
        for name, data in kw.get("extra", {}).items():
            new.writestr(f"{root}/{name}", data)
    return out.getvalue()


def test_stand_ins_cannot_do_anything(tmp_path: Path) -> None:
    """Hand-written programs: admitted names called, built, given hooks; forbidden opcodes."""
    source = make.save(tmp_path / "s.torch", make.state_dict(), make.config())
    path = tmp_path / "m.torch"
    evil = f"{__name__}\nspring\n".encode()
    programs = {
        b"ccherimoya.cherimoya\nCherimoya\n)\x81}X\x01\x00\x00\x00ac" + evil + b"sb.": "spring",
        b"ccherimoya.cherimoya\nos.system\nX\x02\x00\x00\x00ls\x85R.": "os.system",
        b"ctorch.nn\nModule.__init__\n)R.": "Module.__init__",
        b"ccherimoya.evil\nsystem\nX\x02\x00\x00\x00ls\x85R.": "system object",
        b"ccherimoya.cherimoya\nCherimoya\n)\x81c" + evil + b"b.": "spring",
        b"(i" + evil + b".": "INST",
        b"(c" + evil + b"o.": "spring",
        b"\x82\x01.": "EXT1",
        b"ccollections\nOrderedDict\n)RX\x01\x00\x00\x00ab.": "",
        b"ctorch.nn\nModule\n)\x81}X\x0b\x00\x00\x00__reduce__NX\x09\x00\x00\x00__class__Nub.": "",
        b"ccherimoya.cherimoya\nCherimoya\n)\x81}(X\x08\x00\x00\x00_modules}X\x01\x00\x00\x00"
        b"aq\x00hhub.": "",
        b"]q\x00h\x00a.": "list",
        b"}K\x01(K\x02K\x02tK\x03s.": "",
        b"}((K\x01tK\x02u.": "key that is no text",
    }
    for program, text in programs.items():
        path.write_bytes(repack(source, program))
        assert text in refusal(path)


def test_hooks_in_a_pickled_module_are_refused(tmp_path: Path) -> None:
    with make.fake_packages() as classes:
        model, _ = make.module("0.1.0", classes)
        model._forward_hooks = collections.OrderedDict({0: spring})
        torch.save(model, tmp_path / "m.torch")
        model._forward_hooks = collections.OrderedDict()
        model.iconv.__dict__["__setstate__"] = Reducer(spring)
        torch.save(model, tmp_path / "n.torch")
        torch.save(model.linear, tmp_path / "o.torch")
    assert f"{__name__}.spring" in refusal(tmp_path / "m.torch")
    assert f"{__name__}.spring" in refusal(tmp_path / "n.torch")
    assert "Linear object" in refusal(tmp_path / "o.torch")


def test_archive_tricks(tmp_path: Path) -> None:
    source = make.save(tmp_path / "s.torch", make.state_dict(), make.config())
    path = tmp_path / "m.torch"
    path.write_bytes(repack(source, how=zipfile.ZIP_DEFLATED))
    assert "is compressed" in refusal(path)
    path.write_bytes(repack(source, extra={"constants.pkl": b"."}))
    assert "TorchScript" in refusal(path)
    with pytest.warns(UserWarning, match="Duplicate"):
        path.write_bytes(repack(source, extra={"version": b"4"}))
    assert "two names" in refusal(path)
    with pytest.warns(UserWarning, match="Duplicate"):
        path.write_bytes(repack(source, extra={"data.pkl": b"N."}))
    assert "torch.save did not write" in refusal(path)
    data = source.read_bytes()
    for share in (0.3, 0.9, 0.999):
        path.write_bytes(data[: int(len(data) * share)])
        assert "truncated" in refusal(path)


def test_legacy_file_cut_short_and_tar(tmp_path: Path) -> None:
    import tarfile

    path = make.save(
        tmp_path / "m.torch", make.state_dict(), make.config(), _use_new_zipfile_serialization=False
    )
    data = path.read_bytes()
    for share in (0.001, 0.01, 0.5, 0.999):
        path.write_bytes(data[: int(len(data) * share)])
        refusal(path)
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("../../storages")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    assert "tar archive" in refusal(path)
    assert not (tmp_path.parent.parent / "storages").exists()


@pytest.mark.parametrize("field", ["none", "size", "stride", "offset", "numel", "key"])
def test_absurd_tensor_takes_no_memory(field: str, tmp_path: Path) -> None:
    """A tensor larger than its storage, or a storage larger than the file."""
    source = make.save(tmp_path / "s.torch", make.state_dict(), make.config())
    values = {"size": 1, "stride": 1, "offset": 0, "numel": 1, "key": "0"}
    if field != "none":
        values[field] = "99" if field == "key" else 1 << 50
    if field == "stride":
        values["size"], values["numel"] = 2, 1
    part = (
        pickle.dumps(("storage", "@", values["key"], "cpu", values["numel"]), protocol=2)[2:-1]
        .replace(b"X\x01\x00\x00\x00@", b"ctorch\nFloatStorage\n")
        .replace(b"q\x00", b"")
    )
    sizes = pickle.dumps((values["offset"], (values["size"],), (values["stride"],)), protocol=2)
    # Without memo operations the parts can be joined: (storage, offset, size, stride).
    body = re.sub(rb"q.", b"", sizes[2:-1])[:-1]
    program = b"ctorch._utils\n_rebuild_tensor\n(" + re.sub(rb"q.", b"", part) + b"Q"
    program += body + b"tR."
    path = tmp_path / "m.torch"
    path.write_bytes(repack(source, program))
    # The first case shows that the program itself is sound: the tensor is made and refused later.
    text = "the file holds" if field == "none" else "damaged or was tampered with"
    assert text in refusal(path)


def test_exponential_structures_end_quickly(tmp_path: Path) -> None:
    deep: Any = ["x"]
    for _ in range(60):
        deep = [deep, deep]
    path = make.save(tmp_path / "m.torch", make.state_dict(), make.config(future=deep))
    assert any("unknown settings" in w for w in read_checkpoint(path).warnings)
    path = make.save(tmp_path / "m.torch", make.state_dict(), make.config(signal_groups=deep))
    assert "signal_groups" in refusal(path)


def test_damaged_bytes_never_give_a_traceback(tmp_path: Path) -> None:
    """Flipped bytes either read or give a CheckpointError."""
    generator = random.Random(7)
    sources = [
        make.save(tmp_path / "a.torch", make.state_dict(filters=4, layers=1), None),
        make.save(
            tmp_path / "b.torch",
            make.state_dict(filters=4, layers=1),
            None,
            _use_new_zipfile_serialization=False,
        ),
        make.pickled(tmp_path / "c.torch", "0.0.1", filters=16),
    ]
    path = tmp_path / "m.torch"
    for source in sources:
        data = source.read_bytes()
        for _ in range(60):
            changed = bytearray(data)
            for _ in range(generator.choice((1, 3, 20))):
                changed[generator.randrange(min(len(data), 6000))] = generator.randrange(256)
            path.write_bytes(changed)
            try:
                read_checkpoint(path)
            except CheckpointError as error:
                assert str(error).isprintable()


def changed(**swap: Any) -> dict[str, Any]:
    """The default state dict with tensors replaced; None removes one. ``__`` stands for a dot."""
    out: dict[str, Any] = dict(make.state_dict())
    for key, value in swap.items():
        name = key.replace("__", ".")
        if value is None:
            del out[name]
        else:
            out[name] = value
    return out


T = torch.zeros
NAN = torch.tensor([float("nan"), float("inf")] + [0.0] * 14)
TENSORS = {
    "nan": (changed(iconv__bias=NAN), r"iconv.bias has 2 of 16 values .*1 NaN, 1 infinite"),
    "fp64 range": (changed(iconv__bias=T(16).double() + 1e300), "beyond the range of float32"),
    "missing": (changed(fconv__bias=None), "missing tensor fconv.bias"),
    "unexpected": (changed(extra__weight=T(3)), "unexpected tensor extra.weight"),
    "hole": (
        {k.replace("blocks.2", "blocks.3"): v for k, v in make.state_dict().items()},
        "block 2 is missing: the blocks are numbered 0, 1, 3",
    ),
    "no blocks": (
        {k: v for k, v in make.state_dict().items() if "blocks" not in k},
        "n_layers 0",
    ),
    "huge number": (
        {k.replace("blocks.2", "blocks.999999"): v for k, v in make.state_dict().items()},
        "block 2 is missing",
    ),
    "stem axes": (changed(iconv__weight=T(16, 21)), r"iconv.weight has shape \(16, 21\)"),
    "stem letters": (changed(iconv__weight=T(16, 5, 21)), r"\(16, 4, 21\) is needed"),
    "stem bias": (changed(iconv__bias=T(15)), r"iconv.bias has shape \(15\)"),
    "conv": (changed(blocks__1__conv_weight=T(16, 3)), r"blocks.1.conv_weight .* \(3, 16\) is"),
    "linear1": (changed(blocks__2__linear1__weight=T(48, 16)), r"\(32, 16\) is needed"),
    "linear2": (changed(blocks__0__linear2__weight=T(32, 16)), r"\(16, 32\) is needed"),
    "profile": (changed(fconv__weight=T(1, 15, 75)), "fewer than the 16 filters"),
    "profile bias": (changed(fconv__bias=T(2)), r"fconv.bias has shape \(2\)"),
    "controls": (changed(fconv__weight=T(1, 18, 75)), r"\(1, 17\) is needed.*2 control tracks"),
    "counts": (changed(linear__weight=T(1, 17)), r"\(1, 16\) is needed"),
    "counts bias": (changed(linear__bias=T(2)), "linear.bias"),
    "even": (changed(iconv__weight=T(16, 4, 20)), "kernel size 20, which is even"),
    "even head": (changed(fconv__weight=T(1, 16, 2)), "kernel size 2, which is even"),
    "unknown kernel": (changed(fconv__weight=T(1, 16, 5)), "kernel 5"),
    "width 0": (make.state_dict(filters=0), "every size must be 1 or more"),
    "outputs 0": (make.state_dict(outputs=0), "every size must be 1 or more"),
    "gamma in one": (changed(blocks__0__gamma=T(1, 16)), "missing tensors blocks.1.gamma"),
    "40 blocks": (make.state_dict(filters=2, layers=40), "40 blocks"),
    "twice": ({**make.state_dict(), "module.iconv.bias": T(16)}, "name the same tensor"),
    "int": (changed(iconv__bias=T(16, dtype=torch.int64)), "iconv.bias is a tensor of torch.int64"),
    "complex": (changed(iconv__bias=T(16, dtype=torch.complex64)), "torch.complex64"),
    "bool": (changed(iconv__bias=T(16, dtype=torch.bool)), "torch.bool"),
    "float8": (changed(iconv__bias=T(16).to(torch.float8_e4m3fn)), "iconv.bias"),
    "quantised": (
        changed(iconv__bias=torch._empty_affine_quantized([16], scale=0.1, dtype=torch.qint8)),
        "iconv.bias.*(quant|qtensor)",
    ),
    "sparse": (changed(iconv__bias=T(16).to_sparse()), "iconv.bias.*sparse"),
    "meta": (changed(iconv__bias=T(16, device="meta")), "iconv.bias.*meta"),
    "no tensor": (changed(iconv__bias=[1.0]), "iconv.bias is"),
    "resnet": (
        {"conv1.weight": T(8, 3, 7, 7), "layer1.0.bn1.weight": T(8), "fc.weight": T(2, 8)},
        "not a Cherimoya model: found conv1.weight.*expected iconv.weight",
    ),
    "bpnet": (
        {k: T(2) for k in ("iconv.weight", "rconvs.0.weight", "fconv.weight", "linear.weight")},
        "not a Cherimoya model.*rconvs.0.weight.*expected iconv.weight",
    ),
    "transformer": ({"blocks.0.linear1.weight": T(2, 2), "head": T(1)}, r"missing.*iconv.weight"),
    "escape": ({"\x1b[31m\n": T(1)}, r"\\x1b\[31m\\x0a"),
    "long": ({"k" * 10_000: T(1)}, "kkk"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENSORS)
def test_bad_tensors_are_named(name: str, tmp_path: Path) -> None:
    """The same line from a file and from memory. (torch words special forms differently.)"""
    tensors, text = TENSORS[name]
    assert re.search(text, refusal_of(tensors))
    path = make.save(tmp_path / "m.torch", tensors)
    assert re.search(text, refusal(path))


@pytest.mark.parametrize("name", ["int", "nan", "sparse", "quantised", "conv"])
@pytest.mark.filterwarnings("ignore")
def test_bad_tensors_in_a_pickled_module_are_named(name: str, tmp_path: Path) -> None:
    tensors, _ = TENSORS[name]
    key = {"conv": "blocks.1.conv_weight"}.get(name, "iconv.bias")
    with make.fake_packages() as classes:
        model, _ = make.module("0.1.0", classes)
        *parts, leaf = key.split(".")
        owner = model.get_submodule(".".join(parts))
        del owner._parameters[leaf]
        owner.register_buffer(leaf, tensors[key])
        torch.save(model, tmp_path / "m.torch")
    assert key in refusal(tmp_path / "m.torch")


CONFIGS = {
    "filters": ({"n_filters": 32}, "n_filters is 32 but iconv.weight says 16"),
    "layers": ({"n_layers": 10**9}, "n_layers is 1000000000 but the list of blocks says 3"),
    "layers huge": ({"n_layers": 10**300}, "an integer of"),
    "outputs": ({"n_outputs": 2}, "n_outputs is 2 but fconv.weight says 1"),
    "tracks": ({"n_control_tracks": 1}, "n_control_tracks is 1 but fconv.weight says 0"),
    "expansion": ({"expansion": 4}, "expansion is 4 but blocks.0.linear1.weight says 2"),
    "expansion text": ({"expansion": "2"}, "a number is needed"),
    "groups sum": ({"signal_groups": [2]}, "add up to 2 but fconv.weight has 1"),
    "groups empty": ({"signal_groups": []}, "a list of positive integers"),
    "groups zero": ({"signal_groups": [1, 0]}, r"\[1, 0\]"),
    "groups float": ({"signal_groups": [1.0]}, "a list of positive integers"),
    "trimming": ({"trimming": -1}, "trimming is -1"),
    "trimming float": ({"trimming": 53.0}, "trimming is 53.0; an integer is needed"),
    "trimming bool": ({"trimming": True}, "trimming is True"),
    "trimming text": ({"trimming": "53"}, "trimming is 53; an integer"),
    "trimming huge": ({"trimming": 10**30}, "trimming is"),
    "scale nan": ({"residual_scale": float("nan")}, "residual_scale is nan"),
    "scale inf": ({"residual_scale": float("inf")}, "residual_scale is inf"),
    "scale text": ({"residual_scale": "x"}, "residual_scale is x"),
    "scale huge": ({"residual_scale": 1e300}, "residual_scale is 1e\\+300"),
    "single": ({"single_count_output": 1}, "True or False is needed"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_contradiction_names_both_values(name: str, tmp_path: Path) -> None:
    change, text = CONFIGS[name]
    config = {**make.config(), **change}
    assert re.search(text, refusal_of(make.state_dict(), config))
    path = make.save(tmp_path / "m.torch", make.state_dict(), config)
    assert re.search(text, refusal(path))


def test_configuration_of_the_wrong_kind() -> None:
    for config in ([1], "x", {1: 2}, 5):
        assert "'config' is" in refusal_of(make.state_dict(), config)
    tensors, config = make.release("0.2.0", groups=[1, 1])
    assert "2 groups" not in refusal_of(tensors, {**config, "signal_groups": [2]})
    old, settings = make.release("0.1.0", groups=[2])
    settings["single_count_output"] = False
    assert "means 2 count outputs, but linear.weight has 1" in refusal_of(old, settings)
    old, settings = make.release("0.0.1")
    assert "both" in refusal_of(old, {**settings, "residual_scale": 0.15})
    assert "wrap round" in refusal_of(old, {**settings, "trimming": 36})
    three = make.state_dict(outputs=3, counts=2, head=1)
    settings = {**make.release("0.1.0", groups=[3])[1], "single_count_output": None}
    assert "release 0.1.0 has 1 or 3" in refusal_of(three, settings)


def test_damaged_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save

    path, data = tmp_path / "m.safetensors", save({"a": T(3)}, {"format": "cherimoya"})
    path.write_bytes(data)
    assert "not a Cherimoya model" in refusal(path)
    path.write_bytes(data[:-4])
    assert "damaged" in refusal(path)
    path.write_bytes(save({"a": T(3)}, {"cherimoya": "{"}))
    assert "metadata" in refusal(path)
    path.write_bytes(data.replace(b'"F32"', b'"F99"'))
    assert "damaged" in refusal(path)
