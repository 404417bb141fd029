"""Registration with transformers: in every import order, from several threads, and once."""

import subprocess
import sys
from pathlib import Path

import pytest

from permtriton.checkpoint.quantization_config import METHOD, PermTritonQuantizationConfig
from permtriton.checkpoint.quantizer import PermTritonQuantizer

from .folders import QUANTIZATION

ROOT = Path(__file__).parent.parent
REGISTERED = (
    "import transformers.quantizers.auto as auto\n"
    "assert auto.AUTO_QUANTIZER_MAPPING['permtriton'].__name__ == 'QuantizerStandIn'\n"
    "assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING['permtriton'].__name__ == 'ConfigStandIn'\n"
    "assert not [f for f in sys.meta_path if 'permtriton' in type(f).__module__], 'the hook is gone'\n"
)
ORDERS = {
    "ours first": (
        "import sys, importlib, importlib.util, permtriton\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'light'\n"
        "importlib.reload(permtriton)\n"
        "assert sum('permtriton' in type(f).__module__ for f in sys.meta_path) == 1, 'one hook'\n"
        "importlib.util.find_spec('transformers.quantizers.auto')\n" + REGISTERED + "import "
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
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.slow
def test_importing_registers_in_any_order(order):
    result = subprocess.run(
        [sys.executable, "-c", ORDERS[order]], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def in_a_process(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


# Replaces transformers' module, which takes seconds to import; while it is executed, a thread can import permtriton.
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
    """Nothing that transformers does with the registered stand-ins distinguishes them from the classes."""
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    config = auto.AutoQuantizationConfig.from_dict(QUANTIZATION)
    assert type(config) is PermTritonQuantizationConfig
    assert type(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD](**QUANTIZATION)) is PermTritonQuantizationConfig
    assert type(auto.AutoHfQuantizer.from_config(config, pre_quantized=True)) is PermTritonQuantizer
    assert issubclass(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD], QuantizationConfigMixin)
    assert issubclass(auto.AUTO_QUANTIZER_MAPPING[METHOD], HfQuantizer)
