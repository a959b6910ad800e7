"""The list of promises names tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "promises.md"


@cache
def found_in(file: str) -> frozenset[str]:
    """The tests of a file, those of a class behind its name."""
    found = []
    for node in ast.parse((TESTS / file).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = [n for n in inside if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        found += [prefix + each.name for each in functions if each.name.startswith("test_")]
    return frozenset(found)


def test_every_promise_names_a_test_that_is_there() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    rows = [row for row in rows if row != "| promise | shown by |"]
    assert len(rows) > 100
    lost = []
    for row in rows:
        shown = re.fullmatch(r"\| .+ \| `([\w/]+\.py)::([\w:]+)`( †)? \|", row)
        if shown is None or shown[2] not in found_in(shown[1]):
            lost.append(row)
    assert not lost, "Name the test that shows it now:\n" + "\n".join(lost)
