"""The dense model's outputs, which the permuted model must reproduce."""

from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError
from permtriton.model.checks import check_same_outputs, first_output
from permtriton.model.other_calls import other_inputs
from permtriton.model.routing import Routing

SEQUENCES, TOKENS = 2, 64


class Reference:
    """Outputs of a dense model on the first calibration samples (of text, their start), and on its other inputs.

    Args:
        unseen: parameters that the trace did not use; if there are any, calls with `other_inputs` are compared, too.

    Attributes:
        samples: at most `SEQUENCES` samples, of text with at most `TOKENS` tokens.
        output: first output on them, float32 on the CPU.
        verified: arguments of ``forward`` with which calls are compared.
        unverified: argument of ``forward`` -> why no call with it could be made.

    Raises:
        CalibrationError: the outputs on the samples are not finite.
    """

    def __init__(self, model: PreTrainedModel, samples: Samples, unseen: tuple[str, ...]) -> None:
        self.samples = samples.start(SEQUENCES, TOKENS)
        calls, self.unverified = other_inputs(model, self.samples) if unseen else ({}, {})
        self._calls = {samples.name: self.samples.to(model.device, model.dtype).inputs, **calls}
        self.verified = tuple(self._calls)
        self._routing = Routing(model)
        with self._routing.recorded():
            self._outputs = {name: first_output(model, call) for name, call in self._calls.items()}
        self.output = self._outputs[samples.name]
        if not bool(self.output.isfinite().all()):
            raise CalibrationError(
                f"the dense model's outputs on the calibration samples are not finite in {model.dtype}: "
                "activations overflow (try `dtype=float32`) or the weights are damaged"
            )

    def check(self, model: PreTrainedModel, stage: str) -> float:
        """Compares the present outputs of the model with the dense ones, on every call.

        Returns:
            The largest difference on the samples, relative to the largest output.

        Raises:
            VerificationError: a difference is larger than rounding explains, or too many tokens go to other experts.
        """
        differences = {
            name: check_same_outputs(output, partial(self._output, model, name), model, f"{stage}, called with {name}")
            for name, output in self._outputs.items()
        }
        return differences[self.samples.name]

    def _output(self, model: PreTrainedModel, name: str) -> Tensor:
        """Returns the present output of a call, with each token sent to the experts of the dense model."""
        with self._routing.replayed():  # of all calls, in their order
            return {each: first_output(model, call) for each, call in self._calls.items()}[name]
