"""The contract that torch, ONNX, the plugin and the tests share: names, constants, geometry."""

from __future__ import annotations

import dataclasses
from typing import Any

DOMAIN = "trt.plugins"
"""ONNX domain of the four op types. ONNX Runtime's TensorRT provider looks for plugins there."""

OP_VERSION = 1
PLUGIN_VERSION = "1"
PLUGIN_NAMESPACE = ""

STEM, BLOCK, HEAD, HEAD_CONTROL = "CheriStem", "CheriBlock", "CheriHead", "CheriHeadControl"
OP_TYPES = (STEM, BLOCK, HEAD, HEAD_CONTROL)

SEQUENCE, CONTROL = "sequence", "control"
PROFILE_LOGITS, LOG_COUNTS = "profile_logits", "log_counts"

EPSILON = 1e-3
"""Added to the variance inside the square root. Source: cherimoya 0.3.1, CONV_NORM_EPS."""

DEFAULT_LENGTH = 2114
DEFAULT_RESIDUAL_SCALE = 0.15

PRECISIONS = ("fp32", "mixed", "fp16", "bf16")
OPSETS = (20, 21)

FP16_MAX = 65504.0


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The geometry of one Cherimoya model.

    Attributes
    ----------
    n_filters: int
        Channels C of the stream between the ops.

    hidden: int
        Hidden width H of each block's MLP; `expansion` = H / C.

    n_layers: int
        Number of blocks; block i has dilation 2**i.

    n_outputs: int
        Profile channels O.

    n_count_outputs: int
        Log counts per example G. One per signal group, except in models of 0.0.1, 0.1.0 and git
        8b364ee to 7e51085 with ``single_count_output=False`` (one per profile channel), and of git
        1b730fa with ``single_count_output=True`` (one for all groups): never pair groups and counts
        without comparing their numbers.

    signal_groups: tuple of int, or None
        Channels of each signal group, in order. None where the file does not say (a bare state
        dict whose shapes allow several groupings). Logits and log counts do not depend on it;
        expected counts and averages over both strands do.

    n_control_tracks: int
        Control tracks T; 0 for a model without controls.

    stem_kernel, profile_kernel: int
        Kernel sizes (odd) of the first convolution and of the profile head.

    trimming: int
        Positions cut from each end of the input: L_out = L - 2 * trimming.

    count_margin: int
        Positions by which the count window exceeds the profile window at each end (37 in
        release 0.0.1, otherwise 0).

    residual_scale: float
        Factor of every block's MLP term; 1.0 where `has_gamma`.

    has_gamma: bool
        The blocks carry a learned vector ``gamma`` (C,) in place of `residual_scale` (0.0.1).

    epsilon: float
        Added to the variance inside the square root.

    name: str
        Name stored in the checkpoint.
    """

    n_filters: int
    hidden: int
    n_layers: int
    n_outputs: int
    n_count_outputs: int
    signal_groups: tuple[int, ...] | None
    n_control_tracks: int
    stem_kernel: int
    profile_kernel: int
    trimming: int
    count_margin: int = 0
    residual_scale: float = DEFAULT_RESIDUAL_SCALE
    has_gamma: bool = False
    epsilon: float = EPSILON
    name: str = ""

    @property
    def dilations(self) -> tuple[int, ...]:
        """Dilation of every block, in order."""
        return tuple(2**i for i in range(self.n_layers))

    @property
    def min_length(self) -> int:
        """Smallest input length that yields one output position."""
        return 2 * self.trimming + 1

    @property
    def receptive_field(self) -> int:
        """Bases that reach one logit through the convolutions alone.

        The norm over the whole example makes every logit depend, weakly, on the entire input.
        """
        return self.stem_kernel + 2 * sum(self.dilations) + self.profile_kernel - 1

    def output_length(self, length: int) -> int:
        """Profile positions for an input of `length` bases."""
        return length - 2 * self.trimming

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every attribute, with the dilations."""
        out = dataclasses.asdict(self)
        out["signal_groups"] = None if self.signal_groups is None else list(self.signal_groups)
        out["dilations"] = list(self.dilations)
        return out
