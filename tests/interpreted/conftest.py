"""Kernels under Triton's interpreter, on the CPU: TRITON_INTERPRET=1 python -m pytest tests/interpreted

Triton reads the variable when a kernel is made, so these tests have a process of their own.
"""

import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") != "1":
        skip = pytest.mark.skip(reason="needs a process with TRITON_INTERPRET=1: make unit starts one")
        for item in items:
            if "interpreted" in item.path.parts:
                item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
