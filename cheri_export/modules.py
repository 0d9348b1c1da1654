"""`CheriBlock` and `Cherimoya`: cherimoya 0.3.1's modules over the `cheri` ops.

Constructor, submodule and parameter names, state-dict keys and initialisation are those of
cherimoya 0.3.1 (MIT, Jacob Schreiber), so that code and checkpoints move both ways. The extra
keyword-only arguments cover older releases and the export's precision tiers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from cheri_export import ops
from cheri_export.ops.plain import conv_norm
from cheri_export.spec import DEFAULT_RESIDUAL_SCALE, EPSILON, PRECISIONS, ModelSpec

Tensor = torch.Tensor

_STREAM = {
    "fp32": torch.float32,
    "mixed": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


_TIER_OF = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _is_hooked(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class FusedDilatedConvNorm(torch.nn.Module):
    """A block's depthwise convolution and norm, by itself.

    `CheriBlock` calls it only where hooks want to see it; otherwise it merely owns the weight, and
    the whole block is one op.

    Parameters
    ----------
    n_filters: int
        Channels C.

    dilation: int
        Distance of the outer taps.
    """

    def __init__(self, n_filters: int, dilation: int) -> None:
        super().__init__()
        self.n_filters = n_filters
        self.dilation = dilation
        # Drawn here and drawn again by CheriBlock: the number of draws from the global generator
        # must stay cherimoya's, or the same seed would give another model.
        self.conv_weight = torch.nn.Parameter(torch.randn(3, n_filters))

    def forward(self, X: Tensor) -> Tensor:
        """Convolve and normalise: (N, L, C) to (N, L, C), dtype as X."""
        return conv_norm(X, self.conv_weight, self.dilation, EPSILON)


def _rename_conv_key(
    module: torch.nn.Module, destination: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    """Write the depthwise weight under its name on disk, in its old place in the order."""
    new, old = prefix + "conv.conv_weight", prefix + "conv_weight"
    if new in destination:
        items = [(old if key == new else key, value) for key, value in destination.items()]
        destination.clear()
        destination.update(items)


class CheriBlock(torch.nn.Module):
    """One Cheri block: x + residual_scale * W2 gelu(W1 norm(conv(x))).

    Parameters
    ----------
    n_filters: int
        Channels C.

    dilation: int
        Distance of the outer taps of the 3-tap depthwise convolution.

    expansion: int
        H = expansion * C.

    residual_scale: float
        Factor of the MLP term.

    generator: torch.Generator or None
        Source of the initial weights; None uses torch's global generator.

    math: str
        Precision tier of the arithmetic: ``fp32``, ``mixed``, ``fp16`` or ``bf16``.
    """

    def __init__(
        self,
        n_filters: int,
        dilation: int,
        expansion: int = 2,
        residual_scale: float = DEFAULT_RESIDUAL_SCALE,
        generator: torch.Generator | None = None,
        *,
        math: str = "fp32",
    ) -> None:
        super().__init__()
        self.n_filters = n_filters
        self.dilation = dilation
        self.expansion = expansion
        self.residual_scale = residual_scale
        self.math = math
        hidden = expansion * n_filters
        self.conv = FusedDilatedConvNorm(n_filters, dilation)
        self.linear1 = torch.nn.Linear(n_filters, hidden, bias=False)
        self.linear2 = torch.nn.Linear(hidden, n_filters, bias=False)
        self.activation = torch.nn.GELU(approximate="tanh")
        for weight in (self.conv.conv_weight, self.linear1.weight, self.linear2.weight):
            torch.nn.init.trunc_normal_(weight, std=0.02, generator=generator)
        self.register_state_dict_post_hook(_rename_conv_key)

    @property
    def conv_weight(self) -> Tensor:
        """The depthwise weight (3, C), taps at -dilation, 0, +dilation."""
        return self.conv.conv_weight

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        old, new = prefix + "conv_weight", prefix + "conv.conv_weight"
        if old in state_dict and new not in state_dict:
            state_dict[new] = state_dict.pop(old)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Dilation, scale and tier."""
        return f"dilation={self.dilation}, residual_scale={self.residual_scale}, math={self.math!r}"

    def forward(self, X: Tensor) -> Tensor:
        """Run the block.

        Parameters
        ----------
        X: torch.Tensor, shape=(N, L, C)
            The stream.

        Returns
        -------
        out: torch.Tensor, shape=(N, L, C), dtype as X
        """
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self._is_watched():
            hidden = self.activation(self.linear1(self.conv(X)))
            return X + self.linear2(hidden) * self.residual_scale
        return ops.block(
            X,
            self.conv.conv_weight,
            self.linear1.weight,
            self.linear2.weight,
            self.dilation,
            self.residual_scale,
            EPSILON,
            _TIER_OF.get(X.dtype, self.math),
        )

    def _is_watched(self) -> bool:
        """Whether anyone hooked a submodule: attribution methods correct each by its type.

        One opaque op would be taken for a linear one, silently.
        """
        parts = (self.conv, self.linear1, self.activation, self.linear2)
        return any(_is_hooked(part) for part in parts)


class Cherimoya(torch.nn.Module):
    """The Cherimoya sequence-to-profile model over the `cheri` ops.

    Parameters
    ----------
    n_filters, n_layers, signal_groups, n_control_tracks, expansion, residual_scale, name, trimming,
    verbose, compile, compile_mode, random_state:
        As in cherimoya 0.3.1; `verbose`, `compile` and `compile_mode` are accepted and unused.

    stem_kernel, profile_kernel: int
        Kernel sizes (19 and 1 or 75 occur in older releases).

    n_count_outputs: int or None
        Log counts per example; None means one per signal group.

    count_margin: int
        Positions by which the count window exceeds the profile window at each end.

    precision: str
        Tier: ``fp32`` (default), ``mixed``, ``fp16`` or ``bf16``. `set_precision` changes it.
    """

    def __init__(
        self,
        n_filters: int = 128,
        n_layers: int = 9,
        signal_groups: Sequence[int] | None = None,
        n_control_tracks: int = 0,
        expansion: int = 2,
        residual_scale: float = DEFAULT_RESIDUAL_SCALE,
        name: str | None = None,
        trimming: int | None = None,
        verbose: bool = True,
        compile: bool = False,
        compile_mode: str = "max-autotune",
        random_state: int | None = None,
        *,
        stem_kernel: int = 21,
        profile_kernel: int = 75,
        n_count_outputs: int | None = None,
        count_margin: int = 0,
        precision: str = "fp32",
    ) -> None:
        super().__init__()
        generator = None if random_state is None else torch.Generator().manual_seed(random_state)
        self.signal_groups = list(signal_groups) if signal_groups is not None else [1]
        if not self.signal_groups or any(int(g) != g or g < 1 for g in self.signal_groups):
            raise ValueError(f"signal_groups {self.signal_groups}; needed positive integers")
        self.n_outputs = sum(self.signal_groups)
        self.n_groups = len(self.signal_groups) if n_count_outputs is None else n_count_outputs
        self.n_filters = n_filters
        self.n_layers = n_layers
        self.n_control_tracks = n_control_tracks
        self.expansion = expansion
        self.residual_scale = residual_scale
        self.name = name or f"cherimoya.{n_filters}.{n_layers}"
        self.trimming = trimming if trimming is not None else 46 + 2**n_layers - 1
        self.count_margin = count_margin
        # The order of construction is cherimoya's: it fixes which draw lands in which weight.
        self.iconv = torch.nn.Conv1d(4, n_filters, stem_kernel, padding=stem_kernel // 2)
        self.igelu = torch.nn.GELU(approximate="tanh")
        self.blocks = torch.nn.ModuleList(
            CheriBlock(n_filters, 2**i, expansion, residual_scale, generator)
            for i in range(n_layers)
        )
        self.fconv = torch.nn.Conv1d(
            n_filters + n_control_tracks,
            self.n_outputs,
            profile_kernel,
            padding=profile_kernel // 2,
        )
        extra = 1 if n_control_tracks > 0 else 0
        self.linear = torch.nn.Linear(n_filters + extra, self.n_groups)
        self.lw0 = torch.nn.Parameter(torch.ones(self.n_groups))
        self.lw1 = torch.nn.Parameter(torch.ones(self.n_groups))
        for layer in (self.iconv, self.fconv, self.linear):
            torch.nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
        for bias in (self.iconv.bias, self.fconv.bias, self.linear.bias):
            assert bias is not None
            torch.nn.init.zeros_(bias)
        self.set_precision(precision)

    def set_precision(self, precision: str) -> Cherimoya:
        """Choose the tier: stream type, arithmetic, and the storage of the blocks' two matrices.

        In ``fp16`` and ``bf16`` the MLP weights are cast to fp16 in place (not undone by going back
        to another tier).

        Raises
        ------
        ValueError
            No such tier.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r}; needed one of {', '.join(PRECISIONS)}")
        self.precision: str = precision
        for block in self.blocks:
            assert isinstance(block, CheriBlock)
            block.math = precision
            if precision in ("fp16", "bf16"):
                block.linear1.half()
                block.linear2.half()
        return self

    def _init_kwargs(self) -> dict[str, Any]:
        """What cherimoya writes as a checkpoint's config: the constructor's arguments."""
        return {
            "n_filters": self.n_filters,
            "n_layers": self.n_layers,
            "signal_groups": list(self.signal_groups),
            "n_control_tracks": self.n_control_tracks,
            "expansion": self.expansion,
            "residual_scale": self.residual_scale,
            "name": self.name,
            "trimming": self.trimming,
            "verbose": False,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint that cherimoya 0.2 and later, and this package, read.

        Parameters
        ----------
        path: path
            The file to write.

        Raises
        ------
        ValueError
            The model has parts that only older releases had, which the format cannot say.
        """
        current = (self.iconv.kernel_size, self.fconv.kernel_size, self.count_margin)
        if current != ((21,), (75,), 0) or self.n_groups != len(self.signal_groups):
            raise ValueError("a model in the form of an older release has no checkpoint format now")
        torch.save({"config": self._init_kwargs(), "state_dict": self.state_dict()}, path)

    def extra_repr(self) -> str:
        """Name, trimming and tier."""
        return f"name={self.name!r}, trimming={self.trimming}, precision={self.precision!r}"

    def forward(self, X: Tensor, X_ctl: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Predict profile logits and log counts.

        Parameters
        ----------
        X: torch.Tensor, shape=(N, 4, L)
            One-hot sequence, rows A, C, G, T; an all-zero column is an unknown base.

        X_ctl: torch.Tensor or None, shape=(N, T, L)
            Non-negative control counts over the whole input, for a model with control tracks.

        Returns
        -------
        profile_logits: torch.Tensor, shape=(N, O, L - 2 * trimming), dtype=float32
        log_counts: torch.Tensor, shape=(N, G), dtype=float32
            Natural log of (1 + reads in the output window), one per signal group.

        Raises
        ------
        ValueError
            Controls missing or not wanted, or a sequence too short to leave an output.
        """
        if (X_ctl is not None) != (self.n_control_tracks > 0):
            found = "were given" if X_ctl is not None else "are missing"
            raise ValueError(
                f"control tracks {found}; this model has n_control_tracks={self.n_control_tracks}"
            )
        watched = not torch.compiler.is_compiling() and torch.is_grad_enabled()
        if watched and (_is_hooked(self.iconv) or _is_hooked(self.igelu)):
            h = self.igelu(self.iconv(X)).transpose(1, 2)
        else:
            stream = self.iconv.weight.dtype
            if stream == torch.float32:
                stream = _STREAM[self.precision]
            math = _TIER_OF.get(stream, self.precision)
            h = ops.stem(X, self.iconv.weight, self.iconv.bias, stream, math)
        for block in self.blocks:
            h = block(h)
        trim, count = self.trimming, self.trimming - self.count_margin
        # The head needs no such detour: it is linear in h, which is what an opaque op is taken for.
        return ops.head(
            h,
            X_ctl,
            self.fconv.weight,
            self.fconv.bias,
            self.linear.weight,
            self.linear.bias,
            trim,
            trim,
            count,
            count,
            self.precision,
        )


def build_module(spec: ModelSpec, weights: dict[str, Tensor], precision: str = "fp32") -> Cherimoya:
    """A `Cherimoya` in eval mode with a checkpoint's weights, float32 where the tier asks for it.

    Parameters
    ----------
    spec: ModelSpec
        The geometry.

    weights: dict of str to torch.Tensor
        Tensors under their canonical names. A learned ``gamma`` (release 0.0.1) is folded into the
        rows of ``linear2.weight``, and the block's residual scale is then 1.

    precision: str
        The tier.
    """
    groups = spec.signal_groups if spec.signal_groups is not None else (1,) * spec.n_outputs
    model = Cherimoya(
        spec.n_filters,
        spec.n_layers,
        groups,
        spec.n_control_tracks,
        spec.hidden // spec.n_filters,
        1.0 if spec.has_gamma else spec.residual_scale,
        spec.name,
        spec.trimming,
        stem_kernel=spec.stem_kernel,
        profile_kernel=spec.profile_kernel,
        n_count_outputs=spec.n_count_outputs,
        count_margin=spec.count_margin,
    )
    state = {name: t.to(torch.float32) for name, t in weights.items() if not name.endswith("gamma")}
    for i in range(spec.n_layers if spec.has_gamma else 0):
        w2 = weights[f"blocks.{i}.linear2.weight"].double()
        gamma = weights[f"blocks.{i}.gamma"].double().reshape(-1, 1)
        state[f"blocks.{i}.linear2.weight"] = (gamma * w2).float()
    state["lw0"], state["lw1"] = torch.ones(model.n_groups), torch.ones(model.n_groups)
    model.load_state_dict(state)
    return model.eval().set_precision(precision).requires_grad_(False)
