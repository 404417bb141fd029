"""All measurements of permtriton on a GPU, in one command: ``python -m benchmarks.gpu --out FILE``."""
