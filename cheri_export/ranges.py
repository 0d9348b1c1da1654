"""Does everything stay within the range of fp16? All tiers multiply in fp16 on the GPU."""

from __future__ import annotations

import math

import torch

from cheri_export.checkpoint import Checkpoint, weight_extremes
from cheri_export.errors import InputError
from cheri_export.spec import FP16_MAX


def check_weights(checkpoint: Checkpoint, precision: str) -> list[str]:
    """Refuse weights that fp16 cannot hold in the 16-bit tiers; warn of them in the others.

    Parameters
    ----------
    checkpoint: Checkpoint
        The model.

    precision: str
        The tier.

    Returns
    -------
    warnings: list of str
        One line per weight beyond the range (``fp32`` and ``mixed`` only).

    Raises
    ------
    InputError
        Tier ``fp16`` or ``bf16`` and a weight beyond +-65504.
    """
    extremes = weight_extremes(checkpoint)
    if extremes and precision in ("fp16", "bf16"):
        name, value = extremes[0]
        raise InputError(
            f"{name} reaches {value:.4g}, beyond the fp16 range of {FP16_MAX:.0f} in which "
            f"--precision {precision} multiplies; use --precision fp32 or mixed"
        )
    return [
        f"{name} reaches {value:.4g}, beyond the fp16 range: GPU kernels take a slower, scaled path"
        for name, value in extremes
    ]


def hidden_bound(checkpoint: Checkpoint, length: int) -> float:
    """Upper bound of any hidden activation of any block at input length `length`.

    The norm bounds the sum of squares of z over an example by L * C, hence |w1 z| at one position
    by ||w1 row|| * sqrt(L * C), and |gelu(h)| <= |h|.
    """
    spec = checkpoint.spec
    largest = 0.0
    for i in range(spec.n_layers):
        w1 = checkpoint.weights[f"blocks.{i}.linear1.weight"].double()
        largest = max(largest, float(torch.linalg.vector_norm(w1, dim=1).max()))
    return largest * math.sqrt(length * spec.n_filters)


def check_activations(checkpoint: Checkpoint, precision: str, length: int) -> list[str]:
    """Warn when a hidden activation could leave the fp16 range at this length.

    The bound is reached only by an example whose whole energy sits at one position, so this is no
    refusal: the accuracy check on real runs decides.
    """
    bound = hidden_bound(checkpoint, length)
    if bound <= FP16_MAX:
        return []
    return [
        f"hidden activations are bounded only by {bound:.3g} at {length} bases, beyond the fp16 "
        f"range: a contrived input could overflow in tier {precision}"
    ]
