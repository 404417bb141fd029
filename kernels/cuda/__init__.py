"""Hand-written CUDA beside the Triton kernels, for comparison: built on demand, never needed."""
