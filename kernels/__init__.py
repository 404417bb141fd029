# Imports nothing, on purpose: with the repository root on sys.path, transformers takes a top-level ``kernels`` for the
# Hugging Face package of that name and imports it.
