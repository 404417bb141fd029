"""The packages of each extra, and the error if a package is missing."""

from importlib.util import find_spec

from permtriton.errors import MissingExtraError

# There is no release yet. The first one sets these two, and every message, model card and page follows them:
# RELEASE = "permtriton" and the address of the repository.
RELEASE = "."  # what pip installs
HOME = ""  # address of the repository

# Extra of pyproject.toml -> modules that it installs.
EXTRAS = {
    "data": ("datasets", "pyarrow"),
    "fp8": ("compressed_tensors",),
    "eval": ("lm_eval", "accelerate"),
    "gguf": ("gguf", "accelerate"),
    "report": ("jinja2",),
}


def install_command(extra: str = "") -> str:
    """Returns the command that installs permtriton, or one extra of it; without a release, it runs in the checkout."""
    return f'pip install "{RELEASE}[{extra}]"' if extra else f"pip install {RELEASE}"


WHERE = " in the checkout of permtriton" * (RELEASE == ".")


def require(what: str, *modules: str) -> None:
    """Raises a `MissingExtraError` if a module is not installed; ``what`` names the work that needs ``modules``."""
    for module in modules:
        if find_spec(module) is None:
            extra = next(extra for extra, known in EXTRAS.items() if module in known)
            raise MissingExtraError(f"{what} needs {module}, which is not installed: {install_command(extra)}{WHERE}")
