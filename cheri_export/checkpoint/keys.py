"""Names of tensors: wrappers' prefixes, the two spellings of the conv weight, what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cheri_export.checkpoint.messages import KEYS, RESAVE, listing, problem, show

IGNORED = ("lw0", "lw1")
"""Loss weights of training. Their shape varies between releases and no forward pass uses them."""

HEADS = ("iconv.weight", "iconv.bias", "fconv.weight", "fconv.bias", "linear.weight", "linear.bias")
PARTS = ("conv_weight", "linear1.weight", "linear2.weight")
SUBMODULE = "conv.conv_weight"

_WRAPPERS = ("_orig_mod", "module")
_BLOCK = re.compile(
    r"blocks\.(0|[1-9][0-9]{0,5})\.(conv_weight|conv\.conv_weight|gamma|linear[12]\.weight)"
)


def plain(key: str) -> str:
    """The key without torch.compile's and DataParallel's parts, wherever they stand."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def is_ignored(key: str) -> bool:
    """Whether the tensor plays no part in the forward pass."""
    return plain(key) in IGNORED


def resolve(keys: Iterable[str]) -> tuple[dict[str, str], dict[str, str], int]:
    """Find the tensors of the forward pass.

    Returns
    -------
    found: dict of str to str
        Canonical name -> key in the file, in canonical order.

    doubled: dict of str to str
        Canonical conv weight -> the key that lost to the submodule spelling.

    n_layers: int

    Raises
    ------
    CheckpointError
        If tensors are missing, unexpected or ambiguous, or the blocks have a gap.
    """
    spelled: dict[str, str] = {}
    for key in keys:
        name = plain(key)
        if name in spelled:
            raise problem(
                f"{show(spelled[name])} and {show(key)} name the same tensor; one is needed; "
                "remove the copy"
            )
        spelled[name] = key
    blocks: dict[int, set[str]] = {}
    unexpected = []
    for name, key in spelled.items():
        match = _BLOCK.fullmatch(name)
        if match:
            blocks.setdefault(int(match[1]), set()).add(match[2])
        elif name not in HEADS and name not in IGNORED:
            unexpected.append(key)
    _check_numbers(blocks, spelled, unexpected)

    has_gamma = any("gamma" in parts for parts in blocks.values())
    parts = (PARTS[0], "gamma", *PARTS[1:]) if has_gamma else PARTS
    wanted = list(HEADS[:2])
    wanted += [f"blocks.{i}.{part}" for i in range(len(blocks)) for part in parts]
    wanted += HEADS[2:]
    found, doubled, missing = {}, {}, []
    for name in wanted:
        below = name.replace("conv_weight", SUBMODULE) if "conv_weight" in name else name
        if below in spelled:
            found[name] = spelled[below]
            if below != name and name in spelled:
                doubled[name] = spelled[name]
        elif name in spelled:
            found[name] = spelled[name]
        else:
            missing.append(name)
    if missing:
        also = f"; it has {listing(unexpected)} instead" if unexpected else ""
        raise problem(
            f"missing {'tensor' if len(missing) == 1 else 'tensors'} {listing(missing)}{also}; "
            f"needed {KEYS}; {RESAVE}"
        )
    if unexpected:
        raise problem(
            f"unexpected {'tensor' if len(unexpected) == 1 else 'tensors'} {listing(unexpected)}: "
            "no release of Cherimoya has them, and leaving them out could change the result; "
            "remove them if they are not used"
        )
    return found, doubled, len(blocks)


def _check_numbers(
    blocks: dict[int, set[str]], spelled: dict[str, str], unexpected: list[str]
) -> None:
    if not blocks:
        if all(name in spelled for name in HEADS) and not unexpected:
            raise problem(
                "the model has no blocks (n_layers 0); at least one is needed, with the tensors "
                "blocks.0.conv_weight, blocks.0.linear1.weight, blocks.0.linear2.weight"
            )
        raise problem(
            f"not a Cherimoya model: found {listing(spelled.values())}; expected {KEYS}; "
            "give a file of Cherimoya.save()"
        )
    gap = next(i for i in range(len(blocks) + 1) if i not in blocks)
    if gap < len(blocks):
        raise problem(
            f"block {gap} is missing: the blocks are numbered {listing(sorted(blocks), 8)}; "
            f"they must run from 0 without a gap; {RESAVE}"
        )
