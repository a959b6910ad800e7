"""Show the options of a call in place of its ``**options``, as ``help()`` does.

An extension of griffe, which reads the source for the pages; see :mod:`ckpipe.options`.
"""

from __future__ import annotations

from typing import Any

import griffe


class OptionsShown(griffe.Extension):
    """Give functions below ``@showing(…)`` the keys of that ``TypedDict`` as parameters."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Rewrite one function."""
        for decorator in func.decorators:
            if decorator.callable_path == "ckpipe.options.showing":
                call: Any = decorator.value
                _show(func, func.modules_collection[call.arguments[0].canonical_path])


def _show(func: griffe.Function, declared: Any) -> None:
    shown = [each for each in func.parameters if each.name != "options"]
    at = sum(each.kind is griffe.ParameterKind.positional_or_keyword for each in shown)
    lines: list[str] = []
    for name, attribute in reversed(declared.attributes.items()):
        annotation, default = attribute.annotation.slice.elements
        keyword = griffe.ParameterKind.keyword_only
        option = griffe.Parameter(name, annotation=annotation, kind=keyword, default=default)
        shown.insert(at, option)
        text = " ".join(attribute.docstring.value.split())
        lines.insert(0, f"    {name}: {text}")
    func.parameters = griffe.Parameters(*shown)
    if func.docstring:
        before, mark, after = func.docstring.value.partition("\n    options: ")
        if mark:
            rest = after.partition("\n")[2]
            func.docstring.value = "\n".join([before, *lines, rest])
