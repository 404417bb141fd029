"""Two ranks train a pruned folder under FSDP2, started as ``python -m tests.two_ranks_keep FOLDER``."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import permtriton
from tests import zoo

RANKS = 2


def run(rank: int, folder: Path, call: str) -> None:
    """Trains and saves beside the folder; ``call`` says whether the pattern is kept before or after sharding."""
    store = dist.FileStore(str(folder.parent / f"store-{call}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    model = AutoModelForCausalLM.from_pretrained(folder)
    zeros = {name: parameter.detach() == 0 for name, parameter in model.named_parameters()}
    kept = permtriton.keep_pattern(model) if call == "before" else None
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    kept = kept or permtriton.keep_pattern(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    for step in range(2):
        model(input_ids=zoo.tiny_ids(2, 8, seed=2 * step + rank)).logits.logsumexp(-1).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name in kept.patterns:
        whole = model.get_parameter(name).full_tensor()
        assert not whole[zeros[name]].any(), name
        assert whole[~zeros[name]].any(), name
    kept.save_pretrained(folder.parent / call)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    for call in ("before", "after"):
        children = []
        for rank in range(RANKS):
            if not (child := os.fork()):
                try:
                    run(rank, Path(sys.argv[1]), call)
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
