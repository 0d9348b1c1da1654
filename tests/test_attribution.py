"""Attribution hooks see every part of a block, and the numbers are upstream's."""

import pytest
import torch

import cheri_export

PARTS = ("conv", "linear1", "activation", "linear2")


def small_model():
    model = cheri_export.Cherimoya(16, 3, trimming=20, random_state=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return model


def one_hot(n, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bases = torch.randint(0, 4, (n, length), generator=generator)
    return torch.eye(4)[bases].transpose(1, 2).contiguous()


def test_hooked_submodules_are_run_through_while_gradients_are_on():
    model, seen = small_model(), []
    for i, block in enumerate(model.blocks):
        for part in PARTS:
            getattr(block, part).register_forward_hook(
                lambda module, given, out, key=(i, part): seen.append(key)
            )
    model.igelu.register_forward_hook(lambda module, given, out: seen.append("igelu"))
    model(one_hot(2, 90).requires_grad_())
    assert seen == ["igelu", *((i, part) for i in range(3) for part in PARTS)]


def test_hooks_are_not_run_through_without_gradients():
    model, seen = small_model(), []
    model.blocks[0].conv.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(one_hot(2, 90))
    assert not seen


@pytest.mark.parametrize("part", PARTS)
def test_one_hook_changes_neither_result_nor_gradient(part):
    model, x = small_model(), one_hot(2, 90)

    def gradient():
        leaf = x.clone().requires_grad_()
        profile, counts = model(leaf)
        (found,) = torch.autograd.grad(profile.square().sum() + counts.sum(), leaf)
        return profile.detach(), found

    profile, wanted = gradient()
    getattr(model.blocks[1], part).register_full_backward_hook(lambda *_: None)
    again, found = gradient()
    # The submodules and the op are one formula in float32: only the order of rounding differs.
    torch.testing.assert_close(again, profile, rtol=0, atol=2e-6 * float(profile.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("output", ["logcounts", "profile"])
def test_deep_lift_shap_gives_upstreams_attributions(output):
    cherimoya = pytest.importorskip("cherimoya", reason="extra 'parity' is not installed")
    from cherimoya import deep_lift_shap as upstream
    from cherimoya import wrappers
    from tangermeme import deep_lift_shap

    theirs = cherimoya.Cherimoya(
        n_filters=16, n_layers=3, trimming=20, compile=False, random_state=3
    ).eval()
    theirs.load_state_dict(small_model().state_dict())
    x = one_hot(2, 150)
    generator = torch.Generator().manual_seed(1)
    references = torch.stack(
        [x[:, :, torch.randperm(150, generator=generator)] for _ in range(4)], dim=1
    )
    wanted = upstream.deep_lift_shap(
        theirs, x, output=output, references=references, device="cpu", fast=False
    )
    wrapper = wrappers.LogCountWrapper if output == "logcounts" else wrappers.ProfileWrapper
    found = deep_lift_shap.deep_lift_shap(
        wrapper(wrappers.ControlWrapper(cheri_export.from_cherimoya(theirs))),
        x,
        references=references,
        device="cpu",
        additional_nonlinear_ops=cheri_export.attribution_ops(),
    )
    size = float(wanted.abs().max())
    assert size > 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=min(1e-4, 1e-3 * size))
