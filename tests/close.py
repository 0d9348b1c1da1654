"""One comparison for all tests, whose failure says what a person needs to know."""

from __future__ import annotations

from typing import Any

import numpy as np


def array(value: Any) -> np.ndarray:
    """A float64 copy of a tensor or an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value).astype(np.float64)


def assert_within(name: str, actual: Any, reference: Any, limit: float) -> float:
    """Fail unless max |actual - reference| <= limit; a NaN fails. Returns the largest error."""
    found, wanted = array(actual), array(reference)
    assert found.shape == wanted.shape, f"{name}: shape {found.shape}, reference {wanted.shape}"
    assert np.isfinite(wanted).all(), f"{name}: the reference itself is not finite"
    error = np.abs(found - wanted)
    error = np.where(np.isfinite(error), error, np.inf)
    index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    worst, rms = float(error[index]), float(np.sqrt(np.mean(error**2)))
    assert worst <= limit, (
        f"{name}: max abs error {worst:.4g} at {index} exceeds {limit:.4g} "
        f"(reference {wanted[index]:.8g}, found {found[index]:.8g}, rms error {rms:.3g})"
    )
    return worst
