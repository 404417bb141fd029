"""Checks a fused or packed folder before an engine other than transformers loads it."""

import os
from pathlib import Path

from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.quantizer import PermTritonQuantizer
from permtriton.errors import ModelError
from permtriton.serving.order import USE_PORTABLE

# Classes of vLLM whose outputs are tested against transformers' (tests/vllm) -> whether their norms and linears may
# permute: only if the class calls each of them as a module, and uses its weight in no other way.
SERVED = {
    "LlamaForCausalLM": True,
    "MistralForCausalLM": True,
    "Qwen2ForCausalLM": True,
    "Qwen3ForCausalLM": True,
    "GPTNeoXForCausalLM": False,
    "OPTForCausalLM": False,
    "Olmo2ForCausalLM": False,
    "PhiForCausalLM": False,
    "Phi3ForCausalLM": False,
}


def check_folder(name: str) -> Folder:
    """Checks the hashes of a folder, and that it holds every tensor of its model in the form that config.json says."""
    path = Path(os.path.abspath(name))
    if not path.is_dir():
        raise ModelError(
            f"{name} is not a folder on this machine, and permtriton checks a folder before anything is loaded: "
            "download it first (hf download), then give its path"
        )
    folder = Folder(path)
    if folder.is_quantized and not folder.entries.packed:
        raise ModelError(f"{name} is in format fp8, which vLLM serves by itself: leave out `--quantization permtriton`")
    if others := sorted(set(path.glob("*.safetensors")) - set(folder.files)):
        raise ModelError(f"{others[0]} does not belong to the checkpoint, but might be loaded with it: move it away")
    quantizer = PermTritonQuantizer(folder.entries, pre_quantized=True)
    model = folder.empty_model()
    quantizer.preprocess_model(model, checkpoint_files=list(map(str, folder.files)))
    quantizer.refuse_missing(model, set(model.state_dict()) - folder.stored.keys())
    return folder


def refuse_unservable(folder: Folder) -> None:
    """Refuses packed weights and norms that permtriton cannot compute in vLLM, and classes not in `SERVED`."""
    for name, entry in folder.entries.packed.items():
        if len(entry["shape"]) != 2 or entry["dim"] != 1:
            raise ModelError(
                f"{name} is packed with the shape {entry['shape']}: in vLLM, permtriton serves packed linears only, no "
                "experts and no transposed weights; export the folder again with --format dense"
            )
    for name, norm in folder.entries.norms.items():
        if norm["kind"] not in ("rms", "rms_float") or norm["offset"]:
            raise ModelError(
                f"{name} permutes its output and is a norm of kind {norm['kind']} with offset {norm['offset']}: in "
                f"vLLM, permtriton permutes RMS norms without offset only; {USE_PORTABLE}"
            )
    classes = folder.config.get("architectures") or [None]
    refuse_unknown_class(str(classes[0]), permuted=bool(folder.entries.permuted))


def refuse_unknown_class(name: str, *, permuted: bool) -> None:
    """Refuses a model class of vLLM that `SERVED` does not allow: its code might use weights in another way."""
    if permuted and not SERVED.get(name, False):
        raise ModelError(
            f"{name} with permuted norms or gathers is not served by vLLM, whose code for it might use their weights "
            f"in another way ({', '.join(known for known, fused in SERVED.items() if fused)} are): "
            f"{USE_PORTABLE}"
        )
    if name not in SERVED:
        raise ModelError(
            f"{name} with packed weights is not served by vLLM, whose code for it might use weights in another way "
            f"({', '.join(SERVED)} are): export the folder again with --format dense, which vLLM serves by itself"
        )
