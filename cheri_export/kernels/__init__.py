"""Triton kernels of the three ops, in the order of launch.

- stem: `stem.stem_kernel`
- block: `block_forward.conv_stats_kernel`, then `block_forward.fused_block_kernel`
- block, backward: `block_backward.prepare_weights_kernel`, `mlp_backward_kernel`,
  `weight_grad_kernel`, `conv_backward_kernel`
- head: `head.head_project_kernel`, then `head.head_reduce_kernel`

`numerics` holds the device functions that they share, `table` the launch configurations, `launch`
the host side, and `aot` compiles every kernel without a GPU. Nothing is imported here, so that
`table` loads where neither torch nor triton is installed.

The block's algorithm follows cherimoya 0.3.1 (MIT, Jacob Schreiber): statistics in a first pass,
convolution rebuilt from the input in a second one that fuses norm, MLP and residual.
"""
