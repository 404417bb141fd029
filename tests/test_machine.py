"""Free memory within the limits of containers and batch systems, from the files in which Linux states them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from permtriton.util.machine import available_memory

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes the files of a machine with 64 GiB available; returns what reads its free memory."""

    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB))

    def make(cgroup: str, groups: dict[str, dict[str, str]]) -> int:
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(cgroup)
        for folder, files in groups.items():
            (cgroups / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (cgroups / folder / name).write_text(content + "\n")
        return available_memory(CPU, proc=proc, cgroups=cgroups)

    return make


def v2(limit: int | str, used: int, stat: str = "anon 5\nfile 6") -> dict[str, str]:
    return {"memory.max": str(limit), "memory.current": str(used), "memory.stat": stat}


def test_a_limit_of_version_2_counts_without_file_cache(system):
    stat = f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n"
    assert system("0::/job\n", {"job": v2(8 * GIB, 5 * GIB, stat)}) == 5 * GIB


def test_the_tightest_ancestor_counts(system):
    groups = {"a": v2(9 * GIB, 7 * GIB), "a/b": v2("max", 6 * GIB), "a/b/c": v2(6 * GIB, GIB), ".": v2("max", 0)}
    assert system("0::/a/b/c\n", groups) == 2 * GIB


def test_a_container_sees_its_own_group_as_the_root(system):
    assert system("0::/\n", {".": v2(3 * GIB, GIB)}) == 2 * GIB


def test_a_full_group_leaves_nothing(system):
    assert system("0::/job\n", {"job": v2(GIB, 2 * GIB)}) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to keep memory")
def test_freed_memory_is_used_again():
    """In a process of its own, as the setting holds for all of it."""
    code = """
import resource, torch
from permtriton.util.machine import keep_freed_memory
def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.zeros(1 << 24).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = new_pages()
keep_freed_memory()
new_pages()
print(before, new_pages())
"""
    before, after = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert after < before / 10
