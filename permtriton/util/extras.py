"""Which packages does each extra install, and what is said where one is missing?"""

from importlib.util import find_spec

from permtriton.errors import MissingExtraError

# Extra of pyproject.toml -> the modules that it is for.
EXTRAS = {
    "data": ("datasets", "pyarrow", "PIL"),
    "fp8": ("compressed_tensors",),
    "eval": ("lm_eval", "accelerate"),
    "gguf": ("gguf", "accelerate"),
    "report": ("jinja2",),
}


def require(what: str, *modules: str) -> None:
    """Refuses work whose packages are not installed, before it starts.

    Args:
        what: what needs them, for the message.
        modules: modules of `EXTRAS`.

    Raises:
        MissingExtraError: one is missing; the message says which extra has it.
    """
    for module in modules:
        if find_spec(module) is None:
            extra = next(extra for extra, known in EXTRAS.items() if module in known)
            raise MissingExtraError(f'{what} needs {module}, which is not installed: pip install "permtriton[{extra}]"')
