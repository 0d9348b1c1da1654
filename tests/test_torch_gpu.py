"""The torch modules on a GPU: the Triton kernels behind `cheri::stem`, `block` and `head`."""

import copy

import numpy as np
import pytest
import torch

import cheri_export
from cheri_export import accuracy, check, ops, tolerance
from cheri_export.checkpoint import read_checkpoint
from cheri_export.modules import build_module
from cheri_export.reference import block as block64
from cheri_export.spec import LOG_COUNTS, PRECISIONS, PROFILE_LOGITS

pytestmark = pytest.mark.gpu

DTYPES = {
    "fp32": torch.float32,
    "mixed": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def one_hot(n, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bases = torch.randint(0, 4, (n, length), generator=generator)
    return torch.eye(4)[bases].transpose(1, 2).contiguous().cuda()


def small_model(**settings):
    model = cheri_export.Cherimoya(48, 4, trimming=30, random_state=1, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return model.cuda()


@pytest.mark.parametrize("tier", PRECISIONS)
def test_the_reference_sample_keeps_its_tiers_figures(tier, data_dir):
    """The promise of the contract, on the stored input: figures alone, no floor."""
    checkpoint = read_checkpoint(data_dir / "default_9x128_trained.torch")
    stored = np.load(data_dir / "default_9x128_trained.npz")
    model = build_module(checkpoint.spec, checkpoint.weights, tier).cuda()
    with torch.no_grad():
        profile, counts = model(torch.from_numpy(stored["X"]).float().cuda())
    for name, found, key in (
        (PROFILE_LOGITS, profile, "y_profile_f64"),
        (LOG_COUNTS, counts, "y_counts_f64"),
    ):
        error = float(np.abs(found.cpu().numpy() - stored[key]).max())
        print(f"{tier} {name} {error:.2e} of {tolerance.figure(tier, name):.0e}")
        assert error <= tolerance.figure(tier, name)


@pytest.mark.parametrize("tier", PRECISIONS)
def test_every_sample_stays_within_its_limit(tier, data_dir):
    for path in sorted(data_dir.glob("*.torch")):
        if "truncated" in path.name or "default" in path.name:
            continue
        checkpoint = read_checkpoint(path)
        options = check.CheckOptions(max(600, checkpoint.spec.min_length + 301), 3)
        cases = check.make_cases(checkpoint.spec, options)
        check.run_references(checkpoint, tier, cases)
        model = build_module(checkpoint.spec, checkpoint.weights, tier).cuda()
        for case in cases:
            control = None if case.control is None else torch.from_numpy(case.control).cuda()
            with torch.no_grad():
                profile, counts = model(torch.from_numpy(case.sequence).float().cuda(), control)
            case.results["triton"] = {
                PROFILE_LOGITS: profile.cpu().numpy(),
                LOG_COUNTS: counts.cpu().numpy(),
            }
        _, failures = accuracy.judge(tier, cases)
        assert not failures, (path.name, failures)


@pytest.mark.parametrize("tier", PRECISIONS)
def test_gradients_of_a_block_agree_with_float64(tier):
    torch.manual_seed(0)
    x = torch.randn(3, 301, 48, device="cuda").to(DTYPES[tier]).requires_grad_()
    block = cheri_export.CheriBlock(48, 16, math=tier).cuda()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.2)
    grad = torch.randn_like(x)
    block(x).backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, *block.parameters())]
    out = torch.stack([block64(row, *exact[1:], 16, 0.15, 1e-3) for row in exact[0]])
    wanted = torch.autograd.grad(out, exact, grad.double())
    # Shares of the largest gradient: float32 arithmetic, fp16 operands, and 16-bit results.
    share = {"fp32": 5e-6, "mixed": 5e-3, "fp16": 5e-3, "bf16": 2e-2}[tier]
    for found, want in zip((x, *block.parameters()), wanted, strict=True):
        assert (found.grad.double() - want).abs().max() <= share * want.abs().max()


def test_training_is_bitwise_repeatable_and_the_same_in_a_compiled_graph():
    model, x = small_model(), one_hot(3, 300)

    def gradients(call):
        model.zero_grad(set_to_none=True)
        profile, counts = call(x)
        (profile.square().mean() + counts.sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first, again = gradients(model), gradients(model)
    compiled = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for one, two, three in zip(first, again, compiled, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(three, one, rtol=0, atol=1e-5 * float(one.abs().max()))


def test_compiled_with_inductor_without_a_graph_break():
    model, x = small_model().eval(), one_hot(2, 300)
    with torch.no_grad():
        wanted = model(x)
        found = torch.compile(model, fullgraph=True)(x)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_autocast_keeps_float32_outputs_and_trains():
    model, x = small_model(), one_hot(2, 300)
    with torch.no_grad():
        wanted, wanted_counts = model(x)
    for dtype, share in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        with torch.autocast("cuda", dtype):
            profile, counts = model(x)
        assert profile.dtype == counts.dtype == torch.float32
        assert not torch.equal(profile, wanted)
        assert (profile - wanted).abs().max() <= share * wanted.abs().max()
        assert (counts - wanted_counts).abs().max() <= share
        (profile.mean() + counts.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_weights_are_read_at_every_call_also_in_a_replayed_graph():
    """Edits through .data, load_state_dict and an EMA swap take effect at once."""
    model, x = small_model().eval(), one_hot(2, 300)
    other = small_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        graph.replay()
        torch.testing.assert_close(captured[0], model(x)[0], rtol=0, atol=0)
        before = captured[0].clone()
        edits = (
            lambda: model.blocks[0].linear1.weight.data.mul_(0.5),
            lambda: model.load_state_dict(other.state_dict()),
            lambda: [p.copy_(0.9 * p) for p in model.parameters()],
        )
        for edit in edits:
            edit()
            graph.replay()
            torch.testing.assert_close(captured[0], model(x)[0], rtol=0, atol=0)
            assert not torch.equal(captured[0], before)
            before = captured[0].clone()


def test_an_examples_bits_do_not_depend_on_its_batch():
    model, x = small_model().eval(), one_hot(7, 333)
    with torch.no_grad():
        whole = model(x)
        for i in range(7):
            alone = model(x[i : i + 1].clone())
            for one, two in zip(alone, whole, strict=True):
                assert torch.equal(one[0], two[i])


def test_train_and_eval_mode_are_one_path():
    model, x = small_model(), one_hot(2, 300)
    with torch.no_grad():
        assert torch.equal(model.train()(x)[0], model.eval()(x)[0])
    assert torch.equal(model(x)[0].detach(), copy.deepcopy(model)(x)[0].detach())


def test_vmap_is_refused_with_what_to_do():
    x, w2 = torch.randn(2, 9, 16, device="cuda"), torch.randn(16, 32, device="cuda")
    taps, w1 = torch.randn(3, 16, device="cuda"), torch.randn(4, 32, 16, device="cuda")
    with pytest.raises(RuntimeError, match="cannot be vmapped"):
        torch.vmap(lambda w: ops.block(x, taps, w, w2, 1, 0.1, 1e-3, "fp32"))(w1)


def test_float64_and_non_contiguous_input():
    model = small_model().double()
    assert model(one_hot(2, 300).double())[0].dtype == torch.float64
    block = cheri_export.CheriBlock(16, 4).cuda()
    x = torch.randn(2, 16, 70, device="cuda")
    with torch.no_grad():
        assert torch.equal(block(x.transpose(1, 2)), block(x.transpose(1, 2).contiguous()))
