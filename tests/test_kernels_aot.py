"""Every kernel compiles for every architecture without a GPU, within its memory and registers."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from cheri_export.errors import InputError
from cheri_export.kernels import aot, table

SPILLS = {
    (120, "mlp_backward_fp16_fp16_c48_h96"): 16,
    (120, "fused_block_mixed_fp32_c3_h5"): 8,
} | {
    (arch, f"stem_{tier}_{stream}_c48_k19"): 24
    for tier, stream in aot.STREAM.items()
    for arch in (80, 86, 89, 120)
}
"""Stack bytes of the few kernels that spill, by architecture; all for fewer than 128 channels,
where ptxas trades a register or two for one more resident block. None at 128, the default."""


def check(variant: aot.Variant, arch: int) -> aot.Compiled:
    """Compile one variant; shared memory and, up to 128 channels, registers must do."""
    compiled = aot.compile_variant(variant, arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.shared_bytes <= table.SHARED_LIMIT[arch], (arch, variant.name)
    if variant.constants["C"] <= 128:
        allowed = SPILLS.get((arch, variant.name), 0)
        assert compiled.spill_bytes <= allowed, (arch, variant.name, compiled.spill_bytes)
    return compiled


@pytest.mark.parametrize("arch", table.ARCHITECTURES)
def test_default_shape_compiles_without_spills(arch):
    """The kernel that matters most, in its two forms, on all six architectures."""
    for tier in ("fp32", "fp16"):
        _, fused = aot.forward_variants(arch, tier, 128, 256)
        check(fused, arch)


def test_backward_compiles_without_spills():
    """One architecture of each kind of matrix unit; the slow test takes the others."""
    for arch in (86, 90):
        for variant in aot.backward_variants(arch, "bf16", 128, 256):
            check(variant, arch)


def test_stem_and_head_compile():
    """With and without controls."""
    check(aot.stem_variant(90, "fp16", 128, 21), 90)
    for variant in aot.head_variants(86, "fp16", 128, 2, 2, 75, 1):
        check(variant, 86)


def test_length_and_batch_are_runtime_values():
    """One binary serves every length, batch and dilation."""
    for variant in itertools.chain(
        aot.forward_variants(90, "fp16", 128, 256), aot.backward_variants(90, "fp16", 128, 256)
    ):
        assert not {"L", "N", "dilation", "tiles", "n_tiles"} & set(variant.constants)


def test_choice_of_architecture():
    """A newer GPU takes the newest kernels that run on it; an older one is refused."""
    assert table.nearest_architecture(87) == 86
    assert table.nearest_architecture(90) == 90
    assert table.nearest_architecture(121) == 120
    with pytest.raises(InputError, match="sm_75"):
        table.nearest_architecture(75)


OTHERS = {"fp32": (48, 96), "mixed": (3, 5), "fp16": (48, 96), "bf16": (512, 1024)}
"""A second shape of each tier: odd, small or large."""


@pytest.mark.slow
@pytest.mark.parametrize("arch", table.ARCHITECTURES)
@pytest.mark.parametrize("tier", ["fp32", "mixed", "fp16", "bf16"])
def test_every_kernel_of_every_tier_compiles(tier, arch):
    """The default shape and another, forward and backward, stem and head."""
    for channels, hidden in ((128, 256), OTHERS[tier]):
        for variant in aot.forward_variants(arch, tier, channels, hidden, save_stats=True):
            check(variant, arch)
        for variant in aot.backward_variants(arch, tier, channels, hidden):
            check(variant, arch)
    check(aot.stem_variant(arch, tier, 128, 21), arch)
    check(aot.stem_variant(arch, tier, 48, 19), arch)
    for tracks, outputs, width in ((0, 1, 75), (2, 2, 75), (1, 3, 1)):
        for variant in aot.head_variants(arch, aot.STREAM[tier], 128, tracks, outputs, width, 1):
            check(variant, arch)


def test_training_of_wide_blocks_is_refused_with_a_reason():
    """Where no tile of the backward kernels fits."""
    with pytest.raises(InputError, match="use fewer channels"):
        table.backward_config(86, "fp32", 1024, 2048)
