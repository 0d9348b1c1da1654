"""The judge: the model's maths in float64, written to be read next to `docs/op-contract.md`.

Independent of the torch ops, the modules and the ONNX functions on purpose: an error there must not
be able to hide here. Source of the formulas: cherimoya 0.3.1 and, for older checkpoints, the
releases listed in `checkpoint.releases`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from cheri_export.spec import FP16_MAX, ModelSpec

Tensor = torch.Tensor
Rounding = Callable[[Tensor], Tensor]

_STREAM = {
    "fp32": torch.float32,
    "mixed": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def _exact(x: Tensor) -> Tensor:
    return x


def _through(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).to(x.dtype)


def _through_scaled_fp16(x: Tensor) -> Tensor:
    """Round to fp16 after a power-of-two scaling where x would not fit, as the kernels do."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    if not largest > FP16_MAX:
        return x.to(torch.float16).to(x.dtype)
    scale = 2.0 ** -math.ceil(math.log2(largest / FP16_MAX))
    return (x * scale).to(torch.float16).to(x.dtype) / scale


def _gelu(x: Tensor) -> Tensor:
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi); Hendrycks & Gimpel 2016
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Row i holds x[i + by], zero outside the sequence; x is (L, C)."""
    out = torch.zeros_like(x)
    length = x.shape[0]
    if abs(by) < length:
        if by >= 0:
            out[: length - by] = x[by:]
        else:
            out[-by:] = x[: length + by]
    return out


def _convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Cross-correlation of x (C_in, L) with weight (C_out, C_in, k), zero padded; (C_out, L)."""
    # torch's own convolution, so that the strict float32 run sums in the order that a float32
    # implementation does: it is the floor by which others are judged.
    half = weight.shape[2] // 2
    return torch.nn.functional.conv1d(x[None], weight, bias, padding=half)[0]


def block(
    x: Tensor,
    conv_weight: Tensor,
    w1: Tensor,
    w2: Tensor,
    dilation: int,
    residual_scale: float | Tensor,
    epsilon: float,
    operand: Rounding = _exact,
) -> Tensor:
    """One CheriBlock on one example.

    Parameters
    ----------
    x: torch.Tensor, shape=(L, C)
        The stream.

    conv_weight, w1, w2: torch.Tensor, shape=(3, C), (H, C), (C, H)
        Weights, of x's dtype.

    dilation: int
        Distance of the outer taps; may exceed L.

    residual_scale: float or torch.Tensor, shape=(C,)
        Factor of the MLP term (a vector in release 0.0.1).

    epsilon: float
        Added to the variance inside the square root.

    operand: callable
        Rounding applied to both operands of the two matrix products.

    Returns
    -------
    out: torch.Tensor, shape=(L, C)
    """
    y = (
        conv_weight[0] * _shifted(x, -dilation)
        + conv_weight[1] * x
        + conv_weight[2] * _shifted(x, dilation)
    )
    centred = y - y.mean()
    centred = centred - centred.mean()  # what the rounding of a large mean left behind
    z = centred / torch.sqrt((centred * centred).mean() + epsilon)
    hidden = _gelu(operand(z) @ operand(w1).T)
    return x + residual_scale * (operand(hidden) @ operand(w2).T)


def forward(
    weights: Mapping[str, Tensor],
    spec: ModelSpec,
    sequence: Tensor,
    control: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    tier: str | None = None,
    on_stream: Callable[[int, int, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The whole model, example by example.

    Parameters
    ----------
    weights: mapping of str to torch.Tensor
        The checkpoint's tensors under their canonical names, in the dtype they were stored in.

    spec: ModelSpec
        The geometry.

    sequence: torch.Tensor, shape=(N, 4, L)
        One-hot sequence, rows A, C, G, T; any dtype.

    control: torch.Tensor or None, shape=(N, T, L)
        Non-negative control counts over the whole input.

    dtype: torch.dtype
        float64 for the judge, float32 for the strict float32 run.

    tier: str or None
        None computes exactly in `dtype`. A tier's name emulates the roundings that the tier cannot
        avoid: the stream between the ops in its storage type and, except in the fp32 tier, both
        operands of the MLP's products in fp16. Everything else stays in `dtype`.

    on_stream: callable or None
        Called with (example, op index, stream (L, C)) after the stem (0) and every block.

    Returns
    -------
    profile_logits: torch.Tensor, shape=(N, O, L - 2 * trimming)
    log_counts: torch.Tensor, shape=(N, G)

    Raises
    ------
    ValueError
        The input has no output position, or controls are missing or not wanted.
    """
    if sequence.shape[2] < spec.min_length:
        raise ValueError(
            f"length {sequence.shape[2]} leaves no output; at least {spec.min_length} needed"
        )
    if (control is not None) != (spec.n_control_tracks > 0):
        raise ValueError(f"the model has {spec.n_control_tracks} control tracks")
    stream: Rounding = _exact
    operand: Rounding = _exact
    if tier is not None:
        stream = _through(_STREAM[tier])
        if tier != "fp32":
            operand = _through_scaled_fp16 if tier == "mixed" else _through(torch.float16)

    w = {name: tensor.to(dtype) for name, tensor in weights.items()}
    start, stop = spec.trimming, sequence.shape[2] - spec.trimming
    count_start, count_stop = start - spec.count_margin, stop + spec.count_margin
    profiles, counts = [], []
    for n in range(sequence.shape[0]):
        x = stream(_gelu(_convolve(sequence[n].to(dtype), w["iconv.weight"], w["iconv.bias"])).T)
        if on_stream is not None:
            on_stream(n, 0, x)
        for i, dilation in enumerate(spec.dilations):
            prefix = f"blocks.{i}."
            w2, scale = w[prefix + "linear2.weight"], spec.residual_scale
            if spec.has_gamma:  # gamma * (h @ W2.T) = h @ (gamma rows of W2).T
                w2, scale = w[prefix + "gamma"].reshape(-1, 1) * w2, 1.0
            x = stream(
                block(
                    x,
                    w[prefix + "conv_weight"],
                    w[prefix + "linear1.weight"],
                    w2,
                    dilation,
                    scale,
                    spec.epsilon,
                    operand,
                )
            )
            if on_stream is not None:
                on_stream(n, i + 1, x)
        channels = x.T
        summary = channels[:, count_start:count_stop].mean(1)
        if control is not None:
            tracks = control[n].to(dtype)
            channels = torch.cat([channels, tracks])
            total = tracks[:, count_start:count_stop].sum()
            summary = torch.cat([summary, torch.log(total + 1.0).reshape(1)])
        profiles.append(_convolve(channels, w["fconv.weight"], w["fconv.bias"])[:, start:stop])
        counts.append(w["linear.weight"] @ summary + w["linear.bias"])
    return torch.stack(profiles), torch.stack(counts)
