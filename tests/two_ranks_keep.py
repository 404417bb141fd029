"""Two ranks under FSDP2, started as ``python -m tests.two_ranks_keep train FOLDER``, or another of its functions."""

import gc
import os
import sys
import weakref
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import permtriton
from permtriton.errors import ModelError, OutputError
from tests import folders, zoo
from tests.keeping import adapted

RANKS = 2


def divide(model: nn.Module, layers: Iterable[nn.Module], **options: bool) -> None:
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model)


@torch.no_grad()
def look(model: nn.Module) -> None:
    """Evaluates a model; the modules whose weights are not divided again after a forward pass then hold whole ones."""
    model(input_ids=zoo.tiny_ids(1, 8))


def train(rank: int, folder: Path, call: str) -> None:
    """Trains and saves beside the folder; ``call`` says whether the pattern is kept before or after sharding."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    zeros = {name: parameter.detach() == 0 for name, parameter in model.named_parameters()}
    whole = [weakref.ref(parameter) for parameter in model.parameters()]
    kept = permtriton.keep_pattern(model) if call == "before" else None
    divide(model, model.model.layers)
    gc.collect()
    assert not any(parameter() is not None for parameter in whole), "no weight stays whole in memory"
    kept = kept or permtriton.keep_pattern(model)
    kept.restore()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    for step in range(2):
        model(input_ids=zoo.tiny_ids(2, 8, seed=2 * step + rank)).logits.logsumexp(-1).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name in kept.patterns:
        values = model.get_parameter(name).full_tensor()
        assert not values[zeros[name]].any(), name
        assert values[~zeros[name]].any(), name
    assert (kept.save_pretrained(folder.parent / call) / "config.json").is_file()
    with pytest.raises(OutputError, match=f"{call} exists"):
        kept.save_pretrained(folder.parent / call)


def evaluate(rank: int, folder: Path, call: str) -> None:
    """Evaluates after every backward pass and before every call, where weights are then whole: the root's, or all."""
    for stage in ("root", "zero2"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        zeros = {name: parameter.detach() == 0 for name, parameter in model.named_parameters()}
        kept = permtriton.keep_pattern(model) if call == "before" else None
        divide(model, model.model.layers if stage == "zero2" else (), reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        look(model)
        kept = kept or permtriton.keep_pattern(model)
        for step in range(2):
            model(input_ids=zoo.tiny_ids(2, 8, seed=2 * step + rank)).logits.logsumexp(-1).square().mean().backward()
            look(model)
            optimizer.step()
            optimizer.zero_grad()
        look(model)
        saved = kept.save_pretrained(folder.parent / f"{call}-{stage}")
        for parameter in model.parameters():
            parameter.data.fill_(1)
        look(model)
        kept.restore()
        values, again = model.state_dict(), AutoModelForCausalLM.from_pretrained(saved).state_dict()
        for name in kept.patterns:
            assert torch.equal(values[name].full_tensor() == 0, zeros[name]), name
            assert torch.equal(again[name] == 0, zeros[name]), name


def fused(_: int, folder: Path, call: str) -> None:
    """Is refused where it is divided: by the call, or by the first step and by what saves."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    folders.fuse(model, folders.FUSED_NORMS["llama"], [])
    kept = permtriton.keep_pattern(model) if call == "before" else None
    divide(model, ())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    refused = [lambda: permtriton.keep_pattern(model)]
    if kept:
        refused = [optimizer.step, lambda: kept.save_pretrained(folder.parent / call)]
    for begin in refused:
        with pytest.raises(ModelError, match=r"0\.input_layernorm permutes channels.*divided among ranks.*portable"):
            begin()


def loaded_divided(_: int, folder: Path, call: str) -> None:
    """Saves a model that transformers itself divided while loading it: by FSDP2, then by tensor parallelism."""
    divided = DistributedConfig(fsdp_size=RANKS) if call == "before" else DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=divided)
    saved = permtriton.keep_pattern(model).save_pretrained(folder.parent / call)
    assert model.config.distributed_config is not None
    whole, again = (AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (folder, saved))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def merge(_: int, folder: Path, call: str) -> None:
    """Merges an adapter after an evaluation, and compares with what one process gives; see `evaluate`."""
    whole, model = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    kept = permtriton.keep_pattern(model) if call == "before" else None
    wrapped, other = adapted(model), adapted(whole)
    wrapped.load_state_dict(other.state_dict())
    divide(wrapped, model.model.layers, reshard_after_forward=False)
    look(wrapped)
    kept = kept or permtriton.keep_pattern(wrapped)
    merged, expected = kept.merge_and_unload(wrapped), permtriton.keep_pattern(other).merge_and_unload(other)
    assert merged.lost_by_weight == pytest.approx(expected.lost_by_weight)
    assert merged.lost == pytest.approx(expected.lost)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter)


def run(rank: int, work: str, folder: Path, call: str) -> None:
    store = dist.FileStore(str(folder.parent / f"store-{call}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    works = {each.__name__: each for each in (train, evaluate, fused, loaded_divided, merge)}
    works[work](rank, folder, call)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    for call in ("before", "after"):
        children = []
        for rank in range(RANKS):
            if not (child := os.fork()):
                try:
                    run(rank, sys.argv[1], Path(sys.argv[2]), call)
                except BaseException as error:
                    sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
                    sys.stderr.flush()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        ends = [os.waitpid(child, 0)[1] for child in children]
        if any(ends):
            sys.exit(1)


if __name__ == "__main__":
    main()
