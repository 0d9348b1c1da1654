"""Errors that a user can mend; the command line prints them as one line and exits with 2."""

from __future__ import annotations


class CheriError(Exception):
    """A mistake in the input or a lack in the environment, never a fault of this package.

    The message says what was found, what was needed and what to do, on one line. Anything else
    that escapes is a bug of ours and keeps its traceback.
    """


class CheckpointError(CheriError):
    """The file is no Cherimoya checkpoint, or its contents contradict each other."""


class InputError(CheriError):
    """A sequence, a control track or an option cannot be used as given."""


class OutputError(CheriError):
    """The result cannot be written where it was asked for."""


class EnvironmentProblem(CheriError):
    """A library, a device or a version that the step needs is missing."""
