"""Show a setting's type, default and bounds instead of pydantic's ``Field(...)``.

An extension of griffe, which reads the source for the pages.
"""

from __future__ import annotations

from typing import Any

import griffe

BOUNDS = {
    "ge": "at least",
    "gt": "more than",
    "le": "at most",
    "lt": "less than",
    "multiple_of": "a multiple of",
    "min_length": "of a length of at least",
}


class SettingsDefaults(griffe.Extension):
    """Replace ``Field(default, …)`` by the default, and say its bounds in the docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Rewrite one attribute."""
        if "settings" not in attr.path:
            return
        bounds: list[str] = []
        annotation = attr.annotation
        if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
            kind, *extras = getattr(annotation.slice, "elements", (annotation.slice,))
            bounds += [text for extra in extras for text in _bounds(extra)]
            attr.annotation = kind
        value: Any = attr.value
        if _is_field(value):
            bounds += _bounds(value)
            arguments = value.arguments
            factory = [each for each in arguments if getattr(each, "name", "") == "default_factory"]
            attr.value = f"{factory[0].value}()" if factory else arguments[0]
        if bounds and attr.docstring:
            text = ", ".join(bounds)
            attr.docstring.value += f"\n\n{text[0].upper()}{text[1:]}."


def _is_field(value: Any) -> bool:
    return isinstance(value, griffe.ExprCall) and str(value.function) == "Field"


def _bounds(field: Any) -> list[str]:
    """Say the bounds of a field in words."""
    if not _is_field(field):
        return []
    given = {each.name: each.value for each in field.arguments if hasattr(each, "name")}
    return [f"{words} {given[name]}" for name, words in BOUNDS.items() if name in given]
