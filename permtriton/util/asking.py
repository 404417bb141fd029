"""What may be asked for stands once: a frozen dataclass, whose fields are the arguments of a function, and flags."""

from collections.abc import Callable
from dataclasses import Field, field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
Asked = TypeVar("Asked")
Model = TypeVar("Model", contravariant=True)
Result = TypeVar("Result", covariant=True)


def facts(panel: str | None, help: str, **more: Any) -> dict[str, Any]:
    """Returns the metadata of a field that is a flag, too, as `permtriton.cli.options.asked_flag` reads it.

    Args:
        more: ``kind`` (its type; text), ``unset`` (its default, where that is another), ``metavar``, ``hidden``, ``no``
            (whether it has a --no- form), ``command`` (whether the function does not have it).
    """
    return {"panel": panel, "help": help, **more}


def flag(default: Any, panel: str | None, help: str, *, repr: bool = True, **more: Any) -> Any:
    """Returns the field of what is a flag, too; the further arguments are those of `facts`."""
    return field(default=default, metadata=facts(panel, help, **more), repr=repr)


def same_as(kind: Any, name: str, **more: Any) -> Any:
    """Returns a field like the one of another dataclass of what may be asked for.

    Args:
        more: ``default``, where it is another, and what else `facts` takes.
    """
    of: Field[Any] = kind.__dataclass_fields__[name]
    default = more.pop("default", of.default)
    return field(default=default, metadata={**of.metadata, **more}, repr=of.repr, kw_only=True)


def arguments(kind: Any) -> list[Field[Any]]:
    """Returns the fields of a dataclass of what may be asked for that a function has as arguments."""
    return [each for each in fields(kind) if not each.metadata.get("command")]


class Asking(Protocol[Model, P, Result]):
    """A function of a model and the arguments ``P``."""

    def __call__(self, model: Model, *args: P.args, **kwargs: P.kwargs) -> Result: ...


class AskingWithOptions(Protocol[Model, P, Result]):
    """The same with any options besides.

    A type checker shows the arguments, and those that only the command has, but takes all as it takes options.
    """

    @overload
    def __call__(self, model: Model, *args: P.args, **kwargs: P.kwargs) -> Result: ...
    @overload
    def __call__(self, model: Model, **options: Any) -> Result: ...


def asking(kind: Callable[P, Asked]) -> Callable[[Callable[[Model, Asked], Result]], Asking[Model, P, Result]]:
    """Returns a decorator that makes of a function of a model and a ``kind`` one of a model and the fields of it."""
    return lambda function: _with_arguments(kind, function)


def asking_with_options(
    kind: Callable[P, Asked],
) -> Callable[[Callable[[Model, Asked, dict[str, Any]], Result]], AskingWithOptions[Model, P, Result]]:
    """Returns the same of a function that takes a dict of options, too."""
    return lambda function: _with_arguments(kind, function)


def _with_arguments(kind: Any, function: Any) -> Any:
    model, _, *options = signature(function).parameters.values()
    named = sorted(
        (
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY if each.kw_only else Parameter.POSITIONAL_OR_KEYWORD,
                default=each.default,
                annotation=each.type,
            )
            for each in arguments(kind)
        ),
        key=lambda each: each.kind,
    )
    more = [each.replace(kind=Parameter.VAR_KEYWORD, annotation=Any) for each in options]
    whole = Signature([model, *named, *more], return_annotation=signature(function).return_annotation)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        from permtriton.util.machine import as_torch_starts

        try:
            given = whole.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{called.__name__}() {error}") from None
        others = [given.pop(each.name, {}) for each in options]
        with as_torch_starts():
            return function(given.pop(model.name), kind(**given), *others)

    called.__signature__ = whole  # type: ignore[attr-defined]
    return called
