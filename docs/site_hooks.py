"""Fill the pages with text from the source; hooks of mkdocs.

Docstrings are written for readers of the source and for ``help()`` too. Here their roles, such as
``:class:`~ckpipe.Settings```, become links, the tree of errors becomes a list, and the table of
environment variables is made from the settings themselves.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from html import escape
from typing import Any

from pydantic import BaseModel

from ckpipe import errors
from ckpipe.settings import Settings

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc):<code>(~?)([\w.]+)</code>")
VARIABLES = "<!-- variables of settings -->"
TREE = re.compile(r"<p>::</p>\s*<div class=\"highlight\"><pre>.*?</pre></div>", re.DOTALL)
BRANCH = re.compile(r"([│ ]*)(?:[├└]── )?(\w+)(?: {2,}(.+))?")


def on_config(config: Any) -> Any:
    """Link the repository that the pages are built from, and its files, where it has an address."""
    asked = ("git", "remote", "get-url", "origin")
    remote = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if address := web_address(remote):
        config["repo_url"], config["repo_name"] = address, address.split("/", 3)[3]
        config["edit_uri"] = "edit/main/docs/"
    return config


def web_address(remote: str) -> str | None:
    """Return the page of a git remote, without credentials, or None if it has none."""
    found = re.fullmatch(
        r"(?:https://(?:[^@/]*@)?|ssh://(?:\w+@)?|\w+@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote
    )
    return f"https://{found[1]}/{found[2]}" if found else None


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table of variables where its mark stands."""
    return markdown.replace(VARIABLES, variables_table()) if VARIABLES in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Replace roles by links, the tree of errors by a list, and colons before a block by one."""
    with_errors = TREE.sub(lambda _: error_list(), ROLE.sub(_reference, html))
    return with_errors.replace("::</p>", ":</p>")


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
    plain = ROLE.sub(r"\2", " ".join((text or "").split())).replace("``", "`")
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
