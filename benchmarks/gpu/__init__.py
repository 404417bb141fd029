"""Everything that permtriton is measured on with a GPU, in one command: ``python -m benchmarks.gpu --out DIR``."""
