"""The dense model's outputs, which the permuted model must reproduce."""

from torch import Tensor
from transformers import PreTrainedModel

from permtriton.errors import CalibrationError
from permtriton.model.checks import check_same_outputs, first_output
from permtriton.model.experts import Routing
from permtriton.model.inputs import other_inputs

SEQUENCES, TOKENS = 2, 64


class Reference:
    """Outputs of a dense model on the start of the first calibration sequences, and on its other inputs.

    Args:
        model: dense model.
        ids: calibration sequences, int64 ``[samples, tokens]``.
        unseen: parameters that the trace did not use; if there are any, calls with `other_inputs` are compared, too.

    Attributes:
        ids: token ids, int64, at most ``[SEQUENCES, TOKENS]``.
        output: first output on the token ids, float32 on the CPU.
        verified: arguments of ``forward`` with which calls are compared.
        unverified: argument of ``forward`` -> why no call with it could be made.

    Raises:
        CalibrationError: the outputs on the token ids are not finite.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, unseen: tuple[str, ...]) -> None:
        self.ids = ids[:SEQUENCES, :TOKENS]
        calls, self.unverified = other_inputs(model, self.ids) if unseen else ({}, {})
        self._calls = {"input_ids": {"input_ids": self.ids.to(model.device)}, **calls}
        self.verified = tuple(self._calls)
        self._routing = Routing(model)
        with self._routing.recorded():
            self._outputs = {name: first_output(model, call) for name, call in self._calls.items()}
        self.output = self._outputs["input_ids"]
        if not bool(self.output.isfinite().all()):
            raise CalibrationError(
                f"the dense model's outputs on the calibration text are not finite in {model.dtype}: "
                "activations overflow (try --dtype float32) or the weights are damaged"
            )

    def check(self, model: PreTrainedModel, stage: str) -> float:
        """Compares the present outputs of the model with the dense ones, on every call.

        Args:
            model: same model as before, permuted.
            stage: name of the step before, for the error.

        Returns:
            The largest difference on token ids, relative to the largest output.

        Raises:
            VerificationError: a difference is larger than rounding explains, or too many tokens go to other experts.
        """
        with self._routing.replayed():
            outputs = {name: first_output(model, call) for name, call in self._calls.items()}
        differences = {
            name: check_same_outputs(self._outputs[name], output, model.dtype, f"{stage}, called with {name}")
            for name, output in outputs.items()
        }
        return differences["input_ids"]
