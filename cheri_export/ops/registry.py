"""Schemas, implementations, fake kernels and gradients of the three ops, for torch.library.

The schemas are the contract of `docs/op-contract.md`: they must not change without a new
`plugin_version`, since exported files, plugins and other people's modules rely on them. The
backward ops are private.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from cheri_export.ops import checks, gpu, plain

Tensor = torch.Tensor

_LIBRARY = torch.library.Library("cheri", "DEF")
_LIBRARY.define(
    "stem(Tensor sequence, Tensor weight, Tensor bias, ScalarType out_dtype, str math) -> Tensor"
)
_LIBRARY.define(
    "block(Tensor x, Tensor conv_weight, Tensor w1, Tensor w2, int dilation, "
    "float residual_scale, float epsilon, str math) -> Tensor"
)
_LIBRARY.define(
    "head(Tensor x, Tensor? control, Tensor profile_weight, Tensor profile_bias, "
    "Tensor count_weight, Tensor count_bias, int start, int end_trim, int count_start, "
    "int count_end_trim, str math) -> (Tensor profile_logits, Tensor log_counts)"
)
# Each returns one gradient per tensor, in order; an empty tensor where none was wanted.
_LIBRARY.define(
    "stem_backward(Tensor grad, Tensor sequence, Tensor weight, Tensor bias, ScalarType out_dtype, "
    "bool[] wanted) -> Tensor[]"
)
_LIBRARY.define(
    "block_backward(Tensor grad, Tensor x, Tensor conv_weight, Tensor w1, Tensor w2, int dilation, "
    "float residual_scale, float epsilon, str math, bool[] wanted) -> Tensor[]"
)
_LIBRARY.define(
    "head_backward(Tensor grad_profile, Tensor grad_counts, Tensor x, Tensor? control, "
    "Tensor profile_weight, Tensor profile_bias, Tensor count_weight, Tensor count_bias, "
    "int[] windows, bool[] wanted) -> Tensor[]"
)

stem = torch.ops.cheri.stem
block = torch.ops.cheri.block
head = torch.ops.cheri.head


def _head_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _example_by_example(function: Any, examples: Tensor, out: Tensor) -> Tensor:
    """Fill `out` one example at a time: on the CPU, too, none may depend on the batch.

    Matrix products and convolutions sum in another order for another batch size, and for another
    alignment, hence the copies.
    """
    for i in range(out.shape[0]):
        out[i] = function(examples[i : i + 1].clone())[0]
    return out


def _stem(
    sequence: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype, math: str
) -> Tensor:
    checks.check_stem(sequence, weight, bias, math)
    if sequence.is_cuda:
        return gpu.stem(sequence, weight, bias, out_dtype, math)
    out = _stem_fake(sequence, weight, bias, out_dtype, math)
    return _example_by_example(lambda one: plain.stem(one, weight, bias, out_dtype), sequence, out)


def _block(
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
) -> Tensor:
    checks.check_block(x, conv_weight, w1, w2, dilation, math)
    if x.is_cuda:
        return gpu.block(x, conv_weight, w1, w2, dilation, residual_scale, epsilon, math)
    return _example_by_example(
        lambda one: plain.block(one, conv_weight, w1, w2, dilation, residual_scale, epsilon),
        x,
        x.new_empty(x.shape),
    )


def _head(
    x: Tensor,
    control: Tensor | None,
    profile_weight: Tensor,
    profile_bias: Tensor,
    count_weight: Tensor,
    count_bias: Tensor,
    start: int,
    end_trim: int,
    count_start: int,
    count_end_trim: int,
    math: str,
) -> tuple[Tensor, Tensor]:
    tensors = (x, control, profile_weight, profile_bias, count_weight, count_bias)
    windows = (start, end_trim, count_start, count_end_trim)
    checks.check_head(*tensors, *windows, math)
    checks.check_window(x.shape[1], *windows)
    if x.is_cuda:
        profile, counts = gpu.head(*tensors, *windows, math)
        kind = _head_dtype(x)
        return profile.to(kind).contiguous(), counts.to(kind).contiguous()
    profile, counts = _head_fake(*tensors, *windows, math)
    for i in range(x.shape[0]):
        one = None if control is None else control[i : i + 1].clone()
        found = plain.head(x[i : i + 1].clone(), one, *tensors[2:], *windows)
        profile[i], counts[i] = found[0][0], found[1][0]
    return profile, counts


def _gradients(
    function: Any,
    tensors: tuple[Tensor | None, ...],
    wanted: list[bool],
    grads: tuple[Tensor, ...],
) -> list[Tensor]:
    """Recompute `function` with autograd and return the gradient of each tensor that wants one."""
    with torch.enable_grad():
        leaves = [
            None if t is None else t.detach().requires_grad_(want)
            for t, want in zip(tensors, wanted, strict=True)
        ]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sources = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(
            torch.autograd.grad(
                outputs,
                sources,
                [g.to(o.dtype) for o, g in zip(outputs, grads, strict=True)],
                materialize_grads=True,
            )
            if sources
            else ()
        )
    empty = grads[0].new_empty(0)
    return [
        next(found).contiguous() if leaf is not None and leaf.requires_grad else empty.clone()
        for leaf in leaves
    ]


def _repeatable_cudnn() -> Any:
    """Gradients of the two convolutions without atomics, and without TF32.

    By default cuDNN may sum a weight's gradient in another order at every call (seen on an H200).
    """
    enabled = torch.backends.cudnn.enabled
    return torch.backends.cudnn.flags(
        enabled=enabled, benchmark=False, deterministic=True, allow_tf32=False
    )


def _stem_backward(
    grad: Tensor,
    sequence: Tensor,
    weight: Tensor,
    bias: Tensor,
    out_dtype: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    def run(sequence: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return plain.stem(sequence, weight, bias, out_dtype)

    with _repeatable_cudnn():
        return _gradients(run, (sequence, weight, bias), wanted, (grad,))


def _block_backward(
    grad: Tensor,
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
    wanted: list[bool],
) -> list[Tensor]:
    tensors = (x, conv_weight, w1, w2)
    if x.is_cuda:
        found = gpu.block_backward(
            grad, *tensors, dilation, residual_scale, epsilon, math, any(wanted[1:])
        )
        if found is not None:
            return [
                g if want and g is not None else grad.new_empty(0)
                for g, want in zip(found, wanted, strict=True)
            ]

    def run(x: Tensor, conv_weight: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return plain.block(x, conv_weight, w1, w2, dilation, residual_scale, epsilon)

    return _gradients(run, tensors, wanted, (grad,))


def _head_backward(
    grad_profile: Tensor,
    grad_counts: Tensor,
    x: Tensor,
    control: Tensor | None,
    profile_weight: Tensor,
    profile_bias: Tensor,
    count_weight: Tensor,
    count_bias: Tensor,
    windows: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    def run(*tensors: Any) -> tuple[Tensor, Tensor]:
        return plain.head(*tensors, *windows)

    tensors = (x, control, profile_weight, profile_bias, count_weight, count_bias)
    with _repeatable_cudnn():
        return _gradients(run, tensors, wanted, (grad_profile, grad_counts))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("stem", _stem, _key)
    _LIBRARY.impl("block", _block, _key)
    _LIBRARY.impl("head", _head, _key)
    _LIBRARY.impl("stem_backward", _stem_backward, _key)
    _LIBRARY.impl("block_backward", _block_backward, _key)
    _LIBRARY.impl("head_backward", _head_backward, _key)


@torch.library.register_fake("cheri::stem")
def _stem_fake(
    sequence: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype, math: str
) -> Tensor:
    checks.check_stem(sequence, weight, bias, math)
    shape = (sequence.shape[0], sequence.shape[2], weight.shape[0])
    return sequence.new_empty(shape, dtype=out_dtype)


@torch.library.register_fake("cheri::block")
def _block_fake(
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
) -> Tensor:
    checks.check_block(x, conv_weight, w1, w2, dilation, math)
    return x.new_empty(x.shape)


@torch.library.register_fake("cheri::head")
def _head_fake(
    x: Tensor,
    control: Tensor | None,
    profile_weight: Tensor,
    profile_bias: Tensor,
    count_weight: Tensor,
    count_bias: Tensor,
    start: int,
    end_trim: int,
    count_start: int,
    count_end_trim: int,
    math: str,
) -> tuple[Tensor, Tensor]:
    # Not check_head: comparing control's N and L with x's would pin symbolic sizes.
    kind = _head_dtype(x)
    kept = x.shape[1] - start - end_trim
    profile = x.new_empty((x.shape[0], profile_weight.shape[0], kept), dtype=kind)
    counts = x.new_empty((x.shape[0], count_weight.shape[0]), dtype=kind)
    return profile, counts


def _fake_gradients(tensors: tuple[Tensor | None, ...], wanted: list[bool]) -> list[Tensor]:
    first = tensors[0]
    assert first is not None
    return [
        t.new_empty(t.shape) if t is not None and want else first.new_empty(0)
        for t, want in zip(tensors, wanted, strict=True)
    ]


@torch.library.register_fake("cheri::stem_backward")
def _stem_backward_fake(
    grad: Tensor,
    sequence: Tensor,
    weight: Tensor,
    bias: Tensor,
    out_dtype: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    return _fake_gradients((sequence, weight, bias), wanted)


@torch.library.register_fake("cheri::block_backward")
def _block_backward_fake(
    grad: Tensor,
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float,
    epsilon: float,
    math: str,
    wanted: list[bool],
) -> list[Tensor]:
    return _fake_gradients((x, conv_weight, w1, w2), wanted)


@torch.library.register_fake("cheri::head_backward")
def _head_backward_fake(
    grad_profile: Tensor,
    grad_counts: Tensor,
    x: Tensor,
    control: Tensor | None,
    profile_weight: Tensor,
    profile_bias: Tensor,
    count_weight: Tensor,
    count_bias: Tensor,
    windows: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    tensors = (x, control, profile_weight, profile_bias, count_weight, count_bias)
    return _fake_gradients(tensors, wanted)


def _kept(gradients: list[Tensor], wanted: list[bool]) -> list[Tensor | None]:
    return [g if want else None for g, want in zip(gradients, wanted, strict=True)]


def _stem_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.out_dtype = inputs[3]


def _stem_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = torch.ops.cheri.stem_backward(grad, *ctx.saved_tensors, ctx.out_dtype, wanted)
    return (*_kept(found, wanted), None, None)


def _block_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.constants = inputs[4:]


def _block_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    found = torch.ops.cheri.block_backward(grad, *ctx.saved_tensors, *ctx.constants, wanted)
    return (*_kept(found, wanted), None, None, None, None)


def _head_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.windows = list(inputs[6:10])


def _head_autograd(ctx: Any, grad_profile: Tensor, grad_counts: Tensor) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:6])
    found = torch.ops.cheri.head_backward(
        grad_profile, grad_counts, *ctx.saved_tensors, ctx.windows, wanted
    )
    return (*_kept(found, wanted), None, None, None, None, None)


torch.library.register_autograd("cheri::stem", _stem_autograd, setup_context=_stem_setup)
torch.library.register_autograd("cheri::block", _block_autograd, setup_context=_block_setup)
torch.library.register_autograd("cheri::head", _head_autograd, setup_context=_head_setup)


_TIER = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _autocast(device: str) -> tuple[torch.dtype, str] | None:
    """Stream type and tier under autocast; None for a type that the ops have no tier for."""
    dtype = torch.get_autocast_dtype(device)
    return (dtype, _TIER[dtype]) if dtype in _TIER else None


def _register_autocast(device: str, key: str) -> None:
    """Under autocast the stream is 16-bit and the weights stay as they are: the kernels round them.

    The head keeps its float32 outputs: bf16 log counts would be off by up to 0.03.
    """
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def below() -> Any:
        return torch._C._ExcludeDispatchKeyGuard(excluded)

    def stem_autocast(
        sequence: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype, math: str
    ) -> Tensor:
        chosen = _autocast(device)
        with below():
            if chosen is not None and out_dtype == torch.float32:
                out_dtype, math = chosen
            return stem(sequence, weight, bias, out_dtype, math)

    def block_autocast(x: Tensor, *rest: Any) -> Tensor:
        chosen = _autocast(device)
        with below():
            if chosen is not None and x.dtype == torch.float32:
                return block(x.to(chosen[0]), *rest[:-1], chosen[1])
            return block(x, *rest)

    def head_autocast(*arguments: Any) -> tuple[Tensor, Tensor]:
        with below():
            return head(*arguments)

    _LIBRARY.impl("stem", stem_autocast, key)
    _LIBRARY.impl("block", block_autocast, key)
    _LIBRARY.impl("head", head_autocast, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


def _register_no_vmap(name: str) -> None:
    def refuse(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise RuntimeError(
            f"cheri::{name} cannot be vmapped: its first dimension is the batch already; reshape "
            "the inputs to (N, ...) and call it once, or loop over the weights"
        )

    torch.library.register_vmap(f"cheri::{name}", refuse)


for _name in ("stem", "block", "head"):
    _register_no_vmap(_name)
