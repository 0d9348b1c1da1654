"""Imports go downwards only, light commands stay light, tolerances live in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cheri_export

ROOT = Path(cheri_export.__file__).parent

LAYERS = (
    {"errors"},
    {"spec"},
    {"tolerance"},
    # Side by side: none of these may import another.
    {"sequences", "controls", "reference", "strict", "checkpoint", "kernels", "progress", "bundle"},
    {"ops"},
    {"modules"},
    {"onnx_model", "attribution"},
    {"accuracy", "check", "describe", "ranges", "report"},
    {"loading", "pipeline"},
    {"cli"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SAME_LEVEL = {("check", "accuracy"), ("kernels", "kernels")}
"""`check` fills in the cases that `accuracy` defines."""


def top(path: Path) -> str:
    """The layer unit that a file belongs to."""
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def imports_of(tree: ast.AST) -> set[str]:
    """Units of this package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            names = [node.module or ""]
            if node.module == "cheri_export":
                names = [f"cheri_export.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "cheri_export" and len(parts) > 1:
                found.add(parts[1])
    return found


SOURCES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]


def test_every_unit_has_a_layer() -> None:
    assert {top(path) for path in SOURCES} == set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_a_layer_imports_lower_ones_only(path: Path) -> None:
    here = top(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for other in imports_of(tree) - {here, "__version__"}:
        assert other in LEVEL, f"{here} imports {other}, which no layer names"
        below = LEVEL[other] < LEVEL[here] or (here, other) in SAME_LEVEL
        assert below, f"{path.name}: {here} (layer {LEVEL[here]}) imports {other} ({LEVEL[other]})"


def test_the_direction_check_can_fail() -> None:
    assert imports_of(ast.parse("from cheri_export.cli import main")) == {"cli"}
    assert imports_of(ast.parse("def f():\n    import cheri_export.pipeline")) == {"pipeline"}
    assert imports_of(ast.parse("from cheri_export import check, ops")) == {"check", "ops"}
    assert LEVEL["cli"] > LEVEL["pipeline"] > LEVEL["check"] > LEVEL["ops"] > LEVEL["errors"]


def test_the_judge_knows_nothing_of_what_it_judges() -> None:
    tree = ast.parse((ROOT / "reference.py").read_text(encoding="utf-8"))
    assert imports_of(tree) == {"spec"}


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_no_file_but_tolerance_states_one(path: Path) -> None:
    if path.name == "tolerance.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.keyword):
            names = [node.arg or ""]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        for name in names:
            plain = name.lower().strip("_")
            assert plain not in ("atol", "rtol", "tol", "abs_tol", "rel_tol"), (path.name, name)
            assert plain not in ("allclose", "isclose", "assert_close"), (path.name, name)


HEAVY = ("torch", "onnx", "onnxruntime", "onnxscript", "onnx_ir", "matplotlib", "numpy", "triton")


def loaded_after(code: str) -> set[str]:
    """Heavy modules that a fresh interpreter holds after running `code`."""
    report = f"\nimport sys; print('\\nLOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import cheri_export") == set()
    assert loaded_after("import cheri_export; dir(cheri_export)") == set()


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_loads_nothing_heavy(argument: str) -> None:
    code = (
        "from cheri_export.cli import main\n"
        "try:\n"
        f"    main([{argument!r}])\n"
        "except SystemExit as left:\n"
        "    assert left.code == 0\n"
    )
    assert loaded_after(code) == set()


def test_the_measure_of_heaviness_can_fail() -> None:
    assert loaded_after("import numpy") == {"numpy"}


def test_info_needs_no_exporter() -> None:
    """Reading a checkpoint takes torch, not onnx, ONNX Runtime or matplotlib."""
    path = str(ROOT.parent / "tests" / "data" / "small_4x32_init.torch")
    code = (
        "from cheri_export.cli import main\n"
        "try:\n"
        f"    main(['info', {path!r}])\n"
        "except SystemExit as left:\n"
        "    assert left.code == 0\n"
    )
    assert not loaded_after(code) & {"onnx", "onnxruntime", "onnxscript", "matplotlib"}


def test_every_public_name_exists_and_is_documented() -> None:
    for name in cheri_export.__all__:
        value = getattr(cheri_export, name)
        assert name == "__version__" or value.__doc__, name
    assert dir(cheri_export) == sorted(cheri_export.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cheri_export.nothing
