"""A step of one's own: it prunes by a score that needs no text, |W| relative to the sums of its row and its column.

    python examples/own_step.py MODEL --data my-text.txt

`permtriton.compile` takes the step in a list, as below, and so does `permtriton.compare`.
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import torch

import permtriton
from permtriton.methods import Heuristic, Run, Stage, Step, linear_module, option, top_n_mask, weight_in_out


@dataclass(frozen=True)
class Relative(Step):
    """Options of the step; `permtriton.json` records them."""

    name: ClassVar[str] = "relative"
    prefix: ClassVar[str] = "relative"
    summary: ClassVar[str] = "the weights that are smallest in their row and column are set to 0: seconds"
    stage: ClassVar[Stage] = Stage.PRUNE  # ORDER: moves channels; PRUNE: makes weights N:M; TRAIN: changes kept ones

    power: float = option(1.0, "Exponent of the sums: 0 gives the magnitude.", minimum=0)

    @torch.no_grad()
    def run(self, run: Run) -> None:
        """Prunes every linear of the plan, in the order that the steps before chose."""
        for _, name in run.plan.linears():
            weight = weight_in_out(linear_module(run.model, name))  # [in, out], a view: N:M counts along `in`
            size = weight.abs().float()
            sums = [size.sum(dim, keepdim=True).clamp_min(1e-30) ** self.power for dim in (0, 1)]
            mask = top_n_mask(size / sums[0] + size / sums[1], run.plan.patterns[name])
            weight.masked_fill_(~mask, 0).add_(0.0)  # which turns -0.0 into 0.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--sequence-length", type=int, default=256)
    given = parser.parse_args(arguments)
    text = {"data": given.data, "samples": 4, "sequence_length": given.sequence_length}
    compiled = permtriton.compile(given.model, recipe=[Heuristic(), Relative(power=1.0)], **text)
    zeros = compiled.report["sparsity_by_layer"].values()
    print(f"{len(zeros)} linears, {min(zeros):.1%} to {max(zeros):.1%} zeros, by {compiled.report['config']['recipe']}")


if __name__ == "__main__":
    main()
