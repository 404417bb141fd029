"""Where the `fused` layout puts the permutation of each site, architecture by architecture."""

from permtriton.passes.plan import Plan

from .graphs import planned


def plan_of(name: str, layout: str = "fused") -> Plan:
    return planned(name, layout)[1]


# Site within a layer -> "nothing" (it is folded), the name of the norm that gathers, or the number of gathers.
LLAMA_ATTENTION = {"self_attn.q_proj+k_proj+v_proj": "input_layernorm", "self_attn.o_proj": "nothing"}
LLAMA = {**LLAMA_ATTENTION, "mlp.gate_proj+up_proj": "post_attention_layernorm", "mlp.down_proj": "nothing"}
BERT = {
    "attention.self.query+key+value": 3,
    "attention.output.dense": "nothing",
    "intermediate.dense": 1,
    "output.dense": "nothing",
}
EXPERT_NUMBERS = range(5)
ALL_EXPERTS = "+".join(map(str, EXPERT_NUMBERS))
EXPERTS = {
    **LLAMA_ATTENTION,
    f"mlp.experts.{ALL_EXPERTS}.gate_up_proj": "post_attention_layernorm",
    **{f"mlp.experts.{n}.down_proj": "nothing" for n in EXPERT_NUMBERS},
}
EXPECTED: dict[str, tuple[str, dict[str, str | int]]] = {
    "llama": ("model.layers", LLAMA),
    "phi3": (
        "model.layers",
        {
            "self_attn.qkv_proj": "input_layernorm",
            "self_attn.o_proj": "nothing",
            "mlp.gate_up_proj": "post_attention_layernorm",
            "mlp.down_proj": "nothing",
        },
    ),
    "gemma2": ("model.layers", {**LLAMA, "mlp.gate_proj+up_proj": "pre_feedforward_layernorm"}),
    "olmo2": (  # no norm before them: the residual stream itself is read
        "model.layers",
        {**LLAMA, "self_attn.q_proj+k_proj+v_proj": 3, "mlp.gate_proj+up_proj": 2},
    ),
    "gpt2": (
        "transformer.h",
        {"attn.c_attn": "ln_1", "attn.c_proj": "nothing", "mlp.c_fc": "ln_2", "mlp.c_proj": "nothing"},
    ),
    "bert_mlm": ("bert.encoder.layer", BERT),  # its norms write the residual stream, too
    "bert": ("encoder.layer", BERT),
    "mixtral": ("model.layers", EXPERTS),
    "qwen2_moe": (
        "model.layers",
        {
            **LLAMA_ATTENTION,
            "mlp.shared_expert.gate_proj+shared_expert.up_proj+"
            + "+".join(f"experts.{n}.gate_up_proj" for n in EXPERT_NUMBERS): "post_attention_layernorm",
            "mlp.shared_expert.down_proj": "nothing",
            **{f"mlp.experts.{n}.down_proj": "nothing" for n in EXPERT_NUMBERS},
        },
    ),
}
