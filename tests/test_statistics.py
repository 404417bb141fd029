"""Statistics are those of the activations that each site's linears read, as plain hooks see them."""

import pytest
import torch
from torch import Tensor

from permtriton.data.samples import Samples
from permtriton.methods.measure.statistics import hessians, site_statistics
from permtriton.passes.plan import linear_module
from permtriton.running.layer_walk import LayerWalk, from_model
from permtriton.util.progress import NoProgress

from . import zoo

IDS = zoo.token_ids(5, 12)
LAST_BIT = torch.finfo(torch.float32).eps


def seen(model, plan, ids: Tensor = IDS) -> dict[str, Tensor]:
    """Site name -> what its first linear reads, float64 ``[sequences x tokens, channels]``."""
    found, handles = {}, []
    for site in plan.sites:

        def keep(_module, inputs, name=site.name):
            found[name] = inputs[0].detach().double().flatten(0, -2)

        handles.append(linear_module(model, site.linears[0]).register_forward_pre_hook(keep))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", ["llama_eager", "gpt2"])
def test_norms_are_roots_of_sums_of_squares(name):
    model, plan = zoo.planned(name)
    found = site_statistics(LayerWalk(model, plan, Samples.of(IDS), 2), "wanda", NoProgress())
    for site, inputs in seen(model, plan).items():
        expected = (inputs.square().sum(0) / IDS.shape[0]).sqrt()
        torch.testing.assert_close(found[site].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_eager", "gpt2"])
def test_hessians_are_products_of_inputs(name):
    model, plan = zoo.planned(name)
    found = hessians(model, from_model(model, plan.sites, Samples.of(IDS), 2), lambda *_: None)
    for site, inputs in seen(model, plan).items():
        expected = inputs.T @ inputs
        torch.testing.assert_close(found[site].double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["llama_eager", "gpt2"])
def test_the_number_of_sequences_at_a_time_changes_nothing(name):
    """The model and the sums are in float64, whose rounding disappears in float32, but for the last bit."""
    model, plan = zoo.planned(name)
    model.double()
    one, *others = (
        [
            *site_statistics(LayerWalk(model, plan, Samples.of(IDS), batch), "wanda", NoProgress()).values(),
            *hessians(model, from_model(model, plan.sites, Samples.of(IDS), batch), lambda *_: None).values(),
        ]
        for batch in (1, 2, 5)
    )
    for other in others:
        for a, b in zip(other, one, strict=True):
            torch.testing.assert_close(a, b, rtol=LAST_BIT, atol=1e-12 * float(b.abs().max()))
