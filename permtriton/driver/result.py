"""What `permtriton.compile` returns: a pruned model that can be measured and saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from permtriton.arguments import EvaluateArgs
from permtriton.checkpoint.export import check_format, rewrite
from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.formats import Format
from permtriton.checkpoint.masks import Masks, Order
from permtriton.checkpoint.output import claimed, working_folder
from permtriton.checkpoint.pruned import Pruned, pruned_parameters
from permtriton.checkpoint.quantizer import checkpoint_config
from permtriton.checkpoint.read_record import read_record
from permtriton.checkpoint.save import save_checkpoint
from permtriton.data.in_memory import Data
from permtriton.evaluation.evaluate import Against, Evaluated, evaluate_with
from permtriton.methods.recipe_config import CompileConfig
from permtriton.util.machine import as_torch_starts
from permtriton.util.output_files import real_path


@dataclass(repr=False)
class CompiledModel(Pruned):
    """A pruned model and the record of its compilation.

    Attributes:
        config: every option.
        indices: space name -> unit index from the dense order to the present one, int64 ``[units]``.
        states: files that hold the state of long stages, deleted once the model is saved.
    """

    config: CompileConfig
    indices: dict[str, Tensor]
    states: Sequence[Path] = ()

    def __repr__(self) -> str:
        config, pattern = self.config, self.plan.sparsity(self.config.sparsity)
        summary = f"{type(self.model).__name__}, {len(self.plan.patterns)} linears at {pattern}"
        return f"<CompiledModel: {summary}, recipe {config.recipe}, layout {config.layout}>"

    @as_torch_starts()
    def evaluate(self, eval_data: Data | None = None, *, against: Against | bool = True, **options: Any) -> Evaluated:
        """Measures the model: perplexity, distance from the dense model, zero-shot tasks.

        The dense model is not kept while a model is compiled. It is read again from where it came from, for this call
        only: on a CPU its weights are mapped from their files, on a GPU it needs as much memory as before compiling. A
        model that was given in memory was changed in place: give a copy of the dense model as ``against``; without it,
        only the perplexity is measured.

        Args:
            eval_data: held-out text or samples, as `permtriton.evaluate` takes them.
            against: True for the dense model that was compiled, where there is a text to compare on; False for none;
                or a model, folder or hub name.
            options: further arguments of `permtriton.evaluate`, such as ``tasks`` and ``window``; without a protocol,
                ``special_tokens`` is by default what the model was compiled with.

        Raises:
            PermTritonError: as `permtriton.evaluate`.

        Example:
            >>> print(compiled.evaluate("my-heldout.txt"))
            perplexity ..., dense ..., KL ..., cosine ... on my-heldout.txt (...)
        """
        if isinstance(against, bool):
            off = isinstance(eval_data, str) and eval_data == "none"
            against = self.source if against and not off else None
        order = self.plan.hidden_order(self.indices)
        if "protocol" not in options:
            options.setdefault("special_tokens", self.config.calibration.special_tokens)
        args = EvaluateArgs(
            eval_data=eval_data, against=against, tokenizer=self.tokenizer, hidden_order=order, **options
        )
        return evaluate_with(self.model, args)

    @property
    def masks(self) -> Masks:
        """The masks and the orders of all pruned linears; `permtriton.read_masks` reads the masks of a folder."""
        return Masks(self.report, pruned_parameters(self.model, self.plan), self.model.get_parameter)

    def mask(self, linear: str, order: Order = "dense") -> Tensor:
        """Returns which weights of a pruned linear are kept, bool ``[out_features, in_features]``.

        Args:
            linear: name of the linear, such as ``model.layers.0.mlp.down_proj``.
            order: ``dense`` for the dense model's order of rows and columns, ``saved`` for the saved weight's order, in
                which the groups of N:M are consecutive.

        Raises:
            ConfigError: there is no such linear, or ``order`` has another value.

        Example:
            >>> compiled.mask("model.layers.0.mlp.down_proj")[:2, :4]
            tensor([[...]])
        """
        return self.masks.mask(linear, order)

    def permutation(self, linear: str) -> Tensor:
        """Returns the order of a linear's input channels, int64 ``[in_features]``: channel ``j`` was ``index[j]``.

        Args:
            linear: name of the linear, or of its site.

        Raises:
            ConfigError: there is no such linear or site.
        """
        return self.masks.permutation(linear)

    def save_pretrained(self, folder: str | Path, *, format: str | None = None, overwrite: bool = False) -> Path:
        """Writes a Hugging Face checkpoint with ``permtriton.json``, and verifies it before it is renamed into place.

        Args:
            folder: folder to write.
            format: ``dense`` (zeros stored, too), ``packed`` (kept values and positions), ``packed-fp8`` (packed in 8
                bits) or ``fp8`` (8 bits, as vLLM loads them). None for dense. The other formats are written by way of a
                dense folder beside them, as `permtriton.export` writes them.
            overwrite: whether an earlier output of permtriton may be replaced.

        Returns:
            The absolute path of the folder.

        Raises:
            ConfigError: an unknown format, or ``fp8`` in layout ``fused``.
            OutputError: the folder exists and may not be replaced, or cannot be written.
            VerificationError: the written checkpoint fails a check; nothing is left behind.

        Example:
            >>> compiled.save_pretrained("my-model-packed", format="packed").name
            'my-model-packed'
        """
        path = Path(folder)
        permuted = checkpoint_config(self.model, str(self.config.sparsity)) is not None
        check_format(format or Format.DENSE, permuted=permuted, what="the compiled model")
        with claimed(path, overwrite=overwrite):
            if format in (None, Format.DENSE):
                self.report = save_checkpoint(self, path, overwrite=overwrite)
            else:
                with working_folder(path) as place:
                    dense = place / real_path(path).name
                    save_checkpoint(self, dense, overwrite=False)
                    rewrite(Folder(dense), path, format, overwrite=overwrite)
                self.report = read_record(path)
        for state in self.states:
            state.unlink(missing_ok=True)
        return real_path(path)
