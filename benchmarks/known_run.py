"""A run of one step, of what a script or a test knows, in place of what a compilation measures."""

from typing import Any

from transformers import PreTrainedModel

from permtriton import CompileConfig
from permtriton.data.samples import Samples
from permtriton.methods.run import Run
from permtriton.methods.sizes import MemoryEstimate
from permtriton.passes.plan import Plan
from permtriton.running.placement import DevicePlacement, ModelPlacement
from permtriton.running.resume import Workspace
from permtriton.util.progress import NoProgress


class Known(Run):
    """A run whose answers are given.

    Args:
        known: what `importances`, `objective`, `samples_for` and `state` return, and values of attributes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        samples: Samples,
        config: CompileConfig,
        progress: Any = None,
        low_memory: bool = False,
        **known: Any,
    ) -> None:
        nothing = dict.fromkeys(("generated_ids", "graph", "reference"))
        super().__init__(
            model=model, config=config, workspace=Workspace(progress or NoProgress()), samples=samples,
            batch_size=4, plan=plan, memory=MemoryEstimate(DevicePlacement.WHOLE, 0, 0, 0, {}, low_memory=low_memory),
            placement=ModelPlacement(DevicePlacement.WHOLE, next(model.parameters()).device), **nothing,
        )  # fmt: skip
        for name in ("importances", "objective", "samples_for", "state"):
            if (value := known.pop(name, None)) is not None:
                setattr(self, name, lambda *_, value=value: value)
        for name, value in known.items():
            setattr(self, name, value)
