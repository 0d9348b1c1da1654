"""Checkpoints of every release are read to the same canonical form."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import checkpoint_makers as make
import pytest
import torch

from cheri_export.checkpoint import (
    Checkpoint,
    checkpoint_from_module,
    checkpoint_from_tensors,
    read_checkpoint,
    weight_extremes,
    write_weights,
)
from cheri_export.errors import CheckpointError, OutputError

DATA = Path(__file__).parent / "data"
REFS = json.loads((DATA / "refs.json").read_text())
GOOD = sorted(name for name in REFS if name != "variant_truncated_4x32")


def same(first: Checkpoint, second: Checkpoint) -> None:
    """Everything but path and hash agrees, tensors bit by bit."""
    assert first.spec == second.spec
    assert (first.release, first.release_reason) == (second.release, second.release_reason)
    assert first.warnings == second.warnings and first.config == second.config
    for one, two in ((first.weights, second.weights), (first.tensors, second.tensors)):
        assert list(one) == list(two)
        for key in one:
            assert one[key].dtype == two[key].dtype and one[key].shape == two[key].shape
            assert torch.equal(one[key], two[key]), key


def warned(checkpoint: Checkpoint, text: str) -> bool:
    return any(text in line for line in checkpoint.warnings)


@pytest.mark.parametrize("name", GOOD)
def test_sample_of_a_release_is_read(name: str, tmp_path: Path) -> None:
    """Geometry and identity of the samples, and the round trip through safetensors."""
    ref, found = REFS[name], read_checkpoint(DATA / f"{name}.torch")
    config = {**ref.get("ctor", {}), **ref.get("config", {})}
    spec = found.spec
    for key in ("n_filters", "n_layers", "n_outputs", "n_control_tracks", "trimming", "name"):
        if key in config:
            assert getattr(spec, key) == config[key]
    if "trimming" in ref:
        assert spec.trimming == ref["trimming"]
    if "signal_groups" in config:
        assert spec.signal_groups == tuple(config["signal_groups"])
    if "expansion" in config:
        assert spec.hidden == config["expansion"] * spec.n_filters
    if "config" in ref:
        assert found.config == ref["config"]
    if "keys" in ref:
        assert list(found.tensors) == ref["keys"]
        assert (
            found.n_stored
            == ref["n_params"]
            == found.n_parameters + sum(found.tensors[k].numel() for k in ("lw0", "lw1"))
        )
    if "counts_f64" in ref:
        assert spec.n_count_outputs == len(ref["counts_f64"][0])
    assert found.sha256 == ref["sha256"] and found.source_sha256 is None
    assert all(w.is_contiguous() and not w.requires_grad for w in found.weights.values())
    write_weights(found, tmp_path / "weights.safetensors")
    again = read_checkpoint(tmp_path / "weights.safetensors")
    same(found, again)
    assert again.source_sha256 == found.sha256 != again.sha256


def test_truncated_sample_is_refused() -> None:
    with pytest.raises(CheckpointError, match="truncated"):
        read_checkpoint(DATA / "variant_truncated_4x32.torch")


def test_variants_equal_the_file_they_were_made_from() -> None:
    base = read_checkpoint(DATA / "small_4x32_trained.torch")
    bf16 = read_checkpoint(DATA / "v0.2.0_bf16stored_4x32.torch")
    assert {w.dtype for w in bf16.weights.values()} == {torch.bfloat16}
    for name in ("variant_fp64stored_4x32", "variant_submodule_keys_4x32"):
        other = read_checkpoint(DATA / f"{name}.torch")
        assert other.spec == base.spec and list(other.weights) == list(base.weights)
        for key, value in base.weights.items():
            assert torch.equal(value.double(), other.weights[key].double()), key


RELEASES = [
    # name, release, groups in the file, groups read, single_count_output, kernels, counts
    ("0.1.0", "0.1.0", [1], (1,), True, (21, 1), 1),
    ("0.1.0", "0.1.0", [2], (2,), True, (21, 1), 1),
    ("0.1.0", "0.1.0", [2], (2,), False, (21, 1), 2),
    ("8b364ee", "git 8b364ee..7e51085", [2], (2,), True, (21, 1), 1),
    ("8b364ee", "git 8b364ee..7e51085", [3], (3,), False, (21, 1), 3),
    ("1b730fa", "git 1b730fa", [2, 1], (2, 1), False, (21, 1), 2),
    ("1b730fa", "git 1b730fa", [2, 1], (2, 1), True, (21, 1), 1),
    ("ce9bbac", "git ce9bbac..50563c0", [2], (2,), True, (21, 1), 1),
    ("50563c0", "git ce9bbac..50563c0", [1, 1], (1, 1), True, (21, 1), 2),
    ("0.1.1", "0.1.1 to 0.3.1", [1], (1,), True, (21, 75), 1),
    ("0.2.0", "0.1.1 to 0.3.1", [1, 2], (1, 2), True, (21, 75), 2),
]


@pytest.mark.parametrize(
    ("name", "label", "groups", "read", "single", "kernels", "counts"), RELEASES
)
def test_release_is_told(name, label, groups, read, single, kernels, counts, tmp_path) -> None:
    tensors, config = make.release(name, groups=groups, single=single, tracks=2)
    found = read_checkpoint(make.save(tmp_path / "m.torch", tensors, config))
    spec = found.spec
    assert (found.release, spec.signal_groups) == (label, read)
    assert (spec.stem_kernel, spec.profile_kernel) == kernels
    assert (spec.n_outputs, spec.n_count_outputs, spec.n_control_tracks) == (sum(groups), counts, 2)
    assert (spec.count_margin, spec.has_gamma, spec.residual_scale) == (0, False, 0.15)
    assert warned(found, "reverse complement reverses all") == (name in ("0.1.0", "8b364ee"))
    assert warned(found, "never sum") == (name == "0.1.0" and counts > 1)
    assert warned(found, "offset between the strands") == (max(read) > 1 and name != "0.1.0")
    write_weights(found, tmp_path / "w.safetensors")
    same(found, read_checkpoint(tmp_path / "w.safetensors"))


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("name", ["0.0.1", "0.1.0"])
@pytest.mark.parametrize(("protocol", "zipped"), [(2, True), (4, True), (5, False), (2, False)])
def test_whole_module_pickle_is_read_without_cherimoya(name, protocol, zipped, tmp_path) -> None:
    """The stand-ins give what state_dict() gave, and cherimoya is never imported."""
    path = make.pickled(
        tmp_path / "m.torch", name, protocol, zipped, groups=[2], single=False, tracks=1
    )
    assert "cherimoya" not in sys.modules
    found = read_checkpoint(path)
    assert "cherimoya" not in sys.modules
    tensors, config = make.release(name, groups=[2], single=False, tracks=1)
    assert found.release == name and set(found.tensors) == set(tensors)
    assert all(torch.equal(found.tensors[k], tensors[k]) for k in tensors)
    assert found.config == {k: config[k] for k in make.PICKLED[name]}
    spec = found.spec
    assert (spec.signal_groups, spec.n_count_outputs, spec.trimming) == ((2,), 2, 53)
    assert warned(found, "never sum") and warned(found, "reverse complement reverses all 2")
    if name == "0.0.1":
        assert (spec.stem_kernel, spec.count_margin, spec.has_gamma) == (19, 37, True)
        assert spec.residual_scale == 1.0 and found.weights["blocks.0.gamma"].shape == (16,)
        assert found.tensors["blocks.0.gamma"].shape == (1, 16)
    write_weights(found, tmp_path / "w.safetensors")
    same(found, read_checkpoint(tmp_path / "w.safetensors"))


def test_module_in_memory_equals_its_file(tmp_path) -> None:
    for name in ("0.0.1", "0.1.0"):
        path = make.pickled(tmp_path / "m.torch", name)
        with make.fake_packages() as classes:
            model, _ = make.module(name, classes)
        for wrapped in (model, torch.nn.DataParallel(model)):
            found = checkpoint_from_module(wrapped)
            assert found.spec == read_checkpoint(path).spec and found.release == name
        model.iconv.weight.data.zero_()
        assert found.weights["iconv.weight"].abs().sum() > 0, "weights must be copies"
        model.blocks[1].dilation = 5
        with pytest.raises(CheckpointError, match=r"blocks\.1 has dilation 5"):
            checkpoint_from_module(model)
    with pytest.raises(CheckpointError, match="a Cherimoya model is needed"):
        checkpoint_from_module([1])


def test_wrapped_module_pickle_is_read(tmp_path: Path) -> None:
    with make.fake_packages() as classes:
        model, tensors = make.module("0.1.0", classes)
        torch.save(torch.nn.DataParallel(model), tmp_path / "m.torch")
    found = read_checkpoint(tmp_path / "m.torch")
    assert found.release == "0.1.0" and set(found.tensors) == {f"module.{k}" for k in tensors}


def test_init_kwargs_are_the_configuration_of_a_model_in_memory() -> None:
    with make.fake_packages() as classes:
        model, _ = make.module("0.1.0", classes)
    settings = make.release("0.1.0")[1]
    type(model)._init_kwargs = lambda self: settings
    assert checkpoint_from_module(model).config == settings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_storage_dtype_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    path = make.save(tmp_path / "m.torch", make.state_dict(dtype=dtype), make.config())
    found = read_checkpoint(path)
    assert {w.dtype for w in found.weights.values()} == {dtype}
    write_weights(found, tmp_path / "w.safetensors")
    same(found, read_checkpoint(tmp_path / "w.safetensors"))


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
@pytest.mark.parametrize("bare", [True, False])
def test_wrappers_prefixes_are_removed(prefix: str, bare: bool, tmp_path: Path) -> None:
    tensors = {prefix + k: v for k, v in make.state_dict().items()}
    inner = {k.replace("linear1.", "_orig_mod.linear1."): v for k, v in tensors.items()}
    path = make.save(tmp_path / "m.torch", inner, None if bare else make.config())
    found = read_checkpoint(path)
    assert list(found.tensors) == list(inner)
    assert torch.equal(
        found.weights["blocks.2.linear1.weight"],
        inner[f"{prefix}blocks.2._orig_mod.linear1.weight"],
    )


def test_submodule_spelling_wins() -> None:
    tensors = make.state_dict()
    other = {k.replace("conv_weight", "conv.conv_weight"): v for k, v in tensors.items()}
    plain = checkpoint_from_tensors(other, make.config())
    assert list(plain.weights) == list(checkpoint_from_tensors(tensors, make.config()).weights)
    both = {**tensors, "blocks.1.conv.conv_weight": tensors["blocks.1.conv_weight"].clone()}
    assert checkpoint_from_tensors(both, make.config()).warnings == ()
    both["blocks.1.conv.conv_weight"] = torch.ones(3, 16)
    found = checkpoint_from_tensors(both, make.config())
    assert warned(found, "blocks.1.conv_weight and blocks.1.conv.conv_weight differ")
    assert torch.equal(found.weights["blocks.1.conv_weight"], torch.ones(3, 16))


@pytest.mark.parametrize(
    ("groups", "counts", "read"),
    [([1], 1, (1,)), ([2], 1, (2,)), ([1, 1], 2, (1, 1)), ([1, 2], 2, None)],
)
def test_bare_state_dict_states_what_was_assumed(groups, counts, read, tmp_path) -> None:
    tensors, _ = make.release("0.2.0", groups=groups)
    found = read_checkpoint(make.save(tmp_path / "m.torch", tensors))
    assert found.config == {} and found.spec.signal_groups == read
    assert (found.spec.trimming, found.spec.residual_scale) == (53, 0.15)
    assert warned(found, "trimming 53 (46 + the sum of the dilations); residual_scale 0.15")
    assert warned(found, "signal_groups is not in the file") == (sum(groups) > 1)
    write_weights(found, tmp_path / "w.safetensors")
    same(found, read_checkpoint(tmp_path / "w.safetensors"))


def test_bare_old_state_dicts() -> None:
    one = checkpoint_from_tensors(make.release("0.1.0", groups=[2], single=False)[0], None)
    assert (one.release, one.spec.signal_groups) == ("0.1.0", (2,)) and warned(one, "never sum")
    two = checkpoint_from_tensors(make.release("ce9bbac", groups=[1, 1])[0], None)
    assert (two.release, two.spec.signal_groups) == ("0.1.0 to git 50563c0", (1, 1))
    old = checkpoint_from_tensors(make.release("0.0.1")[0], None)
    assert (old.release, old.spec.count_margin) == ("0.0.1", 37)
    assert warned(old, "trimming 53") and not warned(old, "residual_scale")


def test_settings_that_mean_the_default() -> None:
    tensors = make.state_dict()
    given = {**make.config(), "trimming": None}
    assert checkpoint_from_tensors(tensors, given).spec.trimming == 53
    assert checkpoint_from_tensors(tensors, make.config(trimming=0)).spec.trimming == 0
    old, settings = make.release("0.0.1")
    for value in (0, None):
        assert checkpoint_from_tensors(old, {**settings, "trimming": value}).spec.trimming == 53
    partial = checkpoint_from_tensors(tensors, {"n_filters": 16, "signal_groups": [1]})
    assert warned(partial, "trimming 53") and warned(partial, "n_layers, n_control_tracks")


def test_unknown_settings_and_stray_tensors_do_not_fail() -> None:
    tensors = {**make.state_dict(), "lw0": torch.zeros(2, 3, 4), "lw1": torch.zeros(())}
    extra = {"future": {"a": (1, float("nan")), "b": object()}, "name": 5}
    found = checkpoint_from_tensors(tensors, make.config(**extra))
    assert warned(found, "unknown settings") and warned(found, "name in the configuration is 5")
    json.dumps(found.config, allow_nan=False)
    assert found.tensors["lw0"].shape == (2, 3, 4)
    tensors["lw1"] = torch.eye(3).to_sparse()
    assert "lw1" not in checkpoint_from_tensors(tensors, make.config()).tensors
    del tensors["lw0"], tensors["lw1"]
    assert checkpoint_from_tensors(tensors, make.config()).warnings == ()


def test_values_beyond_half_precision_are_listed() -> None:
    tensors = make.state_dict()
    tensors["blocks.1.linear2.weight"][3, 4] = -1e5
    tensors["iconv.bias"][0] = 65504.0
    assert weight_extremes(checkpoint_from_tensors(tensors, make.config())) == [
        ("blocks.1.linear2.weight", 1e5)
    ]


def test_shared_and_strided_storage_is_kept_apart(tmp_path: Path) -> None:
    tensors = make.state_dict()
    tensors["blocks.1.conv_weight"] = tensors["blocks.0.conv_weight"]
    tensors["blocks.0.linear1.weight"] = torch.randn(16, 32).t()
    found = read_checkpoint(make.save(tmp_path / "m.torch", tensors, make.config()))
    write_weights(found, tmp_path / "w.safetensors")
    again = read_checkpoint(tmp_path / "w.safetensors")
    same(found, again)
    assert torch.equal(again.weights["blocks.0.linear1.weight"], tensors["blocks.0.linear1.weight"])
    assert again.source_sha256 == hashlib.sha256((tmp_path / "m.torch").read_bytes()).hexdigest()
    with pytest.raises(OutputError, match="cannot be written"):
        write_weights(found, tmp_path / "missing" / "w.safetensors")


def test_legacy_dictionary_and_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = make.state_dict()
    path = make.save(
        tmp_path / "m.torch", tensors, make.config(), _use_new_zipfile_serialization=False
    )
    assert read_checkpoint(path).warnings == ()
    save_file(dict(tensors), tmp_path / "plain.safetensors")
    assert warned(read_checkpoint(tmp_path / "plain.safetensors"), "bare state dict")


def test_package_import_is_light() -> None:
    code = "import sys, cheri_export, cheri_export.errors; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, cwd=DATA.parent.parent).returncode
        == 0
    )


def test_inputs_are_not_changed() -> None:
    tensors, config = make.release("0.2.0")
    before = copy.deepcopy((tensors, config))
    checkpoint_from_tensors(tensors, config)
    assert config == before[1] and all(torch.equal(tensors[k], before[0][k]) for k in tensors)
