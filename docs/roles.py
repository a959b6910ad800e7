"""Shows the roles of docstrings, such as ``:class:`~ckpipe.Settings```, as links on built pages.

A hook of mkdocs: docstrings are written for readers of the source and for ``help()`` too, which
know this form; the renderer of the pages does not.
"""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc):<code>(~?)([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Replaces roles by references that are links where the page of the object exists."""
    return ROLE.sub(_reference, html)


def _reference(match: re.Match[str]) -> str:
    short, name = match[1], match[2]
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref optional identifier="{name}"><code>{shown}</code></autoref>'
