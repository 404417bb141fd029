"""Packed and permuted checkpoints inside transformers: loaded exactly, or not at all."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from permtriton import registration
from permtriton.errors import ModelError
from permtriton.export import export
from permtriton.modules import PermutedLayerNorm, PermutedRMSNorm, SparseLinear
from permtriton.quantizer import PermTritonQuantizer
from permtriton.schema import METHOD, PermTritonQuantizationConfig

from . import folders

ROOT = Path(__file__).parent.parent
IDS = torch.arange(3, 27).view(2, 12)
UP = "model.layers.1.mlp.up_proj.weight"
PACKED = {"shape": [112, 64], "dim": 1}
NORM = {"kind": "rms", "offset": 0.0, "eps": 1e-6, "channels": 64}
VALID = {
    "quant_method": "permtriton",
    "version": 1,
    "format": "packed",
    "sparsity": "2:4",
    "packed": {UP: PACKED},
    "gathers": {"model.layers.0.self_attn.o_proj": 64},
    "norms": {"model.norm": NORM},
    "sha256": {"model.safetensors": "0" * 64},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return folders.places(tmp_path_factory.mktemp("quantizer"))


def load(folder: Path, kind=AutoModelForCausalLM, **options):
    return kind.from_pretrained(folder, **options)


# -- the schema ----------------------------------------------------------------------------------------------------


def test_a_config_survives_json():
    config = PermTritonQuantizationConfig(**VALID)
    assert json.loads(json.dumps(config.to_dict())) == VALID
    assert PermTritonQuantizationConfig.from_dict(config.to_dict()).to_dict() == VALID


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, ["version is 2", "reads version 1", "upgrade"]),
        ({"version": True}, ["version is True"]),
        ({"version": None}, ["version is None"]),
        ({"quant_method": "gptq"}, ["'gptq'"]),
        ({"format": "sparse"}, ["'sparse'", "packed", "dense"]),
        ({"format": "dense"}, ["format dense with 1 packed"]),
        ({"packed": {}}, ["format packed with 0 packed"]),
        ({"packed": [UP]}, ["packed", "an object"]),
        ({"sparsity": "4:2"}, ["'4:2'", "2:4"]),
        ({"sparsity": " 2:4"}, ["' 2:4'"]),
        ({"sparsity": 0.5}, ["0.5"]),
        ({"color": "red"}, ["'color'", "unknown"]),
        ({"packed": {UP: {**PACKED, "shape": [112, 66]}}}, ["66", UP, "multiple of 4"]),
        ({"packed": {UP: {**PACKED, "shape": [112, -64]}}}, ["-64"]),
        ({"packed": {UP: {**PACKED, "shape": [112, 64.0]}}}, ["64.0"]),
        ({"packed": {UP: {**PACKED, "shape": [2**40, 64]}}}, [str(2**40)]),
        ({"packed": {UP: {**PACKED, "shape": "112"}}}, ["'112'"]),
        ({"packed": {UP: {**PACKED, "dim": 2}}}, ["'dim': 2"]),
        ({"packed": {UP: {**PACKED, "dim": -1}}}, ["'dim': -1"]),
        ({"packed": {UP: {"shape": [112, 64]}}}, [UP]),
        ({"packed": {"": PACKED}}, ["''"]),
        ({"gathers": {"a": 0}}, ["gathers holds 0"]),
        ({"gathers": {"a": True}}, ["gathers holds True"]),
        ({"gathers": 7}, ["gathers is 7"]),
        ({"norms": {"a": {**NORM, "kind": "batch"}}}, ["batch"]),
        ({"norms": {"a": {**NORM, "kind": ["rms"]}}}, ["['rms']"]),
        ({"norms": {"a": {**NORM, "offset": 0.5}}}, ["0.5"]),
        ({"norms": {"a": {**NORM, "eps": "1e-6"}}}, ["'1e-6'"]),
        ({"norms": {"a": {**NORM, "eps": float("nan")}}}, ["nan"]),
        ({"norms": {"a": {"more": 1, **NORM}}}, ["more"]),
        ({"sha256": {"f": "xyz"}}, ["'xyz'", "64 hexadecimal"]),
    ],
)
def test_a_config_is_taken_strictly(change, words):
    with pytest.raises(ModelError) as caught:
        PermTritonQuantizationConfig(**{**VALID, **change})
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["version", "format", "sparsity"])
def test_a_config_needs_its_entries(key):
    with pytest.raises(ModelError, match=key):
        PermTritonQuantizationConfig(**{k: v for k, v in VALID.items() if k != key})


# -- registration --------------------------------------------------------------------------------------------------


REGISTERED = (
    "import transformers.quantizers.auto as auto\n"
    "assert auto.AUTO_QUANTIZER_MAPPING['permtriton'].__name__ == 'PermTritonQuantizer'\n"
    "assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING['permtriton'].__name__ == 'PermTritonQuantizationConfig'\n"
    "assert not [f for f in sys.meta_path if 'permtriton' in type(f).__module__], 'the hook is gone'\n"
)
ORDERS = {
    "ours first": (
        "import sys, importlib, importlib.util, permtriton\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'light'\n"
        "importlib.reload(permtriton)\n"
        "assert sum('permtriton' in type(f).__module__ for f in sys.meta_path) == 1, 'one hook'\n"
        + REGISTERED
        + "import "
        "transformers\nimportlib.reload(permtriton)\nimportlib.reload(auto)\n"
    ),
    "theirs first": (
        "import sys, importlib, transformers.quantizers.auto as auto\n"
        "assert 'permtriton' not in auto.AUTO_QUANTIZER_MAPPING\n"
        "import permtriton\n"
        "del sys.modules['permtriton']\n"
        "import permtriton\n"
        "importlib.reload(permtriton)\n" + REGISTERED
    ),
    "looked up, then imported by threads": (
        "import sys, threading, importlib, importlib.util, permtriton\n"
        "import transformers.quantizers.quantizers_utils\n"
        "assert importlib.util.find_spec('permtriton.registration')\n"
        "work = lambda: importlib.import_module('transformers.quantizers.auto')\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n" + REGISTERED
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_importing_registers_in_any_order(order):
    result = subprocess.run(
        [sys.executable, "-c", ORDERS[order]], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


# Two threads import at once, each in a fork of a process that has everything else loaded. The finder makes the import
# system wait where threads change over, so that each looks for the other's modules while they are executed.
RACE = """
import importlib, os, pkgutil, random, sys, threading, time
sys.modules["transformers.quantizers.auto"] = None  # all but this one
try:
    import transformers.quantizers
except ImportError:
    pass
path = [os.path.join(next(iter(sys.modules["transformers"].__path__)), "quantizers")]
package = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("transformers.quantizers", None))
package.__path__ = path
sys.modules["transformers.quantizers"] = package
import safetensors.torch, torch, transformers.modeling_rope_utils, transformers.utils.quantization_config, triton
from transformers import AutoConfig
for module in pkgutil.iter_modules(path, "transformers.quantizers."):
    if module.name not in sys.modules:
        importlib.import_module(module.name)
del sys.modules["transformers.quantizers.auto"]

class Slow:
    def find_spec(self, name, path, target=None):
        if name.startswith(("permtriton", "transformers.quantizers")):
            time.sleep(random.random() / 100)

order, repetitions = sys.argv[1].split(","), int(sys.argv[2])
sys.setswitchinterval(1e-5)
for seed in range(repetitions):
    child = os.fork()
    if not child:
        random.seed(seed)
        failed = []
        if seed % 2:
            import permtriton
        sys.meta_path.insert(0, Slow())
        def work(name):
            try:
                importlib.import_module(name)
            except BaseException as error:
                failed.append(f"{name}: {error!r}")
        threads = [threading.Thread(target=work, args=[name]) for name in order]
        for thread in threads:
            thread.start()
            time.sleep(random.random() / 100)
        for thread in threads:
            thread.join(30)
        failed += [f"{thread.name} waits for ever" for thread in threads if thread.is_alive()]
        auto = sys.modules.get("transformers.quantizers.auto")
        for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"):
            if "permtriton" not in getattr(auto, name, ()):
                failed.append(f"not in {name}")
        print(*failed, sep="\\n", end="", file=sys.stderr, flush=True)
        os._exit(bool(failed))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"repetition {seed}"
"""
NAMES = ["transformers.quantizers.auto", "permtriton.quantizer"]


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]], ids=["theirs first", "ours first"])
def test_threads_may_import_both_at_once(order):
    code = [sys.executable, "-c", RACE, ",".join(order), "12"]
    result = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def in_a_process(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


# Stands for transformers' module, which takes seconds: in it, a thread imports us while it is executed.
FAKE = """
import importlib.abc, importlib.machinery, sys, threading, types
for name in ("transformers", "transformers.quantizers"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
class Fake(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    during = staticmethod(lambda: None)
    def find_spec(self, name, path, target=None):
        if name == "transformers.quantizers.auto":
            return importlib.machinery.ModuleSpec(name, self)
    def exec_module(self, module):
        self.during()
        module.HfQuantizer = module.QuantizationConfigMixin = type("Base", (), {})
        module.AUTO_QUANTIZER_MAPPING, module.AUTO_QUANTIZATION_CONFIG_MAPPING = {}, {}
        def register(mapping):
            return lambda method: lambda cls: mapping.setdefault(method, cls)
        module.register_quantizer = register(module.AUTO_QUANTIZER_MAPPING)
        module.register_quantization_config = register(module.AUTO_QUANTIZATION_CONFIG_MAPPING)
fake = Fake()
sys.meta_path.insert(0, fake)
def registered():
    auto = sys.modules["transformers.quantizers.auto"]
    return "permtriton" in auto.AUTO_QUANTIZER_MAPPING and "permtriton" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
"""
INSTANTS = {
    "imported while theirs is executed": """
def during():
    global thread
    thread = threading.Thread(target=__import__, args=["permtriton"])
    thread.start()
    thread.join(0.3)
fake.during = during
import transformers.quantizers.auto
thread.join()
assert registered()
""",
    "imported between their lookup and their execution": """
class Between(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "transformers.quantizers.auto":
            import permtriton
            return fake.find_spec(name, path)
sys.meta_path.insert(0, Between())
import transformers.quantizers.auto
import colorsys  # whatever comes next
assert registered()
""",
    "another thread is among the finders": """
import permtriton
assert "permtriton" in type(sys.meta_path[0]).__module__
finders = iter(sys.meta_path)
next(finders), next(finders)
import transformers.quantizers.auto
assert registered()
assert importlib.machinery.PathFinder in list(finders), "none is passed over"
assert fake in sys.meta_path
""",
    "executing theirs imports nothing of ours": """
import permtriton
before = set(sys.modules)
import transformers.quantizers.auto
assert set(sys.modules) - before == {"transformers.quantizers.auto"}, set(sys.modules) - before
assert registered()
""",
}


@pytest.mark.parametrize("instant", INSTANTS)
def test_registers_at_any_instant(instant):
    in_a_process(FAKE + INSTANTS[instant])


def test_what_is_registered_becomes_ours_when_used():
    """The stand-ins are told from the classes by nothing that transformers does with them."""
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    config = auto.AutoQuantizationConfig.from_dict(VALID)
    assert type(config) is PermTritonQuantizationConfig
    assert type(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD](**VALID)) is PermTritonQuantizationConfig
    assert type(auto.AutoHfQuantizer.from_config(config, pre_quantized=True)) is PermTritonQuantizer
    assert issubclass(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD], QuantizationConfigMixin)
    assert issubclass(auto.AUTO_QUANTIZER_MAPPING[METHOD], HfQuantizer)


def test_registering_twice_from_threads_changes_nothing():
    from transformers.quantizers import auto

    before = auto.AUTO_QUANTIZER_MAPPING["permtriton"]
    threads = [threading.Thread(target=registration.register_with_transformers) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert auto.AUTO_QUANTIZER_MAPPING["permtriton"] is before


def test_transformers_alone_refuses(place):
    """It warns that it does not know the method, then stumbles over the shapes; it must not come up with a model."""
    code = (
        "import sys\nfrom transformers import AutoModelForCausalLM\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n"
        "        AutoModelForCausalLM.from_pretrained(folder)\n"
        "    except RuntimeError as error:\n"
        "        print('refused:', 'mismatched_sizes' in str(error))\n"
    )
    names = [str(place("llama", "packed")), str(place("llama", "saved", fused=True))]
    result = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=120, check=True, cwd="/"
    )
    assert result.stdout.split("\n")[:2] == ["refused: True"] * 2, result.stdout + result.stderr
    assert result.stderr.count("got permtriton") == 2


# -- loading exactly -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "opt", "gemma2", "phi3", "mixtral", "qwen3_moe"])
def test_a_packed_model_is_the_plain_model(place, name):
    dense, packed = load(place(name, "saved")), load(place(name, "packed"))
    assert folders.differing(folders.state(dense), folders.state(packed)) == []
    assert [type(module) for module in packed.modules()] == [type(module) for module in dense.modules()]
    assert list(dict(packed.named_parameters())) == list(dict(dense.named_parameters()))
    assert all(parameter.requires_grad and parameter.is_contiguous() for parameter in packed.parameters())
    assert not hasattr(packed.config, "quantization_config")
    assert not packed.is_quantized


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("format", ["saved", "dense", "packed"])
def test_a_fused_model_is_what_was_saved(place, name, format):
    expected = folders.model_of(name, fused=True, dtype=torch.bfloat16)
    loaded = load(place(name, format, fused=True))
    assert folders.differing(folders.state(expected), folders.state(loaded)) == []
    kinds = [type(m) for m in loaded.modules() if isinstance(m, PermutedRMSNorm | PermutedLayerNorm | SparseLinear)]
    assert len(kinds) == len(folders.FUSED_NORMS[name]) + len(folders.FUSED_GATHERS[name])
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize(("name", "fused"), [("llama_tied", False), ("gpt2", False), ("llama", True)])
def test_generates_and_saves_again(place, tmp_path, name, fused):
    loaded, expected = load(place(name, "packed", fused=fused)), load(place(name, "saved", fused=fused))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    assert torch.equal(
        loaded.generate(IDS, attention_mask=mask, **options), expected.generate(IDS, attention_mask=mask, **options)
    )
    loaded.save_pretrained(tmp_path / "again")
    told = json.loads((tmp_path / "again" / "config.json").read_text()).get("quantization_config")
    assert (told or {}).get("format") == ("dense" if fused else None)
    assert "packed" not in (tmp_path / "again" / "model.safetensors").read_bytes()[:20000].decode("latin1")
    assert folders.differing(folders.state(expected), folders.state(load(tmp_path / "again"))) == []


def test_a_saved_plain_model_needs_no_permtriton(place, tmp_path):
    load(place("llama", "packed")).save_pretrained(tmp_path)
    assert "permtriton" not in (tmp_path / "config.json").read_text()
    assert set(load_file(tmp_path / "model.safetensors")) == set(
        load_file(place("llama", "saved") / "model.safetensors")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_a_dtype_is_cast_to_as_from_the_dense_checkpoint(place, stored, dtype, fused):
    dense = load(place("llama", "saved", fused=fused, dtype=stored), dtype=dtype)
    packed = load(place("llama", "packed", fused=fused, dtype=stored), dtype=dtype)
    assert {parameter.dtype for parameter in packed.parameters()} == {dtype}
    assert folders.differing(folders.state(dense), folders.state(packed)) == []


def test_modules_that_stay_float32_do(place):
    """T5's wo, in float16."""
    model = transformers.T5ForConditionalGeneration._from_config(
        transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    )
    folders.prune(model)
    root = place("llama", "saved").parent
    folders.save(model.eval(), root / "t5")
    export(root / "t5", root / "t5-packed")
    kind = transformers.T5ForConditionalGeneration
    dense, packed = (load(root / name, kind, dtype=torch.float16) for name in ("t5", "t5-packed"))
    assert {p.dtype for p in packed.parameters()} == {torch.float16, torch.float32}
    assert folders.differing(folders.state(dense), folders.state(packed)) == []


def test_a_fused_model_can_be_cast_and_moved(place):
    model = load(place("llama", "packed", fused=True))
    for cast in (lambda: model.float(), lambda: model.to(torch.bfloat16), lambda: model.to("cpu").half()):
        cast()
    assert model.model.layers[0].input_layernorm.index.dtype == torch.uint8


@pytest.mark.parametrize("fused", [False, True])
def test_the_base_model_takes_its_part(place, fused):
    whole, base = load(place("llama", "packed", fused=fused)), load(place("llama", "packed", fused=fused), AutoModel)
    assert folders.differing(folders.state(whole.model), folders.state(base)) == []


def test_a_class_with_other_weights_is_refused(place):
    with pytest.raises(ModelError, match=r"no weights for score\.weight.*LlamaForSequenceClassification"):
        load(place("llama", "packed"), AutoModelForSequenceClassification)


def test_hashes_are_left_out_where_the_config_says_so(place, tmp_path):
    folder = shutil.copytree(place("llama", "packed"), tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="SHA-256"):
        load(folder)
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config.pop("sha256")
    assert torch.equal(load(folder, config=config).model.norm.weight, tensors["model.norm.weight"])


# -- or not at all -------------------------------------------------------------------------------------------------


def quantization(change):
    """Changes config.json's quantization_config."""

    def apply(folder: Path) -> None:
        folders.rewrite(folder, lambda tensors: None)
        folders.edit_json(folder / folders.CONFIG, lambda config: change(config["quantization_config"]))

    return apply


def tensors(change):
    return lambda folder: folders.rewrite(folder, change)


def duplicated(t):
    index = t["model.layers.0.input_layernorm.index"]
    index[0] = index[1]


INDEX, GATHER = "model.layers.0.input_layernorm.index", "model.layers.0.self_attn.o_proj.gather.index"
FIRST_NORM, O_PROJ = "model.layers.0.input_layernorm", "model.layers.0.self_attn.o_proj"
DAMAGE = {
    "no values": (tensors(lambda t: t.pop(f"{UP}_values")), [UP, "incomplete"]),
    "no positions": (tensors(lambda t: t.pop(f"{UP}_positions")), [UP, "incomplete"]),
    "no norm": (tensors(lambda t: t.pop("model.norm.weight")), ["model.norm.weight"]),
    "no index": (tensors(lambda t: t.pop(INDEX)), [INDEX]),
    "no gather": (tensors(lambda t: t.pop(GATHER)), [GATHER]),
    "an index twice": (tensors(duplicated), ["input_layernorm", "no permutation"]),
    "an index out of range": (tensors(lambda t: t[GATHER].fill_(200)), ["o_proj.gather", "no permutation"]),
    "an index of another type": (tensors(lambda t: t.update({GATHER: t[GATHER].long()})), [GATHER, "int64"]),
    "an index too short": (tensors(lambda t: t.update({INDEX: t[INDEX][:-1].clone()})), [INDEX, "[63]", "[64]"]),
    "positions that do not ascend": (tensors(lambda t: t[f"{UP}_positions"].fill_(0)), [UP, "ascend"]),
    "values of another type": (
        tensors(lambda t: t.update({f"{UP}_values": t[f"{UP}_values"].to(torch.int8)})),
        [UP, "I8"],
    ),
    "values of another shape": (
        tensors(lambda t: t.update({f"{UP}_values": t[f"{UP}_values"].T.contiguous()})),
        [UP, "[32, 112]"],
    ),
    "a value that is not finite": (tensors(lambda t: t[f"{UP}_values"][0].fill_(torch.inf)), [UP, "not finite"]),
    "embeddings of another shape": (
        tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1].clone()})),
        ["lm_head.weight", "[89, 64]"],
    ),
    "another version": (quantization(lambda q: q.update(version=9)), ["version is 9"]),
    "another pattern": (quantization(lambda q: q.update(sparsity="1:4")), ["1:4"]),
    "a parameter not told": (quantization(lambda q: q["packed"].pop(UP)), [UP]),
    "a parameter too many": (
        quantization(lambda q: q["packed"].update({"model.embed_tokens.weight": {"shape": [90, 64], "dim": 1}})),
        ["model.embed_tokens.weight", "incomplete"],
    ),
    "another shape told": (quantization(lambda q: q["packed"][UP].update(shape=[64, 112])), [UP, "[64, 112]"]),
    "another dimension told": (quantization(lambda q: q["packed"][UP].update(dim=0)), [UP, "not the input dimension"]),
    "a norm not told": (quantization(lambda q: q["norms"].pop(FIRST_NORM)), [INDEX, "does not tell"]),
    "a norm too many": (
        quantization(lambda q: q["norms"].update({"model.norm": q["norms"][FIRST_NORM]})),
        ["model.norm"],
    ),
    "a norm of another kind": (
        quantization(lambda q: q["norms"][FIRST_NORM].update(offset=1.0)),
        [FIRST_NORM, "offset=1.0"],
    ),
    "another epsilon": (quantization(lambda q: q["norms"][FIRST_NORM].update(eps=1e-3)), [FIRST_NORM, "0.001"]),
    "a norm that is none": (
        quantization(lambda q: q["norms"].update({"model.layers.0.mlp": q["norms"][FIRST_NORM]})),
        ["no norm of 64"],
    ),
    "a gather not told": (quantization(lambda q: q["gathers"].clear()), [O_PROJ, "does not tell"]),
    "a gather of other channels": (quantization(lambda q: q["gathers"].update({O_PROJ: 32})), [O_PROJ, "32 input"]),
    "many layers": (
        lambda f: folders.edit_json(f / folders.CONFIG, lambda c: c.update(num_hidden_layers=10**9)),
        ["num_hidden_layers", "no layer beyond 1"],
    ),
    "another hidden size": (
        lambda f: folders.edit_json(f / folders.CONFIG, lambda c: c.update(intermediate_size=10**9)),
        ["1000000000"],
    ),
    "no layers": (
        lambda f: folders.edit_json(f / folders.CONFIG, lambda c: c.update(num_hidden_layers=-1)),
        ["model.layers", "LlamaForCausalLM", "does not have"],
    ),
    "a third layer": (
        lambda f: folders.edit_json(f / folders.CONFIG, lambda c: c.update(num_hidden_layers=3)),
        ["layers.2", "incomplete"],
    ),
    "a file of another": (lambda f: (f / "model.safetensors").write_bytes(b"\1" * 9), ["model.safetensors"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_gives_no_model(place, tmp_path, case):
    damage, words = DAMAGE[case]
    folder = shutil.copytree(place("llama", "packed", fused=True), tmp_path / "copy")
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_a_shard_outside_the_folder_is_refused(tmp_path):
    model = folders.model_of("llama", fused=True)
    folder = folders.save(model, tmp_path / "in", shard="40KB")
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    name = where["model.norm.weight"]
    shutil.move(folder / name, tmp_path / name)
    folders.edit_json(
        index, lambda found: found.update(weight_map={k: f"../{v}" if v == name else v for k, v in where.items()})
    )
    with pytest.raises(ModelError, match="outside"):
        load(folder)


def test_a_dense_model_is_not_packed_on_loading(place):
    with pytest.raises(ModelError, match="permtriton compile"):
        load(place("llama", "saved"), quantization_config=PermTritonQuantizationConfig(**VALID))
