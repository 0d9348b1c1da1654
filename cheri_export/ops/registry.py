"""Schemas, implementations, fake kernels and gradients of the three ops, for torch.library.

The schemas are the contract of `docs/op-contract.md`: they must not change without a new
`plugin_version`, since exported files, plugins and other people's modules rely on them.
"""

from __future__ import annotations

from typing import Any

import torch

from cheri_export.ops import checks, plain

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

stem = torch.ops.cheri.stem
block = torch.ops.cheri.block
head = torch.ops.cheri.head


def _head_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _stem_plain(
    sequence: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype, math: str
) -> Tensor:
    checks.check_stem(sequence, weight, bias, math)
    return plain.stem(sequence, weight, bias, out_dtype)


def _block_plain(
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
    return plain.block(x, conv_weight, w1, w2, dilation, residual_scale, epsilon).contiguous()


def _head_plain(
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
    checks.check_window(x.shape[1], start, end_trim)
    profile, counts = plain.head(*tensors, *windows)
    kind = _head_dtype(x)
    return profile.to(kind).contiguous(), counts.to(kind).contiguous()


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("stem", _stem_plain, _key)
    _LIBRARY.impl("block", _block_plain, _key)
    _LIBRARY.impl("head", _head_plain, _key)


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


def _gradients(
    function: Any, tensors: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Recompute `function` with autograd and return the gradient of each tensor that wants one."""
    with torch.enable_grad():
        leaves = [
            None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors
        ]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g.to(o.dtype) for o, g in pairs], allow_unused=True
            )
        )
    return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def _stem_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.out_dtype = inputs[3]


def _stem_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    def run(sequence: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return plain.stem(sequence, weight, bias, ctx.out_dtype)

    found = _gradients(run, ctx.saved_tensors, (grad,))
    return (*found, None, None)


def _block_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.constants = inputs[4:7]


def _block_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = _gradients(lambda *t: plain.block(*t, *ctx.constants), ctx.saved_tensors, (grad,))
    return (*found, None, None, None, None)


def _head_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.windows = inputs[6:10]


def _head_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    found = _gradients(lambda *t: plain.head(*t, *ctx.windows), ctx.saved_tensors, grads)
    return (*found, None, None, None, None, None)


torch.library.register_autograd("cheri::stem", _stem_backward, setup_context=_stem_setup)
torch.library.register_autograd("cheri::block", _block_backward, setup_context=_block_setup)
torch.library.register_autograd("cheri::head", _head_backward, setup_context=_head_setup)
