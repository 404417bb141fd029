"""Checks that the content of a file has the form that permtriton writes; pydantic checks the declared forms."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from permtriton.errors import shown

Form = TypeVar("Form")


def checked(form: type[Form], content: Any, refuse: Callable[[str], Exception]) -> Form:
    """Returns the ``content`` of a JSON file if it has ``form``: no other type, no unknown entry, no NaN or infinity.

    Args:
        form: a ``TypedDict``, or any other type that pydantic knows.
        refuse: returns the error for a problem, such as ``sites[0].index is 7, expected a valid list``.
    """
    from pydantic import ValidationError  # late: `permtriton --help` must not wait for the import

    try:
        (value,) = _checker(form).validate_python([content])  # type: ignore[arg-type]
    except ValidationError as error:
        raise refuse(_words(error.errors(include_url=False)[0])) from None
    return value


@cache
def _checker(form: Any) -> Any:
    """Returns an adapter for a list of ``form``, because pydantic accepts no settings for a ``TypedDict`` itself."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(list[form], config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _words(problem: Any) -> str:
    """Describes in one line a problem from pydantic: its place, the value there, and what was expected."""
    places = [key for key in problem["loc"][1:] if key != "[key]"]
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in places).removeprefix(".")
    where = repr(where)[1:-1] or "it"  # a name from a file may hold any characters
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where} is unknown"
    expected = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{where} is {shown(problem['input'])}, expected {expected}"
