"""The sizes of a model and its samples, from which the memory, time and disk that a step needs are estimated."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from permtriton.model.forward import TOKENS_WITHOUT_LOGITS
from permtriton.running.placement import DevicePlacement

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Memory:
    """Bytes that a stage or a step takes at most beside the program and the model."""

    device: int = 0  # bytes that must be on the device where the model runs
    # bytes of large tensors, such as inputs of layers, which are in host memory while layers come to a GPU one by one;
    # also all bytes of work that is done on the host
    movable: int = 0

    @property
    def total(self) -> int:
        return self.device + self.movable


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one compilation on each device, in bytes."""

    placement: DevicePlacement  # how the model is placed
    program: int  # bytes that the process holds beside the model before the work begins; 0 on a GPU
    model: int  # bytes of the parameters
    # bytes that are in memory already and stay there: the program, and a model that is not mapped from its files
    held: int
    stages: Mapping[str, int]  # stage -> bytes that it takes beside program and model
    host: int = 0  # bytes in host memory, the model included, where layers come to the GPU one by one; else 0
    low_memory: bool = False  # whether steps keep less and compute more anew, because what they could keep does not fit
    recomputes: bool = False  # whether backward passes recompute activations, because keeping them would take too much

    @property
    def largest(self) -> str:
        """The stage that needs the most memory."""
        return max(self.stages, key=self.stages.__getitem__)

    @property
    def peak(self) -> int:
        """The largest number of bytes in use at once: in a stage, or when a whole model is saved and loaded again.

        A compilation does without the second model where it does not fit.
        """
        second_model = self.model if self.placement is DevicePlacement.WHOLE else 0
        return self.program + self.model + max(second_model, *self.stages.values())

    @property
    def added(self) -> int:
        """The bytes that the largest stage needs in addition to ``held``."""
        return self.program + self.model + self.stages[self.largest] - self.held

    def fits(self, free: int) -> bool:
        return self.added <= free

    @property
    def savings(self) -> str:
        """What is done to save memory, in words; empty if nothing is."""
        recomputing = "backward passes recompute activations" * self.recomputes
        return "; ".join(filter(None, [recomputing, "less is kept, and more computed anew" * self.low_memory]))

    def report(self) -> dict[str, object]:
        """Returns the estimate as JSON values, for the record and for dry runs."""
        return asdict(self) | {"placement": self.placement.name.lower(), "peak": self.peak}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model and its calibration samples."""

    model: int  # bytes of all parameters
    element: int  # bytes of a weight
    pruned: int  # number of weights in pruned linears
    largest_weight: int  # number of weights in the largest linear that is pruned
    layers: int
    hidden: int  # channels of the hidden states
    width: int  # largest number of input channels of a pruned linear, or ``hidden`` if that is larger
    # largest number of channels that the sites of one layer read, ``hidden`` more per site with a residual stream, or
    # of rows of its linears if these are more; of stacked experts, only the widest site counts, and of routed ones none
    layer_channels: int
    vocabulary: int  # size of the logits of a token; 0 without a language-model head
    hessians: int  # largest number of bytes that the Hessians of one layer and their inversion take
    spaces: tuple[int, ...]  # number of units of each channel space that may move
    kept: float  # share of ``pruned`` that is kept
    rows: int  # rows of the pruned linears that every token runs through
    sequences: int  # samples that a step reads
    calibration: int  # calibration samples
    generated: int  # samples that the dense model writes
    surplus: int  # further samples of the calibration text
    longest: int  # positions of a sample, in the longer half of an encoder-decoder
    positions: int  # positions of the last hidden state in all samples
    micro_batch_size: int  # the option
    checkpointing: bool  # whether activations are recomputed
    low_memory: bool = False  # whether steps must save memory, because what they could keep does not fit
    backward_batch: int = 0  # the step's ``backward_batch``, which limits its micro-batches; 0 for no limit
    shares: int = 1  # devices that share the weights

    @property
    def all_positions(self) -> int:
        """Positions that a layer reads in all samples."""
        return self.sequences * self.longest

    @property
    def forward(self) -> int:
        """Bytes of the activations of a forward pass that computes neither gradients nor logits."""
        return self._activations(max(self.longest, min(TOKENS_WITHOUT_LOGITS, self.all_positions)))

    def _activations(self, tokens: int) -> int:
        return tokens * (self.hidden + 8 * self.width) * FLOAT32

    @property
    def gradients(self) -> int:
        """Bytes of the activations and logits that forward and backward passes keep."""
        channels = self.hidden if self.checkpointing else 10 * self.hidden + 5 * self.width  # as measured on a LLaMA
        sequences = min(self.micro_batch_size, self.backward_batch or self.micro_batch_size)
        backward = sequences * (self.layers * channels + 16 * self.width)
        measuring = self._activations(self.micro_batch_size * self.longest)
        tokens = self.positions // self.sequences  # of a sample that have logits
        logits = self.micro_batch_size * tokens * self.vocabulary * 4 * FLOAT32
        return max(self.longest * backward * FLOAT32, measuring) + logits

    @property
    def targets(self) -> int:
        """Bytes of the dense model's last hidden states."""
        return self.positions * self.hidden * self.element

    @property
    def layer_inputs(self) -> int:
        """Bytes of the inputs and the outputs of a layer; the factor 3 leaves room for one more such tensor."""
        return 3 * self.all_positions * self.hidden * self.element

    @property
    def layer_by_layer(self) -> Memory:
        """The memory that measuring the Hessians of one layer after another takes."""
        return Memory(self.forward + self.hessians + self.mask, self.layer_inputs)

    @property
    def finished_layers(self) -> int:
        """Bytes of all pruned weights, packed; a kept weight's position takes half a byte in groups of up to 16."""
        return int(self.pruned * self.kept * (self.element + 0.5))

    @property
    def mask(self) -> int:
        """Bytes of temporaries while the largest pruned linear gets its mask: six float32 numbers per weight."""
        return self.largest_weight * 6 * FLOAT32
