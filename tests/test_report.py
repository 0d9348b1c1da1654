"""The report: schema, JSON, page, figures and the documentation of its fields."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import matplotlib
import numpy as np
import pytest

from cheri_export import report
from cheri_export.report import html, plots
from cheri_export.report.facts import load_snippet
from cheri_export.spec import ModelSpec

RUNNERS = ("torch-fp32", "onnxruntime-cpu")
VOID = {"meta", "link", "br", "img", "hr", "input"}


def judged(max_abs: float, limit: float, index: list[int]) -> dict[str, Any]:
    return {
        "max_abs": max_abs,
        "rms": max_abs / 5,
        "mean_abs": max_abs / 7,
        "worst_index": index,
        "worst_reference": -1.25,
        "worst_value": -1.25 + max_abs,
        "limit": limit,
        "rule": "figure",
        "figure": limit,
        "scaled": limit,
        "floor": limit / 4,
        "ratio": max_abs / limit,
        "nonfinite": 0,
        "passed": max_abs <= limit,
    }


def make(groups: tuple[int, ...] = (1,), tracks: int = 0) -> tuple[dict, report.ReportArrays]:
    """A report as a run on the default model gives it."""
    spec = ModelSpec(
        128, 256, 9, sum(groups), len(groups), groups, tracks, 21, 75, 557, name="cherimoya.128.9"
    )
    cases = [
        {
            "id": f"random {batch} x 2114",
            "kind": "random",
            "length": 2114,
            "batch": batch,
            "seed": 0,
            "file": None,
            "controls": "random" if tracks else None,
            "output_std": {"profile_logits": 1.83, "log_counts": 0.0},
            "floors": {"profile_logits": 3.8e-5, "log_counts": 3.1e-7},
            "runs": [
                {
                    "runner": runner,
                    "outputs": {
                        "profile_logits": judged(3.9e-5, 1e-4, [0, 0, 17]),
                        "log_counts": judged(4e-7, 5e-6, [0, 0]),
                    },
                    "nonfinite": 0,
                }
                for runner in RUNNERS
            ],
        }
        for batch in (1, 4)
    ]
    tensor = {"dtype": "float32", "meaning": "numbers"}
    document = {
        "schema_version": 1,
        "tool": {"name": "cheri-export", "version": "0.1.0"},
        "created": "2026-01-02T03:04:05+00:00",
        "command": ["cheri-export", "export", "model.torch"],
        "verdict": {
            "passed": True,
            "headline": "The exported model matches the exact calculation: the largest profile "
            "error is 3.9e-05 logits, 0.39 of what the fp32 tier allows.",
            "allow_mismatch": False,
            "failures": [],
        },
        "checkpoint": {
            "path": "model.torch",
            "sha256": "a" * 64,
            "bytes": 2469240,
            "release": "0.2.0 to 0.3.1",
            "release_reason": "kernels 21 and 75",
            "config": {"n_filters": 128, "signal_groups": list(groups), "verbose": False},
            "warnings": [],
            "n_parameters": 613890,
            "source": None,
            "license": "CC-BY-4.0",
        },
        "model": {
            **spec.to_dict(),
            "receptive_field": spec.receptive_field,
            "min_length": spec.min_length,
            "inputs": [{"name": "sequence", "shape": ["N", 4, "L"], **tensor}],
            "outputs": [
                {"name": "profile_logits", "shape": ["N", sum(groups), "L - 1114"], **tensor},
                {"name": "log_counts", "shape": ["N", len(groups)], **tensor},
            ],
        },
        "export": {
            "precision": "fp32",
            "opset": 20,
            "ir_version": 10,
            "file": "model.onnx",
            "sha256": "b" * 64,
            "bytes": 2465737,
            "node_counts": {"CheriStem": 1, "CheriBlock": 9, "CheriHead": 1},
            "initializers": 33,
            "torch_exporter": "torch.onnx.export(dynamo=True)",
            "warnings": [],
        },
        "weights": {"file": "weights.safetensors", "sha256": "c" * 64, "bytes": 2460424},
        "accuracy": {
            "judge": "float64 reference from the checkpoint's tensors",
            "cases": cases,
            "runners": {
                "torch-fp32": {"settings": {"float32_matmul_precision": "highest"}},
                "onnxruntime-cpu": {
                    "version": "1.22.0",
                    "providers": ["CPUExecutionProvider"],
                    "settings": {"intra_op_threads": "default"},
                },
            },
            "tolerances": [
                {"tier": "fp32", "output": "log_counts", "figure": 5e-6, "reason": "measured"}
            ],
        },
        "environment": {
            "python": "3.12.1",
            "platform": "Linux-6.1-x86_64",
            "cpu": "A processor",
            "cores": 2,
            "packages": {"torch": "2.9.0"},
        },
        "timings_s": {"read": 0.25, "export": 9.0},
    }
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(sum(groups), 1000))
    errors = {
        runner: {
            "profile_logits": np.abs(rng.normal(size=5000)) * 1e-5,
            "log_counts": np.abs(rng.normal(size=5 * len(groups))) * 1e-7,
        }
        for runner in RUNNERS
    }
    arrays = report.ReportArrays(
        reference,
        reference + 1e-5,
        np.full(len(groups), 5.0),
        np.full(len(groups), 5.0),
        "random 4 x 2114",
        2,
        groups,
        errors,
    )
    return document, arrays


class Balance(HTMLParser):
    """Checks that tags nest, and gathers ids, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.note(tag, attrs)

    def note(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.text += data


def parse(page: str) -> Balance:
    """Parse a page and check what holds for every page."""
    found = Balance()
    found.feed(page)
    found.close()
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    tags = {tag for tag, _, _ in found.attributes}
    assert tags.isdisjoint({"script", "iframe", "object", "embed", "form", "base"})
    for tag, name, value in found.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:")), (tag, name, value)
        elif "://" in value:
            assert name.startswith("xmlns"), (tag, name, value)
            assert value.startswith("http://www.w3.org/"), value
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    return found


def test_a_real_report_fits_the_schema():
    """The example holds every field, and the schema itself is valid."""
    jsonschema.Draft202012Validator.check_schema(report.schema())
    document, _ = make((1, 2), tracks=2)
    report.validate(document)
    report.validate(json.loads(report.to_json(document)))


MUTATIONS: list[tuple[str, Any]] = [
    ("schema_version", 2),
    ("tool.name", "other"),
    ("created", "yesterday"),
    ("created", "2026-01-02T03:04:05"),
    ("verdict.passed", "yes"),
    ("verdict.extra", 1),
    ("checkpoint.sha256", "abc"),
    ("checkpoint.bytes", -1),
    ("model.n_filters", 0),
    ("model.signal_groups", [0]),
    ("model.inputs", []),
    ("export.precision", "int8"),
    ("export.file", "other.onnx"),
    ("export.node_counts", {"CheriStem": "one"}),
    ("accuracy.cases", []),
    ("accuracy.cases.0.kind", "real"),
    ("accuracy.cases.0.runs.0.outputs.profile_logits.rule", "because"),
    ("accuracy.cases.0.runs.0.outputs.profile_logits.limit", None),
    ("accuracy.cases.0.runs.0.outputs.profile_logits.worst_index", [1.5, 0]),
    ("accuracy.cases.0.runs.0.outputs.profile_logits.max_abs", "NaN"),
    ("accuracy.runners", {}),
    ("environment.cores", 0),
    ("timings_s.read", -1.0),
    ("unknown", 1),
]


@pytest.mark.parametrize(("path", "value"), MUTATIONS)
def test_the_schema_rejects(path: str, value: Any):
    """One wrong field is enough."""
    document, _ = make()
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    target: Any = document
    for key in parents:
        target = target[key]
    target[last] = value
    with pytest.raises(jsonschema.ValidationError):
        report.validate(document)


def test_every_field_is_required_but_the_optional_ones():
    """Removing any one key breaks the report, save for free-form sections and three options."""
    optional = {"reference_settings", "version", "providers"}
    free = {"config", "settings", "packages", "timings_s", "node_counts", "runners"}

    def paths(node: Any, path: tuple) -> list[tuple]:
        if isinstance(node, list):
            return [p for i, item in enumerate(node[:1]) for p in paths(item, (*path, i))]
        if not isinstance(node, dict) or (path[-1:] and path[-1] in free):
            return []
        return [p for k in node for p in [(*path, k), *paths(node[k], (*path, k))]]

    document, _ = make()
    found = paths(document, ())
    assert len(found) > 90
    for *parents, last in found:
        if last in optional:
            continue
        broken = copy.deepcopy(document)
        target: Any = broken
        for key in parents:
            target = target[key]
        del target[last]
        with pytest.raises(jsonschema.ValidationError):
            report.validate(broken)


def test_every_field_is_described():
    """A property without a description would be a field that nobody explains."""
    for path, node in fields(report.schema()):
        assert node.get("description", "").endswith("."), path


def test_json_is_strict_and_names_the_bad_field():
    """NaN and infinity never reach the file."""
    document, _ = make()
    document["accuracy"]["cases"][1]["output_std"]["log_counts"] = float("nan")
    with pytest.raises(ValueError, match=r"report\.accuracy\.cases\[1\]\.output_std\.log_counts"):
        report.to_json(document)
    clean, nonfinite = report.sanitise(document)
    assert nonfinite == 1
    assert json.loads(report.to_json(clean))["accuracy"]["cases"][1]["output_std"] == {
        "profile_logits": 1.83,
        "log_counts": None,
    }
    report.validate(clean)


def test_sanitise_turns_numpy_into_plain_types():
    """Arrays become lists, scalars become Python's, and every lost number is counted."""
    given = {"a": np.array([[1.0, np.nan]]), 2: (np.float32("inf"), np.int64(3), True), "b": None}
    clean, nonfinite = report.sanitise(given)
    assert clean == {"a": [[1.0, None]], "2": [None, 3, True], "b": None}
    assert nonfinite == 2
    assert type(clean["2"][1]) is int


def test_text_that_is_no_utf8_can_still_be_written():
    """Such file names arrive with lone surrogates."""
    document, arrays = make()
    document["checkpoint"]["path"] = "m\udcff.torch"
    report.to_json(document).encode("utf-8")
    report.render_html(document, arrays).encode("utf-8")


def test_the_page_of_a_good_export():
    """Verdict first, then the figures, the table, the limits of the verdict and the code."""
    document, arrays = make()
    page = report.render_html(document, arrays)
    found = parse(page)
    assert page.startswith("<!DOCTYPE html>")
    assert '<html lang="en">' in page
    for text in (
        "✓ Passed",
        document["verdict"]["headline"],
        "No GPU engine was run",
        "Random sequences were used, not your data",
        "ort.InferenceSession",
        "5,000 profile logits",
        "CC-BY-4.0",
        "float32_matmul_precision",
        "expected reads per base",
    ):
        assert text in found.text, text
    assert found.text.index("✓ Passed") < found.text.index("What was compared")
    assert page.count('role="img"') == 4
    labels = [v for tag, name, v in found.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == 4
    assert all(len(label) > 40 for label in labels)
    assert "FAIL" not in found.text
    assert len(page) < 400_000


def test_the_page_of_a_bad_export():
    """Nothing on it can be taken for success, and no code loads a file that was not kept."""
    document, arrays = make()
    for case in document["accuracy"]["cases"]:
        case["runs"][1]["outputs"]["profile_logits"] = judged(2e-3, 1e-4, [0, 0, 1])
    document["verdict"].update(
        passed=False, headline="Not good.", failures=["it is <too> far"] * 15
    )
    found = parse(report.render_html(document, arrays))
    for text in (
        "✗ Failed",
        "Not good.",
        "it is <too> far",
        "and 3 more",
        "No model file was kept",
    ):
        assert text in found.text
    assert "20 times the limit" in found.text
    assert "✓ Passed" not in found.text
    assert "InferenceSession" not in found.text
    document["verdict"]["allow_mismatch"] = True
    found = parse(report.render_html(document, arrays))
    assert "because --allow-mismatch was given" in found.text
    assert "InferenceSession" in found.text


@pytest.mark.parametrize("everything", [False, True])
def test_the_page_of_an_export_with_nan(everything: bool):
    """Some or all values are NaN: the page says so and still draws what there is."""
    document, arrays = make((1, 2))
    profile, counts = arrays.predicted_profile.copy(), arrays.predicted_log_counts.copy()
    profile[0, 10:20] = np.nan
    profile[1, 5] = np.inf
    errors = copy.deepcopy(arrays.errors)
    errors["onnxruntime-cpu"]["profile_logits"][:11] = np.nan
    if everything:
        profile[:] = counts[:] = np.nan
        for values in errors["onnxruntime-cpu"].values():
            values[:] = np.nan
    arrays = dataclasses.replace(
        arrays, predicted_profile=profile, predicted_log_counts=counts, errors=errors
    )
    for case in document["accuracy"]["cases"]:
        row = case["runs"][1]["outputs"]["profile_logits"]
        row.update(max_abs=float("inf"), ratio=float("nan"), passed=False, nonfinite=11)
        case["runs"][1]["nonfinite"] = 11
    document["verdict"].update(passed=False, failures=["11 values are NaN or infinite"])
    with np.errstate(all="raise", under="ignore"):
        found = parse(report.render_html(document, arrays))
    assert "✗ 11 values are NaN or infinite" in found.text
    assert "not finite" in found.text
    missing = "3,000 positions" if everything else "11 positions"
    assert f"{missing} have no finite value" in found.text
    assert ("probability per base" in found.text) is everything


def test_the_page_of_a_model_with_groups_controls_and_user_sequences():
    """Groups get their own axes, controls their input, sequences of the user their sentence."""
    document, arrays = make((1, 2), tracks=2)
    found = parse(report.render_html(document, arrays))
    assert "signal group 2, channel 2 of 2" in found.text
    assert "Control tracks were random, not your data" in found.text
    assert "control = np.zeros((1, 2, len(dna))" in found.text
    document["accuracy"]["cases"][1].update(
        kind="fasta", file="peaks.fa", seed=None, controls="p.bw+m.bw"
    )
    document["accuracy"]["runners"]["tensorrt"] = {"settings": {}}
    found = parse(report.render_html(document, arrays))
    assert "4 sequences of yours, from peaks.fa" in found.text
    assert "controls: p.bw+m.bw" in found.text
    assert "No GPU engine" not in found.text
    assert "not your data" not in found.text


def test_a_model_without_stored_groups_or_name():
    """A bare state dict says neither; a model in memory has no file."""
    document, arrays = make((1, 1))
    document["model"].update(signal_groups=None, name="", n_count_outputs=1)
    document["checkpoint"].update(path=None, sha256=None, bytes=None, config={})
    document["timings_s"] = {}
    document["command"] = []
    report.validate(document)
    arrays = dataclasses.replace(
        arrays, reference_log_counts=np.array([5.0]), predicted_log_counts=np.array([5.0])
    )
    found = parse(report.render_html(document, arrays))
    assert "probability per base" in found.text
    assert "model in memory" in found.text
    assert "called from Python" in found.text
    assert "expm1" not in found.text


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "{{ 7*7 }}", "$x_1$ & </svg>"]
)
def test_hostile_names_are_text(name: str):
    """Whatever a file, a runner or a case is called, it stays text, in figures too."""
    document, arrays = make()
    document["checkpoint"].update(path=name, source=name, license=name, warnings=[name])
    document["checkpoint"]["config"] = {name: name}
    document["model"]["name"] = name
    document["verdict"].update(headline=name, failures=[name])
    document["export"]["warnings"] = [name]
    document["command"] = [name]
    for case in document["accuracy"]["cases"]:
        case.update(id=name, file=name, controls=name)
        case["runs"][1]["runner"] = name
    runners = document["accuracy"]["runners"]
    runners[name] = runners.pop("onnxruntime-cpu")
    errors = {"torch-fp32": arrays.errors["torch-fp32"], name: arrays.errors["onnxruntime-cpu"]}
    arrays = dataclasses.replace(arrays, case_id=name, errors=errors)
    found = parse(report.render_html(document, arrays))
    assert found.text.count(name) >= 12
    assert not any(tag == "img" for tag, _, _ in found.attributes)


def test_matplotlib_settings_are_left_alone():
    """Neither does the page change the user's settings, nor they the page."""
    document, arrays = make()
    before = report.render_html(document, arrays)
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": True}):
        settings = dict(matplotlib.rcParams)
        assert report.render_html(document, arrays) == before
        assert dict(matplotlib.rcParams) == settings
    assert "matplotlib.pyplot" not in Path(plots.__file__).read_text()


def test_the_report_is_not_changed_by_drawing_it():
    """The caller writes the same dictionary as JSON afterwards."""
    document, arrays = make()
    before = copy.deepcopy(document)
    report.render_html(document, arrays)
    assert document == before
    assert list(arrays.errors) == list(RUNNERS)


def test_expected_profiles_by_hand():
    """One softmax per group over channels and positions, times expm1 of its log count."""
    logits = np.log(np.array([[1.0, 3.0], [1.0, 1.0], [2.0, 4.0]]))
    counts = np.log(np.array([9.0, 17.0]))  # 8 and 16 reads
    _, arrays = make((1, 2))
    arrays = dataclasses.replace(
        arrays, reference_profile=logits, predicted_profile=logits.astype(np.float32),
        reference_log_counts=counts, predicted_log_counts=counts,
    )  # fmt: skip
    reference, predicted, unit = plots.expected_profiles(arrays)
    assert unit == "expected reads per base"
    np.testing.assert_allclose(reference, [[2, 6], [2, 2], [4, 8]])
    np.testing.assert_allclose(predicted, reference, rtol=1e-6)


def test_one_nan_does_not_move_the_other_positions():
    """Both curves are normalised over what both have."""
    _, arrays = make()
    predicted = arrays.reference_profile.copy()
    predicted[0, 0] = np.nan
    a, b, _ = plots.expected_profiles(dataclasses.replace(arrays, predicted_profile=predicted))
    np.testing.assert_array_equal(a[0, 1:], b[0, 1:])
    assert np.isfinite(a[0, 0])


def test_long_profiles_and_many_channels_are_thinned_and_said_to_be():
    """The page stays small, and peaks survive."""
    document, arrays = make((1,) * 6)
    logits = np.zeros((6, 20000))
    logits[0, 12345] = 9.0
    arrays = dataclasses.replace(arrays, reference_profile=logits, predicted_profile=logits)
    page = report.render_html(document, arrays)
    found = parse(page)
    assert "Each point is the largest of 8 neighbouring bases" in found.text
    assert "the first 4 of 6 channels" in found.text
    assert len(page) < 2_000_000
    values = np.array([1.0, -5.0, np.nan, 2.0, np.nan, np.nan, 3.0])
    np.testing.assert_array_equal(plots._thin(values, 2), [-5, 2, np.nan, 3])


def test_zero_errors_have_no_bar_but_a_mention():
    """A logarithmic axis cannot show them."""
    document, arrays = make()
    for by_output in arrays.errors.values():
        by_output["log_counts"][:] = 0.0
    found = parse(report.render_html(document, arrays))
    assert "5 log counts (5 exactly equal, not drawn)" in found.text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not finite"), (0.0, "0"), (3.94e-5, "3.9e-05"), (0.394, "0.39"), (20.0, "20"),
     (1234.5, "1,234"), (1e9, "1.0e+09")],
)  # fmt: skip
def test_numbers_are_short(value: float | None, text: str):
    """Two or three digits tell a reader enough; report.json has the rest."""
    assert html.number(value) == text


@pytest.mark.parametrize(("groups", "tracks"), [((1,), 0), ((1, 2), 2)])
def test_the_code_on_the_page_runs(monkeypatch, capsys, groups: tuple[int, ...], tracks: int):
    """With a stand-in for ONNX Runtime that checks what it is fed."""
    document, _ = make(groups, tracks)

    class Session:
        def __init__(self, path, providers):
            assert path == "model.onnx"

        def run(self, names, feed):
            assert feed["sequence"].shape == (1, 4, 2114)
            assert feed["sequence"].sum() == 2114
            assert feed["sequence"].dtype == np.float32
            assert set(feed) == ({"sequence", "control"} if tracks else {"sequence"})
            if tracks:
                assert feed["control"].shape == (1, tracks, 2114)
            return np.zeros((1, sum(groups), 1000)), np.log(np.full((1, len(groups)), 11.0))

    fake = types.ModuleType("onnxruntime")
    fake.InferenceSession = Session
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    exec(compile(load_snippet(document), "snippet", "exec"), {})
    out = capsys.readouterr().out.splitlines()
    assert len(out) == len(groups)
    assert out[-1].startswith(f"group {len(groups)}: 10.0 reads, shape (1, {groups[-1]}, 1000)")


def fields(node: dict, path: str = "", root: dict | None = None) -> list[tuple[str, dict]]:
    """Every field of the schema with its path, in order."""
    root = root or node
    target = root
    for part in node.get("$ref", "#").split("/")[1:]:
        target = target[part]
    if "$ref" in node:
        node = {**target, **node}
    found: list[tuple[str, dict]] = []
    children = list(node.get("properties", {}).items())
    if node.get("items", {}).get("type") == "object":
        children += node["items"]["properties"].items()
        path += "[]"
    extra = node.get("additionalProperties")
    if isinstance(extra, dict) and extra.get("type") == "object":
        children += extra["properties"].items()
        path += ".*"
    for name, child in children:
        below = f"{path}.{name}" if path else name
        found += [(below, child), *fields(child, below, root)]
    return found


def table(schema: dict) -> list[str]:
    """The rows that docs/report.md must hold."""
    rows = []
    for path, node in fields(schema):
        target = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
        kind = target.get("type", "one of" if "enum" in target else "constant")
        kind = " or ".join(kind) if isinstance(kind, list) else kind
        text, _, unit = node["description"].partition(" Unit: ")
        unit, _, rest = unit.partition(".")
        rows.append(f"| `{path}` | {kind} | {(text + rest).strip()} | {unit} |")
    return rows


def test_the_documentation_lists_every_field():
    """docs/report.md follows the schema, row by row."""
    page = Path(__file__).parent.parent / "docs" / "report.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert rows == table(report.schema())
