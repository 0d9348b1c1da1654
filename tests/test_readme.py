"""What README.md, examples/ and .ci/run say is run here, word for word."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyBigWig
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "example_9x128.torch"


def command_after(marker):
    found = re.search(rf"<!-- {marker} -->\n```bash\n(.*?)\n```", README, re.DOTALL)
    assert found, f"README.md has no {marker}"
    return found.group(1)


def run(command, cwd, **extra):
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"], **extra}
    done = subprocess.run(
        command, cwd=cwd, env=environment, shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def workplace(tmp_path):
    """The files that the README's examples name."""
    shutil.copy(EXAMPLE, tmp_path / "model.torch")
    shutil.copy(ROOT / "tests/data/stranded2_ctl2_5x48.torch", tmp_path / "stranded.torch")
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "examples")
    generator = np.random.default_rng(5)
    starts = (100, 4000)
    with (tmp_path / "peaks.fa").open("w") as file:
        for start in starts:
            letters = "".join(generator.choice(list("ACGTN"), 1200))
            file.write(f">chr1:{start}-{start + 1200}\n{letters}\n")
    for name in ("plus.bw", "minus.bw"):
        with pyBigWig.open(str(tmp_path / name), "w") as track:
            track.addHeader([("chr1", 10000)])
            track.addEntries(
                "chr1", 50, values=generator.poisson(1.0, 6000).astype(float), span=1, step=1
            )
    return tmp_path


def test_ci_runs_the_readmes_test_command_word_for_word():
    assert command_after("test command") in (ROOT / ".ci/run").read_text().splitlines()


def test_common_uses_run(workplace):
    block = re.search(r"## Common uses\n\n```bash\n(.*?)\n```", README, re.DOTALL).group(1)
    commands = [line.split("#")[0].strip() for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        run(command, workplace)
    assert (workplace / "out.cheri/model.onnx").is_file()
    assert (workplace / "stranded.cheri/model.onnx").is_file()


def test_python_in_the_readme_runs(workplace):
    blocks = re.findall(r"```python\n(.*?)\n```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        (workplace / "block.py").write_text(block)
        assert "True" in run("python block.py", workplace)


def test_examples_run(workplace):
    out = run(f"python {ROOT}/examples/python_api.py model.torch api.cheri", workplace)
    assert "passed: True" in out
    difference = re.search(r"largest difference from torch: (\S+)", out)
    assert float(difference.group(1)) < 2e-4  # two honest float32 runs, each within 1e-4
    out = run(f"python {ROOT}/examples/plain_onnxruntime.py api.cheri", workplace)
    assert re.search(r"group 0: \d+\.\d reads", out)


def test_own_module_exports_with_the_translation_table(workplace):
    out = run(f"python {ROOT}/examples/own_module.py own.onnx", workplace)
    assert float(re.search(r"profile difference (\S+)", out).group(1)) < 2e-4
    assert "weights: 66" in out, out  # two folds of 33: equal tensors keep their own initializers


@pytest.mark.slow
def test_train_tiny_learns_and_exports(workplace):
    out = run(f"python {ROOT}/examples/train_tiny.py tiny --steps 60", workplace)
    first, last = map(float, re.search(r"loss (\S+) -> (\S+);", out).groups())
    assert last < first
    assert "matches the exact calculation" in out
    assert (workplace / "tiny.cheri/model.onnx").is_file()


@pytest.mark.slow
def test_main_command_works_in_a_fresh_clone(tmp_path):
    """Installs everything anew, as a newcomer's machine would."""
    clone = tmp_path / "clone"
    kept = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, kept.split("\0")):
        source = ROOT / name
        if source.exists():
            target = clone / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target, follow_symlinks=False)
    out = run(command_after("main command"), clone)
    assert out.startswith("PASSED")
    assert (clone / "examples/example_9x128.cheri/report.html").is_file()
