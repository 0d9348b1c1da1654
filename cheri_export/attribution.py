"""DeepLIFT/SHAP on our modules: the one rule that tangermeme lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cheri_export.errors import EnvironmentProblem
from cheri_export.modules import FusedDilatedConvNorm


def attribution_ops() -> dict[type, Callable[..., Any]]:
    """The rules that DeepLIFT needs beside tangermeme's own.

    Pass them as `additional_nonlinear_ops` to ``tangermeme.deep_lift_shap.deep_lift_shap`` or
    ``tangermeme.pisa.pisa``. tangermeme takes every module type that it has no rule for as linear;
    the norm is not. While gradients are on, a block whose submodules are hooked runs through them
    one by one instead of through the fused op, so hooks see each.

    Returns
    -------
    ops: dict
        Maps `cheri_export.modules.FusedDilatedConvNorm` to the rule of cherimoya 0.3.1
        (``cherimoya.deep_lift_shap.conv_norm_op``), which is the closed form for a LayerNorm over
        (L, C) behind a linear convolution.

    Raises
    ------
    EnvironmentProblem
        The package cherimoya is not installed.
    """
    try:
        from cherimoya.deep_lift_shap import conv_norm_op
    except ImportError as error:
        raise EnvironmentProblem(
            f"the DeepLIFT rule comes with the package cherimoya, which cannot be imported "
            f"({error}); pip install 'cheri-export[parity]'"
        ) from error
    return {FusedDilatedConvNorm: conv_norm_op}
