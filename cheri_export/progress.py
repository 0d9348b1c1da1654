"""What the user sees while the command works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO


class Progress:
    """Named steps with their wall time in seconds; writes to stderr, stdout stays for results.

    Parameters
    ----------
    quiet: bool
        Say nothing, only keep the times.

    stream: text stream or None
        Where to write; None is stderr.

    after_step: callable or None
        Called after every step; may raise to end the work.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.timings: dict[str, float] = {}
        found = stream if stream is not None else sys.stderr
        self._quiet = quiet or found is None  # None: started with stderr closed
        self._stream = found
        self._after_step = after_step

    @contextlib.contextmanager
    def step(self, key: str, text: str) -> Iterator[None]:
        """Time a step under `key` and show `text` while it runs."""
        started = time.perf_counter()
        shown: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        terminal = not self._quiet and self._stream is not None and self._stream.isatty()
        if terminal:
            from rich.console import Console

            shown = Console(file=self._stream).status(text)
        elif not self._quiet:
            self._print(f"{text} ...")
        with shown:
            yield
        seconds = time.perf_counter() - started
        self.timings[key] = self.timings.get(key, 0.0) + seconds
        if terminal:
            self._print(f"\u2713 {text} ({seconds:.1f} s)")
        if self._after_step is not None:
            self._after_step()

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):
            self._quiet = True  # nobody reads the progress; the work goes on
