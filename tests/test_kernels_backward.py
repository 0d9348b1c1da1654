"""Runs the cases for the backward kernels of the block in Triton's interpreter."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


def test_cases_pass_in_the_interpreter():
    """A process of its own: triton reads TRITON_INTERPRET once, when a kernel is defined."""
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(HERE.parent))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / "interpreter" / "backward_cases.py")],
        env=environment,
        cwd=HERE / "interpreter",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
