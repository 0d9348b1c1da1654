"""Which release wrote a checkpoint, the signal groups it implies, and what users should know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from cheri_export.checkpoint.config import Settings
from cheri_export.checkpoint.geometry import Geometry
from cheri_export.checkpoint.messages import problem

V001 = "0.0.1"
V010 = "0.1.0"
GIT_TRACKS = "git 8b364ee..7e51085"
GIT_BOTH = "git 1b730fa"
GIT_GROUPS = "git ce9bbac..50563c0"
BEFORE_011 = "0.1.0 to git 50563c0"
CURRENT = "0.1.1 to 0.3.1"

# Loss: one multinomial over all channels up to 0.1.0 and per group from 0.2.0; in between one
# per channel, which leaves the offset between the channels of a group free.
_UNGROUPED = (V001, V010, GIT_TRACKS)
_PER_CHANNEL = (GIT_TRACKS, GIT_BOTH, GIT_GROUPS)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Release, evidence, signal groups and warnings."""

    release: str
    reason: str
    groups: tuple[int, ...] | None
    warnings: tuple[str, ...]


def identify(geometry: Geometry, settings: Settings, ignored: Mapping[str, torch.Size]) -> Origin:
    """Tell the release from shapes and configuration.

    Parameters
    ----------
    geometry: Geometry

    settings: Settings

    ignored: mapping of str to torch.Size
        Shapes of ``lw0`` and ``lw1`` where present; they tell two releases apart.

    Raises
    ------
    CheckpointError
        If the count outputs fit no release.
    """
    release, reason = _release(geometry, settings, ignored)
    warnings: list[str] = []
    groups = _groups(release, geometry, settings, warnings)
    _warn_counts(release, geometry, settings, groups, warnings)
    _warn_strands(release, geometry, groups, warnings)
    return Origin(release, reason, groups, tuple(warnings))


def _release(
    geometry: Geometry, settings: Settings, ignored: Mapping[str, torch.Size]
) -> tuple[str, str]:
    kernels = f"kernels {geometry.stem_kernel} (iconv) and {geometry.profile_kernel} (fconv)"
    if geometry.has_gamma:
        return V001, f"blocks carry gamma, {kernels}"
    if geometry.profile_kernel != 1:
        return CURRENT, f"{kernels}, no gamma; these releases write the same files"
    if settings.groups is not None:
        if settings.single_count_output is not None:
            return GIT_BOTH, f"{kernels}, signal_groups with single_count_output"
        return GIT_GROUPS, f"{kernels}, signal_groups without single_count_output"
    first = ignored.get("lw0")
    per_output = first is not None and first.numel() == geometry.n_outputs
    if settings.has_n_outputs:
        if geometry.n_outputs == 1 or first is None:
            return V010, f"{kernels}, no signal_groups; {GIT_TRACKS} writes the same file"
        if per_output:
            return GIT_TRACKS, f"{kernels}, no signal_groups, lw0 has one value per output"
        return V010, f"{kernels}, no signal_groups, lw0 has not one value per output"
    one_value = first is not None and first.numel() == 1
    if geometry.n_outputs == geometry.n_count_outputs > 1 and one_value:
        return V010, f"{kernels}, one value in lw0 for {geometry.n_outputs} outputs"
    return BEFORE_011, f"{kernels}; without its configuration the file is not told apart further"


def _groups(
    release: str, geometry: Geometry, settings: Settings, warnings: list[str]
) -> tuple[int, ...] | None:
    outputs, counts = geometry.n_outputs, geometry.n_count_outputs
    if settings.groups is not None:
        shared = release == GIT_BOTH and settings.single_count_output and counts == 1
        if counts != len(settings.groups) and not shared:
            raise problem(
                f"config signal_groups has {len(settings.groups)} groups but linear.weight gives "
                f"{counts} counts; one count per group is needed; the file was changed after it "
                "was saved, so save the model again"
            )
        return settings.groups
    if release in _UNGROUPED:
        if counts not in (1, outputs):
            raise problem(
                f"linear.weight gives {counts} counts for {outputs} profile channels; release "
                f"{release} has 1 or {outputs}; save the model again with Cherimoya.save()"
            )
        return (outputs,)
    if counts == 1 or counts == outputs:
        groups = (outputs,) if counts == 1 else (1,) * outputs
        if outputs > 1:
            warnings.append(
                f"signal_groups is not in the file; deduced {list(groups)} from {counts} count and "
                f"{outputs} profile outputs"
            )
        return groups
    warnings.append(
        f"signal_groups is not in the file, and {counts} count for {outputs} profile outputs allow "
        "several; logits and log counts are right, but expected counts and reverse-complement "
        "averages need the groups"
    )
    return None


def _warn_counts(
    release: str,
    geometry: Geometry,
    settings: Settings,
    groups: tuple[int, ...] | None,
    warnings: list[str],
) -> None:
    outputs, counts, single = (
        geometry.n_outputs,
        geometry.n_count_outputs,
        settings.single_count_output,
    )
    if single is not None:
        needed = 1 if single else len(groups or ()) if release == GIT_BOTH else outputs
        if counts != needed:
            raise problem(
                f"config single_count_output is {single}, which means {needed} count outputs, but "
                f"linear.weight has {counts}; they must agree; save the model again"
            )
    if counts > 1 and release in (V001, V010) and groups == (outputs,):
        warnings.append(
            f"release {release} with single_count_output=False: each of the {counts} count outputs "
            "was trained on the total over all channels; never sum them"
        )
    if counts > 1 and release == GIT_TRACKS and groups == (outputs,):
        warnings.append(
            f"{release} with single_count_output=False: count output i was trained on profile "
            "channel i alone, not on a group"
        )
    if counts == 1 and groups is not None and len(groups) > 1:
        warnings.append(
            f"{release} with single_count_output=True: the one count output is the total over all "
            f"{len(groups)} signal groups"
        )


def _warn_strands(
    release: str, geometry: Geometry, groups: tuple[int, ...] | None, warnings: list[str]
) -> None:
    outputs, tracks = geometry.n_outputs, geometry.n_control_tracks
    if release in _UNGROUPED and (outputs > 1 or tracks > 1):
        warnings.append(
            f"release {release} knows no signal groups: a reverse complement reverses all "
            f"{outputs} output channels and all {tracks} control tracks"
        )
    stranded = groups is None or max(groups) > 1
    if stranded and release in _PER_CHANNEL:
        warnings.append(
            f"{release} normalised each channel by itself in training (between 0.1.0 and 0.2.0), "
            "so the offset between the strands of a group is untrained and arbitrary: compare "
            "shapes within a strand, not strands"
        )
    if stranded and release in (CURRENT, BEFORE_011):
        when = "before 0.2.0" if release == CURRENT else "after 0.1.0"
        warnings.append(
            f"stranded model of {release}, which the file cannot tell apart: if it was trained "
            f"{when}, the offset between the strands of a group is untrained and arbitrary"
        )
