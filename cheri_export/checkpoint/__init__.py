"""Reading checkpoints of every Cherimoya release, without executing anything in them."""

from cheri_export.checkpoint.build import checkpoint_from_module, checkpoint_from_tensors
from cheri_export.checkpoint.read import read_checkpoint
from cheri_export.checkpoint.record import Checkpoint, weight_extremes
from cheri_export.checkpoint.weights_file import write_weights

__all__ = [
    "Checkpoint",
    "checkpoint_from_module",
    "checkpoint_from_tensors",
    "read_checkpoint",
    "weight_extremes",
    "write_weights",
]
