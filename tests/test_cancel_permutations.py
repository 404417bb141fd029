"""Permutations without effect are removed, adjacent ones are merged, and nothing else is lost."""

import pytest
import torch
from torch import Tensor, fx, nn

from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.graph import NORM_PERMUTE, PERMUTE, Constants, index_value
from permtriton.util.permutation import identity, inverse

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FIRST, SECOND = (torch.randperm(8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


class Chain:
    """A graph of ``neg(x)``, the nodes appended to it, and the outputs."""

    def __init__(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = X
        self.start = graph.call_function(torch.ops.aten.neg.default, (x,))
        self.start.meta["val"] = X
        graph.output((self.start,))
        self.module = fx.GraphModule(nn.Module(), graph)
        self.constants = Constants(self.module)

    def call(self, target: object, *arguments: object) -> fx.Node:
        output = next(node for node in self.module.graph.nodes if node.op == "output")
        with self.module.graph.inserting_before(output):
            node = self.module.graph.call_function(target, arguments)
        node.meta["val"] = X
        return node

    def permute(self, node: fx.Node, index: Tensor, *dim: int) -> fx.Node:
        return self.call(PERMUTE, node, self.constants.index(index), *dim)

    def norm(self, node: fx.Node, index: Tensor) -> fx.Node:
        weight = self.constants.tensor(torch.arange(1.0, 9.0, dtype=torch.float64), "weight")
        return self.call(NORM_PERMUTE, node, weight, None, self.constants.index(index), "rms", 1e-6, 0.0)

    def cancelled(self, *outputs: fx.Node) -> list[fx.Node]:
        """Cancels, checks that the outputs stay, and returns the permuting nodes that are left."""
        next(node for node in self.module.graph.nodes if node.op == "output").args = (outputs,)
        self.module.recompile()
        before = fx.Interpreter(self.module).run(X)
        after = cancel_permutations(self.module)
        after.graph.eliminate_dead_code()
        after.graph.lint()
        for expected, got in zip(before, fx.Interpreter(after).run(X), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        return [node for node in after.graph.nodes if node.target in (PERMUTE, NORM_PERMUTE)]


def test_the_identity_goes():
    chain = Chain()
    assert chain.cancelled(chain.permute(chain.start, identity(8))) == []


def test_two_permutations_become_one():
    chain = Chain()
    (left,) = chain.cancelled(chain.permute(chain.permute(chain.start, FIRST), SECOND))
    assert torch.equal(index_value(left.args[1]), FIRST[SECOND])


def test_a_permutation_and_its_inverse_vanish():
    chain = Chain()
    assert chain.cancelled(chain.permute(chain.permute(chain.start, FIRST), inverse(FIRST))) == []


def test_an_inner_permutation_with_other_readers_stays_for_them():
    chain = Chain()
    inner = chain.permute(chain.start, FIRST)
    left = chain.cancelled(inner, chain.permute(inner, SECOND), chain.permute(inner, inverse(FIRST)))
    assert [index_value(node.args[1]).tolist() for node in left] == [FIRST.tolist(), FIRST[SECOND].tolist()]
    assert {node.args[0].name for node in left} == {chain.start.name}


def test_permutations_of_other_dimensions_do_not_merge():
    chain = Chain()
    rows = torch.tensor([2, 0, 1])
    left = chain.cancelled(chain.permute(chain.permute(chain.start, rows, 0), FIRST))
    assert len(left) == 2


def test_a_norm_takes_the_permutation_after_it():
    chain = Chain()
    (left,) = chain.cancelled(chain.permute(chain.norm(chain.start, FIRST), SECOND))
    assert left.target is NORM_PERMUTE
    assert torch.equal(index_value(left.args[3]), FIRST[SECOND])


def test_a_norm_takes_a_permutation_that_all_its_readers_share():
    chain = Chain()
    norm = chain.norm(chain.start, FIRST)
    (left,) = chain.cancelled(chain.permute(norm, SECOND), chain.permute(norm, SECOND))
    assert torch.equal(index_value(left.args[3]), FIRST[SECOND])


@pytest.mark.parametrize("other", ["plain", "another order"])
def test_a_norm_with_other_readers_keeps_its_order(other):
    chain = Chain()
    norm = chain.norm(chain.start, FIRST)
    second = norm if other == "plain" else chain.permute(norm, SECOND.flip(0))
    left = chain.cancelled(chain.permute(norm, SECOND), second)
    assert torch.equal(index_value(left[0].args[3]), FIRST)
    assert len(left) == (2 if other == "plain" else 3)
