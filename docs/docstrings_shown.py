"""Show docstrings as pages: roles as links, the tree of errors as a list, the table of variables.

An extension of griffe, which reads the source for the pages. Docstrings are written for readers of
the source and for ``help()`` too. The page of environment variables shows the module ``variables``,
whose docstring becomes a table of all settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

import griffe
from pydantic import BaseModel

from ckpipe import errors
from ckpipe.settings import Settings

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc):`(~?)([\w.]+)`")
TREE = re.compile(r"::\n\n    CkpipeError\n(?: .*\n)+")
BRANCH = re.compile(r"([│ ]*)(?:[├└]── )?(\w+)(?: {2,}(.+))?")


class DocstringsShown(griffe.Extension):
    """Rewrite each docstring from what Sphinx and ``help()`` show to Markdown."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring and obj.path == "variables":
            obj.docstring.value = variables_table()
        elif obj.docstring:
            text = TREE.sub(lambda _: error_list() + "\n", obj.docstring.value)
            obj.docstring.value = re.sub(
                r"::$", ":", ROLE.sub(_reference, text), flags=re.MULTILINE
            )


def _reference(match: re.Match[str]) -> str:
    short, name = match[1], match[2]
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref optional identifier="{name}"><code>{shown}</code></autoref>'


def variables_table() -> str:
    """Make a table of all settings as environment variables, with defaults."""
    rows = [
        f"| `{name}` | {default} | {text} |"
        for name, default, text in sorted(variables(Settings, "CKPIPE_"))
    ]
    return "\n".join(("| variable | default | setting |", "|---|---|---|", *rows))


def variables(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, default and first sentence of each variable of a group."""
    for name, field in model.model_fields.items():
        variable = prefix + name.upper()
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            yield (
                variable,
                "",
                f"The whole group as a JSON object. {_first_sentence(group.__doc__)}",
            )
            yield from variables(group, f"{variable}__")
        elif name == "backends":
            yield f"{variable}__SCHEME__OPTION", "", "An option of the backend of a URL's scheme."
        else:
            default = field.get_default(call_default_factory=True)
            shown = "" if default is None else f"`{_text(default)}`"
            yield variable, shown, _first_sentence(field.description)


def _first_sentence(text: str | None) -> str:
    plain = ROLE.sub(_reference, " ".join((text or "").split())).replace("``", "`")
    return re.split(r"(?<=[.:]) (?=[A-Z`])", plain)[0].rstrip(":").replace("|", "&#124;")


def _text(value: Any) -> str:
    return str(value).replace("|", " or ") if isinstance(value, str | int | float) else repr(value)


def error_list() -> str:
    """Make a nested list of the tree in the docstring of the errors."""
    depth, parts = 0, ["<ul>"]
    for line in (errors.__doc__ or "").splitlines():
        branch = BRANCH.fullmatch(line.removeprefix("    "))
        if branch is None or not hasattr(errors, branch[2]):
            continue
        level = (len(line) - len(line.removeprefix("    ").lstrip("│├└─ "))) // 4 - 1
        parts.append("<ul>" * (level - depth) + "</ul>" * (depth - level))
        depth = level
        name, text = branch[2], escape(branch[3] or "base of all").replace("``", "")
        link = f'<a href="#ckpipe.errors.{name}"><code>{name}</code></a>'
        parts.append(f"<li>{link}: {text}</li>")
    return "\n".join((*parts, "</ul>" * (depth + 1)))
