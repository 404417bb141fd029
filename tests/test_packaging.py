"""The package as a whole: imports go downward, nothing heavy or unsafe is imported, and every file is installed."""

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).parent.parent
LINKED = ("kernels", "passes", "cli")  # folders of the root that the package links to
UNSAFE = {("torch", "load"), ("torch", "save"), ("np", "load")}  # they read or write pickles

# A module may import from its own level and from lower ones; a line covers what is in a folder, but for other lines.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("permtriton.errors", "permtriton.util", "permtriton.demo", "permtriton.config"),
    ("permtriton.kernels",),
    ("permtriton.model", "permtriton.data"),
    ("permtriton.passes",),
    ("permtriton.running",),
    ("permtriton.methods",),
    ("permtriton.checkpoint",),
    ("permtriton.serving", "permtriton.finetune"),
    ("permtriton",),
    ("permtriton.api",),
    ("permtriton.cli",),
    ("permtriton.__main__",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def sources() -> dict[str, Path]:
    """Maps each module's name to its file."""
    found = {}
    for folder, _, files in os.walk(ROOT / "permtriton", followlinks=True):
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return dict(sorted(found.items()))


MODULES = sources()


def level_of(module: str) -> int:
    return LEVEL[module] if module in LEVEL else level_of(module.rpartition(".")[0])


def syntax(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))


@functools.cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it, for types alone too; a name from a package may be a module."""
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
    assert set(LEVEL) <= set(MODULES)
    at_the_root = {name for name in MODULES if name.count(".") == 1 and MODULES[name].name != "__init__.py"}
    assert at_the_root == {
        f"permtriton.{name}" for name in ("__main__", "api", "arguments", "config", "errors", "recipe")
    }


def test_imports_go_downward_only():
    upward = []
    for module, path in MODULES.items():
        inside = {name for name in imported(path) if name.split(".")[0] == "permtriton"}
        assert inside <= set(MODULES), f"{module} imports a module that is not there"
        if module not in ("permtriton", "permtriton.demo"):
            upward += [f"{module} imports {name}" for name in inside if level_of(name) > level_of(module)]
    assert upward == []


def test_no_imports_go_in_a_circle():
    names = sorted(MODULES)
    rows, columns = [], []
    for row, name in enumerate(names):
        found = imported(MODULES[name]) & set(MODULES)
        rows += [row] * len(found)
        columns += [names.index(other) for other in found]
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(names), len(names)))
    count, labels = connected_components(graph, connection="strong")
    circles = [[n for n, label in zip(names, labels, strict=True) if label == c] for c in range(count)]
    assert [circle for circle in circles if len(circle) > 1] == []


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/*.py")]), ids=lambda path: path.name
)
def test_scripts_import_what_there_is(path):
    for node in syntax(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("permtriton"):
            for alias in node.names:
                if f"{node.module}.{alias.name}" not in MODULES:
                    assert hasattr(import_module(node.module), alias.name), f"{node.module}.{alias.name}"


def test_every_module_is_in_a_listed_package():
    """A new folder must be added to the packages in pyproject.toml, or it is missing from the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {n if p.name == "__init__.py" else n.rpartition(".")[0] for n, p in MODULES.items()}
    assert packages == set(setuptools["packages"])


@pytest.mark.parametrize("name", LINKED)
def test_the_package_links_to_the_folders_of_the_root(name):
    assert Path("..", name) == (ROOT / "permtriton" / name).readlink()


def test_kernels_init_imports_nothing():
    assert imported(ROOT / "kernels" / "__init__.py") == set()


def test_the_library_does_not_print():
    printing = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        if not module.startswith("permtriton.cli")
        for node in syntax(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_no_pickle():
    unsafe = []
    for module, path in MODULES.items():
        libraries = imported(path) & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
        unsafe += [f"{module} imports {library}" for library in libraries]
        attributes = [node for node in syntax(path) if isinstance(node, ast.Attribute)]
        unsafe += [f"{module}:{n.lineno}" for n in attributes if (getattr(n.value, "id", ""), n.attr) in UNSAFE]
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
    printed = json.loads(
        python(
            "import json, sys, torch\n"
            "from unittest import mock\n"
            "with mock.patch.object(torch.cuda, '_lazy_init', side_effect=AssertionError('CUDA was started')):\n"
            "    import permtriton, permtriton.kernels\n"
            "print(json.dumps([sorted(m.split('.')[0] for m in sys.modules), torch.cuda.is_initialized(),"
            " permtriton.kernels.__file__, permtriton.__file__]))"
        )
    )
    modules, started, kernels, package = printed
    assert {"datasets", "lm_eval", "matplotlib", "pandas", "pydantic", "rich", "typer"} & set(modules) == set()
    assert not started
    assert Path(package) == ROOT / "permtriton" / "__init__.py"
    assert Path(kernels) == ROOT / "permtriton" / "kernels" / "__init__.py"


def built(command: list[str], cwd: Path) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist of a copy of the sources, so that building leaves nothing in them."""
    there = tmp_path_factory.mktemp("sdist")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    files = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
    for name in ("permtriton", *LINKED, *files):
        source, target = ROOT / name, there / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=skip, symlinks=True)
        else:
            shutil.copy(source, target)
    built([sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('built')"], there)
    (found,) = (there / "built").glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel_file(sdist) -> Path:
    """The wheel that pip makes of the sdist."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--no-build-isolation"]
    built([*pip, "--wheel-dir", ".", sdist.name], sdist.parent)
    (found,) = sdist.parent.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(wheel_file) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


@pytest.mark.slow
def test_the_sdist_holds_files_in_place_of_links(sdist):
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert [name for name, member in members.items() if not (member.isfile() or member.isdir())] == []
    inside = {str(path.relative_to(ROOT)) for path in MODULES.values()}
    assert inside | {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "permtriton/py.typed"} <= set(members)
    assert all(members[name].size == (ROOT / name).stat().st_size for name in inside)


@pytest.mark.slow
def test_the_installed_wheel_works(wheel_file, tmp_path):
    """In an environment of its own, which takes everything else from this one."""
    home = tmp_path / "venv"
    built([sys.executable, "-m", "venv", "--without-pip", str(home)], tmp_path)
    (packages,) = home.glob("lib/*/site-packages")
    (packages / "others.pth").write_text(str(Path(np.__file__).parent.parent))
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-deps", "--quiet"]
    built([*pip, "--force-reinstall", str(wheel_file)], tmp_path)
    command = str(home / "bin" / "permtriton")
    options = ["--recipe", "mask", "--samples", "2", "--eval-data", "none", "--output", "out"]
    for words in (["--version"], ["compile", "demo", *options], ["export", "out"], ["report", "out"], ["doctor"]):
        built([command, *words], tmp_path)
    assert (tmp_path / "out-packed" / "permtriton.json").is_file()
    place = "import permtriton.kernels; print(permtriton.kernels.__file__)"
    found = subprocess.run(
        [home / "bin" / "python", "-c", place], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == packages / "permtriton" / "kernels" / "__init__.py"


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
