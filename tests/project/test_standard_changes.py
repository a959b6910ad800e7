"""Each standard change is made in a copy of the library, at as many places as are promised.

The table of standard changes is in ``docs/design.md``. A test here makes one of them and runs the
copy: if the change needs one place more than the test edits, the copy does not do it.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

ROOT = Path(__file__).parents[2]


class Copy:
    """A copy of the library, to be changed.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("ckpipe", "backends"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        self.places = 0

    def add(self, where: str, code: str) -> None:
        """Add code at one place: at the end of a class or function, before its return.

        Args:
            where: The name of the class or function, such as ``LoadRequest.__init__``.
            code: The code.
        """
        outer = where.partition(".")[0]
        (file,) = [
            each
            for each in (self._folder / "ckpipe").rglob("*.py")
            if f"\nclass {outer}" in each.read_text() and outer in _bodies(each.read_text())
        ]
        text = file.read_text()
        last = _bodies(text)[where][-1]
        lines = text.splitlines()
        at = last.lineno - 1 if isinstance(last, ast.Return) else last.end_lineno
        lines[at:at] = indent(code, " " * last.col_offset).splitlines()
        file.write_text("\n".join(lines) + "\n")
        self.places += 1

    def run(self, program: str) -> subprocess.CompletedProcess[str]:
        """Run a program with the copy."""
        paths = os.pathsep.join([str(self._folder), str(self._folder / "backends")])
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def _bodies(text: str) -> dict[str, list[ast.stmt]]:
    """Return the bodies of the classes of a module, and of their functions, by name."""
    found = {}
    for outer in ast.parse(text).body:
        if isinstance(outer, ast.ClassDef):
            found[outer.name] = outer.body
            for inner in outer.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[f"{outer.name}.{inner.name}"] = inner.body
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


SHOWN = """
import inspect

def check_shown(function):
    option = inspect.signature(function).parameters["made_up"]
    assert (option.kind, option.annotation, option.default) == (option.KEYWORD_ONLY, "str", "none")
    text = inspect.getdoc(function)
    assert "\\n    made_up: Do what is made up.\\n" in text, text
"""


def test_an_option_of_a_load_is_three_places(copy: Copy) -> None:
    copy.add("LoadOptions", 'made_up: Annotated[str, "none"]\n"""Do what is made up."""')
    copy.add(
        "LoadRequest.__init__",
        'self.made_up = one_of("made_up", given["made_up"], "none", "some")',
    )
    copy.add("MatchedLoad.apply", "self.missing = (*self.missing, self.request.made_up)")
    assert copy.places == 3

    ran = copy.run(
        SHOWN
        + """
import asyncio
import ckpipe

for function in (ckpipe.load, ckpipe.Pipeline.load, ckpipe.SyncPipeline.load):
    check_shown(function)

state = {"a": 1}
with ckpipe.SyncPipeline("run") as pipeline:
    pipeline.save(state, 1, until="committed")
    assert pipeline.load(state).missing == ("none",)
    assert pipeline.load(state, made_up="some").missing == ("some",)

async def main():
    async with ckpipe.Pipeline("run") as pipeline:
        assert (await pipeline.load(state, made_up="some")).missing == ("some",)

asyncio.run(main())
assert ckpipe.load("run", made_up="some").missing == ("some",)
try:
    ckpipe.load("run", made_up="more")
except ckpipe.errors.UsageError as error:
    print(error)
"""
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "made_up is 'none' or 'some', not 'more'\n"


def test_an_option_of_a_save_is_three_places(copy: Copy) -> None:
    copy.add("SaveOptions", 'made_up: Annotated[str, "none"]\n"""Do what is made up."""')
    copy.add(
        "SaveRequest.__init__",
        'self.made_up = one_of("made_up", given["made_up"], "none", "some", step=step)',
    )
    copy.add("Save.__init__", 'request.metadata["made up"] = request.made_up')
    assert copy.places == 3

    ran = copy.run(
        SHOWN
        + """
import asyncio
import ckpipe

for function in (ckpipe.Pipeline.save, ckpipe.SyncPipeline.save):
    check_shown(function)

state = {"a": 1}
with ckpipe.SyncPipeline("run") as pipeline:
    pipeline.save(state, 1)
    pipeline.save(state, 2, made_up="some")
assert ckpipe.load("run", step=1).metadata == {"made up": "none"}
assert ckpipe.load("run").metadata == {"made up": "some"}

async def main():
    async with ckpipe.Pipeline("run") as pipeline:
        await pipeline.save(state, 3, made_up="some")
        try:
            await pipeline.save(state, 4, made_up="more")
        except ckpipe.errors.UsageError as error:
            print(error)

asyncio.run(main())
assert ckpipe.load("run").metadata == {"made up": "some"}
"""
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "made_up is 'none' or 'some', not 'more' [step 4]\n"
