"""Tests that need a GPU. Run on one by python -m benchmarks.gpu, or with python -m pytest tests/gpu."""

import pytest
import torch

from permtriton.kernels.launch import triton


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available() or triton is None:
        skip = pytest.mark.skip(reason="needs a CUDA GPU and triton")
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
