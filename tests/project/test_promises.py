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


def rows_by_heading() -> dict[str, list[str]]:
    """The rows of promises under each heading."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            found[line.removeprefix("## ")] = []
        elif line.startswith("| ") and line != "| promise | shown by |":
            found[[*found][-1]].append(line)
    return found


def folders() -> dict[str, str]:
    """The heading of each folder of tests, which is empty for those of no promises."""
    lines = (TESTS / "README.md").read_text().splitlines()
    return {row[1]: row[2] for line in lines if (row := re.match(r"\| `(\w+)` \| (.*?) ?\|", line))}


def test_every_promise_names_a_test_in_the_folder_of_its_heading() -> None:
    headings = {heading: folder for folder, heading in folders().items() if heading}
    assert list(headings) == list(rows_by_heading()), "tests/README.md has the same headings"
    lost = []
    for heading, rows in rows_by_heading().items():
        assert rows, f"no promise under {heading}"
        for row in rows:
            shown = re.fullmatch(r"\| .+ \| `((\w+)/[\w/]+\.py)::([\w:]+)`( †)? \|", row)
            if shown is None or shown[2] != headings[heading] or shown[3] not in found_in(shown[1]):
                lost.append(f"{heading} (tests/{headings[heading]}): {row}")
    assert not lost, "Name the test that shows it now, in the folder of the heading:\n" + "\n".join(
        lost
    )


def test_every_folder_of_tests_is_explained() -> None:
    there = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert there == folders().keys()
