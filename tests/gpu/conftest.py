"""Tests of a GPU. Run on one by python -m benchmarks.gpu, or with python -m pytest tests/gpu.

Without one, those marked ``also_on_cpu`` run in float32: nobody notices otherwise that what they call has changed.
"""

import pytest
import torch

from permtriton.kernels.launch import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() and triton is not None else "cpu")


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA GPU and triton")
    for item in items:
        here = item.get_closest_marker("also_on_cpu") and "float32" in item.name
        if "gpu" in item.path.parts and DEVICE.type == "cpu" and not here:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return DEVICE
