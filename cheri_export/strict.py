"""Strict float32: no TF32, no bf16 splitting, whatever the process was set to before.

Importing cherimoya sets `torch.set_float32_matmul_precision('high')`, and a reference taken after
that is no float32 reference. The settings are put back on leaving, since they are the user's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Torch as it starts: float32 and CPU by default, no autocast; then the user's state again."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.device("cpu"))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def strict_fp32() -> Iterator[dict[str, Any]]:
    """Turn every reduced-precision float32 path of torch off inside the block.

    Yields
    ------
    settings: dict
        What is in force, for the report.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=torch.backends.cudnn.enabled,
            benchmark=False,
            deterministic=True,
            allow_tf32=False,
        ):
            yield {
                "float32_matmul_precision": torch.get_float32_matmul_precision(),
                "allow_tf32": False,
                "float32_matmul_precision_before": before,
                "threads": torch.get_num_threads(),
            }
    finally:
        torch.set_float32_matmul_precision(before)
