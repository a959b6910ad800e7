"""Options of a call: declared once, as the keys of a ``TypedDict``, and shown by all its forms.

A key is declared as ``name: Annotated[type, default]``, with a docstring. ``**options:
Unpack[...]`` gives the keys to type checkers and editors; :func:`showing` gives them, with their
defaults and docstrings, to ``help()`` and :func:`inspect.signature`. Note 78 of ``docs/design.md``
tells why.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from inspect import Parameter
from itertools import pairwise
from textwrap import TextWrapper
from typing import Any, Literal, TypeVar, cast, get_origin, get_type_hints

from ckpipe.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_LINES = TextWrapper(
    96, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False,
    break_long_words=False,
)  # fmt: skip


@cache
def parameters_of(kind: type) -> Mapping[str, Parameter]:
    """Return the options that a ``TypedDict`` declares, as keyword parameters by name."""
    found, names = {}, vars(sys.modules[kind.__module__])
    for name, declared in kind.__annotations__.items():
        inner = declared.__forward_arg__.removeprefix("Annotated[").removesuffix("]")
        annotation, _, default = inner.rpartition(", ")
        for alias in re.findall(r"\w+", annotation):
            if get_origin(names.get(alias)) is Literal:  # its choices tell more than its name
                annotation = annotation.replace(alias, str(names[alias]).removeprefix("typing."))
        found[name] = Parameter(
            name, Parameter.KEYWORD_ONLY, default=ast.literal_eval(default), annotation=annotation
        )
    return found


def completed(call: str, kind: type, given: T) -> T:
    """Return the options of a call with the defaults of those that are not given.

    Raises:
        TypeError: If one is unknown.
    """
    known, options = parameters_of(kind), cast("Mapping[str, Any]", given)
    for name in options.keys() - known.keys():
        near = get_close_matches(name, known, 1)
        raise TypeError(
            f"{call}() got an unexpected keyword argument {name!r}"
            + (f". Did you mean {near[0]!r}?" if near else "")
        )
    return cast("T", {**{name: each.default for name, each in known.items()}, **options})


def one_of(name: str, value: T, *choices: object, step: int | None = None) -> T:
    """Return the value of an option that is one of a few.

    Raises:
        UsageError: If it is another one.
    """
    if not any(isinstance(value, type(each)) and value == each for each in choices):
        *most, last = map(repr, choices)
        raise UsageError(f"{name} is {', '.join(most)} or {last}, not {value!r:.100}", step=step)
    return value


def showing(kind: type) -> Callable[[F], F]:
    """Show a function with the options of a ``TypedDict`` in place of its ``**options``.

    In its docstring they take the place of the line on ``options``.
    """

    def show(function: F) -> F:
        signature = inspect.signature(function)
        shown = [each for each in signature.parameters.values() if each.name != "options"]
        at = sum(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in shown)
        shown[at:at] = parameters_of(kind).values()
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        function.__annotations__.pop("options", None)
        function.__annotations__ |= get_type_hints(kind)
        text = inspect.getdoc(function) or ""
        before, mark, after = text.partition("\n    options: ")
        _, _, rest = after.partition("\n")
        if mark and (described := _described(kind)):
            function.__doc__ = f"{before}\n{described}\n{rest}"
        return function

    return show


@cache
def _described(kind: type) -> str | None:
    """Return the docstrings of options as lines of a section ``Args``; None without the source."""
    try:
        (tree,) = ast.parse(inspect.getsource(kind)).body
    except OSError:  # a program that is packed without sources
        return None
    assert isinstance(tree, ast.ClassDef)
    found = []
    for declared, text in pairwise(tree.body):
        match declared, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                found.append(_LINES.fill(" ".join(f"{name}: {doc}".split())))
    return "\n".join(found)
