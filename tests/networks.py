"""Small networks for the tests of channel provenance, and the check that each of them goes through."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from permtriton import NMPattern
from permtriton.config import CommonConfig
from permtriton.passes.plan import ChannelSpace, Plan
from permtriton.passes.provenance import propagate
from permtriton.passes.sites import find_sites
from permtriton.passes.trace import export_program, unlifted

from . import zoo
from .zoo import fold

TOKENS, IN, WIDE, OUT = 20, 24, 16, 4
HALF = WIDE // 2
Forward = Callable[["Net", Tensor], Tensor | tuple[Tensor, ...]]


class Net(nn.Module):
    """A few parameters of distinct roles, with the forward pass that a test defines."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.up = nn.Linear(IN, WIDE)
        self.gate = nn.Linear(IN, WIDE, bias=False)
        self.narrow = nn.Linear(IN, HALF)
        self.values = nn.Linear(IN, HALF)
        self.inner = nn.Linear(WIDE, WIDE)
        self.down = nn.Linear(WIDE, OUT)
        self.side = nn.Linear(WIDE, OUT, bias=False)
        self.half_down = nn.Linear(HALF, OUT)
        self.half_side = nn.Linear(HALF, OUT)
        self.tokens = nn.Linear(TOKENS, TOKENS, bias=False)
        self.vector = nn.Parameter(torch.empty(WIDE))
        self.alpha = nn.Parameter(torch.empty(()))
        self.beta = nn.Parameter(torch.empty(1))
        self.matrix = nn.Parameter(torch.empty(WIDE, OUT))
        self.positions = nn.Parameter(torch.empty(TOKENS, WIDE))
        self.register_buffer("constant", torch.rand(WIDE) + 1)
        self.register_buffer("ring", torch.rand(TOKENS) + 1)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self._forward(self, x)


def check(forward: Forward, pattern: str = "2:4") -> Plan:
    """Returns the plan of a network after permuting all that it allows, several times, in float64."""
    torch.manual_seed(0)
    net = Net(forward)
    zoo.randomize(net)
    net.double().eval()
    inputs = torch.randn(2, TOKENS, IN, dtype=torch.float64)
    before = zoo.outputs(net, inputs)
    plan = plan_of(net, inputs, NMPattern.parse(pattern))
    for seed in range(5):
        folded = copy.deepcopy(net)
        fold(folded, plan, zoo.random_indices(plan, seed))
        difference = zoo.difference(before, zoo.outputs(folded, inputs))
        assert difference < 1e-12, describe(plan)
    return plan


def plan_of(net: nn.Module, inputs: Tensor, pattern: NMPattern) -> Plan:
    with torch.no_grad():
        graph_module = unlifted(export_program(net, inputs), net)
    results = results_of(graph_module)
    provenance = propagate(graph_module, range(len(results)), hidden_position=0)
    drop_unused(net, provenance.parameters)
    return find_sites(provenance, net, CommonConfig(sparsity=pattern))


def drop_unused(net: nn.Module, used: set[str]) -> None:
    """Removes the parameters that the forward pass does not use, since they might seem to carry its channels."""
    for name, parameter in list(net.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        if name not in used and parameter.numel() > 1:
            net.get_submodule(owner).register_parameter(attribute, None)


def results_of(graph_module: fx.GraphModule) -> tuple[fx.Node, ...]:
    return next(node for node in graph_module.graph.nodes if node.op == "output").args[0]


def describe(plan: Plan) -> str:
    return "; ".join(f"{s.name}: {s.segments} {s.frozen or 'free'}" for s in plan.spaces)


def space_of(plan: Plan, linear: str) -> ChannelSpace:
    return next(site.space for site, name in plan.linears() if name == linear)


def axes_of(space: ChannelSpace) -> set[str]:
    return {f"{axis.parameter}[{axis.dim}]" for axis in space.axes}
