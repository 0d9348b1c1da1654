"""Compile the kernels for every architecture without a GPU, and say what each one needs.

Only compiles: no torch, no device, no driver. The plugin's build and the tests both start here, so
that what is measured is what is shipped.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cheri_export.errors import EnvironmentProblem
from cheri_export.kernels import block_backward, block_forward, head, stem, table

STREAM = {"fp32": "fp32", "mixed": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""Type of the stream between the ops, by tier."""

CONSTEXPR = "constexpr"

_TYPES = (
    dict.fromkeys(("residual_scale", "epsilon", "z_scale", "undo", "g_bound"), "fp32")
    | dict.fromkeys(
        (
            "L", "dilation", "tiles", "prepare_programs", "n_tiles", "stat_tiles", "sum_tiles",
            "tiles_per_split", "first_tile", "first_slot", "slots", "conv_slots", "runs",
            "first_row", "profile_row", "profile_rows", "count_start",
            "count_end", "start", "length", "column_tiles", "z_size16", "h_size16",
            "left_size16", "right_size16", "run",
        ),
        "i32",
    )
    | dict.fromkeys(
        (
            "conv_ptr", "partial_ptr", "inverse_ptr", "mean_ptr", "rstd_ptr", "sums_ptr",
            "dconv_ptr", "slots_ptr", "dconv_slots_ptr", "largest_ptr", "scale_ptr",
            "sequence_ptr",
            "weight_ptr", "bias_ptr",
            "products_ptr", "column_ptr", "control_ptr", "count_weight_ptr", "count_bias_ptr",
            "profile_ptr", "counts_ptr",
        ),
        "*fp32",
    )
    | dict.fromkeys(("prepared_ptr", "w1_lo_ptr", "w2_lo_ptr"), "*fp16")
)  # fmt: skip
"""Types of the parameters that are the same everywhere, by name."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel with everything that makes a binary of it.

    Attributes
    ----------
    name: str
        Unique among the variants of one architecture.

    kernel: triton.JITFunction
        The device function.

    signature: dict of str to str
        Triton type of every parameter in order; ``constexpr`` for the compile-time ones.

    constants: mapping of str to int, bool or float
        Values of the compile-time parameters.

    num_warps, num_stages: int
        Launch options.

    registers: int or None
        Most registers of a thread; None leaves it to the compiler.
    """

    name: str
    kernel: object
    signature: dict[str, str]
    constants: Mapping[str, int | bool | float]
    num_warps: int
    num_stages: int
    registers: int | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A binary and what it needs of the GPU; `spill_bytes` is the stack of one thread."""

    variant: Variant
    arch: int
    entry: str
    cubin: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int


def make_variant(
    name: str,
    kernel: object,
    types: dict[str, str],
    constants: Mapping[str, int | bool | float],
    num_warps: int,
    num_stages: int = 3,
    registers: int | None = None,
) -> Variant:
    """Order the types and constants as the kernel's parameters, and check that none is missing."""
    signature = {
        arg: CONSTEXPR if arg in constants else types[arg]
        for arg in kernel.arg_names  # type: ignore[attr-defined]
    }
    return Variant(name, kernel, signature, constants, num_warps, num_stages, registers)


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile one variant for sm_`arch`.

    Every pointer is promised to be aligned to 16 bytes; without the promise loads are not vectors.
    """
    order = list(variant.signature)
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(order)
        if variant.signature[arg].startswith("*")
    }
    source = ASTSource(
        fn=variant.kernel,
        signature=variant.signature,
        constexprs={(order.index(arg),): value for arg, value in variant.constants.items()},
        attrs=attrs,
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": True,
        "maxnreg": variant.registers,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = compiled.asm["cubin"]
    registers, stack = resource_usage(cubin)
    meta = compiled.metadata
    return Compiled(variant, arch, meta.name, cubin, registers, stack, meta.shared, meta.num_warps)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, from the `cuobjdump` that Triton brings along."""
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        raise EnvironmentProblem(f"{tool} is missing; install triton's own wheel")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise EnvironmentProblem(f"cannot read the output of {tool}: {text[:200]}")
    return int(found[1]), int(found[2])


def forward_variants(
    arch: int,
    tier: str,
    channels: int,
    hidden: int,
    stream: str | None = None,
    weights: str | None = None,
    save_stats: bool = False,
    config: table.ForwardConfig | None = None,
) -> Iterator[Variant]:
    """The block's two forward kernels of one tier and shape.

    Parameters
    ----------
    stream, weights: str, optional
        Triton types of x and of w1 and w2. Default is what an exported model holds.

    save_stats: bool, optional
        The training form. Default is False.
    """
    config = config or table.forward_config(arch, tier, channels, hidden)
    scaled, split = tier in table.SCALED_TIERS, tier in table.SPLIT_TIERS
    stream = stream or STREAM[tier]
    weights = weights or ("fp32" if scaled else "fp16")
    block_c = table.power_of_two(channels)
    hidden_pad = -(-hidden // config.block_h) * config.block_h
    ready = not scaled and weights == "fp16" and (channels, hidden) == (block_c, hidden_pad)
    types = _TYPES | {"x_ptr": f"*{stream}", "out_ptr": f"*{stream}"}
    label = f"{tier}_{stream}_c{channels}_h{hidden}"
    yield make_variant(
        f"conv_stats_{label}",
        block_forward.conv_stats_kernel,
        types | dict.fromkeys(("w1_ptr", "w2_ptr"), f"*{weights}"),
        {
            "C": channels, "H": hidden, "BLOCK_C": block_c, "H_PAD": hidden_pad,
            "BLOCK_S": config.stats_l, "PREPARE": not ready, "SCALED": scaled, "SPLIT": split,
        },
        config.stats_warps,
    )  # fmt: skip
    yield make_variant(
        f"fused_block_{label}",
        block_forward.fused_block_kernel,
        types | dict.fromkeys(("w1_ptr", "w1_lo_ptr", "w2_ptr", "w2_lo_ptr"), "*fp16"),
        {
            "C": channels, "H_PAD": hidden_pad, "BLOCK_C": block_c, "BLOCK_L": config.block_l,
            "BLOCK_H": config.block_h, "BLOCK_S": config.stats_l, "SCALED": scaled,
            "SPLIT": split, "APPROX": config.approx, "SAVE_STATS": save_stats,
            "RESIDENT": config.resident, "PERSISTENT": config.persistent > 0,
            "MERGE": True, "PARTS": config.parts,
        },
        config.num_warps,
        config.num_stages,
        config.registers,
    )  # fmt: skip


def backward_variants(
    arch: int,
    tier: str,
    channels: int,
    hidden: int,
    stream: str | None = None,
    weights: str = "fp32",
    config: table.BackwardConfig | None = None,
) -> Iterator[Variant]:
    """The block's five backward kernels of one tier and shape; parameters as `forward_variants`."""
    config = config or table.backward_config(arch, tier, channels, hidden)
    scaled, split = tier in table.SCALED_TIERS, tier in table.SPLIT_TIERS
    stream = stream or STREAM[tier]
    block_c = table.power_of_two(channels)
    unit = max(config.mlp_h, config.grad_m)
    hidden_pad = -(-hidden // unit) * unit
    g_type = "*fp16" if scaled else f"*{stream}"
    types = _TYPES | dict.fromkeys(("x_ptr", "grad_ptr", "dx_ptr", "dz_ptr"), f"*{stream}")
    types |= dict.fromkeys(("z_ptr", "da_ptr", "dout_ptr"), "*fp16") | {"g_ptr": g_type}
    given = types | dict.fromkeys(("w1_ptr", "w2_ptr", "dw1_ptr", "dw2_ptr"), f"*{weights}")
    label = f"{tier}_{stream}_c{channels}_h{hidden}"
    shape = {"C": channels, "BLOCK_C": block_c}
    padded = shape | {"H_PAD": hidden_pad}
    terms = {"SCALED": scaled, "SPLIT": split}
    da_scale = {"DA_SCALE": 2.0**-15}
    yield make_variant(
        f"prepare_weights_{label}",
        block_backward.prepare_weights_kernel,
        given,
        padded | terms | {"H": hidden},
        4,
    )
    yield make_variant(
        f"mlp_backward_{label}",
        block_backward.mlp_backward_kernel,
        types | dict.fromkeys(("w1_ptr", "w2_ptr"), "*fp16"),
        padded
        | terms
        | da_scale
        | {
            "BLOCK_L": config.mlp_l,
            "BLOCK_H": config.mlp_h,
            "APPROX": config.approx,
            "STORE": True,
        },
        config.mlp_warps,
        config.mlp_stages,
    )
    for name, operand, stored in (("w1", "*fp16", True), ("w2", g_type, scaled)):
        yield make_variant(
            f"{name}_grad_{label}",
            block_backward.weight_grad_kernel,
            types | dict.fromkeys(("left_ptr", "right_ptr"), operand),
            padded
            | {
                "BLOCK_L": config.mlp_l,
                "BLOCK_M": config.grad_m,
                "BLOCK_N": min(config.grad_n, block_c),
                "STREAM": not stored,
                "TILE_SCALE": name == "w1" and not scaled,
                "SPLIT": split,
                "WIDEN": False,
            },
            config.grad_warps,
            config.grad_stages,
        )
    yield make_variant(
        f"conv_backward_{label}",
        block_backward.conv_backward_kernel,
        types,
        shape | {"BLOCK_L": config.conv_l, "RUN": config.conv_run, "WEIGHTS": True},
        config.conv_warps,
        registers=config.conv_registers,
    )
    yield make_variant(
        f"sum_grads_{label}",
        block_backward.sum_grads_kernel,
        given,
        padded | da_scale | {"H": hidden, "SUM_BLOCK": 256, "SCALED": scaled},
        4,
    )


def stem_variant(
    arch: int, tier: str, channels: int, width: int, stream: str | None = None
) -> Variant:
    """The stem of one tier and shape."""
    stream = stream or STREAM[tier]
    config = table.stem_config(arch)
    return make_variant(
        f"stem_{tier}_{stream}_c{channels}_k{width}",
        stem.stem_kernel,
        _TYPES | {"out_ptr": f"*{stream}"},
        {
            "C": channels, "WIDTH": width, "TAPS": table.power_of_two(4 * width),
            "BLOCK_L": config.block_l, "BLOCK_C": min(config.block_c, table.power_of_two(channels)),
            "APPROX": 0 if tier == "fp32" else 1,
        },
        config.num_warps,
    )  # fmt: skip


def head_variants(
    arch: int, stream: str, channels: int, tracks: int, outputs: int, width: int, groups: int
) -> Iterator[Variant]:
    """The head's two kernels for one stream type and shape."""
    block_c = table.power_of_two(channels)
    config = table.head_config(arch, block_c, outputs * width)
    label = f"{stream}_c{channels}_t{tracks}_o{outputs}_k{width}_g{groups}"
    shape = {"C": channels, "T": tracks, "OUTPUTS": outputs, "WIDTH": width, "BLOCK_C": block_c}
    yield make_variant(
        f"head_project_{label}",
        head.head_project_kernel,
        _TYPES | {"x_ptr": f"*{stream}"},
        shape | {"BLOCK_L": config.block_l, "BLOCK_Q": config.block_q, "SPLIT": stream == "fp32"},
        config.num_warps,
    )
    yield make_variant(
        f"head_reduce_{label}",
        head.head_reduce_kernel,
        _TYPES,
        shape | {"GROUPS": groups, "BLOCK_L": config.reduce_l},
        4,
    )
