"""Host side of the stem and the head: checks, workspace, grids and launches."""

from __future__ import annotations

import torch
from torch import Tensor

from cheri_export.errors import InputError
from cheri_export.kernels import head, stem, table
from cheri_export.kernels.host import STREAM_DTYPES, aligned, check_math, guard, launch, target


def _tiles_per_program(tiles: int) -> int:
    """Tiles that share one preparation of the weights; a tile's bits do not depend on it.

    One for a small batch, which needs the programs.
    """
    return 1 if tiles <= 264 else 8


def stem_forward(
    sequence: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype, math: str
) -> Tensor:
    """gelu(conv1d(sequence, weight, bias, padding=k // 2)), channels last, in one launch.

    Parameters
    ----------
    sequence: torch.Tensor, shape=(N, 4, L), any float dtype
        Any values, one-hot or not.

    weight, bias: torch.Tensor, shape=(C, 4, k) and (C,), any float dtype
        k is odd.

    out_dtype: torch.dtype
        float32, float16 or bfloat16.

    math: str
        The tier. ``fp32`` takes the GELU from exp, the others from the hardware's tanh; sums are
        float32 in every tier.

    Returns
    -------
    out: torch.Tensor, shape=(N, L, C), dtype=out_dtype
    """
    check_math(math)
    shape = tuple(weight.shape)
    if sequence.ndim != 3 or sequence.shape[1] != 4 or len(shape) != 3 or shape[1] != 4:
        raise InputError(f"stem: {tuple(sequence.shape)} and weight {shape} need 4 bases")
    if shape[2] % 2 == 0 or tuple(bias.shape) != shape[:1] or out_dtype not in STREAM_DTYPES:
        raise InputError(f"stem: weight {shape}, bias {tuple(bias.shape)}, output {out_dtype}")
    n_examples, _, length = sequence.shape
    channels, _, width = shape
    out = torch.empty((n_examples, length, channels), dtype=out_dtype, device=sequence.device)
    if out.numel() == 0:
        return out
    config = table.stem_config(target(sequence)[0])
    block_c = min(config.block_c, table.power_of_two(channels))
    tiles = -(-length // config.block_l)
    approx = 0 if math == "fp32" or not target(sequence)[2] else 1
    with guard(sequence):
        run = _tiles_per_program(n_examples * tiles)
        runs = -(-tiles // run)
        launch(
            stem.stem_kernel,
            n_examples * runs * -(-channels // block_c),
            (aligned(sequence), aligned(weight), aligned(bias), out),
            (length, tiles, run, runs),
            (
                channels, width, table.power_of_two(4 * width), config.block_l, block_c, approx,
            ),
            num_warps=config.num_warps,
        )  # fmt: skip
    return out


def head_forward(
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
    """Profile logits on the kept window and log counts, in two launches.

    Parameters
    ----------
    x: torch.Tensor, shape=(N, L, C), dtype=float32, float16 or bfloat16

    control: torch.Tensor, shape=(N, T, L), or None

    profile_weight, profile_bias: torch.Tensor, shape=(O, C + T, k) and (O,)
        k is odd.

    count_weight, count_bias: torch.Tensor, shape=(G, C) or, with a control, (G, C + 1), and (G,)

    start, end_trim, count_start, count_end_trim: int
        Positions cut from the two ends for the profile and for the counts.

    math: str
        The tier; the head computes the same in all of them.

    Returns
    -------
    profile_logits: torch.Tensor, shape=(N, O, L - start - end_trim), dtype=float32

    log_counts: torch.Tensor, shape=(N, G), dtype=float32
    """
    check_math(math)
    if x.ndim != 3 or x.dtype not in STREAM_DTYPES:
        raise InputError(f"head: x is {tuple(x.shape)} {x.dtype}; expected (N, L, C)")
    n_examples, length, channels = x.shape
    tracks = 0 if control is None else control.shape[1]
    outputs, _, width = profile_weight.shape
    groups = count_weight.shape[0]
    kept = length - start - end_trim
    count_end = length - count_end_trim
    if (
        tuple(profile_weight.shape) != (outputs, channels + tracks, width)
        or tuple(count_weight.shape) != (groups, channels + (tracks > 0))
        or width % 2 == 0
        or (control is not None and tuple(control.shape) != (n_examples, tracks, length))
    ):
        raise InputError(
            f"head: x {tuple(x.shape)} with {tracks} controls does not fit profile_weight "
            f"{tuple(profile_weight.shape)} and count_weight {tuple(count_weight.shape)}"
        )
    if (
        kept < 1
        or count_end <= count_start
        or min(start, end_trim, count_start, count_end_trim) < 0
    ):
        raise InputError(f"head: {length} positions leave nothing between the trimmed ends")
    profile = torch.empty((n_examples, outputs, kept), dtype=torch.float32, device=x.device)
    counts = torch.empty((n_examples, groups), dtype=torch.float32, device=x.device)
    if n_examples == 0:
        return profile, counts
    block_c = table.power_of_two(channels)
    config = table.head_config(target(x)[0], block_c, outputs * width)
    half = width // 2
    profile_rows = kept + width - 1
    first_row = min(start - half, count_start)
    tiles = -(-(max(start - half + profile_rows, count_end) - first_row) // config.block_l)
    taps = outputs * width
    products = torch.empty((n_examples, taps, profile_rows), dtype=torch.float32, device=x.device)
    columns = torch.empty((n_examples, tiles, channels), dtype=torch.float32, device=x.device)
    out_tiles = -(-kept // config.reduce_l)
    weight = aligned(profile_weight)
    with guard(x):
        run = _tiles_per_program(n_examples * tiles)
        runs = -(-tiles // run)
        launch(
            head.head_project_kernel,
            n_examples * runs,
            (aligned(x), weight, products, columns),
            (
                length, first_row, tiles, run, runs, start - half, profile_rows,
                count_start, count_end,
            ),
            (
                channels, tracks, outputs, width, block_c, config.block_l, config.block_q,
                x.dtype == torch.float32,
            ),
            num_warps=config.num_warps,
        )  # fmt: skip
        launch(
            head.head_reduce_kernel,
            n_examples * (outputs * out_tiles + 1),
            (
                products, columns, x if control is None else aligned(control), weight,
                aligned(profile_bias), aligned(count_weight), aligned(count_bias),
                profile, counts,
            ),
            (length, start, kept, out_tiles, profile_rows, count_start, count_end, tiles),
            (channels, tracks, outputs, width, groups, block_c, config.reduce_l),
            num_warps=4,
        )  # fmt: skip
    return profile, counts
