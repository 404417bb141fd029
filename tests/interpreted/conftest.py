"""Kernels under Triton's interpreter, on the CPU: TRITON_INTERPRET=1 python -m pytest tests/interpreted

Triton reads the variable when a kernel is made, so these tests have a process of their own.
"""

import os

import pytest
import torch

from ..kernel_inputs import poison


def pytest_configure():
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("tests/interpreted runs with TRITON_INTERPRET=1 in the environment, which is not set")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded_and_poisoned(monkeypatch):
    torch.manual_seed(0)
    poison(monkeypatch)
