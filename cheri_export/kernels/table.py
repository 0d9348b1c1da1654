"""Launch configurations: a literal table, and the rule for every shape that it does not list.

A configuration depends on the architecture, the tier and the shape (C, H) alone. It never depends
on N (an example's result must not change with the batch) and is never found by timing.
"""

from __future__ import annotations

import dataclasses
import functools

from cheri_export.errors import InputError

ARCHITECTURES = (80, 86, 89, 90, 100, 120)

SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Largest dynamic shared memory of one block in bytes. Source: CUDA programming guide, table of
compute capabilities (163, 99 and 227 KB)."""

MAX_CHANNELS = 1024

SPLIT_TIERS = ("fp32",)
"""Tiers whose dots take three products."""

HALF_TIERS = ("fp16", "bf16")
"""Tiers with a 16-bit stream."""

SCALED_TIERS = ("fp32", "mixed")
"""Tiers that scale their dot operands by powers of two, so that no weight is out of range."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How the block's two forward kernels are compiled and launched.

    Attributes
    ----------
    block_l, block_h: int
        Positions and hidden channels of one tile of the fused kernel.

    num_warps, num_stages: int
        Warps of the fused kernel, and depth of its prefetch of the weights.

    approx: int
        GELU of the 16-bit and mixed tiers, see `numerics.gelu_of_half`.

    resident: bool
        Weights loaded once per program; needs ``H == 2 * block_h`` and `persistent` > 0.

    persistent: int
        Programs per multiprocessor, each of which loops over tiles; 0 = one program per tile.

    stats_l, stats_warps: int
        Positions of one tile of the statistics kernel, and its warps.

    parts: int
        1, or 2 to take the convolution's channels in two halves, which needs fewer registers.

    registers: int or None
        Most registers of a thread of the fused kernel; None leaves it to the compiler.
    """

    block_l: int
    block_h: int
    num_warps: int
    num_stages: int
    approx: int
    resident: bool = False
    persistent: int = 0
    stats_l: int = 64
    stats_warps: int = 4
    parts: int = 1
    registers: int | None = None


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How the block's backward kernels are compiled and launched.

    Attributes
    ----------
    mlp_l, mlp_h, mlp_warps, mlp_stages: int
        Tile, warps and prefetch depth of `mlp_backward_kernel`.

    grad_m, grad_n, grad_warps, grad_stages: int
        Tile, warps and prefetch depth of `weight_grad_kernel`; it sums mlp_l positions a step.

    splits: int
        Fixed runs of tiles over which the weight gradients are first summed.

    conv_l, conv_run, conv_warps: int
        Positions of a tile of `conv_backward_kernel`, tiles of one program, and its warps.

    conv_registers: int or None
        Most registers of one of its threads; None leaves it to the compiler.

    approx: int
        0 or 1, see `numerics.gelu_and_slope`.
    """

    mlp_l: int
    mlp_h: int
    mlp_warps: int
    mlp_stages: int
    grad_m: int
    grad_n: int
    grad_warps: int
    grad_stages: int
    splits: int
    conv_l: int
    conv_run: int
    conv_warps: int
    conv_registers: int | None
    approx: int


@dataclasses.dataclass(frozen=True)
class StemConfig:
    """Tile and warps of `stem_kernel`."""

    block_l: int
    block_c: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Tiles and warps of `head_project_kernel`, and the positions of `head_reduce_kernel`."""

    block_l: int
    block_q: int
    num_warps: int
    reduce_l: int


FORWARD: dict[tuple[int, str, int, int], ForwardConfig] = {
    # Measured on an H200: `benchmarks/check_kernels_gpu.py`, docs/performance.md.
    (90, "fp32", 128, 256): ForwardConfig(64, 32, 4, 2, 0, stats_l=16, stats_warps=2, parts=2),
    (90, "mixed", 128, 256): ForwardConfig(64, 32, 4, 4, 1, stats_l=16, stats_warps=2, parts=2),
    (90, "fp16", 128, 256): ForwardConfig(64, 32, 4, 3, 2, stats_warps=8),
    (90, "bf16", 128, 256): ForwardConfig(64, 32, 4, 3, 2, stats_warps=8),
}
"""Choices by (architecture, tier, C, H); everything else follows `_forward_rule`."""

BACKWARD: dict[tuple[int, str, int, int], BackwardConfig] = {
    (90, "fp32", 128, 256): BackwardConfig(64, 32, 4, 3, 128, 128, 8, 3, 64, 4, 32, 4, None, 0),
    (90, "mixed", 128, 256): BackwardConfig(64, 32, 4, 3, 128, 128, 8, 4, 64, 4, 32, 4, None, 1),
    (90, "fp16", 128, 256): BackwardConfig(64, 64, 4, 2, 128, 128, 8, 4, 64, 8, 32, 4, 128, 1),
    (90, "bf16", 128, 256): BackwardConfig(64, 64, 4, 2, 128, 128, 8, 4, 64, 8, 32, 4, 128, 1),
}
"""Measured choices by (architecture, tier, C, H); everything else follows `_backward_rule`."""


def power_of_two(value: int, least: int = 16) -> int:
    """Smallest power of two that is at least `value` and `least`."""
    return max(least, 1 << (value - 1).bit_length())


def nearest_architecture(capability: int) -> int:
    """Newest listed architecture that is not newer than `capability` (major * 10 + minor)."""
    known = [arch for arch in ARCHITECTURES if arch <= capability]
    if not known:
        raise InputError(
            f"this GPU is sm_{capability}; the kernels need sm_{ARCHITECTURES[0]} or newer"
        )
    return known[-1]


def _forward_shared(block_c: int, config: ForwardConfig, terms: int) -> int:
    """Upper estimate of the fused kernel's shared memory in bytes; `aot` checks the real one."""
    operands = terms * 2 * config.block_l * (block_c + config.block_h)
    weights = terms * 2 * 2 * block_c * config.block_h * config.num_stages
    return operands + weights


def _forward_rule(arch: int, tier: str, channels: int, hidden: int) -> ForwardConfig:
    """First of a list of ever smaller tiles whose shared memory fits."""
    block_c = power_of_two(channels)
    terms = 2 if tier in SPLIT_TIERS else 1
    block_l = max(16, min(64, 16384 // block_c))
    # One warpgroup per tile, two tiles per multiprocessor, where the registers allow it.
    narrow = arch == 90 and block_c <= 128
    num_warps = 4 if narrow or block_l * block_c < 8192 else 8
    # On an H200 the halves are slower for a 16-bit stream, which has the registers.
    parts = 2 if block_c in (64, 128) and not (arch == 90 and tier in HALF_TIERS) else 1
    stats_l = max(4, min(64, 8192 // block_c))
    approx = {"fp32": 0, "mixed": 1}.get(tier, 2)
    # An fp32 stream needs the registers that a wider chunk of hidden channels would take.
    first = min(64 if tier in HALF_TIERS else 32, power_of_two(hidden))
    for rows in (block_l, max(16, block_l // 2), 16):
        for num_stages in (2, 1):
            block_h = first
            while block_h >= 16:
                config = ForwardConfig(
                    rows,
                    block_h,
                    num_warps,
                    num_stages,
                    approx,
                    stats_l=stats_l,
                    stats_warps=8,
                    parts=parts,
                )
                if _forward_shared(block_c, config, terms) <= SHARED_LIMIT[arch]:
                    return config
                block_h //= 2
    raise InputError(
        f"{channels} channels do not fit the shared memory of sm_{arch} in tier {tier}; "
        "use fewer channels or another GPU"
    )


@functools.cache
def forward_config(arch: int, tier: str, channels: int, hidden: int) -> ForwardConfig:
    """Configuration of the block's forward kernels.

    Parameters
    ----------
    arch: int
        A member of `ARCHITECTURES`, see `nearest_architecture`.

    tier: str
        ``fp32``, ``mixed``, ``fp16`` or ``bf16``.

    channels, hidden: int
        C and H of the block.

    Raises
    ------
    InputError
        More than `MAX_CHANNELS` channels, or no tile fits the shared memory.
    """
    if channels > MAX_CHANNELS:
        raise InputError(f"{channels} channels; the kernels take at most {MAX_CHANNELS}")
    found = FORWARD.get((arch, tier, channels, hidden))
    return found or _forward_rule(arch, tier, channels, hidden)


def _mlp_backward_shared(block_c: int, block_l: int, block_h: int, stages: int, terms: int) -> int:
    """Upper estimate of `mlp_backward_kernel`'s shared memory in bytes."""
    operands = terms * 2 * block_l * (2 * block_c + block_h)
    return operands + terms * 2 * 2 * block_c * block_h * stages


def _weight_grad_shared(block_l: int, block_m: int, block_n: int, stages: int, terms: int) -> int:
    """Upper estimate of `weight_grad_kernel`'s shared memory in bytes."""
    return terms * 2 * block_l * (block_m + block_n) * stages


def _backward_rule(arch: int, tier: str, channels: int, hidden: int) -> BackwardConfig:
    """First of a list of ever smaller tiles whose shared memory fits, for each of the kernels."""
    block_c = power_of_two(channels)
    terms = 2 if tier in SPLIT_TIERS else 1
    limit = SHARED_LIMIT[arch]
    widest = power_of_two(hidden)
    # mma.sync (not 90 and 100) holds both operands in registers: two terms of a wide tile spill.
    wide = terms == 1 or arch in (90, 100)
    start = max(16, min(64 if wide else 32, 8192 // block_c))
    mlp = [
        (block_l, min(block_h, widest), stages)
        for block_l in (start, max(16, start // 2), 16)
        for stages in (2, 1)
        for block_h in (32, 16)
        if _mlp_backward_shared(block_c, block_l, min(block_h, widest), stages, terms) <= limit
    ]
    if not mlp:
        raise InputError(
            f"{channels} channels do not fit the shared memory of sm_{arch} for training in tier "
            f"{tier}; use fewer channels or another GPU"
        )
    mlp_l, mlp_h, mlp_stages = mlp[0]
    sides = (128, 64, 32, 16) if wide and terms == 1 else (64, 32, 16)
    grad_m, grad_n, grad_stages = next(
        (min(side, widest), min(side, block_c), stages)
        for side in sides
        for stages in (4, 3, 2)
        if _weight_grad_shared(mlp_l, side, side, stages, terms) <= limit
    )
    conv_l = 16 if tier in HALF_TIERS else 8
    warpgroup = arch == 90 or (arch == 100 and terms == 1)
    return BackwardConfig(
        mlp_l, mlp_h, 8 if mlp_l * block_c >= 8192 and not warpgroup else 4, mlp_stages,
        grad_m, grad_n, 8 if grad_m * grad_n >= 8192 else 4, grad_stages, 64,
        max(2, min(conv_l, 128 * conv_l // block_c)), 128 // conv_l, 8, None,
        0 if tier == "fp32" else 1,
    )  # fmt: skip


@functools.cache
def backward_config(arch: int, tier: str, channels: int, hidden: int) -> BackwardConfig:
    """Configuration of the block's backward kernels; parameters as `forward_config`."""
    if channels > MAX_CHANNELS:
        raise InputError(f"{channels} channels; the kernels take at most {MAX_CHANNELS}")
    found = BACKWARD.get((arch, tier, channels, hidden))
    return found or _backward_rule(arch, tier, channels, hidden)


def stem_config(arch: int) -> StemConfig:
    """Tile of the stem. Four warps are a third faster where wgmma leaves them the registers."""
    return StemConfig(64, 128, 4 if arch == 90 else 8)


def head_config(arch: int, block_c: int, taps: int) -> HeadConfig:
    """Tiles of the head; their operands take at most 80 KB, which every architecture has."""
    return HeadConfig(
        max(16, min(64, 8192 // block_c)),
        max(16, min(64, 4096 // block_c, power_of_two(taps))),
        4 if arch == 90 or block_c < 128 else 8,
        128,
    )
