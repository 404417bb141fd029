"""Models whose layers share weights or initialize them by their shape: exported, loaded and calibrated as others."""

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.architectures import tiny
from permtriton import NMPattern, config_from
from permtriton.checkpoint.export import export
from permtriton.driver.pipeline import compile_model
from permtriton.methods.order.learned import Learned

from . import folders, zoo
from .zoo import find_plan

SIZES = {"vocab_size": zoo.VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
ZAMBA = {
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "attn_layer_period": 2,
    "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 8, "mamba_d_state": 4,
}  # fmt: skip
XLSTM = {"vocab_size": zoo.VOCABULARY, "hidden_size": 32, "num_blocks": 1, "num_heads": 4, "chunk_size": 8}
FUNNEL = {"vocab_size": zoo.VOCABULARY, "block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48}
MODELS: dict[str, tuple[type[PreTrainedModel], Callable[[], object]]] = {
    "zamba": (transformers.ZambaForCausalLM, lambda: transformers.ZambaConfig(**SIZES, **ZAMBA)),
    "rwkv": (transformers.RwkvForCausalLM, lambda: transformers.RwkvConfig(**SIZES, num_hidden_layers=2)),
    "xlstm": (transformers.xLSTMForCausalLM, lambda: transformers.xLSTMConfig(**XLSTM)),
    "funnel": (transformers.FunnelBaseModel, lambda: transformers.FunnelConfig(**FUNNEL)),
}


def build(name: str) -> PreTrainedModel:
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    model = model_class._from_config(config())
    zoo.randomize(model)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_packed_folders_load(name, tmp_path):
    """Zamba's layers share their attention; the others initialize a weight by its shape, which packed ones lack."""
    model = build(name)
    folders.prune(model)
    if name == "funnel":
        folders.fuse(model, [], ["encoder.blocks.0.0.ffn.linear_2"])
    folders.save(model, tmp_path / "dense")
    export(tmp_path / "dense", tmp_path / "packed")
    loaded = folders.load(tmp_path / "packed", type(model)).eval()
    assert folders.differing(folders.state(model), folders.state(loaded)) == []
    ids = zoo.token_ids(2, 8)
    assert zoo.difference(zoo.outputs(model, ids), zoo.outputs(loaded, ids)) == 0


@pytest.mark.slow
def test_layers_in_lists_of_lists_have_the_numbers_of_the_outermost():
    """Funnel has blocks of layers: ``last:1`` is the last block."""
    plan = find_plan(tiny.build("FunnelModel"), NMPattern(2, 4))
    inside = [sites for sites in plan.layers() if sites[0].layer_paths]
    assert all(len(sites[0].layer_paths) == 1 for sites in inside)
    assert [sites[0].layer for sites in inside] == [0] * 4 + [1] * 4 + [2] * 4 + [0, 1]  # the decoder's last
    last = Learned(layers="last:1").spaces(plan)
    assert {site.layer for space in last for site in plan.sites_of(space)} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["portable", "fused"])
def test_linears_on_rows_whose_number_depends_on_values(layout):
    """X-MOD sends the tokens of each language through an adapter of its own."""
    model = tiny.build("XmodForMaskedLM")
    config = config_from({"layout": layout, "importance": "wanda"}, "heuristic,mask")
    compiled = compile_model(model, None, config, ids=tiny.inputs(model, samples=2))
    assert any("adapter_modules" in name for _, name in compiled.plan.linears())
