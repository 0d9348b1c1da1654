"""Host side of the kernels: the functions that launch them.

All of them may run inside a CUDA graph capture: no synchronisation, no host copy, and weights are
read from their tensors at every call.
"""

from cheri_export.kernels.launch_block import (
    block_backward,
    block_backward_launch,
    block_forward,
    block_forward_launch,
    block_statistics,
)
from cheri_export.kernels.launch_ends import head_forward, stem_forward
from cheri_export.kernels.table import MAX_CHANNELS

__all__ = [
    "MAX_CHANNELS",
    "block_backward",
    "block_backward_launch",
    "block_forward",
    "block_forward_launch",
    "block_statistics",
    "head_forward",
    "stem_forward",
]
