"""Hand-written CUDA kernels beside those of Triton: compiled at their first use; other routes run where that fails."""
