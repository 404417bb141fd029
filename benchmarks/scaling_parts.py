"""The parts of a compilation, timed on this machine: single operators, whole stages of small models, disk and sums.

Seconds are processor time of one thread, to which other processes of the machine add little; those of the disk and of
sums over processes are wall-clock time.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scaling_work import Sizes, seconds, stages
from shared import PATTERN, llama, random_importances
from transformers import PreTrainedModel

from permtriton import find_plan
from permtriton.config import CompileConfig
from permtriton.data.samples import Samples
from permtriton.kernels.assignment import assignment
from permtriton.kernels.swap_gains import SwapTerms, swap_gains
from permtriton.machine import device_name, versions
from permtriton.methods.fisher import fisher_information
from permtriton.methods.hard_masks import hard_masked
from permtriton.methods.heuristic_order import heuristic_indices
from permtriton.methods.learning import Trainer, learned_spaces
from permtriton.methods.masked_model import masked_model
from permtriton.methods.objective import dense_objective
from permtriton.methods.reconstruction import reconstruct
from permtriton.methods.relaxation import Relaxation
from permtriton.methods.statistics import site_statistics
from permtriton.methods.swap_search import TRIALS, Round, Searched, Searcher
from permtriton.methods.weights import mask_weights, update_weights
from permtriton.model.plan import Plan, linear_module
from permtriton.permutation import identity
from permtriton.progress import NoProgress

BATCH, REPEATS = 8, 3
WIDTHS = (256, 512)
SEQUENCES, LENGTH, VOCABULARY = 16, 256, 1024


def measure() -> dict[str, Any]:
    """Returns this machine's rates, and the seconds of each stage beside those that follow from its counted work."""
    torch.set_num_threads(1)
    rates = {kind: amount / _seconds(run) for kind, (amount, run) in _operators().items()}
    rows = []
    for hidden in WIDTHS:
        torch.manual_seed(0)
        shape = argparse.Namespace(
            hidden=hidden, intermediate=hidden * 11 // 4, layers=2, heads=hidden // 64, vocabulary=VOCABULARY,
            tokens=LENGTH, dtype="float32", device="cpu",
        )  # fmt: skip
        model = llama(shape)
        plan = find_plan(model, PATTERN)
        config = CompileConfig.from_options({"permutation": "learned", "epochs": 1, "update_epochs": 1})
        counted = stages(Sizes.of(model, plan, SEQUENCES, LENGTH), config, TRIALS)
        for name, run in _stages(model, plan).items():
            found = {"measured_s": _seconds(run, 1), "counted_s": seconds(counted[name].alone(), rates)}
            rows.append({"stage": name, "shape": vars(shape), **{key: round(value, 4) for key, value in found.items()}})
    return {
        "rates": {kind: float(f"{rate:.3g}") for kind, rate in rates.items()},
        "disk": _disk(),
        "all_reduce": _all_reduce(),
        "stages": rows, "sequences": SEQUENCES, "device": device_name(torch.device("cpu")),
        "system": platform.platform(), "versions": versions(),
    }  # fmt: skip


def _seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Returns the processor time of a call, the median; other processes on the machine add nothing to it."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        run()
        found.append(time.process_time() - started)
    return statistics.median(found)


def _operators() -> dict[str, tuple[float, Callable[[], object]]]:
    """Returns kind -> amount of work, and what does it."""
    a, b, small = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.randn(256)
    spread, scores = torch.randn(1 << 26), torch.rand(256, 4096)
    definite = a @ a.T + 1024 * torch.eye(1024)
    costs = torch.cdist(scores, scores.flip(1).roll(1, 0), p=1).unsqueeze(0)
    parts = [torch.rand(256, 2048) for _ in range(4)]
    terms = SwapTerms(*parts, torch.rand(256))
    return {
        "products": (8 * 2 * 1024**3, lambda: [a @ b for _ in range(8)]),
        "wide": (8 * 2 * 1024**3, lambda: [a.T @ b for _ in range(8)]),
        "factors": (1024**3, lambda: torch.cholesky_inverse(torch.linalg.cholesky(definite))),
        "moved": (8 * spread.numel(), spread.clone),
        "distances": (256 * 256 * 4096, lambda: torch.cdist(scores, scores, p=1)),
        "searched": (4 * 4 * 256, lambda: [assignment(costs) for _ in range(4)]),
        "gains": (256 * 256 * 2048, lambda: swap_gains(terms, terms)),
        "operators": (10_000, lambda: [small.mul_(1) for _ in range(10_000)]),
    }


def _stages(model: PreTrainedModel, plan: Plan) -> dict[str, Callable[[], object]]:
    """Returns stage -> what runs it on a model; those that change it stand last."""
    generator = torch.Generator().manual_seed(0)
    samples = Samples.of(torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=generator))
    importances, quiet = random_importances(model, plan), NoProgress()
    spaces = [space for space in plan.spaces if not space.frozen]
    config = CompileConfig.from_options({"permutation": "searched"})
    learning = CompileConfig.from_options({"permutation": "learned", "epochs": 1})
    updating = CompileConfig.from_options(
        {"importance": "obs", "weight_update": "sparsegpt+reconstruct"} | {"update_epochs": 1}
    )
    objectives = {kind: dense_objective(model, kind, samples, BATCH) for kind in ("kl", "cosine")}
    rows = fisher_information(model, plan, "kl", samples[:1], config, quiet)
    names = [name for _, name in plan.linears()]
    dense = {name: linear_module(model, name).weight.detach().clone() for name in names}
    found = site_statistics(model, plan, "wanda", samples, BATCH, quiet)

    def one_epoch() -> None:
        relaxation = Relaxation(learned_spaces(plan, learning.learn), learning.learn, 0, model.device)
        optimizer = torch.optim.AdamW(relaxation.parameters())
        with masked_model(model, plan, importances, relaxation, learning, True) as masks:
            trainer = Trainer(model, masks, relaxation, optimizer, samples, objectives["cosine"], learning)
            list(trainer.epoch(1))
            trainer.evaluate(trainer.indices(trainer.steps_per_epoch))

    def one_round() -> None:
        # No loss is lower than this one, so that the round makes as many trials as it may.
        start = Searched({space.name: identity(space.units) for space in spaces}, [Round(0, -1.0, 0, 0, 4, 0, 0, 0)])
        with hard_masked(model, plan, importances, rows, config) as masks:
            Searcher(masks, spaces, samples, objectives["kl"], config).round(start)

    def reconstructed() -> None:
        mask_weights(model, plan, importances, PATTERN)
        reconstruct(model, plan, dense, samples, updating, quiet)

    return {
        "statistics (wanda)": lambda: site_statistics(model, plan, "wanda", samples, BATCH, quiet),
        "statistics (obs)": lambda: site_statistics(model, plan, "obs", samples, BATCH, quiet),
        "Fisher rows": lambda: fisher_information(model, plan, "kl", samples, config, quiet),
        "heuristic order": lambda: heuristic_indices(model, plan, spaces, importances, None, PATTERN, quiet),
        "one search round": one_round,
        "one learning epoch": one_epoch,
        "SparseGPT": lambda: update_weights(model, plan, found, samples, BATCH, updating, quiet),
        "reconstruct": reconstructed,
    }


def _disk(size: int = 1 << 29) -> dict[str, float]:
    """Returns bytes per second of writing a file to the disk and of reading it from there, past the system's cache."""
    content = os.urandom(1 << 24)
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        started = time.perf_counter()
        for _ in range(size // len(content)):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        reading = time.perf_counter()
        while file.read(len(content)):
            pass
        return {"write": size / (written - started), "read": size / (time.perf_counter() - reading)}


def _all_reduce(ranks: int = 2, size: int = 1 << 26) -> dict[str, float]:
    """Returns bytes per second that each of some processes on this machine sends while they add up a tensor (gloo)."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"file://{folder}/meet", ranks, size, folder)
        torch.multiprocessing.spawn(_adding_up, arguments, ranks)
        took = json.loads((Path(folder) / "seconds").read_text())
    return {"ranks": ranks, "bytes": size, "sent": 2 * (ranks - 1) / ranks * size / took}


def _adding_up(rank: int, meet: str, ranks: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    tensor, found = torch.ones(size // 4), []
    for _ in range(5):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        found.append(time.perf_counter() - started)
    if rank == 0:
        (Path(folder) / "seconds").write_text(json.dumps(min(found)))
    dist.destroy_process_group()
