"""What holds the package together: imports go downward, nothing heavy or unsafe is pulled in, and it installs whole."""

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"permtriton": "permtriton", "kernels": "permtriton.kernels", "passes": "permtriton.passes",
           "cli": "permtriton.cli"}  # fmt: skip

# A module may import from its own level and from lower ones; a folder's line covers every module in it.
LEVELS: tuple[tuple[str, ...], ...] = (
    (
        "permtriton.errors",
        "permtriton.sparsity",
        "permtriton.config",
        "permtriton.progress",
        "permtriton.permutation",
        "permtriton.checkpoint",
        "permtriton.registration",
    ),
    ("permtriton.kernels", "permtriton.kernels.cuda"),
    (
        "permtriton.plan",
        "permtriton.forward",
        "permtriton.inputs",
        "permtriton.match_norm",
        "permtriton.modules",
        "permtriton.experts",
        "permtriton.schema",
        "permtriton.placement",
        "permtriton.quantizer",
        "permtriton.importance",
        "permtriton.heuristic",
        "permtriton.relaxation",
        "permtriton.calibration",
        "permtriton.resume",
        "permtriton.learn",
        "permtriton.reconstruct",
        "permtriton.evaluate",
    ),
    ("permtriton.passes",),
    (
        "permtriton.trace",
        "permtriton.load",
        "permtriton.memory",
        "permtriton.planning",
        "permtriton.report",
        "permtriton.compiler",
        "permtriton.artifact",
        "permtriton.export",
        "permtriton.compare",
        "permtriton",
    ),
    ("permtriton.cli",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def sources(*folders: str) -> dict[str, Path]:
    """Module name -> file."""
    found = {}
    for folder in folders or FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((FOLDERS[folder], *parts)).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = sources()


def level_of(module: str) -> int:
    if module in LEVEL:
        return LEVEL[module]
    return LEVEL[module.rpartition(".")[0]]


def syntax(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it; a name taken from a package may be its module."""
    found = set()
    for node in syntax(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            base = node.module or ""
            found.update(f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names)
    return found


def test_the_table_of_levels_names_what_there_is():
    packages = set(FOLDERS.values())
    own = {name for name in MODULES if name.rpartition(".")[0] == "permtriton" and name not in packages}
    assert own - set(LEVEL) == {"permtriton.demo"}, "every module of permtriton/ has a level"
    assert set(LEVEL) <= set(MODULES), "and the table names no other"


@pytest.mark.parametrize("module", [name for name in MODULES if name != "permtriton.demo"])
def test_imports_go_downward_only(module):
    inside = {name for name in imported(MODULES[module]) if name.split(".")[0] == "permtriton"}
    assert inside <= set(MODULES), "no import of a module that is not there"
    assert {name for name in inside if level_of(name) > level_of(module)} == set()


def test_every_module_is_in_a_listed_package():
    """A new folder must be added to the packages in pyproject.toml, or it is missing from the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {n if p.name == "__init__.py" else n.rpartition(".")[0] for n, p in MODULES.items()}
    assert packages == set(setuptools["packages"])
    assert setuptools["package-dir"] == {name: folder for folder, name in FOLDERS.items()}


def test_kernels_init_imports_nothing():
    assert imported(ROOT / "kernels" / "__init__.py") == set()


@pytest.mark.parametrize("module", sources("permtriton", "kernels", "passes"))
def test_the_library_does_not_print(module):
    calls = [node for node in syntax(MODULES[module]) if isinstance(node, ast.Call)]
    assert [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_pickle(module):
    assert imported(MODULES[module]) & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"} == set()
    unsafe = [
        node.lineno
        for node in syntax(MODULES[module])
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", ""), node.attr) in {("torch", "load"), ("torch", "save"), ("np", "load")}
    ]
    assert unsafe == []


def test_the_demo_is_safe_to_read():
    kinds = {path.suffix for path in (ROOT / "permtriton" / "demo").iterdir() if path.is_file()}
    assert kinds <= {".py", ".json", ".safetensors", ".txt", ".md"}


def python(code: str, *options: str, **environment: str) -> str:
    """Runs code in a new interpreter, in the repository's root, and returns what it printed."""
    result = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light_and_leaves_the_gpu_alone():
    told = json.loads(
        python(
            "import json, sys, torch\n"
            "from unittest import mock\n"
            "with mock.patch.object(torch.cuda, '_lazy_init', side_effect=AssertionError('CUDA was started')):\n"
            "    import permtriton, permtriton.kernels\n"
            "print(json.dumps([sorted(m.split('.')[0] for m in sys.modules), torch.cuda.is_initialized(),"
            " permtriton.kernels.__file__, permtriton.__file__]))"
        )
    )
    modules, started, kernels, package = told
    assert {"datasets", "lm_eval", "matplotlib", "pandas", "rich", "typer"} & set(modules) == set()
    assert not started
    assert (Path(kernels), Path(package)) == (ROOT / "kernels" / "__init__.py", ROOT / "permtriton" / "__init__.py")


def new_setuptools() -> bool:
    """Whether the one that is installed can build; otherwise pip fetches another."""
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of a copy of the sources, so that building leaves nothing in them."""
    there = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        (shutil.copytree(source, there / name, ignore=skip) if source.is_dir() else shutil.copy(source, there / name))
    isolation = ["--no-build-isolation"] if new_setuptools() else []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", *isolation, "--wheel-dir", "built", "."]
    result = subprocess.run(command, cwd=there, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    (built,) = (there / "built").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_module_and_nothing_else_of_ours(wheel):
    expected = {
        f"{name.replace('.', '/')}{'/__init__.py' if path.name == '__init__.py' else '.py'}"
        for name, path in MODULES.items()
    }
    assert {name for name in wheel.namelist() if name.endswith(".py")} == expected
    assert "permtriton/py.typed" in wheel.namelist()


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "calibration.txt",
        "heldout.txt",
        "LICENSE-PSF.txt",
    ],
)
def test_the_wheel_holds_the_demo_model(wheel, name):
    assert (
        wheel.getinfo(f"permtriton/demo/{name}").file_size == (ROOT / "permtriton" / "demo" / name).stat().st_size > 0
    )


def test_the_demo_model_is_small(wheel):
    assert wheel.getinfo("permtriton/demo/model.safetensors").file_size <= 8 * 2**20


def test_the_wheel_offers_the_command(wheel):
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "permtriton = permtriton.cli.main:main" in wheel.read(entry_points).decode()


@pytest.mark.parametrize("first", ["installed", "checkout"])
def test_the_wheel_works_in_the_repositorys_root(wheel, tmp_path, first):
    """``python -c`` in the root finds the checkout's ``permtriton/`` first, which has no ``kernels`` inside."""
    wheel.extractall(tmp_path)
    code = "import permtriton.kernels, permtriton.passes.sites, permtriton.cli; print(permtriton.kernels.__file__)"
    if first == "installed":
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
    # Without site, the editable install's finder is out of the way; the other packages come by path.
    told = python(code, "-S", PYTHONPATH=os.pathsep.join([str(tmp_path), sysconfig.get_paths()["purelib"]]))
    expected = {tmp_path / "permtriton" / "kernels" / "__init__.py"}
    if first == "checkout":
        expected.add(ROOT / "kernels" / "__init__.py")
    assert Path(told.strip()) in expected
