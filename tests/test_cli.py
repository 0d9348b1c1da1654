"""The command: what it prints, writes and exits with, and that bad input leaves no trace."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_makers as make
import jsonschema
import numpy as np
import onnx
import pytest
import torch
from close import assert_within
from conftest import DATA, GOOD, load_sample
from onnx import numpy_helper

from cheri_export import __version__, bundle, cli, pipeline, report, tolerance
from cheri_export.check import open_session
from cheri_export.checkpoint import read_checkpoint
from cheri_export.spec import LOG_COUNTS, PRECISIONS, PROFILE_LOGITS

FILES = ["model.onnx", "report.html", "report.json", "weights.safetensors"]
FAST = ("--length", "160", "--batch", "2")
COMMAND = (sys.executable, "-m", "cheri_export")
PROGRESS = re.compile(r"[a-z][^\n]* \.\.\.")


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    """A working folder with one small model in it."""
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copyfile(DATA / "small_4x32_trained.torch", folder / "m.torch")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def call(capsys, monkeypatch):
    """Run the command in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        argv = [str(a) for a in arguments]
        monkeypatch.setattr(sys, "argv", ["cheri-export", *argv])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main(argv)
        captured = capsys.readouterr()
        return left.value.code, captured.out, captured.err

    return run


@pytest.fixture
def quick(monkeypatch):
    """Each model is exported once per session and no page is drawn: for tests of other things."""
    real = pipeline.export_onnx

    def export(module, **options):
        state = hashlib.sha256(
            b"".join(t.numpy().tobytes() for t in module.state_dict().values())
        ).hexdigest()
        key = (state, module.precision, json.dumps(options, sort_keys=True))
        if key not in EXPORTED:
            EXPORTED[key] = real(module, **options)
        model = onnx.ModelProto()
        model.CopyFrom(EXPORTED[key])
        return model

    monkeypatch.setattr(pipeline, "export_onnx", export)
    monkeypatch.setattr(pipeline.report, "render_html", lambda *_: "<!doctype html>NOT match")


EXPORTED: dict[tuple, onnx.ModelProto] = {}


def listing(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def check_refusal(code: int, out: str, err: str, expected: int = 2) -> str:
    """One error line, progress lines before it, nothing else. Returns the message."""
    lines = err.splitlines()
    assert code == expected, err
    assert out == ""
    assert lines and lines[-1].startswith("cheri-export: error: "), err
    assert all(PROGRESS.fullmatch(line) for line in lines[:-1]), err
    assert "Traceback" not in err and lines[-1].isprintable()
    assert len(lines[-1]) < 1000
    return lines[-1]


def check_bundle(out: Path, precision: str = "fp32", opset: int = 20) -> dict:
    assert listing(out) == FILES and bundle.is_bundle(out)
    document = json.loads((out / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, report.schema())
    assert document["verdict"]["passed"] is True and document["verdict"]["failures"] == []
    assert (document["export"]["precision"], document["export"]["opset"]) == (precision, opset)
    for section, name in (("export", "model.onnx"), ("weights", "weights.safetensors")):
        data = (out / name).read_bytes()
        assert document[section]["sha256"] == hashlib.sha256(data).hexdigest()
        assert document[section]["bytes"] == len(data)
    for case in document["accuracy"]["cases"]:
        assert {run["runner"] for run in case["runs"]} >= {"torch-fp32", "onnxruntime-cpu"}
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page), "not self-contained"
    return document


# The good way.


def test_default_command_end_to_end(here: Path) -> None:
    """As a user runs it, with the default length of 2114."""
    done = subprocess.run([*COMMAND, "m.torch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert listing(here) == ["m.cheri", *(f"m.cheri/{f}" for f in FILES), "m.torch"]
    document = check_bundle(here / "m.cheri")
    assert all(PROGRESS.fullmatch(line) for line in done.stderr.splitlines()), done.stderr
    assert done.stdout.startswith("PASSED  The exported model matches")
    for name in FILES:
        assert name in done.stdout
    cases = document["accuracy"]["cases"]
    assert len({c["length"] for c in cases}) == 2 and len({c["batch"] for c in cases}) == 2
    assert max(c["length"] for c in cases) == 2114
    source = here / "m.torch"
    assert document["checkpoint"]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    before, after = read_checkpoint(source), read_checkpoint(here / "m.cheri/weights.safetensors")
    assert list(before.tensors) == list(after.tensors)
    assert all(torch.equal(before.tensors[k], after.tensors[k]) for k in before.tensors)
    found = load_sample("small_4x32_trained")
    session = open_session(here / "m.cheri" / "model.onnx")
    profile, counts = session.run(None, {"sequence": found.sequence.float().numpy()})
    assert_within("profile", profile, found.profile, tolerance.figure("fp32", PROFILE_LOGITS))
    assert_within("counts", counts, found.counts, tolerance.figure("fp32", LOG_COUNTS))


@pytest.mark.parametrize(
    ("precision", "opset"), [("fp32", 21), ("mixed", 20), ("fp16", 20), ("bf16", 21)]
)
def test_every_tier_and_opset(quick, precision: str, opset: int, here: Path, call) -> None:
    code, out, _ = call("m.torch", *FAST, "--precision", precision, "--opset", opset, "-o", "out")
    assert code == 0 and out.startswith("PASSED")
    document = check_bundle(here / "out", precision, opset)
    assert listing(here) == ["m.torch", "out", *(f"out/{f}" for f in FILES)]
    tiers = {t["tier"] for t in document["accuracy"]["tolerances"]}
    assert tiers == {precision}
    for case in document["accuracy"]["cases"]:
        for run in case["runs"]:
            for output in (PROFILE_LOGITS, LOG_COUNTS):
                row = run["outputs"][output]
                assert row["passed"] and row["max_abs"] <= row["limit"]
                assert row["figure"] == tolerance.figure(precision, output)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", GOOD)
def test_every_sample_in_every_tier(name: str, precision: str, tmp_path: Path, call) -> None:
    out = tmp_path / "out"
    code, _, err = call(DATA / f"{name}.torch", "-o", out, "--precision", precision)
    assert code == 0, err
    check_bundle(out, precision)


def write_fasta(path: Path, sequence: torch.Tensor, names: list[str] | None = None) -> Path:
    lines = []
    for n, one in enumerate(sequence):
        rows = torch.where(one.sum(0) == 0, 4, one.argmax(0)).tolist()
        name = f"example{n}" if names is None else names[n]
        lines += [f">{name}", "".join("ACGTN"[r] for r in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def stranded(here: Path):
    """The sample with controls: its sequences as FASTA, its controls as .npz."""
    found = load_sample("stranded2_ctl2_5x48")
    shutil.copyfile(found.path, here / "s.torch")
    write_fasta(here / "x.fa", found.sequence)
    np.savez(here / "x.npz", control=found.control.numpy())
    return found


SHORT = ("--length", "200", "--batch", "2")


@pytest.mark.parametrize("controls", [None, "zero"])
def test_random_and_zero_controls(quick, controls, stranded, here: Path, call) -> None:
    option = () if controls is None else ("--controls", controls)
    code, _, err = call("s.torch", *SHORT, *option)
    assert code == 0, err
    document = check_bundle(here / "s.cheri")
    wanted = {controls or "random"}
    assert {c["controls"] for c in document["accuracy"]["cases"]} == wanted


@pytest.mark.parametrize("controls", ["x.npz", "zero", "plus.bw+minus.bw"])
def test_sequences_and_controls_of_the_user(
    quick, controls: str, stranded, here: Path, call
) -> None:
    if controls.endswith(".bw"):
        names = [f"chr1:{500 * n}-{500 * (n + 1)}" for n in range(3)]
        write_fasta(here / "x.fa", stranded.sequence, names)
        write_bigwigs(here, stranded.control)
    code, _, err = call("s.torch", *SHORT, "--check-sequences", "x.fa", "--controls", controls)
    assert code == 0, err
    cases = check_bundle(here / "s.cheri")["accuracy"]["cases"]
    (own,) = [c for c in cases if c["kind"] == "fasta"]
    assert (own["batch"], own["length"], own["controls"]) == (3, 500, controls)
    # The judge saw these very sequences and controls: its spread is that of cherimoya's outputs.
    if controls == "zero":
        profile, counts = (stranded.stored[f"zeroctl_{k}_f32"] for k in ("profile", "counts"))
    else:
        profile, counts = stranded.profile, stranded.counts
    assert own["output_std"][PROFILE_LOGITS] == pytest.approx(profile.std(), rel=1e-5)
    assert own["output_std"][LOG_COUNTS] == pytest.approx(counts.std(), rel=1e-3)


def write_bigwigs(folder: Path, control: torch.Tensor) -> None:
    import pyBigWig

    n, _, length = control.shape
    for track, name in enumerate(("plus.bw", "minus.bw")):
        values = control[:, track].reshape(-1).double()
        file = pyBigWig.open(str(folder / name), "w")
        file.addHeader([("chr1", n * length)])
        starts = list(range(n * length))
        file.addEntries(
            ["chr1"] * len(starts), starts, ends=[s + 1 for s in starts], values=values.tolist()
        )
        file.close()


def test_json_is_the_report_and_alone_on_stdout(here: Path, call) -> None:
    code, out, err = call(
        "m.torch", *FAST, "--json", "--source", "doi:1", "--license", "CC0", "--seed", "3"
    )
    assert code == 0
    document = json.loads(out)
    jsonschema.validate(document, report.schema())
    stored = json.loads((here / "m.cheri" / "report.json").read_text(encoding="utf-8"))
    assert document == stored
    assert all(PROGRESS.fullmatch(line) for line in err.splitlines())
    assert document["command"][:2] == ["cheri-export", "m.torch"]
    assert (document["checkpoint"]["source"], document["checkpoint"]["license"]) == ("doi:1", "CC0")
    assert document["accuracy"]["cases"][0]["seed"] == 3
    pairs = {p.key: p.value for p in onnx.load(here / "m.cheri" / "model.onnx").metadata_props}
    assert (pairs["source"], pairs["license"]) == ("doi:1", "CC0")


def test_quiet_prints_nothing(quick, here: Path, call) -> None:
    assert call("m.torch", *FAST, "--quiet") == (0, "", "")
    check_bundle(here / "m.cheri")


def test_the_same_seed_gives_the_same_figures_and_file(here: Path, call, monkeypatch) -> None:
    documents = []
    for out in ("one", "two"):
        monkeypatch.setattr(pipeline.report, "render_html", lambda *_: "<!doctype html>")
        assert call("m.torch", *FAST, "-q", "-o", out)[0] == 0
        documents.append(check_bundle(here / out))
    assert documents[0]["export"]["sha256"] == documents[1]["export"]["sha256"]
    judged = [[c["output_std"] for c in d["accuracy"]["cases"]] for d in documents]
    assert judged[0] == judged[1]


def test_out_lies_beside_the_model_not_in_the_working_folder(quick, here, tmp_path, call) -> None:
    elsewhere = tmp_path / "models"
    elsewhere.mkdir()
    shutil.copyfile(here / "m.torch", elsewhere / "my.model.pt")
    assert call(elsewhere / "my.model.pt", *FAST, "-q")[0] == 0
    assert sorted(p.name for p in elsewhere.iterdir()) == ["my.model.cheri", "my.model.pt"]
    assert listing(here) == ["m.torch"]


@pytest.mark.parametrize("name", ["info", "export"])
def test_a_file_named_like_a_command_is_given_with_its_folder(
    quick, name, here: Path, call
) -> None:
    (here / "m.torch").rename(here / name)
    assert call(f"./{name}", *FAST, "-q")[0] == 0
    check_bundle(here / f"{name}.cheri")
    code, out, err = call("info", f"./{name}")
    assert code == 0 and "0.1.1 to 0.3.1" in out, err


def test_a_bundle_of_ours_is_replaced(quick, here: Path, call) -> None:
    assert call("m.torch", *FAST, "-q")[0] == 0
    first = (here / "m.cheri" / "report.json").read_bytes()
    assert call("m.torch", *FAST, "-q", "--precision", "mixed")[0] == 0
    check_bundle(here / "m.cheri", "mixed")
    assert (here / "m.cheri" / "report.json").read_bytes() != first
    assert listing(here) == ["m.cheri", *(f"m.cheri/{f}" for f in FILES), "m.torch"]


def test_anything_else_is_replaced_only_with_force(quick, here: Path, call) -> None:
    (here / "m.cheri").mkdir()
    (here / "m.cheri" / "thesis.txt").write_text("precious")
    message = check_refusal(*call("m.torch", *FAST))
    assert "m.cheri exists" in message and "--force" in message
    assert listing(here) == ["m.cheri", "m.cheri/thesis.txt", "m.torch"]
    assert call("m.torch", *FAST, "-q", "--force")[0] == 0
    check_bundle(here / "m.cheri")


def test_force_never_takes_the_model(quick, here: Path, call) -> None:
    message = check_refusal(*call("m.torch", *FAST, "-o", "m.torch", "--force"))
    assert "holds the model" in message
    assert "holds the model or the working folder" in check_refusal(
        *call("m.torch", *FAST, "-o", ".", "--force")
    )
    assert read_checkpoint(here / "m.torch").spec.n_layers == 4


# info, --version, --help


@pytest.mark.parametrize("name", GOOD)
def test_info_of_every_sample(name: str, call) -> None:
    path = DATA / f"{name}.torch"
    code, out, err = call("info", path, "--json")
    assert code == 0 and err == ""
    found, checkpoint = json.loads(out), load_sample(name).checkpoint
    spec = checkpoint.spec
    assert found["release"] == checkpoint.release and found["release_reason"]
    assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["n_parameters"] == checkpoint.n_parameters
    assert found["warnings"] == list(checkpoint.warnings)
    model = found["model"]
    assert (model["trimming"], model["min_length"]) == (spec.trimming, 2 * spec.trimming + 1)
    expected = spec.stem_kernel + spec.profile_kernel - 1 + 2 * (2**spec.n_layers - 1)
    assert model["receptive_field"] == expected
    assert [t["name"] for t in model["inputs"]] == [
        "sequence",
        *["control"] * bool(spec.n_control_tracks),
    ]
    assert [t["name"] for t in model["outputs"]] == [PROFILE_LOGITS, LOG_COUNTS]
    code, out, err = call("info", path)
    assert code == 0 and err == "" and found["sha256"] in out
    for text in found["warnings"]:
        assert text in out


def test_info_refuses_as_the_export_does(here: Path, call) -> None:
    (here / "empty").write_bytes(b"")
    for arguments in (("empty",), ("missing",), (".",), ("empty", "--json")):
        check_refusal(*call("info", *arguments))
    assert listing(here) == ["empty", "m.torch"]


def test_version_and_help(call) -> None:
    code, out, err = call("--version")
    assert code == 0 and __version__ in out and err == ""
    for arguments in (("--help",), ("-h",)):
        code, out, err = call(*arguments)
        assert code == 0 and err == ""
        for word in ("MODEL", "--precision", "--opset", "--check-sequences", "--allow-mismatch"):
            assert word in out
        assert "info" in out and "Exit codes" in out
    assert "MODEL" in call("info", "--help")[1]
    code, out, err = call()
    assert code == 2 and out == "" and "Usage" in err


# Bad input: exit 2, one line, nothing written.


class Reducer:
    def __reduce__(self):
        return (os.system, ("touch sprung",))


def spoiled(**changes):
    """A saved model with one thing wrong."""

    def write(folder: Path) -> None:
        tensors, config = make.state_dict(), make.config()
        for key, change in changes.items():
            key = key.replace("__", ".")
            if change is None:
                del tensors[key]
            elif callable(change):
                tensors[key] = change(tensors[key])
            else:
                tensors[key] = change
        make.save(folder / "bad", tensors, config)

    return write


def put(index, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[index] = value
        return tensor

    return change


def raw(data: bytes):
    return lambda folder: (folder / "bad").write_bytes(data)


def renumbered(folder: Path) -> None:
    tensors = make.state_dict(layers=4)
    tensors = {k: v for k, v in tensors.items() if not k.startswith("blocks.2.")}
    make.save(folder / "bad", tensors, make.config(n_layers=4, trimming=61))


def other_architecture(folder: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
    torch.save(layer.state_dict(), folder / "bad")


def even_kernel(name: str):
    return spoiled(**{name.replace(".", "__"): lambda t: t[:, :, :-1].contiguous()})


FILES_THAT_ARE_BAD = {
    "missing": (lambda folder: None, "no such file"),
    "empty": (raw(b""), "empty"),
    "truncated": (
        lambda folder: shutil.copyfile(DATA / "variant_truncated_4x32.torch", folder / "bad"),
        "truncated",
    ),
    "text": (raw(b"not a checkpoint\n"), "text"),
    "onnx": (raw(b"\x08\x0a\x12\x0ccheri-export" + bytes(99)), "not a checkpoint"),
    "directory": (lambda folder: (folder / "bad").mkdir(), "directory"),
    "reducer": (raw(pickle.dumps(Reducer())), "system"),
    "reducer in a torch file": (
        lambda folder: torch.save({"state_dict": Reducer()}, folder / "bad"),
        "system",
    ),
    "nan": (spoiled(blocks__1__linear1__weight=put(3, torch.nan)), "blocks.1.linear1.weight has 1"),
    "infinite": (spoiled(fconv__bias=put(0, torch.inf)), "fconv.bias has 1"),
    "missing key": (spoiled(linear__bias=None), "linear.bias"),
    "missing block tensor": (spoiled(blocks__1__linear2__weight=None), "blocks.1.linear2.weight"),
    "wrong shape": (spoiled(blocks__0__conv_weight=torch.zeros(3, 15)), r"\(3, 15\)"),
    "transposed": (spoiled(blocks__0__linear1__weight=lambda t: t.T), "blocks.0.linear1.weight"),
    "hole": (renumbered, "block"),
    "architecture": (other_architecture, "iconv"),
    "even stem kernel": (even_kernel("iconv.weight"), "kernel size 20, which is even"),
    "even head kernel": (even_kernel("fconv.weight"), "kernel size 74, which is even"),
}


@pytest.mark.parametrize("name", FILES_THAT_ARE_BAD)
def test_bad_checkpoint_is_refused(name: str, here: Path, call) -> None:
    write, text = FILES_THAT_ARE_BAD[name]
    write(here)
    before = listing(here)
    message = check_refusal(*call("bad", *FAST))
    assert re.search(text, message), message
    assert "bad" in message
    assert listing(here) == before


OPTIONS = {
    "batch 0": (("m.torch", "--batch", "0"), "--batch 0"),
    "batch below 0": (("m.torch", "--batch", "-1"), "--batch -1"),
    "batch word": (("m.torch", "--batch", "x"), "'x' is not a valid integer"),
    "precision": (("m.torch", "--precision", "fp8"), "fp8 .*fp32, mixed, fp16, bf16"),
    "precision case": (("m.torch", "--precision", "FP32"), "FP32"),
    "opset": (("m.torch", "--opset", "19"), "--opset 19 .*20 or 21"),
    "opset above": (("m.torch", "--opset", "22"), "--opset 22"),
    "length": (("m.torch", "--length", "122"), "--length 122 .*at least 123"),
    "length 0": (("m.torch", "--length", "0"), "--length 0"),
    "length below 0": (("m.torch", "--length", "-5"), "--length -5"),
    "seed below 0": (("m.torch", *FAST, "--seed", "-1"), "seed"),
    "unknown option": (("m.torch", "--presicion", "fp16"), "--presicion"),
    "two models": (("m.torch", "other"), "other"),
    "no value": (("m.torch", "-o"), "-o"),
    "controls not wanted": (("m.torch", *FAST, "--controls", "zero"), "no control tracks"),
    "controls of nothing": (("s.torch", *SHORT, "--controls", "x.npz"), "--check-sequences"),
    "controls not given": (("s.torch", *SHORT, "--check-sequences", "x.fa"), "2 control tracks"),
    "controls negative": (
        ("s.torch", *SHORT, "--check-sequences", "x.fa", "--controls", "negative.npz"),
        "negative",
    ),
    "controls nan": (
        ("s.torch", *SHORT, "--check-sequences", "x.fa", "--controls", "nan.npz"),
        "finite|NaN|nan",
    ),
    "controls shape": (
        ("s.torch", *SHORT, "--check-sequences", "x.fa", "--controls", "shape.npz"),
        r"\(3, 1, 500\)|1 ",
    ),
    "controls missing": (
        ("s.torch", *SHORT, "--check-sequences", "x.fa", "--controls", "none.npz"),
        "none.npz",
    ),
    "controls grammar": (
        ("s.torch", *SHORT, "--check-sequences", "x.fa", "--controls", "x.txt"),
        "x.txt",
    ),
    "fasta missing": (("m.torch", *FAST, "--check-sequences", "none.fa"), "no such file"),
    "fasta folder": (("m.torch", *FAST, "--check-sequences", "."), "directory"),
    "fasta binary": (("m.torch", *FAST, "--check-sequences", "m.torch"), "binary|first line"),
    "fasta empty": (("m.torch", *FAST, "--check-sequences", "empty.fa"), "empty"),
    "fasta letters": (("m.torch", *FAST, "--check-sequences", "digit.fa"), "no letter"),
    "fasta lengths": (("m.torch", *FAST, "--check-sequences", "uneven.fa"), "one length"),
    "fasta short": (("m.torch", *FAST, "--check-sequences", "short.fa"), "at least 123"),
    "out in no folder": (("m.torch", *FAST, "-o", "no/where"), "does not exist"),
    "out under a file": (("m.torch", *FAST, "-o", "empty.fa/out"), "does not exist"),
    "out is a file": (("m.torch", *FAST, "-o", "empty.fa"), "--force"),
    "out too long": (("m.torch", *FAST, "-o", "x" * 300), "too long"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_option_or_input_is_refused(quick, name: str, stranded, here: Path, call) -> None:
    (here / "empty.fa").write_text("")
    (here / "digit.fa").write_text(">a\n" + "ACG7" * 50 + "\n")
    (here / "uneven.fa").write_text(">a\n" + "ACGT" * 50 + "\n>b\n" + "ACGT" * 51 + "\n")
    (here / "short.fa").write_text(">a\nACGT\n")
    control = stranded.control.numpy().copy()
    np.savez(here / "shape.npz", control=control[:, :1])
    control[1, 1, 7] = -1
    np.savez(here / "negative.npz", control=control)
    control[1, 1, 7] = np.nan
    np.savez(here / "nan.npz", control=control)
    before = listing(here)
    arguments, text = OPTIONS[name]
    message = check_refusal(*call(*arguments))
    assert re.search(text, message), message
    assert listing(here) == before


def write_large_weight(folder: Path) -> None:
    tensors = make.state_dict()
    tensors["blocks.1.linear1.weight"][3, 4] = 7e4
    make.save(folder / "large", tensors, make.config())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_weight_beyond_fp16_is_refused_by_the_narrow_tiers(precision, here, call) -> None:
    write_large_weight(here)
    before = listing(here)
    message = check_refusal(*call("large", *FAST, "--precision", precision))
    assert "blocks.1.linear1.weight reaches 7e+04" in message and "fp32 or mixed" in message
    assert listing(here) == before


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_a_weight_beyond_fp16_is_a_warning_in_the_wide_tiers(quick, precision, here, call) -> None:
    """The bundle is written whatever the verdict says of such a model."""
    write_large_weight(here)
    code, out, err = call("large", *FAST, "--precision", precision, "--allow-mismatch")
    assert code in (0, 1) and "error:" not in err
    assert "warning: blocks.1.linear1.weight reaches 7e+04, beyond the fp16 range" in out
    stored = json.loads((here / "large.cheri" / "report.json").read_text(encoding="utf-8"))
    assert any("beyond the fp16 range" in w for w in stored["export"]["warnings"])


def test_a_stream_beyond_fp16_fails_the_verdict_and_not_the_program(quick, here, call) -> None:
    """Every weight fits, but the sums do not: the 16-bit file gives NaN, and the report says so."""
    tensors = make.state_dict()
    tensors["iconv.weight"] = tensors["iconv.weight"].abs() * 1e5
    assert tensors["iconv.weight"].max() < 65504
    make.save(here / "loud", tensors, make.config())
    code, out, err = call("loud", *FAST, "--precision", "fp16", "--json")
    assert code == 1, err
    document = json.loads(out)
    jsonschema.validate(document, report.schema())
    assert document["verdict"]["passed"] is False
    assert any("NaN or infinite" in f for f in document["verdict"]["failures"])
    assert listing(here)[:1] == ["loud"] and (here / "loud.cheri.failed").is_dir()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_out_that_cannot_be_written_is_refused(
    quick, number: int, here: Path, call, monkeypatch
) -> None:
    """Root may write anywhere, so the refusal of the system is simulated."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(bundle.tempfile, "mkdtemp", refuse)
    message = check_refusal(*call("m.torch", *FAST))
    assert os.strerror(number) in message and "-o" in message
    assert listing(here) == ["m.torch"]


def full_device_for(name: str, monkeypatch) -> None:
    """Writing `name` in the staged folder gives a real ENOSPC."""
    if name == "weights.safetensors":
        from cheri_export.checkpoint import weights_file

        def on_full(**options):
            full = os.open("/dev/full", os.O_WRONLY)
            return full, os.path.join(options["dir"], "never")

        # Only there: bundle uses mkdtemp of the same module.
        fake = type("tempfile", (), {"mkstemp": staticmethod(on_full)})
        monkeypatch.setattr(weights_file, "tempfile", fake)
        return
    real = bundle.tempfile.mkdtemp

    def prepared(*args, **options):
        folder = real(*args, **options)
        os.symlink("/dev/full", os.path.join(folder, name))
        return folder

    monkeypatch.setattr(bundle.tempfile, "mkdtemp", prepared)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_leaves_no_trace(
    quick, name: str, old: bool, here: Path, call, monkeypatch
) -> None:
    if old:
        (here / "m.cheri").mkdir()
        (here / "m.cheri" / "report.json").write_text('{"tool": {"name": "cheri-export"}}')
    before = listing(here)
    full_device_for(name, monkeypatch)
    message = check_refusal(*call("m.torch", *FAST))
    assert "disk is full" in message or "No space left" in message
    assert listing(here) == before


@pytest.mark.slow
def test_a_real_write_failure_in_its_own_process(here: Path) -> None:
    """The system's limit on a file's size ends the write of model.onnx half-way."""
    import resource

    done = subprocess.run(
        [*COMMAND, "m.torch", *FAST],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    message = check_refusal(done.returncode, done.stdout, done.stderr)
    assert "File too large" in message
    assert listing(here) == ["m.torch"]


@pytest.mark.parametrize(
    "arguments", [("missing",), pytest.param(("m.torch", "--batch", "0"), marks=pytest.mark.slow)]
)
def test_bad_input_in_its_own_process(arguments, here: Path) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    check_refusal(done.returncode, done.stdout, done.stderr)
    assert listing(here) == ["m.torch"]


def test_error_text_from_a_file_cannot_break_the_line(here: Path, call) -> None:
    name = "a\nb\x1b[31m.torch"
    (here / name).write_bytes(b"")
    message = check_refusal(*call(name))
    assert "\x1b" not in message
    assert listing(here) == sorted([name, "m.torch"])


# The verdict.


def sabotage(monkeypatch, amount: float = 0.01) -> None:
    """Export a file whose profile bias is off by `amount`."""
    real = pipeline.export_onnx

    def wrong(*args, **options):
        model = real(*args, **options)
        (bias,) = (i for i in model.graph.initializer if i.name == "fconv.bias")
        shifted = numpy_helper.to_array(bias) + np.float32(amount)
        bias.CopyFrom(numpy_helper.from_array(shifted, bias.name))
        return model

    monkeypatch.setattr(pipeline, "export_onnx", wrong)


def test_a_failed_verdict_writes_the_reports_only_and_exits_with_1(
    quick, here, call, monkeypatch
) -> None:
    sabotage(monkeypatch)
    code, out, err = call("m.torch", *FAST)
    assert code == 1 and out.startswith("FAILED  The exported model does NOT match")
    failures = [line for line in err.splitlines() if not PROGRESS.fullmatch(line)]
    assert failures and all(f.startswith("cheri-export: onnxruntime-cpu, ") for f in failures)
    assert listing(here) == [
        "m.cheri.failed",
        "m.cheri.failed/report.html",
        "m.cheri.failed/report.json",
        "m.torch",
    ]
    document = json.loads((here / "m.cheri.failed" / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, report.schema())
    assert document["verdict"]["passed"] is False and document["verdict"]["failures"]
    for case in document["accuracy"]["cases"]:
        for run in case["runs"]:
            profile = run["outputs"][PROFILE_LOGITS]
            assert profile["passed"] == (run["runner"] == "torch-fp32")
            if run["runner"] == "onnxruntime-cpu":
                assert profile["max_abs"] == pytest.approx(0.01, rel=1e-2)
    # A later good run takes the contradiction away; a later bad one replaces it.
    assert call("m.torch", *FAST)[0] == 1
    sabotage(monkeypatch, -0.01)
    assert call("m.torch", *FAST, "-q")[0] == 0
    assert listing(here) == ["m.cheri", *(f"m.cheri/{f}" for f in FILES), "m.torch"]


def test_a_failed_verdict_keeps_an_earlier_good_bundle(
    quick, here: Path, call, monkeypatch
) -> None:
    assert call("m.torch", *FAST, "-q")[0] == 0
    before = (here / "m.cheri" / "model.onnx").read_bytes()
    sabotage(monkeypatch)
    assert call("m.torch", *FAST, "-q")[0] == 1
    assert (here / "m.cheri" / "model.onnx").read_bytes() == before
    check_bundle(here / "m.cheri")
    assert (here / "m.cheri.failed" / "report.json").is_file()


def test_a_folder_of_the_users_named_failed_is_kept(quick, here: Path, call, monkeypatch) -> None:
    sabotage(monkeypatch)
    (here / "m.cheri.failed").mkdir()
    (here / "m.cheri.failed" / "thesis.txt").write_text("precious")
    code, _, err = call("m.torch", *FAST)
    assert code == 2 and "m.cheri.failed exists" in err
    assert listing(here) == ["m.cheri.failed", "m.cheri.failed/thesis.txt", "m.torch"]


def test_allow_mismatch_writes_the_bundle_and_still_exits_with_1(here, call, monkeypatch) -> None:
    sabotage(monkeypatch)
    code, out, err = call("m.torch", *FAST, "--allow-mismatch", "--json")
    assert code == 1 and "exceeds" in err
    assert listing(here) == ["m.cheri", *(f"m.cheri/{f}" for f in FILES), "m.torch"]
    document = json.loads(out)
    jsonschema.validate(document, report.schema())
    assert document["verdict"]["allow_mismatch"] is True
    assert document["verdict"]["passed"] is False
    page = (here / "m.cheri" / "report.html").read_text(encoding="utf-8")
    assert "NOT match" in page


def test_a_file_that_gives_nan_fails_and_the_report_is_valid(
    quick, here, call, monkeypatch
) -> None:
    sabotage(monkeypatch, float("nan"))
    code, out, _ = call("m.torch", *FAST, "--json")
    assert code == 1
    document = json.loads(out)
    jsonschema.validate(document, report.schema())
    assert "NaN" in document["verdict"]["headline"]
    assert all("NaN or infinite" in f for f in document["verdict"]["failures"])


# Ctrl-C and SIGTERM.


STAGES = {
    "read": (pipeline, "read_checkpoint"),
    "cases": (pipeline.check, "make_cases"),
    "export": (pipeline, "export_onnx"),
    "save": (pipeline, "save_onnx"),
    "weights": (pipeline, "write_weights"),
    "reference": (pipeline.check, "run_references"),
    "torch": (pipeline.check, "run_torch"),
    "onnxruntime": (pipeline.check, "run_onnxruntime"),
    "report": (pipeline.report, "render_html"),
    "move": (pipeline.bundle, "commit"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt, 130), (signal.SIGINT, 130), (signal.SIGTERM, 143), (MemoryError, 2)],
)
def test_stopped_at_any_stage_nothing_is_left(
    quick, stage, error, code, here, call, monkeypatch
) -> None:
    where, name = STAGES[stage]

    def stop(*_, **__):
        if isinstance(error, signal.Signals):
            signal.raise_signal(error)
            time.sleep(10)  # the handler raises before this
        raise error

    monkeypatch.setattr(where, name, stop)
    check_refusal(*call("m.torch", *FAST), expected=code)
    assert listing(here) == ["m.torch"]


def test_a_signal_that_a_library_turns_into_an_import_error(here, call, monkeypatch) -> None:
    """onnxruntime does while it is being imported; the user pressed Ctrl-C all the same."""
    from cheri_export.errors import EnvironmentProblem

    def stop(*_, **__):
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise EnvironmentProblem("onnxruntime is not installed") from error

    monkeypatch.setattr(pipeline.check, "require_onnxruntime", stop)
    message = check_refusal(*call("m.torch", *FAST), expected=130)
    assert "interrupted" in message
    assert listing(here) == ["m.torch"]


def test_a_signal_that_python_drops_ends_the_command_after_the_step(
    here, call, monkeypatch
) -> None:
    """What is raised in a callback of the import system, or in __del__, goes nowhere."""

    class Dropped:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    real = pipeline.check.make_cases

    def drop(*arguments):
        del [Dropped()][0]
        return real(*arguments)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(pipeline.check, "make_cases", drop)
    code, out, err = call("m.torch", *FAST)
    assert code == 130 and out == "" and "exporting" not in err
    assert err.splitlines()[-1].startswith("cheri-export: error: interrupted")
    assert listing(here) == ["m.torch"]


def stop_at(line: str, number: int) -> subprocess.CompletedProcess:
    """Start the command, wait for the progress line that begins with `line`, send the signal."""
    process = subprocess.Popen(
        [*COMMAND, "m.torch", *FAST],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen = []
    for text in process.stderr:
        seen.append(text)
        if text.startswith(line):
            time.sleep(0.05)
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess([], process.returncode, out, "".join(seen) + err)


MOMENTS = [
    pytest.param("loading", marks=pytest.mark.slow),
    pytest.param("reading", marks=pytest.mark.slow),
    "exporting",
    pytest.param("computing", marks=pytest.mark.slow),
    pytest.param("running torch", marks=pytest.mark.slow),
    pytest.param("running the file", marks=pytest.mark.slow),
    pytest.param("writing", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("line", MOMENTS)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_command_and_nothing_is_left(line, number, code, here: Path) -> None:
    done = stop_at(line, number)
    check_refusal(done.returncode, done.stdout, done.stderr, expected=code)
    assert listing(here) == ["m.torch"]


def test_a_reader_that_leaves_early_is_no_error(here: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "info", "m.torch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 0 and err == ""
