"""Shape and type checks of the ops: said here once, for every implementation."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
MATHS = ("fp32", "mixed", "fp16", "bf16")


def _shape(t: Tensor) -> str:
    return "(" + ", ".join(str(s) for s in t.shape) + ")"


def _math(op: str, math: str) -> None:
    if math not in MATHS:
        raise ValueError(f"{op}: unknown math {math!r}; use one of {', '.join(MATHS)}")


def check_stem(sequence: Tensor, weight: Tensor, bias: Tensor, math: str) -> None:
    """Raise ValueError unless sequence (N, 4, L), weight (C, 4, k odd), bias (C,)."""
    _math("cheri::stem", math)
    if sequence.dim() != 3 or weight.dim() != 3 or sequence.shape[1] != weight.shape[1]:
        raise ValueError(
            f"cheri::stem: sequence {_shape(sequence)} does not fit weight {_shape(weight)}; "
            "needed (N, 4, L) and (C, 4, k)"
        )
    if weight.shape[2] % 2 == 0:
        raise ValueError(f"cheri::stem: kernel size {weight.shape[2]} is even; it must be odd")
    if tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"cheri::stem: bias {_shape(bias)}; needed ({weight.shape[0]},)")


def check_block(
    x: Tensor, conv_weight: Tensor, w1: Tensor, w2: Tensor, dilation: int, math: str
) -> None:
    """Raise ValueError unless x (N, L, C), conv_weight (3, C), w1 (H, C), w2 (C, H)."""
    _math("cheri::block", math)
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"cheri::block: x is {x.dtype} {_shape(x)}; needed floating (N, L, C)")
    c = x.shape[2]
    if tuple(conv_weight.shape) != (3, c):
        raise ValueError(f"cheri::block: conv_weight {_shape(conv_weight)}; needed (3, {c})")
    if w1.dim() != 2 or w1.shape[1] != c or tuple(w2.shape) != (c, w1.shape[0]):
        raise ValueError(
            f"cheri::block: w1 {_shape(w1)} and w2 {_shape(w2)}; needed (H, {c}) and ({c}, H)"
        )
    if dilation < 1:
        raise ValueError(f"cheri::block: dilation {dilation}; needed 1 or more")


def check_head(
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
) -> None:
    """Raise ValueError unless the shapes agree and both windows lie within the sequence."""
    _math("cheri::head", math)
    if x.dim() != 3:
        raise ValueError(f"cheri::head: x {_shape(x)}; needed (N, L, C)")
    tracks = 0
    if control is not None:
        if control.dim() != 3 or control.shape[0] != x.shape[0] or control.shape[2] != x.shape[1]:
            raise ValueError(
                f"cheri::head: control {_shape(control)} does not fit x {_shape(x)}; "
                f"needed (N, T, L) = ({x.shape[0]}, T, {x.shape[1]})"
            )
        tracks = control.shape[1]
    if profile_weight.dim() != 3 or profile_weight.shape[1] != x.shape[2] + tracks:
        raise ValueError(
            f"cheri::head: profile_weight {_shape(profile_weight)}; "
            f"needed (O, {x.shape[2]} + {tracks} control tracks, k)"
        )
    if profile_weight.shape[2] % 2 == 0:
        raise ValueError(f"cheri::head: kernel size {profile_weight.shape[2]} is even; must be odd")
    if tuple(profile_bias.shape) != (profile_weight.shape[0],):
        raise ValueError(f"cheri::head: profile_bias {_shape(profile_bias)}")
    width = x.shape[2] + (1 if control is not None else 0)
    if count_weight.dim() != 2 or count_weight.shape[1] != width:
        raise ValueError(f"cheri::head: count_weight {_shape(count_weight)}; needed (G, {width})")
    if tuple(count_bias.shape) != (count_weight.shape[0],):
        raise ValueError(f"cheri::head: count_bias {_shape(count_bias)}")
    if min(start, end_trim, count_start, count_end_trim) < 0:
        raise ValueError("cheri::head: a window begins before the sequence; the trims must be >= 0")


def check_window(
    length: int, start: int, end_trim: int, count_start: int, count_end_trim: int
) -> None:
    """Raise ValueError when nothing of the sequence is kept, for the profile or the counts.

    Apart from `check_head`, because a symbolic length must not be compared while tracing.
    """
    if length - start - end_trim < 1:
        raise ValueError(
            f"cheri::head: sequence length {length} leaves no output after trimming {start} and "
            f"{end_trim}; give at least {start + end_trim + 1} bases"
        )
    if length - count_start - count_end_trim < 1:
        raise ValueError(
            f"cheri::head: sequence length {length} leaves no count window after {count_start} and "
            f"{count_end_trim}; give at least {count_start + count_end_trim + 1} bases"
        )
