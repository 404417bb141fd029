"""What the steps that train have in common, see `permtriton.methods.train.trainer`."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from permtriton.config import OptimizerKind
from permtriton.driver.step import BACKWARD, FLOAT32, GENERATED, Facts, Stage, Step
from permtriton.util.option import option

RATE = "Peak learning rate, with cosine decay to 0: relative to the root mean square of a linear's kept weights."
EPOCHS = "Passes over all samples that it reads; more where there are fewer further ones than asked for."
FURTHER = (
    "Further samples of the calibration text to train on, per sample of --samples; where it has fewer, or none may be "
    "drawn, all samples are read more often."
)
HALF = 2  # bytes
MOST_FURTHER = 63
ROUND = 64  # most steps of a round, or as many as read three times what is held out, if that is more
HELD_OUT, MOST_HELD_OUT = 0.1, 24  # share of the sequences that decides which round is kept, and their number


def held_out(sequences: int) -> int:
    """Returns how many of several sequences decide which round is kept."""
    return min(max(int(HELD_OUT * sequences), 1), MOST_HELD_OUT)


def with_held_out(trained: int) -> int:
    """Returns of how many sequences so many are left to train on once some are held out."""
    return trained + min(max(int(trained * HELD_OUT / (1 - HELD_OUT)), 1), MOST_HELD_OUT)


class TrainingStep(Step):
    """A step that trains.

    Attributes:
        batch_size: sequences per optimiser step.
        generated: whether it reads what the dense model wrote.
    """

    stage: ClassVar[Stage] = Stage.TRAIN
    shards: ClassVar[bool] = False

    batch_size: int
    generated: bool

    @property
    def at_once(self) -> int:
        return self.batch_size

    @property
    def reads_generated(self) -> bool:
        return self.generated

    @property
    def gradients(self) -> bool:
        return True

    def uses_importance(self) -> bool:
        return False

    @staticmethod
    def memory_of_passes(facts: Facts) -> dict[str, int]:
        """Returns the bytes that passes through the whole model keep, and those of its targets.

        Where layers come one by one, each is run again in the backward pass, from the inputs of all of them.
        """
        facts = replace(facts, one_layer=False, checkpointing=facts.checkpointing or facts.one_layer)
        return {**facts.gradients(), **facts.targets()}


@dataclass(frozen=True)
class Training(TrainingStep):
    """Options of training kept weights."""

    epochs: int = option(20, EPOCHS, minimum=1)
    learning_rate: float = option(5e-3, RATE, positive=True)
    batch_size: int = option(8, "Sequences per optimiser step.", minimum=1)
    optimizer: Literal[OptimizerKind] = option(
        "adam",
        "What changes the weights: adam, which keeps two numbers per weight, or adafactor: one per row and column.",
    )
    generated: bool = option(True, GENERATED)
    further: int = option(0, FURTHER, maximum=MOST_FURTHER)

    @property
    def saves_memory(self) -> str:
        return f"{self.prefix}_optimizer=adafactor" if self.optimizer == "adam" else ""

    @property
    def ends_after(self) -> int:
        """Number of optimiser steps after which it ends; 0 for those of all epochs."""
        return 0

    def optimizer_bytes(self, weights: int, facts: Facts) -> int:
        """Returns what the optimizer keeps of so many weights: moments, and remainders in half precision."""
        moments = 2 * FLOAT32 if self.optimizer == "adam" else 0
        return weights * (moments + (HALF if facts.element < FLOAT32 else 0))

    def over(self, calibration: int, read: int) -> Self:
        """Returns the options with more epochs where the text has too few further samples.

        Args:
            calibration: number of calibration samples.
            read: number of all samples that it reads: those, further ones, and what the dense model wrote.
        """
        return replace(self, epochs=max(self.epochs, round(self.epochs * (1 + self.further) * calibration / read)))

    def passes(self, facts: Facts) -> float:
        return BACKWARD * self.over(facts.calibration, facts.sequences).epochs
