"""`Cherimoya` over the ops: cherimoya's names, draws and outputs."""

from __future__ import annotations

import json
from collections import OrderedDict

import checkpoint_makers as make
import pytest
import torch
from close import assert_within
from conftest import DATA

from cheri_export import from_cherimoya, load, tolerance
from cheri_export.checkpoint import checkpoint_from_tensors
from cheri_export.modules import CheriBlock, Cherimoya, build_module
from cheri_export.spec import EPSILON, LOG_COUNTS, PRECISIONS, PROFILE_LOGITS
from cheri_export.strict import strict_fp32

REFS = json.loads((DATA / "refs.json").read_text())


def test_state_dict_has_cherimoyas_keys_in_cherimoyas_order(sample) -> None:
    for name in ("default_9x128_trained", "stranded2_ctl2_5x48", "expansion3_4x32"):
        spec = REFS[name]["ctor"]
        state = Cherimoya(**spec).state_dict()
        assert list(state) == REFS[name]["keys"]
        tensors = sample(name).checkpoint.tensors
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in tensors.items()}


def test_the_same_seed_gives_cherimoyas_initial_weights(sample) -> None:
    """The sample is cherimoya 0.3.1's Cherimoya(n_filters=32, n_layers=4, random_state=1).save."""
    state = Cherimoya(n_filters=32, n_layers=4, random_state=1).state_dict()
    stored = sample("small_4x32_init").checkpoint.tensors
    assert list(state) == list(stored)
    # Upstream's order of draws: each block in turn, then stem, profile head, count head.
    parts = ("conv_weight", "linear1.weight", "linear2.weight")
    order = [f"blocks.{i}.{part}" for i in range(4) for part in parts]
    generator = torch.Generator().manual_seed(1)
    for key in [*order, "iconv.weight", "fconv.weight", "linear.weight"]:
        drawn = torch.empty(stored[key].shape)
        torch.nn.init.trunc_normal_(drawn, std=0.02, generator=generator)
        assert torch.equal(state[key], drawn), key
    # torch 2.11 draws other numbers for a seed than the version that wrote the sample.
    if torch.__version__ >= "2.13":
        for key, value in stored.items():
            assert torch.equal(state[key], value), key
    other = Cherimoya(n_filters=32, n_layers=4, random_state=2).state_dict()
    assert not torch.equal(other["iconv.weight"], state["iconv.weight"])


def test_initialisation_takes_as_many_global_draws_as_cherimoya() -> None:
    """Without random_state the weights come from torch's global generator, each drawn in turn."""
    torch.manual_seed(3)
    first = Cherimoya(n_filters=8, n_layers=2)
    torch.manual_seed(3)
    second = Cherimoya(n_filters=8, n_layers=2)
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    assert float(first.iconv.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert not first.iconv.bias.any() and torch.equal(first.lw0, torch.ones(1))


@pytest.mark.parametrize("prefix", ["blocks.{}.", "blocks.{}.conv."])
def test_both_spellings_of_the_depthwise_weight_load(prefix: str) -> None:
    source = Cherimoya(n_filters=8, n_layers=3, random_state=1)
    state = OrderedDict(
        (
            prefix.format(key.split(".")[1]) + "conv_weight" if "conv_weight" in key else key,
            value,
        )
        for key, value in source.state_dict().items()
    )
    target = Cherimoya(n_filters=8, n_layers=3, random_state=2)
    before = list(state)
    assert target.load_state_dict(state) == ([], [])
    assert list(state) == before, "the caller's dictionary was changed"
    for one, two in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, two)


def test_state_dict_of_one_block_and_of_a_wrapper_use_the_name_on_disk() -> None:
    assert list(CheriBlock(4, 2).state_dict()) == [
        "conv_weight",
        "linear1.weight",
        "linear2.weight",
    ]
    wrapper = torch.nn.Sequential(CheriBlock(4, 2))
    assert next(iter(wrapper.state_dict())) == "0.conv_weight"
    assert wrapper.load_state_dict(wrapper.state_dict()) == ([], [])


def test_module_gives_the_stored_outputs_in_float32(good) -> None:
    with torch.no_grad(), strict_fp32():
        profile, counts = good.module()(*good.inputs)
    assert profile.dtype == counts.dtype == torch.float32
    for name, found, stored in (
        (PROFILE_LOGITS, profile, good.profile),
        (LOG_COUNTS, counts, good.counts),
    ):
        # The figure, scaled down to the sample's spread for the profile; never loosened.
        share = 1.0
        if name == PROFILE_LOGITS:
            share = min(1.0, stored.std() / tolerance.REFERENCE_STD[name])
        assert_within(name, found, stored, tolerance.figure("fp32", name) * share)


def test_module_in_float64_gives_the_stored_outputs_exactly(good) -> None:
    if good.checkpoint.spec.has_gamma:
        limit = 1e-6  # gamma is folded into float32 weights
    else:
        limit = 1e-11
    model = good.module().double()
    control = None if good.control is None else good.control.double()
    with torch.no_grad():
        profile, counts = model(good.sequence.double(), control)
    assert profile.dtype == counts.dtype == torch.float64
    assert_within(PROFILE_LOGITS, profile, good.profile, limit)
    assert_within(LOG_COUNTS, counts, good.counts, limit)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_module_in_every_tier_is_within_the_figures(precision, sample, reference_run) -> None:
    for name in ("small_4x32_trained", "stranded2_ctl2_5x48"):
        found = sample(name)
        module = found.module(precision)
        with torch.no_grad(), strict_fp32():
            outputs = module(*found.inputs)
        floors = reference_run(name, "strict" if precision == "fp32" else precision)
        for output, value, stored, floor in zip(
            (PROFILE_LOGITS, LOG_COUNTS),
            outputs,
            (found.profile, found.counts),
            floors,
            strict=True,
        ):
            assert value.dtype == torch.float32
            error = max(float(abs(floor - stored).max()), 1e-7)
            limit = tolerance.limit_for(
                precision, output, output_std=float(stored.std()), floor=error
            )
            assert_within(f"{name} {output}", value, stored, limit.limit)


def test_set_precision_sets_stream_arithmetic_and_storage(sample) -> None:
    found = sample("small_4x32_trained")
    streams = {"fp32": torch.float32, "mixed": torch.float32}
    streams |= {"fp16": torch.float16, "bf16": torch.bfloat16}
    for precision, stream in streams.items():
        module = found.module(precision)
        narrow = torch.float16 if precision in ("fp16", "bf16") else torch.float32
        assert module.precision == precision
        assert {b.math for b in module.blocks} == {precision}
        for key, value in module.state_dict().items():
            mlp = "linear1" in key or "linear2" in key
            assert value.dtype == (narrow if mlp else torch.float32), key
        seen = []
        for block in module.blocks:
            block.register_forward_hook(lambda m, a, out, s=seen: s.append(out.dtype))
        module(*found.inputs)
        assert seen == [stream] * 4
    with pytest.raises(ValueError, match="precision 'fp8'; needed one of fp32, mixed, fp16, bf16"):
        module.set_precision("fp8")
    with pytest.raises(ValueError, match="precision 'fp64'"):
        Cherimoya(8, 1, precision="fp64")


def test_controls_missing_or_not_wanted_are_named(sample) -> None:
    plain, controlled = sample("small_4x32_init"), sample("stranded2_ctl2_5x48")
    with pytest.raises(ValueError, match=r"were given; this model has n_control_tracks=0"):
        plain.module()(plain.inputs[0], torch.zeros(4, 1, 378))
    with pytest.raises(ValueError, match=r"are missing; this model has n_control_tracks=2"):
        controlled.module()(controlled.inputs[0])
    with pytest.raises(ValueError, match=r"control \(3, 1, 500\)|control tracks, k"):
        controlled.module()(controlled.inputs[0], controlled.control[:, :1])
    with pytest.raises(ValueError, match="give at least 123 bases"):
        plain.module()(plain.inputs[0][:, :, :122])
    assert plain.module()(plain.inputs[0][:, :, :123])[0].shape == (4, 1, 1)


def test_a_learned_gamma_is_folded_into_the_second_matrix(sample) -> None:
    found = sample("v0.0.1_pickle_4x32")
    module = found.module()
    weights = found.checkpoint.weights
    for i, block in enumerate(module.blocks):
        assert block.residual_scale == 1.0
        folded = weights[f"blocks.{i}.gamma"].reshape(-1, 1) * weights[f"blocks.{i}.linear2.weight"]
        assert_within("folded", block.linear2.weight, folded, 1e-7)
        assert weights[f"blocks.{i}.gamma"].std() > 0
    assert module.count_margin == 37 and not any("gamma" in key for key in module.state_dict())


def test_built_module_is_for_inference(good) -> None:
    module = good.module()
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    shared = {t.data_ptr() for t in good.checkpoint.weights.values()}
    assert not shared & {p.data_ptr() for p in module.parameters()}, "memory of the checkpoint"


def test_load_and_from_cherimoya_agree_with_the_checkpoint(good) -> None:
    inputs = tuple(None if t is None else t[:1] for t in good.inputs)
    profile, counts = good.module()(*inputs)
    others = [load(good.path)]
    if not good.checkpoint.spec.has_gamma:
        # Our module of a 0.0.1 checkpoint has gamma folded in, which no release writes.
        others.append(from_cherimoya(good.module()))
    for other in others:
        theirs = other(*inputs)
        assert torch.equal(profile, theirs[0]) and torch.equal(counts, theirs[1])
    assert load(good.path, precision="fp16").precision == "fp16"


def test_constructor_arguments_are_cherimoyas() -> None:
    model = Cherimoya(8, 2, [1, 2], 3, 4, 0.5, "name", 5, False, True, "default", 1)
    assert (model.n_outputs, model.n_groups, model.trimming, model.name) == (3, 2, 5, "name")
    assert model.blocks[1].linear1.weight.shape == (32, 8) and model.blocks[1].dilation == 2
    assert model.fconv.weight.shape == (3, 11, 75) and model.linear.weight.shape == (2, 9)
    default = Cherimoya()
    assert (default.trimming, default.name) == (557, "cherimoya.128.9")
    for groups in ([], [0], [1.5], [-1]):
        with pytest.raises(ValueError, match="needed positive integers"):
            Cherimoya(8, 1, groups)


def test_epsilon_of_the_blocks_is_the_specs() -> None:
    """An input whose spread is far below sqrt(epsilon) tells 1e-3 from any other value."""
    block = CheriBlock(4, 1, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        block.linear1.weight.mul_(50)
        block.linear2.weight.mul_(50)
        x = 1e-2 * torch.randn(1, 30, 4, generator=torch.Generator().manual_seed(1)).double()
        from cheri_export import reference

        weights = (block.conv_weight, block.linear1.weight, block.linear2.weight)
        wanted = reference.block(x[0], *weights, 1, 0.15, EPSILON)
        other = reference.block(x[0], *weights, 1, 0.15, 1e-5)
        assert EPSILON == 1e-3
        assert_within("block", block(x)[0], wanted, 1e-12)
        assert (other - wanted).abs().max() > 1e-4


def test_module_trains(sample) -> None:
    """Loss goes down over the ops' own gradients, controls and all."""
    found = sample("stranded2_ctl2_5x48")
    model = found.module().requires_grad_(True).train()
    target = torch.from_numpy(found.profile).float() + 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        profile, counts = model(*found.inputs)
        loss = (profile - target).square().mean() + counts.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]
    for name, parameter in model.named_parameters():
        if not name.startswith("lw"):
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_build_module_of_every_release_has_the_specs_geometry() -> None:
    for name in ("0.0.1", "0.1.0", "8b364ee", "1b730fa", "0.2.0"):
        tensors, config = make.release(name, groups=[2], tracks=1)
        found = checkpoint_from_tensors(tensors, config)
        module = build_module(found.spec, found.weights)
        profile, counts = module(torch.zeros(2, 4, 130), torch.ones(2, 1, 130))
        assert profile.shape == (2, 2, 130 - 2 * found.spec.trimming)
        assert counts.shape == (2, found.spec.n_count_outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"signal_groups": [1, 2]},
        {"signal_groups": [2], "n_control_tracks": 2},
        {"expansion": 3, "residual_scale": 0.4},
    ],
)
def test_parity_with_the_package_cherimoya(settings) -> None:
    cherimoya = pytest.importorskip("cherimoya", reason="extra 'parity' is not installed")
    theirs = cherimoya.Cherimoya(
        n_filters=32, n_layers=4, verbose=False, compile=False, random_state=1, **settings
    ).eval()
    ours = from_cherimoya(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.one_hot(torch.randint(4, (3, 400), generator=generator), 4)
    x = x.transpose(1, 2).float()
    tracks = settings.get("n_control_tracks", 0)
    control = torch.rand(3, tracks, 400, generator=generator) if tracks else None
    with torch.no_grad(), strict_fp32():
        wanted = theirs(x) if control is None else theirs(x, control)
        found = ours(x, control)
    for name, one, two in zip((PROFILE_LOGITS, LOG_COUNTS), found, wanted, strict=True):
        assert_within(name, one, two, tolerance.figure("fp32", name) / 5)
