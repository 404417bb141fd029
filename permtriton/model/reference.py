"""The dense model's outputs, which the permuted model must reproduce."""

from torch import Tensor
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, VerificationError
from permtriton.model.checks import LAST, check_same_outputs, output_and_states, same_channels
from permtriton.model.routing import Routing
from permtriton.util.micro_batch import is_out_of_memory

SEQUENCES, TOKENS = 2, 64


class Reference:
    """Outputs of a dense model on the first calibration samples, of which texts are cut short.

    Attributes:
        samples: at most `SEQUENCES` samples; texts have at most `TOKENS` tokens.
        output: the dense model's first output on ``samples``, float32 on the CPU.
        unproved: why `check` could not prove that all hidden states have the order of the last one; else empty.
    """

    def __init__(self, model: PreTrainedModel, samples: Samples) -> None:
        self._routing = Routing(model)
        for sequences in (SEQUENCES, 1):  # 1 if the model takes no batch, as a classifier without padding
            self.samples = samples.start(sequences, TOKENS)
            self._inputs = self.samples.to(model.device, model.dtype).inputs
            try:
                with self._routing.recorded():
                    self.output, self._states = output_and_states(model, self._inputs)
                break
            except Exception as error:  # the model's code may raise any exception
                if len(self.samples) == 1 or is_out_of_memory(error):
                    raise
        self.unproved = ""
        if not bool(self.output.isfinite().all()):
            raise CalibrationError(
                f"the dense model's outputs on the calibration samples are not finite in {model.dtype}: "
                "activations overflow (try `dtype=float32`) or the weights are damaged"
            )

    def check(self, model: PreTrainedModel, stage: str, order: Tensor | None) -> float:
        """Refuses a model whose output or last hidden state differs from the dense model's; sets `unproved`.

        Args:
            order: index ``[C]`` of the last hidden state, from the dense model's channels to the present ones; None
                where they did not move.

        Returns:
            The largest difference, relative to the largest output.
        """
        with self._routing.replayed():  # each token goes to the experts of the dense model
            output, states = output_and_states(model, self._inputs)
        difference = check_same_outputs(self.output, output, model.dtype, stage)
        unordered = [name for name, dense in self._states.items() if not _ordered(dense, states[name], order, model)]
        if LAST in unordered:
            raise VerificationError(
                f"{stage}: the channels of the last hidden state are not in the order that the plan says. Nothing was "
                "saved; please report this with the output of `permtriton inspect`"
            )
        self.unproved = ""
        if not self._states[LAST]:
            self.unproved = f"{LAST}: the model returns none to compare with"
        elif unordered:
            self.unproved = f"{', '.join(unordered)}: other channels moved than in the last hidden state"
        return difference


def _ordered(dense: list[Tensor], present: list[Tensor], order: Tensor | None, model: PreTrainedModel) -> bool:
    """Whether the ``present`` hidden states are the ``dense`` ones with their channels in ``order``."""
    if order is not None and any(state.shape[-1] != len(order) for state in dense):
        return False
    moved = dense if order is None else [state[..., order.cpu()] for state in dense]
    return all(same_channels(a, b, model.dtype) for a, b in zip(moved, present, strict=True))
