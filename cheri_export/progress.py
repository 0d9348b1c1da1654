"""What the user sees while the command works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO


class Progress:
    """Named steps with their wall time in seconds; writes to stderr, stdout stays for results.

    Parameters
    ----------
    quiet: bool
        Say nothing, only keep the times.

    stream: text stream or None
        Where to write; None is stderr.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.timings: dict[str, float] = {}
        self._quiet = quiet
        self._stream = stream if stream is not None else sys.stderr

    @contextlib.contextmanager
    def step(self, key: str, text: str) -> Iterator[None]:
        """Time a step under `key` and show `text` while it runs."""
        started = time.perf_counter()
        shown: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        terminal = not self._quiet and self._stream.isatty()
        if terminal:
            from rich.console import Console

            shown = Console(file=self._stream).status(text)
        elif not self._quiet:
            print(f"{text} ...", file=self._stream, flush=True)
        with shown:
            yield
        seconds = time.perf_counter() - started
        self.timings[key] = self.timings.get(key, 0.0) + seconds
        if terminal:
            print(f"\u2713 {text} ({seconds:.1f} s)", file=self._stream, flush=True)
