"""The published format and its schema name each kind of node that a tree may have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ckpipe.format.tree import FORMS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_schema_and_the_format_have_all_kinds_of_nodes() -> None:
    schema = json.loads((DOCS / "schema" / "bundle.json").read_text())
    (kinds,) = schema["$defs"]["node"]["prefixItems"]
    assert set(kinds["enum"]) == FORMS.keys()
    text = (DOCS / "format.md").read_text()
    assert [kind for kind in FORMS if not re.search(f'["`]{kind}["`]', text)] == []
