"""The one list of kernels: ``kernels/<name>.py`` with ``<name>_triton.py`` beside it, in the order of their tuning."""

KERNELS = ("permute", "norm_permute", "sinkhorn", "assignment", "nm_mask", "swap_gains", "packing", "sparse_linear")
