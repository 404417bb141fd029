"""One class of the zoo: compiled with random orders in both layouts, compared with the dense model, saved and reloaded.

The orders are drawn at random, because an order that a search finds may by chance leave a wrong rule unseen.
"""

import contextlib
import copy
import re
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from benchmarks.architectures import tiny
from benchmarks.architectures.table import LAYOUTS, TOLERANCE
from permtriton.checkpoint.export import export
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.errors import PermTritonError
from permtriton.methods import planning
from permtriton.methods.order.heuristic import Heuristic
from permtriton.methods.run import Run
from permtriton.model.core import ENCODER_STATE, has_head
from permtriton.model.experts import unstacked_experts
from permtriton.passes.plan import ChannelSpace, Plan
from permtriton.passes.weight_folds import apply_edits, edits_of, moves_of
from permtriton.recipe import config_from

OPTIONS = {"recipe": "heuristic,mask", "importance": "magnitude", "skip_indivisible": True}
SEEDS = (2, 3, 4)  # of inputs
NOT_LINEAR = (nn.Conv1d, nn.ConvTranspose1d, nn.utils.parametrize.ParametrizationList)


def trial(name: str, compiled: bool) -> dict[str, Any]:
    """Tries one class in both layouts.

    Args:
        name: class in transformers.
        compiled: whether to run the whole of `permtriton.compile` with random orders, and to save and reload.

    Returns:
        What is known of the class: ``unbuilt`` with the reason, or one entry per layout.
    """
    record: dict[str, Any] = {"class": name, "kind": tiny.classes()[name], "compiled": compiled}
    try:
        dense = tiny.build(name)
        record["parameters"] = sum(parameter.numel() for parameter in dense.parameters())
        inputs = tiny.inputs(dense)
        record["inputs"] = list(inputs)
        if not all(bool(value.isfinite().all()) for value in _outputs(dense)):
            raise ValueError("the dense model's outputs are not finite")
    except Exception as error:
        return {**record, "unbuilt": _line(error), "where": _where(error)}
    with _one_trace(), unstacked_experts(dense):
        for layout in LAYOUTS:
            record[layout] = _planned(dense, layout, inputs)
    if compiled:
        for layout in LAYOUTS:
            record[layout] |= _compiled(dense, layout, inputs)
    return record


@contextlib.contextmanager
def _one_trace() -> Iterator[None]:
    """Inside the ``with`` block, a model is traced once: both layouts start from the same graph."""
    traces: dict[int, Any] = {}
    original = planning.trace

    def trace(model: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
        if id(model) not in traces:
            traces[id(model)] = original(model, *arguments, **options)
        return traces[id(model)]

    with mock.patch.object(planning, "trace", trace):
        yield


def _planned(dense: PreTrainedModel, layout: str, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Plans one layout, and writes random orders into a copy of the dense model."""
    config = config_from({**OPTIONS, "layout": layout})
    try:
        plan = planning.plan_model(dense, config, Samples.of(inputs))[0]
        return {**described(plan, dense), **_permuted(dense, plan)}
    except PermTritonError as error:
        return {"step": "plan", "refused": str(error)}
    except Exception as error:
        return {"step": "plan", "traceback": _line(error), "where": _where(error)}


def _compiled(dense: PreTrainedModel, layout: str, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Compiles a copy of ``dense``, saves it, exports it packed, and reloads both."""
    model, step = copy.deepcopy(dense), "compile"
    config = config_from({**OPTIONS, "layout": layout})
    try:
        with mock.patch.object(Heuristic, "indices", _random_orders):
            compiled = compile_model(model, None, config, ids=inputs)
        step = "save"
        with tempfile.TemporaryDirectory() as folder:
            compiled.save_pretrained(Path(folder) / "saved")
            step = "packed"
            export(Path(folder) / "saved", Path(folder) / "packed", "packed")
            reloaded = type(model).from_pretrained(Path(folder) / "packed").eval()
            return {"packed_difference": difference(_outputs(model), _outputs(reloaded))}
    except PermTritonError as error:
        return {"step": step, "refused": str(error)}
    except Exception as error:
        return {"step": step, "traceback": _line(error), "where": _where(error)}


def _outputs(model: PreTrainedModel, seed: int = 2) -> list[Tensor]:
    return outputs(model, tiny.inputs(model, samples=2, seed=seed))


def _random_orders(_step: Heuristic, run: Run) -> dict[str, Tensor]:
    spaces = [space for space in run.plan.spaces if not space.frozen]
    return {space.name: random_index(space, seed) for seed, space in enumerate(spaces)}


def _permuted(dense: PreTrainedModel, plan: Plan) -> dict[str, Any]:
    """Writes random orders into a copy of the dense model and returns how far its outputs move.

    Other inputs are tried where they move far: rounding sends a token to another expert now and then. Those of a wrong
    plan move on all inputs.
    """
    model = copy.deepcopy(dense)
    indices = {space.name: random_index(space, seed) for seed, space in enumerate(plan.spaces) if not space.frozen}
    try:
        with unstacked_experts(model):
            apply_edits(model, edits_of(moves_of(plan, indices)))
        found = []
        for seed in SEEDS:
            found.append(difference(_outputs(dense, seed), _outputs(model, seed)))
            if found[-1] <= TOLERANCE:
                break
        return {"difference": min(found)}
    except Exception as error:
        return {"permuted": _line(error), "permuted_where": _where(error)}


def described(plan: Plan, model: PreTrainedModel) -> dict[str, Any]:
    """Returns what a plan prunes, permutes and freezes; names stand once for all layers and experts."""
    sizes = _linear_weights(model)
    dense: dict[str, int] = {}
    for name, reason in plan.skipped.items():
        dense[reason] = dense.get(reason, 0) + sizes.get(name, sizes.get(f"{name}.weight", 0))
    pruned = sum(sizes[f"{name}.weight"] for _, name in plan.linears())
    return {
        "pruned_weights": pruned,
        "dense_weights": {reason: size for reason, size in dense.items() if size},
        "free": sum(not space.frozen for space in plan.spaces),
        "kept": sum(space.frozen for space in plan.spaces),
        "frozen": _by_reason({space.name: space.reason for space in plan.spaces if space.frozen}),
    }


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns reason -> names, with ``N`` for the numbers in both."""
    found: dict[str, set[str]] = {}
    for name, reason in reasons.items():
        short = re.sub(r"[+].*", "+...", name)
        found.setdefault(re.sub(r"(?<=[.])\d+(?=[.])", "N", reason), set()).add(re.sub(r"\d+", "N", short))
    return {reason: sorted(names) for reason, names in found.items()}


def _linear_weights(model: PreTrainedModel) -> dict[str, int]:
    """Returns parameter -> size, for the weights of all linears and stacks of experts but embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found: dict[int, tuple[str, int]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            linear = isinstance(module, nn.Linear | Conv1D) and name == "weight"
            stacked = parameter.ndim == 3 and parameter.shape[0] > 1 and not isinstance(module, NOT_LINEAR)
            if (linear or stacked) and id(parameter) not in embeddings:
                found.setdefault(id(parameter), (f"{prefix}.{name}", parameter.numel()))
    return dict(found.values())


def random_index(space: ChannelSpace, seed: int) -> Tensor:
    """Returns a unit index, int64 ``[units]``, that permutes every segment at random."""
    generator = torch.Generator().manual_seed(seed)
    start, parts = 0, []
    for size in space.segments:
        parts.append(start + torch.randperm(size, generator=generator))
        start += size
    return torch.cat(parts)


@torch.no_grad()
def outputs(model: PreTrainedModel, arguments: dict[str, Tensor]) -> list[Tensor]:
    """Returns every tensor of floating point that a model returns, but for the state between encoder and decoder."""
    torch.manual_seed(0)  # some models draw random numbers in eval mode
    inner = ENCODER_STATE if has_head(model) else ""  # the model's own, as the states between layers
    found = [value for name, value in model(**arguments).items() if name != inner and isinstance(value, Tensor)]
    return [value for value in found if value.is_floating_point()]


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Returns the largest difference of two models' outputs, relative to the largest output."""
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(first, second, strict=True))


def _line(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:400]


def _where(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in frames[-4:]]
