"""What a hostile or unlucky user met once: it stays mended."""

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from cheri_export import cli, pipeline
from cheri_export.onnx_model import function_body

FAST = ("--length", "160", "--batch", "2")


@pytest.fixture
def here(tmp_path, monkeypatch, data_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.torch").write_bytes((data_dir / "small_4x32_trained.torch").read_bytes())
    return tmp_path


def call(*arguments):
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    return left.value.code


def test_a_model_that_float32_cannot_hold_fails_instead_of_raising_its_own_limit(here, capsys):
    """The variance overflows in float32; three times that failure must not become the limit."""
    saved = torch.load("m.torch", weights_only=True)
    for name, weight in saved["state_dict"].items():
        if name == "blocks.0.conv_weight":
            weight *= 1e20
        elif "linear2" in name:
            weight *= 30
    torch.save(saved, "wide.torch")
    assert call("wide.torch", *FAST) == 1
    assert "float32 does not hold this model" in capsys.readouterr().err
    assert (here / "wide.cheri.failed").is_dir() and not (here / "wide.cheri").exists()


def test_a_dilation_far_beyond_the_sequence_costs_no_memory():
    """2**40 zeros could not be padded; the result is that of any dilation >= L."""
    generator = np.random.default_rng(0)
    shapes = {"X": (1, 9, 4), "conv_weight": (3, 4), "w1": (8, 4), "w2": (4, 8)}
    feed = {n: generator.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    found = []
    for dilation in (9, 2**40):
        node = onnx.helper.make_node(
            "CheriBlock", list(shapes), ["Y"], domain="trt.plugins", dilation=dilation,
            residual_scale=0.5, epsilon=1e-3, math="fp32",
        )  # fmt: skip
        kind = onnx.TensorProto.FLOAT
        graph = onnx.helper.make_graph(
            [node], "one",
            [onnx.helper.make_tensor_value_info(n, kind, s) for n, s in shapes.items()],
            [onnx.helper.make_tensor_value_info("Y", kind, shapes["X"])],
        )  # fmt: skip
        imports = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("trt.plugins", 1)]
        model = onnx.helper.make_model(
            graph, functions=[function_body("CheriBlock", 20)], opset_imports=imports, ir_version=10
        )
        session = onnxruntime.InferenceSession(model.SerializeToString())
        found.append(session.run(None, feed)[0])
    np.testing.assert_array_equal(found[0], found[1])


def test_the_processes_torch_settings_do_not_matter_and_stay(here):
    options = pipeline.ExportOptions(length=160, batch=2)
    plain = pipeline.export("m.torch", here / "a.cheri", options)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            odd = pipeline.export("m.torch", here / "b.cheri", options)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert plain.passed and odd.passed
    assert plain.report["export"]["sha256"] == odd.report["export"]["sha256"]
    assert plain.report["accuracy"]["cases"] == odd.report["accuracy"]["cases"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("",),
        (".",),
        ("/",),
        ("-x",),
        ("m.torch", "-o", "a" * 300 + "/x"),
        ("m.torch", "-o", "loop"),
        ("m.torch", "--length", "1" + "0" * 19),
        ("m.torch", "--batch", "1" + "0" * 19),
        ("m.torch", "--seed", "-1"),
        ("m.torch", "--check-sequences", "b" * 300),
        ("m.torch", "--check-sequences", "empty.fa"),
        ("m.torch", "--source", "\udcff"),
        ("m.torch", "-o", "deep"),
    ],
    ids=lambda arguments: " ".join(arguments)[:40].encode("ascii", "replace").decode(),
)
def test_each_is_one_line_and_exit_2(here, capsys, arguments):
    (here / "loop").symlink_to("loop")
    (here / "empty.fa").write_text(">")
    (here / "deep").mkdir()
    (here / "deep" / "report.json").write_text("[" * 200000)
    before = sorted(p.name for p in here.iterdir())
    assert call(*arguments, "-q") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("cheri-export: error: "), lines
    assert sorted(p.name for p in here.iterdir()) == before


def test_the_letters_of_a_fasta_file_are_refused_with_its_name(here, capsys):
    (here / "odd.fa").write_text(">a\n" + "ACGT1" * 40 + "\n")
    assert call("m.torch", *FAST, "--check-sequences", "odd.fa", "-q") == 2
    assert "odd.fa" in capsys.readouterr().err


def test_closed_and_full_streams_do_not_change_what_is_written(here):
    """Stderr closed: the work is done all the same. Stdout full: said, exit 2, bundle complete."""
    command = f"{sys.executable} -m cheri_export m.torch {' '.join(FAST)}"
    done = subprocess.run(f"{command} -o a.cheri 2>&-", shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("PASSED")
    done = subprocess.run(
        f"{command} -o b.cheri -q --json >/dev/full", shell=True, capture_output=True, text=True
    )
    assert done.returncode == 2 and "b.cheri is complete" in done.stderr
    assert (here / "b.cheri" / "model.onnx").is_file()
