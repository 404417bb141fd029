"""The pipeline: calibrate -> trace -> sites -> score -> permute -> fold -> mask or update -> verify."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton import memory
from permtriton.calibration import calibration_ids, channel_norms, check_finite, hessians, ids_hash
from permtriton.config import CompileConfig
from permtriton.errors import CalibrationError
from permtriton.evaluate import Evaluation
from permtriton.experts import Routing, unstacked_experts
from permtriton.forward import hidden_states, max_tokens
from permtriton.heuristic import heuristic_index, space_scores
from permtriton.importance import Importance, importance_of
from permtriton.inputs import other_inputs
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.learn import Epoch, ResumeFile, learn, learned_spaces
from permtriton.load import check_weights
from permtriton.passes.fold import fold
from permtriton.passes.fuse_permutations import DECISIONS
from permtriton.passes.graph import absorb
from permtriton.passes.insert_masks import insert_masks
from permtriton.passes.lower import lower
from permtriton.passes.pipeline import Pass, PassResult, permutation_passes, run_passes
from permtriton.passes.verify import check_pruned, check_same_outputs, first_output, model_outputs
from permtriton.passes.verify_graph import count_operators, run
from permtriton.permutation import compose, identity, moved
from permtriton.plan import ChannelSpace, Plan, Site, linear_module, weight_in_out
from permtriton.planning import check_not_compiled, hidden_order, plan_model
from permtriton.progress import NoProgress, Progress
from permtriton.reconstruct import inverse_diagonal, sparsegpt
from permtriton.report import device_name, hidden_states_report, site_report, space_report, versions

REFERENCE_SEQUENCES, REFERENCE_TOKENS = 2, 64  # that exact steps must reproduce
TOKENS_AT_ONCE = 4096  # in passes that keep no gradients


@dataclass
class CompiledModel:
    """A pruned model and how it came about.

    Attributes:
        model: physically N:M, every permutation folded; an ordinary transformers model.
        tokenizer: as given.
        config: what was asked for.
        plan: sites and channel spaces.
        indices: space name -> unit index from the dense order to the present one, int64.
        report: everything worth telling, as JSON types; as `_Compilation._report` lists it.
        reference_ids: token ids on which a reloaded checkpoint must agree with ``model``.
        resume: learning's state file, deleted once the model is saved.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: CompileConfig
    plan: Plan
    indices: dict[str, Tensor]
    report: dict[str, Any]
    reference_ids: Tensor
    resume: ResumeFile | None = None

    def save(self, output: str | Path, *, overwrite: bool = False) -> Path:
        """Writes a plain Hugging Face checkpoint and ``permtriton.json``, verifies it, then renames it into place.

        Raises:
            OutputError: the folder exists and ``overwrite`` is off, or cannot be written.
            VerificationError: the checkpoint is not what it must be; nothing is left behind.
        """
        from permtriton.artifact import save_checkpoint

        path = save_checkpoint(self, Path(output), overwrite=overwrite)
        if self.resume is not None:
            self.resume.delete()
        return path


def compile(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Tensor | None = None,
    evaluation_windows: Tensor | None = None,
    progress: Progress | None = None,
    resume_path: Path | None = None,
) -> CompiledModel:
    """Prunes ``model`` to N:M in place, in the best channel order that can be found and folded.

    Args:
        model: dense, in eval mode, on the device to work on.
        tokenizer: for calibration text.
        config: every option; the default recipe where None.
        ids: calibration sequences, int64 ``[samples, tokens]``, in place of the config's source.
        evaluation_windows: held-out sequences, int64 ``[windows, tokens]``, measured before and after.
        progress: told how the stages go.
        resume_path: file that keeps learning's state between epochs; an equal run continues from it.

    Returns:
        The compiled model; ``model`` is the same object, changed.

    Raises:
        PermTritonError: bad input, too little memory, or a failed check. The model may then be half changed.
    """
    compilation = _Compilation(model.eval(), tokenizer, config or CompileConfig(), progress or NoProgress())
    with unstacked_experts(model):
        return compilation.run(ids, evaluation_windows, resume_path)


@dataclass
class _Compilation:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: CompileConfig
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)
    kept_epoch: int | None = None
    largest_difference: float = 0.0
    passes: list[dict[str, Any]] = field(default_factory=list)

    def run(self, ids: Tensor | None, windows: Tensor | None, resume_path: Path | None) -> CompiledModel:
        check_not_compiled(self.model)
        check_weights(self.model)
        with self._timed("calibration text"):
            ids = self._ids(ids)
        with self._timed("trace"):
            self.plan, self.graph = plan_model(self.model, self.config)
        needs = memory.estimate(self.model, self.plan, self.config, ids, windows)
        self.progress.say(memory.told(needs, self.model.device))
        memory.check_fits(needs, self.model.device)
        self.ids, self.batch = ids, max(TOKENS_AT_ONCE // ids.shape[1], 1)
        self.reference_ids = ids[:REFERENCE_SEQUENCES, :REFERENCE_TOKENS]
        self.routing = Routing(self.model)
        self.calls: dict[str, dict[str, Tensor]] = {}
        self.unverified: dict[str, str] = {}
        if self.plan.unseen:
            self.calls, self.unverified = other_inputs(self.model, self.reference_ids)
        with self.routing.recorded():
            self.reference = model_outputs(self.model, self.reference_ids)
            self.call_outputs = {name: first_output(self.model, call) for name, call in self.calls.items()}
        if not bool(self.reference.isfinite().all()):
            raise CalibrationError(
                f"the dense model's outputs on the calibration text are not finite in {self.model.dtype}: "
                "activations overflow (try --dtype float32) or the weights are damaged"
            )
        with self._timed("evaluate"):
            evaluation = None if windows is None else Evaluation(self.model, windows, self.progress)
        with self._timed("calibrate"):
            self.statistics = self._statistics()
        indices = self._permute(resume_path)
        with self._timed("update" if self.config.weight_update == "sparsegpt" else "mask"):
            self._prune()
        check_pruned(self.model, self.plan, self.config.sparsity)
        measured = {}
        if evaluation is not None:
            with self._timed("evaluate"):
                measured = {
                    "measure": evaluation.measure,
                    "dense": evaluation.dense,
                    "compiled": evaluation.compiled(self.model, hidden_order(self.plan, indices)),
                }
        if self.config.layout == "fused":
            from permtriton.quantizer import attach  # transformers' quantizers take seconds to import

            attach(self.model, str(self.config.sparsity))  # so that the model's own save_pretrained keeps its order
        report = self._report(indices, measured, needs)
        return CompiledModel(
            self.model, self.tokenizer, self.config, self.plan, indices, report, self.reference_ids, self.resume
        )

    # -- stages ----------------------------------------------------------------------------------------------------

    def _ids(self, ids: Tensor | None) -> Tensor:
        vocabulary = self.model.get_input_embeddings().get_parameter("weight").shape[0]
        length = self.config.calibration.sequence_length if ids is None else ids.shape[1]
        limit = max_tokens(self.model)
        if limit is not None and limit < length:
            raise CalibrationError(
                f"sequence_length is {length}, but the model has {limit} positions: "
                f"use --sequence-length {limit} or less"
            )
        if ids is None:
            return calibration_ids(self.config.calibration, self.tokenizer, vocabulary, self.config.seed)
        if ids.ndim != 2 or not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise CalibrationError(
                f"ids have shape {tuple(ids.shape)}: expected [samples, tokens] with values from 0 to {vocabulary - 1}"
            )
        return ids.cpu()

    def _statistics(self) -> dict[str, Tensor]:
        """Returns a float32 vector a site: ``diag(H^-1)`` for OBS, ones for magnitude, else ``||X_j||``."""
        sites = self.plan.sites
        if self.config.importance == "magnitude":
            return {site.name: torch.ones(site.channels, device=self.model.device) for site in sites}
        if self.config.importance != "obs":
            return channel_norms(self.model, sites, self.ids, self.batch, self.progress)
        found: dict[str, Tensor] = {}
        layers = self.plan.layers()
        with self.progress.stage("calibrate", self.ids.shape[0] * len(layers)) as advance:
            for layer in layers:
                layer_hessians = hessians(self.model, layer, self.ids, self.batch, advance)
                found.update({name: inverse_diagonal(hessian, name) for name, hessian in layer_hessians.items()})
        for name, diagonal in found.items():
            check_finite(name, diagonal)
        return found

    def _permute(self, resume_path: Path | None) -> dict[str, Tensor]:
        """Finds and folds the permutations; returns every space's index from the dense order."""
        config = self.config
        indices = {space.name: identity(space.units) for space in self.plan.spaces}
        spaces = [space for space in self.plan.spaces if not space.frozen and config.permutation != "none"]
        if config.permutation == "learned" and config.learn.base_order == "identity":
            learning = learned_spaces(self.plan, config.learn)
            spaces = [space for space in spaces if not any(space is other for other in learning)]
        if spaces:
            with self._timed("heuristic"):
                base = self._heuristic(spaces)
            self._fold(base)
            indices.update(base)
        self.resume = None
        if config.permutation == "learned":
            if resume_path is not None:
                self.resume = ResumeFile(resume_path, self._fingerprint())
            with self._timed("learn"):
                target = hidden_states(self.model, self.ids, self.batch)
                learned = learn(
                    self.model, self.plan, self._importances(), self.ids, target, config.learn, config.sparsity,
                    config.seed, self.progress, self.resume,
                )  # fmt: skip
            self.epochs, self.kept_epoch = learned.history, learned.kept
            self._fold(learned.indices, config.learn.block_size)
            indices.update({name: compose(indices[name], index) for name, index in learned.indices.items()})
        return indices

    def _heuristic(self, spaces: Sequence[ChannelSpace]) -> dict[str, Tensor]:
        importances = self._importances()
        found = {}
        with self.progress.stage("heuristic", sum(len(space.segments) for space in spaces)) as advance:
            for space in spaces:
                scores = space_scores(self.model, self.plan.sites_of(space), importances)
                found[space.name] = heuristic_index(space, scores, self.config.sparsity, advance)
        return found

    def _fold(self, indices: Mapping[str, Tensor], block_size: int | None = None) -> None:
        """Folds indices relative to the present order, moves the statistics along, and proves that nothing changed."""
        self._run_passes(permutation_passes(self.plan, indices, block_size))
        fold(self.model, self.plan, indices)
        self.graph = absorb(self.graph)
        for site in self.plan.sites:
            if site.space.name in indices:
                order = site.expand(indices[site.space.name]).to(self.model.device)
                self.statistics[site.name] = self.statistics[site.name][order]
        with self.routing.replayed():
            outputs = model_outputs(self.model, self.reference_ids)
            others = {name: first_output(self.model, call) for name, call in self.calls.items()}
        difference = check_same_outputs(self.reference, outputs, self.model.dtype, "after folding permutations")
        for name, output in others.items():
            stage = f"after folding permutations, called with {name}"
            check_same_outputs(self.call_outputs[name], output, self.model.dtype, stage)
        self.largest_difference = max(self.largest_difference, difference)

    def _run_passes(self, passes: Sequence[Pass]) -> None:
        """Runs compiler passes on the traced graph, each one verified on the start of the first sequences."""

        def note(result: PassResult) -> None:
            self.passes.append({"name": result.name, "nodes": result.changes, "difference": result.difference})

        self.graph = run_passes(self.graph, passes, self._batches(), note)

    def _batches(self) -> list[Tensor]:
        tokens = next(node for node in self.graph.graph.nodes if node.op == "placeholder").meta["val"].shape[1]
        rows = self.ids[:REFERENCE_SEQUENCES]
        rows = rows.repeat(1, -(-tokens // rows.shape[1]))[:, :tokens]  # sequences may be shorter than the trace
        return list(rows.to(self.model.device).split(1))

    def _importances(self) -> dict[str, Importance]:
        return {
            name: importance_of(self.config.importance, self._weight(name), self.statistics[site.name])
            for site, name in self.plan.linears()
        }

    @torch.no_grad()
    def _prune(self) -> None:
        if self.config.weight_update == "none":
            self._mask()
            return
        layers = self.plan.layers()
        with self.progress.stage("update", (self.ids.shape[0] + 1) * len(layers)) as advance:
            for layer in layers:
                layer_hessians = hessians(self.model, layer, self.ids, self.batch, advance)
                for site in layer:
                    masks = self._masks(site) if self.config.update_mask == "keep" else {}
                    for name in site.linears:
                        given = masks[name].T if name in masks else None
                        weight = self._weight(name)
                        updated = sparsegpt(weight.T, layer_hessians[site.name], self.config.sparsity, given, name)
                        weight.copy_(updated.T).add_(0.0)
                advance()

    def _mask(self) -> None:
        """Zeroes what the masks drop, and proves that the model computes what the compiled graph does."""
        masked = partial(insert_masks, plan=self.plan, importances=self._importances(), pattern=self.config.sparsity)
        self._run_passes((Pass(masked, exact=False), Pass(lower)))
        expected = run(self.graph, self._batches()[0], wide=False)
        for site in self.plan.sites:
            for name, mask in self._masks(site).items():
                self._weight(name).masked_fill_(~mask, 0).add_(0.0)  # the sum turns -0.0 into 0.0
        routes = any("topk" in operator for operator in count_operators(self.graph))
        if routes and self.model.dtype.itemsize < 4:
            self.passes[-1]["compared"] = f"not with the model: in {self.model.dtype} rounding sends tokens elsewhere"
            return
        outputs = model_outputs(self.model, self._batches()[0])
        check_same_outputs(expected.float().cpu(), outputs, self.model.dtype, "after masking")

    def _masks(self, site: Site) -> dict[str, Tensor]:
        masks = {}
        for name in site.linears:
            weight = self._weight(name)
            scores = importance_of(self.config.importance, weight, self.statistics[site.name]).scores(weight)
            masks[name] = top_n_mask(scores, self.config.sparsity.kept, self.config.sparsity.group)
        return masks

    # -- small things ----------------------------------------------------------------------------------------------

    def _weight(self, name: str) -> Tensor:
        return weight_in_out(linear_module(self.model, name))

    def _fingerprint(self) -> str:
        told = {
            "config": self.config.to_dict(),
            "ids": ids_hash(self.ids),
            "reference": hashlib.sha256(self.reference.numpy().tobytes()).hexdigest(),
            "versions": versions(),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def _report(
        self, indices: Mapping[str, Tensor], measured: dict[str, Any], needs: Mapping[str, int]
    ) -> dict[str, Any]:
        pruned = {name: self._weight(name) for _, name in self.plan.linears()}
        zeros = {name: float((weight == 0).float().mean()) for name, weight in pruned.items()}
        return {
            "model": self.model.name_or_path,
            "versions": versions(),
            "device": device_name(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "config": self.config.to_dict(),
            "calibration": {"sha256": ids_hash(self.ids), "shape": list(self.ids.shape)},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "pruned_parameters": sum(weight.numel() for weight in pruned.values()),
            "sparsity_by_layer": zeros,
            "spaces": [
                {**space_report(self.plan, space), "moved": moved(indices[space.name])} for space in self.plan.spaces
            ],
            "skipped": self.plan.skipped,
            "barriers": self.plan.barriers,
            "learning": {"epochs": [asdict(epoch) for epoch in self.epochs], "kept_epoch": self.kept_epoch},
            "evaluation": measured,
            "passes": self.passes,
            "decisions": [asdict(decision) for decision in self.graph.meta.get(DECISIONS, [])],
            "fold_difference": self.largest_difference,
            "verified_inputs": ["input_ids", *self.calls],
            "unverified_inputs": self.unverified,
            "hidden_states": hidden_states_report(hidden_order(self.plan, indices)),
            "seconds": {stage: round(value, 3) for stage, value in self.seconds.items()},
            "memory": {"peak": memory.peak(self.model.device), "estimate": dict(needs)},
            "sites": [site_report(site, indices[site.space.name]) for site in self.plan.sites],
        }
