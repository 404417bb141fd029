"""What checks, tunes and times the kernels; nothing here runs in a compiled model."""
