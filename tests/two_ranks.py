"""Compilations by one process and by two that share the sequences: ``python -m tests.two_ranks FOLDER CASES``.

One process imports everything and is forked twice before it starts any thread: importing takes most of the time.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import permtriton
from benchmarks.known_run import Known
from permtriton import PermTritonError, config_from
from permtriton.data.generated import generated_text
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.methods.measure.fisher import fisher_information
from permtriton.model.experts import unstacked_experts
from permtriton.model.forward import last_hidden_state
from permtriton.running.placement import DevicePlacement
from permtriton.util import ranks
from permtriton.util.progress import NoProgress
from tests import folders, updating, zoo
from tests.pretend_gpu import GPU, PretendGpu

RANKS = 2
# Row weights: every rank computes a part of a backward pass.
SMALL = {"micro_batch_size": 2, "activation_checkpointing": False, "heuristic_row_weights": "fisher"}
LEARN = {"learn_epochs": 2, "learn_batch_size": 2, "learn_block_size": 8, "learn_learning_rate": 0.1}
DISTILL = {"distill_epochs": 2, "distill_batch_size": 3, "distill_learning_rate": 0.01}


class Interrupting(NoProgress):
    """Interrupts a stage at a call of its function, as a user could."""

    def __init__(self, stage: str, call: int) -> None:
        self._recording, self._stage = updating.Recording(call, updating.interrupt), stage

    def stage(self, name: str, total: int):
        return self._recording.stage(name, total) if name == self._stage else super().stage(name, total)


def compiled(
    model: PreTrainedModel,
    ids: Tensor,
    path: Path | None = None,
    progress=None,
    placements=tuple(DevicePlacement),
    device=None,
    **options,
) -> dict:
    """Returns the tensors and numbers that a compilation ends with."""
    windows = zoo.tiny_ids(4, 10, seed=5)
    config = config_from({**SMALL, **options})
    found = compile_model(
        model,
        None,
        config,
        ids=ids,
        held_out=windows,
        resume_path=path,
        progress=progress or NoProgress(),
        placements=placements,
        device=device,
    )
    return {
        "tensors": {**model.state_dict(), **{f"index.{name}": index for name, index in found.indices.items()}},
        "losses": list(_losses(found.report)),
        "evaluation": [found.report["evaluation"][which] for which in ("dense", "compiled")],
    }


def _losses(report: object) -> Iterator[float]:
    if isinstance(report, dict):
        for name, value in report.items():
            if name in ("loss", "held_out", "start", "end") and isinstance(value, float):
                yield value
            else:
                yield from _losses(value)
    elif isinstance(report, list | tuple):
        for value in report:
            yield from _losses(value)


def every_update(_folder: Path) -> dict:
    model = updating.tiny_model().double()
    return compiled(model, zoo.tiny_ids(5, 12), recipe="heuristic,sparsegpt,distill", **DISTILL)


def refitted(folder: Path) -> dict:
    """Each rank runs both models on its sequences, and fits every other linear. Two ranks are interrupted after it."""
    path = folder / "refitted.safetensors"
    _interrupt(_refitted, path, Interrupting("distill", 1))
    for each in folder.glob("refitted.refit_1.*"):
        each.unlink()  # as if it had been interrupted in the last layer
    return _refitted(path)


def _interrupt(case: Callable[..., dict], path: Path, interrupting: Interrupting) -> None:
    """Runs a case on two ranks until it is interrupted; a single process does not begin it."""
    if ranks.count() == 1:
        return
    try:
        case(path, interrupting)
    except KeyboardInterrupt:
        return
    raise AssertionError("it was not interrupted")


def _refitted(path: Path, progress: NoProgress | None = None) -> dict:
    options = {"recipe": "heuristic,refit,distill", "refit_iterations": 4, "distill_steps": 2, "distill_batch_size": 1}
    return compiled(updating.tiny_model().double(), zoo.tiny_ids(9, 12), path, progress, **options)


def onloaded(_folder: Path) -> dict:
    """The layers come to a GPU that is not there, one by one; one rank has no share of the gradients of the outputs."""
    options = {"refit_iterations": 2, "refit_exchanges": 1, "refit_metric_rounds": 1, "refit_metric_tokens": 12}
    with PretendGpu().here():
        model, ids = updating.tiny_model(3).double(), zoo.tiny_ids(5, 12)
        return compiled(
            model, ids, device=GPU, placements=(DevicePlacement.ONLOADED,), recipe="heuristic,refit", **options
        )


def trained_onloaded(_folder: Path) -> dict:
    """The same, and one rank has no share of a step. In float32: the GPU that is not there has no backward casts."""
    options = {"distill_epochs": 1, "distill_batch_size": 1, "distill_optimizer": "adafactor"}
    with PretendGpu().here():
        model, ids = updating.tiny_model(3), zoo.tiny_ids(5, 12)
        return compiled(
            model, ids, device=GPU, placements=(DevicePlacement.ONLOADED,), recipe="mask,distill", **options
        )


def wrote(_folder: Path) -> dict:
    """Eleven texts, of which one rank writes six and the other five; ten are kept."""
    model = updating.tiny_model().double()
    starts = zoo.tiny_ids(11, 2)
    text = generated_text(model, starts, 10, 12, 0, NoProgress())
    options = {"generated": 9, "distill_epochs": 1, "distill_batch_size": 3, "distill_learning_rate": 0.01}
    result = compiled(model, zoo.tiny_ids(5, 12), recipe="mask,distill", **options)
    return {**result, "tensors": {**result["tensors"], "text": text}}


def searched_mixture(_folder: Path) -> dict:
    """All tokens of the first rank are equal, so that it visits only two experts; the other rank visits more.

    In float64, as the others, because swaps are chosen by comparison; the grouped products of experts know it not.
    """
    model, ids = (
        zoo.build("mixtral", num_hidden_layers=1, experts_implementation="eager").double(),
        zoo.token_ids(5, 12),
    )
    ids[:3] = 7
    with unstacked_experts(model):
        linears = [name for name, module in model.named_modules() if name.endswith("gate_up_proj")]
        visited: set[str] = set()
        hooks = [
            model.get_submodule(name).register_forward_hook(lambda *_, name=name: visited.add(name)) for name in linears
        ]
        last_hidden_state(model, Samples.of(ranks.own(ids)))
        for hook in hooks:
            hook.remove()
    result = compiled(model, ids, recipe="heuristic,searched,mask", search_rounds=2)
    return {**result, "unvisited": sorted(set(linears) - visited)}


def spread_search(_folder: Path) -> dict:
    return _spread(5, recipe="heuristic,searched,mask", search_rounds=3)


def spread_learning(_folder: Path) -> dict:
    return _spread(4, recipe="heuristic,learned,mask", importance="obs", learn_loss="kl", **LEARN)


def _spread(sequences: int, **options: object) -> dict:
    """With two ranks, FSDP2 spreads the layers."""
    placements = (DevicePlacement.SPREAD,) if ranks.count() > 1 else tuple(DevicePlacement)
    model, ids = updating.tiny_model().double(), zoo.tiny_ids(sequences, 12)
    return compiled(model, ids, placements=placements, **{"importance": "ria", **options})


def learned(folder: Path) -> dict:
    """Two ranks are interrupted in the second epoch, and continue from the state of the first rank."""
    path = folder / "states.safetensors"
    _interrupt(_learned, path, Interrupting("learn", 5))
    return _learned(path)


def _learned(path: Path, progress: NoProgress | None = None) -> dict:
    options = {"recipe": "heuristic,learned,mask", "importance": "ria", **LEARN}
    return compiled(updating.tiny_model(1).double(), zoo.tiny_ids(5, 12), path, progress, **options)


def encoder(_folder: Path) -> dict:
    model = zoo.build("bert", vocab_size=zoo.TINY["vocab_size"], num_hidden_layers=1).double()
    ids, config = zoo.tiny_ids(5, 12), config_from(SMALL)
    plan = zoo.find_plan(model, config.sparsity)
    found = fisher_information(Known(model, plan, Samples.of(ids), config), "cosine")
    result = compiled(model, ids, recipe="mask,distill", **DISTILL)
    result["tensors"] |= {f"fisher.{name}": torch.outer(each.row, each.column) for name, each in found.items()}
    return result


def refused(_folder: Path) -> dict:
    """One sequence is too few for two ranks, and what one rank refuses, all refuse."""
    if ranks.count() == 1:
        return {}
    errors = []
    tasks: list[Callable[[], object]] = [
        lambda: compiled(updating.tiny_model(), zoo.tiny_ids(1, 12)),
        lambda: ranks.on_first(_refuse),
        lambda: ranks.deal([0, 1], lambda item: _refuse() if item else None),
    ]
    for task in tasks:
        try:
            task()
            errors.append("")
        except PermTritonError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors}


def _refuse() -> None:
    raise permtriton.errors.OutputError("refused")


def strided(_folder: Path) -> dict:
    """Collective operations on a part of a tensor whose rows are not neighbours in memory."""
    found = []
    for work in (lambda part: ranks.add_up([part]), lambda part: ranks.send_from_first([part])):
        whole = torch.zeros(3, 4)
        part = whole[:, :2]
        part += ranks.number() + 1
        work(part)
        found.append(whole.tolist())
    return {"found": found}


def data_parallel(_folder: Path) -> dict:
    """The gradients of a fused model, whose orders take more than a byte per channel: DDP sends the first rank's.

    No test process makes a DDP model: where the group of ranks ends before it, torch may wait for itself forever.
    """
    model, ids = zoo.build("llama", hidden_size=320), zoo.token_ids(4, 8)
    folders.fuse(model, folders.FUSED_NORMS["llama"], folders.FUSED_GATHERS["llama"])
    if ranks.number() == 1:
        for buffer in model.buffers():
            buffer.copy_(buffer.flip(0))
    wrapped = DistributedDataParallel(model) if ranks.count() > 1 else model
    own = ranks.own(ids)
    wrapped(input_ids=own, labels=own).loss.backward()
    return {"tensors": {name: parameter.grad for name, parameter in model.named_parameters()}}


def run(folder: Path, name: str, cases: list[str]) -> None:
    """Runs the cases and writes what they return into ``folder``, each file named after case and process."""
    own = folder / name
    own.mkdir()
    for case in map(globals().__getitem__, cases):
        result = case(own)
        tensors = {key: tensor.contiguous() for key, tensor in result.pop("tensors", {}).items()}
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / f"{case.__name__}.{name}.st")
        (folder / f"{case.__name__}.{name}.json").write_text(json.dumps(result))


def main(folder: Path, cases: list[str]) -> None:
    """Runs the cases in one process, and in two."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    children = []
    for rank in (*range(RANKS), None):
        if (child := os.fork()) == 0:
            code = 1
            try:
                if rank is not None:
                    store = dist.FileStore(str(folder / "store"), RANKS)
                    dist.init_process_group("gloo", None, timedelta(minutes=5), RANKS, rank, store)
                run(folder, "alone" if rank is None else f"rank{rank}", cases)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
