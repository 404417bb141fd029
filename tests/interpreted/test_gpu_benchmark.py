"""The GPU benchmark's own kernels: what it takes for the ceiling of decoding, and for a norm without a permutation."""

import torch
from torch.nn.functional import rms_norm

from benchmarks.gpu import kernels, reading


def test_the_kernel_that_measures_reading_reads_everything(monkeypatch):
    monkeypatch.setattr(reading, "TILE", 64)
    monkeypatch.setattr(reading, "multiprocessors", lambda device: 2)
    x = torch.randint(0, 1 << 30, (64 * 21 + 5,), dtype=torch.int32)
    found, expected = 0, 0
    for part in reading.checksum(x).tolist():
        found ^= part
    for word in x.tolist():
        expected ^= word
    assert found == expected


def test_the_norm_that_does_not_permute(monkeypatch):
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 1)
    x, weight = torch.randn(9, 48), torch.rand(48)
    torch.testing.assert_close(kernels.rms_norm_alone(x, weight, 1e-5), rms_norm(x, (48,), weight, 1e-5))
