"""The torch ops: schema, gradients, fake kernels, odd sizes, hard numbers, refusals."""

from __future__ import annotations

import pytest
import torch
from close import assert_within

from cheri_export import ops, reference, tolerance
from cheri_export.spec import EPSILON

F64 = torch.float64


class Draw:
    """Seeded tensors of one geometry."""

    def __init__(self, c=6, h=10, k=5, n=2, length=12, tracks=0, outputs=2, dtype=F64, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.x = self(n, length, c)
        self.conv, self.w1, self.w2 = self(3, c, std=0.3), self(h, c, std=0.1), self(c, h, std=0.1)
        self.sequence, self.stem, self.bias = self(n, 4, length), self(c, 4, k, std=0.3), self(c)
        # Counts are not negative, and a gradient through log1p wants room below.
        self.control = self(n, tracks, length).abs() + 0.1 if tracks else None
        self.profile = (self(outputs, c + tracks, k, std=0.2), self(outputs))
        self.count = (self(1, c + bool(tracks)), self(1))

    def __call__(self, *size: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, dtype=F64).to(self.dtype) * std

    def stem_arguments(self, out_dtype=None):
        return (self.sequence, self.stem, self.bias, out_dtype or self.dtype, "fp32")

    def block_arguments(self, dilation=2, math="fp32"):
        return (self.x, self.conv, self.w1, self.w2, dilation, 0.15, EPSILON, math)

    def head_arguments(self, windows=(3, 2, 1, 4)):
        return (self.x, self.control, *self.profile, *self.count, *windows, "fp32")


def wanting_gradients(arguments):
    return tuple(
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments
    )


def judge_block(arguments):
    x, conv, w1, w2 = (t.double() for t in arguments[:4])
    return torch.stack([reference.block(one, conv, w1, w2, *arguments[4:7]) for one in x])


@pytest.mark.parametrize("op", ["stem", "block", "head", "head with control"])
def test_opcheck(op: str) -> None:
    draw = Draw(dtype=torch.float32, tracks=2 if "control" in op else 0)
    name = op.split()[0]
    arguments = wanting_gradients(getattr(draw, f"{name}_arguments")())
    found = torch.library.opcheck(getattr(ops, name).default, arguments)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("stream", [torch.float16, torch.bfloat16])
def test_opcheck_of_a_narrow_stream(stream: torch.dtype) -> None:
    draw = Draw(dtype=torch.float32)
    x = draw.x.to(stream)
    for op, arguments in (
        (ops.stem, draw.stem_arguments(stream)),
        (ops.block, (x, draw.conv, draw.w1.half(), draw.w2.half(), *draw.block_arguments()[4:])),
        (ops.head, (x, *draw.head_arguments()[1:])),
    ):
        arguments = wanting_gradients(arguments)
        assert set(torch.library.opcheck(op.default, arguments).values()) == {"SUCCESS"}


def test_schemas_are_the_contracts() -> None:
    assert str(ops.stem.default._schema) == (
        "cheri::stem(Tensor sequence, Tensor weight, Tensor bias, ScalarType out_dtype, str math) "
        "-> Tensor"
    )
    assert str(ops.block.default._schema) == (
        "cheri::block(Tensor x, Tensor conv_weight, Tensor w1, Tensor w2, int dilation, "
        "float residual_scale, float epsilon, str math) -> Tensor"
    )
    assert str(ops.head.default._schema) == (
        "cheri::head(Tensor x, Tensor? control, Tensor profile_weight, Tensor profile_bias, "
        "Tensor count_weight, Tensor count_bias, int start, int end_trim, int count_start, "
        "int count_end_trim, str math) -> (Tensor profile_logits, Tensor log_counts)"
    )


@pytest.mark.parametrize("op", ["stem", "block", "head", "head with control"])
def test_gradcheck_of_every_tensor_input(op: str) -> None:
    draw = Draw(c=3, h=4, k=3, length=6, tracks=2 if "control" in op else 0)
    name = op.split()[0]
    settings = {"windows": (1, 1, 2, 1)} if name == "head" else {}
    arguments = wanting_gradients(getattr(draw, f"{name}_arguments")(**settings))
    assert sum(isinstance(a, torch.Tensor) for a in arguments) >= 3
    assert torch.autograd.gradcheck(getattr(ops, name), arguments)


def test_gradient_of_one_head_output_alone() -> None:
    """A loss on the counts only, or on the profile only, gives the gradients of that loss."""
    draw = Draw(tracks=2)
    for kept in (0, 1):
        arguments = wanting_gradients(draw.head_arguments())
        ops.head(*arguments)[kept].square().sum().backward()
        expected = wanting_gradients(draw.head_arguments())
        (plain_head(expected)[kept]).square().sum().backward()
        for ours, theirs in zip(arguments, expected, strict=True):
            if isinstance(ours, torch.Tensor) and theirs.grad is not None:
                assert_within("gradient", ours.grad, theirs.grad, 1e-12)
                assert theirs.grad.abs().max() > 0


def plain_head(arguments):
    """The head written straight from the contract, windows cut after the whole convolution."""
    x, control, pw, pb, cw, cb, start, end, count_start, count_end, _ = arguments
    length = x.shape[1]
    channels = x.transpose(1, 2)
    summary = channels[:, :, count_start : length - count_end].mean(2)
    if control is not None:
        channels = torch.cat([channels, control], 1)
        reads = control[:, :, count_start : length - count_end].sum((1, 2))
        summary = torch.cat([summary, torch.log1p(reads)[:, None]], 1)
    profile = torch.nn.functional.conv1d(channels, pw, pb, padding=pw.shape[2] // 2)
    return profile[:, :, start : length - end], summary @ cw.T + cb


class Chain(torch.nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, sequence, control=None):
        d = self.draw
        h = ops.stem(sequence, d.stem, d.bias, d.dtype, "fp32")
        for dilation in (1, 64):
            h = ops.block(h, d.conv, d.w1, d.w2, dilation, 0.15, EPSILON, "fp32")
        return ops.head(h, control, *d.profile, *d.count, 3, 2, 1, 4, "fp32")


@pytest.mark.parametrize("tracks", [0, 2])
def test_one_exported_program_serves_every_batch_and_length(tracks: int) -> None:
    draw = Draw(tracks=tracks, n=3, length=40)
    model = Chain(draw)
    inputs = (draw.sequence,) if tracks == 0 else (draw.sequence, draw.control)
    # 5 positions are trimmed, and torch specialises on sizes of 1.
    n, span = torch.export.Dim("N", min=1), torch.export.Dim("L", min=7)
    program = torch.export.export(model, inputs, dynamic_shapes=[{0: n, 2: span} for _ in inputs])
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    wanted = {ops.stem.default, ops.block.default, ops.head.default}
    assert {t for t in targets if t in wanted} == wanted
    shape = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == "sequence")
    assert [isinstance(s, torch.SymInt) for s in shape.meta["val"].shape] == [True, False, True]
    for batch, length in ((1, 7), (2, 40), (5, 133)):
        other = Draw(tracks=tracks, n=batch, length=length, seed=1)
        given = (other.sequence,) if tracks == 0 else (other.sequence, other.control)
        for ours, theirs in zip(program.module()(*given), model(*given), strict=True):
            assert torch.equal(ours, theirs)
        assert theirs.shape == (batch, 1)


@pytest.mark.parametrize("c", [3, 5])
@pytest.mark.parametrize(("length", "dilation"), [(1, 1), (1, 8), (2, 1), (7, 7), (7, 6), (7, 64)])
def test_block_at_odd_sizes(c: int, length: int, dilation: int) -> None:
    draw = Draw(c=c, h=2 * c + 1, length=length, n=3, dtype=torch.float32)
    arguments = draw.block_arguments(dilation)
    limit = tolerance.block_limit(
        "fp32", trained_scale=True, max_abs_input=float(draw.x.abs().max())
    )
    assert_within("block", ops.block(*arguments), judge_block(arguments), limit)
    exact = Draw(c=c, h=2 * c + 1, length=length, n=3)
    arguments = exact.block_arguments(dilation)
    assert_within("block, float64", ops.block(*arguments), judge_block(arguments), 1e-13)


@pytest.mark.parametrize("length", [1, 4, 30])
@pytest.mark.parametrize("k", [1, 19, 21])
def test_stem_at_odd_sizes(length: int, k: int) -> None:
    draw = Draw(c=5, k=k, length=length, n=3)
    found = ops.stem(*draw.stem_arguments())
    padded = torch.nn.functional.pad(draw.sequence, (k // 2, k // 2))
    windows = padded.unfold(2, k, 1)  # (N, 4, L, k)
    wide = torch.einsum("nilk,cik->nlc", windows, draw.stem) + draw.bias
    inner = 0.7978845608028654 * (wide + 0.044715 * wide**3)
    assert_within("stem", found, 0.5 * wide * (1 + torch.tanh(inner)), 1e-12)
    assert found.is_contiguous()


@pytest.mark.parametrize("tracks", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 5, 75])
@pytest.mark.parametrize("windows", [(0, 0, 0, 0), (3, 2, 1, 4), (11, 0, 5, 6), (0, 11, 0, 0)])
def test_head_follows_the_contract_in_every_window(tracks, k, windows) -> None:
    draw = Draw(tracks=tracks, k=k)
    arguments = draw.head_arguments(windows)
    profile, counts = ops.head(*arguments)
    wanted = plain_head(arguments)
    assert profile.shape == (2, 2, 12 - windows[0] - windows[1]) and counts.shape == (2, 1)
    assert_within("profile", profile, wanted[0], 1e-12)
    assert_within("counts", counts, wanted[1], 1e-12)


@pytest.mark.parametrize("std", [0.1, 1.0])
@pytest.mark.parametrize("taps", ["one", "random"])
def test_block_survives_a_mean_far_above_the_spread(std: float, taps: str) -> None:
    """With taps of 0, 1, 0 the mean reaches the norm whole; E[y^2] - m^2 would lose it all."""
    draw = Draw(c=20, h=40, length=300, dtype=torch.float32)
    if taps == "one":
        draw.conv = torch.tensor([0.0, 1.0, 0.0])[:, None].expand(3, 20)
    draw.x = std * (draw.x + 3000.0)
    arguments = draw.block_arguments()
    limit = tolerance.block_limit(
        "fp32", trained_scale=True, max_abs_input=float(draw.x.abs().max())
    )
    error = assert_within("block", ops.block(*arguments), judge_block(arguments), limit)
    # The test can fail: one-pass variance in float32 is far outside the limit.
    if taps == "one":
        y = draw.x
        variance = y.square().mean((1, 2), keepdim=True) - y.mean((1, 2), keepdim=True).square()
        z = (y - y.mean((1, 2), keepdim=True)) / torch.sqrt(variance.abs() + EPSILON)
        hidden = torch.nn.functional.gelu(z @ draw.w1.T, approximate="tanh")
        naive = (y + 0.15 * hidden @ draw.w2.T).double()
        assert (naive - judge_block(arguments)).abs().max() > max(limit, error)


def test_inputs_may_have_any_strides() -> None:
    draw = Draw(dtype=torch.float32, tracks=2)
    arranged = {
        ops.stem: draw.stem_arguments(),
        ops.block: draw.block_arguments(),
        ops.head: draw.head_arguments(),
    }
    for op, arguments in arranged.items():
        strided = tuple(
            a.transpose(0, -1).contiguous().transpose(0, -1)
            if isinstance(a, torch.Tensor) and a.dim() > 1
            else a
            for a in arguments
        )
        assert not strided[0].is_contiguous()
        outputs, wanted = op(*strided), op(*arguments)
        for ours, theirs in zip(
            outputs if isinstance(outputs, tuple) else (outputs,),
            wanted if isinstance(wanted, tuple) else (wanted,),
            strict=True,
        ):
            assert ours.is_contiguous()
            assert_within(str(op), ours, theirs, 2e-6)


def test_sequence_may_be_integers() -> None:
    draw = Draw(dtype=torch.float32)
    one_hot = torch.eye(4, dtype=torch.int8)[torch.randint(4, (2, 12))].transpose(1, 2)
    assert torch.equal(
        ops.stem(one_hot, *draw.stem_arguments()[1:]),
        ops.stem(one_hot.float(), *draw.stem_arguments()[1:]),
    )


@pytest.mark.parametrize("stream", [torch.float16, torch.bfloat16])
def test_a_narrow_stream_costs_one_rounding_per_op(stream: torch.dtype) -> None:
    draw = Draw(c=20, h=40, length=50, dtype=torch.float32)
    whole = ops.stem(*draw.stem_arguments())
    assert torch.equal(ops.stem(*draw.stem_arguments(stream)), whole.to(stream))
    x = draw.x.to(stream)
    rest = draw.block_arguments()[1:]
    narrow = ops.block(x, *rest)
    assert narrow.dtype == stream
    assert torch.equal(narrow, ops.block(x.float(), *rest).to(stream))
    profile, counts = ops.head(x, *draw.head_arguments()[1:])
    assert profile.dtype == counts.dtype == torch.float32
    wanted = ops.head(x.float(), *draw.head_arguments()[1:])
    assert torch.equal(profile, wanted[0]) and torch.equal(counts, wanted[1])


def run_all(draw: Draw, x: torch.Tensor, sequence: torch.Tensor):
    rest = draw.head_arguments()[2:]
    return (
        ops.stem(sequence, *draw.stem_arguments()[1:]),
        ops.block(x, *draw.block_arguments()[1:]),
        *ops.head(x, None, *rest),
    )


@pytest.mark.parametrize(("c", "h", "length"), [(3, 6, 20), (32, 64, 378), (128, 256, 301)])
def test_an_example_depends_on_no_other(c: int, h: int, length: int) -> None:
    """Bitwise the same alone, whatever else is in the batch, and wherever it stands in it."""
    draw = Draw(c=c, h=h, k=21, n=5, length=length, dtype=torch.float32)
    for n in range(1, 6):
        x, sequence = draw.x[:n], draw.sequence[:n]
        together = run_all(draw, x, sequence)
        for place in range(n):
            others = torch.full_like(x, torch.nan), torch.full_like(sequence, torch.nan)
            others[0][place], others[1][place] = x[place], sequence[place]
            for ours, theirs in zip(run_all(draw, *others), together, strict=True):
                assert torch.equal(ours[place], theirs[place])
            alone = run_all(draw, x[place : place + 1].clone(), sequence[place : place + 1].clone())
            for ours, theirs in zip(alone, together, strict=True):
                assert torch.equal(ours[0], theirs[place])


WRONG = {
    "stem channels": ("stem", {0: (2, 3, 12)}, r"sequence \(2, 3, 12\) does not fit weight"),
    "stem rank": ("stem", {0: (4, 12)}, r"needed \(N, 4, L\)"),
    "stem even": ("stem", {1: (6, 4, 4)}, "kernel size 4 is even"),
    "stem bias": ("stem", {2: (5,)}, r"bias \(5\); needed \(6,\)"),
    "stem math": ("stem", {4: "fp8"}, "unknown math 'fp8'; use one of fp32, mixed, fp16, bf16"),
    "block rank": ("block", {0: (12, 6)}, r"x is torch.float64 \(12, 6\); needed floating"),
    "block conv": ("block", {1: (6, 3)}, r"conv_weight \(6, 3\); needed \(3, 6\)"),
    "block w1": ("block", {2: (10, 5)}, r"w1 \(10, 5\)"),
    "block w2": ("block", {3: (10, 6)}, r"w2 \(10, 6\); needed \(H, 6\) and \(6, H\)"),
    "block dilation": ("block", {4: 0}, "dilation 0; needed 1 or more"),
    "block math": ("block", {7: "tf32"}, "unknown math 'tf32'"),
    "head rank": ("head", {0: (12, 6)}, r"x \(12, 6\); needed \(N, L, C\)"),
    "head weight": ("head", {2: (2, 7, 5)}, r"profile_weight \(2, 7, 5\); needed \(O, 6 \+ 0"),
    "head even": ("head", {2: (2, 6, 4)}, "kernel size 4 is even"),
    "head bias": ("head", {3: (3,)}, r"profile_bias \(3\)"),
    "head count": ("head", {4: (1, 7)}, r"count_weight \(1, 7\); needed \(G, 6\)"),
    "head count bias": ("head", {5: (2,)}, r"count_bias \(2\)"),
    "head window": ("head", {6: 7, 7: 5}, "length 12 leaves no output .* give at least 13 bases"),
    "head negative": ("head", {6: -1}, "trims must be >= 0"),
    "head negative count": ("head", {8: -1}, "trims must be >= 0"),
    "head math": ("head", {10: "x"}, "unknown math 'x'"),
    "control length": ("head", {1: (2, 2, 11)}, r"control \(2, 2, 11\) does not fit x"),
    "control batch": ("head", {1: (1, 2, 12)}, r"needed \(N, T, L\) = \(2, T, 12\)"),
    "control tracks": ("head", {1: (2, 3, 12)}, r"needed \(O, 6 \+ 3 control tracks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    op, changes, message = WRONG[name]
    draw = Draw(tracks=2 if name.startswith("control") else 0)
    arguments = list(getattr(draw, f"{op}_arguments")())
    for index, change in changes.items():
        arguments[index] = draw(*change) if isinstance(change, tuple) else change
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(*arguments)


def test_an_empty_count_window_is_refused() -> None:
    """A mean over no position would be NaN without a word."""
    draw = Draw()
    with pytest.raises(ValueError, match="window"):
        ops.head(*draw.head_arguments((0, 0, 8, 4)))


def test_an_integer_stream_is_refused() -> None:
    arguments = Draw().block_arguments()
    with pytest.raises(ValueError, match=r"x is torch\.int64"):
        ops.block(arguments[0].long(), *arguments[1:])
