"""Copies of the library in which a standard change is made, for programs that use it."""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path
from textwrap import indent

import ckpipe
from tests.support.command_line import Done, forked_anew

_ROOT = Path(__file__).parents[2]


class ChangedTree:
    """A copy of the library, to be changed.

    Args:
        folder: An empty folder.

    Attributes:
        package: The copied package.
        places: The number of places that were changed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.package = shutil.copytree(Path(ckpipe.__file__).parent, folder / "ckpipe")
        self.places = 0

    def create(self, path: str, code: str) -> None:
        """Create a module of the package."""
        with (self.package / path).open("x") as file:
            file.write(code)
        self.places += 1

    def append(self, path: Path | str, code: str) -> None:
        """Append code to a module."""
        with (self.package / path).open("a") as file:
            file.write(code)
        self.places += 1

    def insert(self, path: Path | str, after: str, code: str) -> None:
        """Insert code into a module, after the only place of a text."""
        file = self.package / path
        before = file.read_text()
        assert before.count(after) == 1, after
        file.write_text(before.replace(after, after + code))
        self.places += 1

    def add(self, where: str, code: str) -> None:
        """Add code at the end of a definition, in a function before its return.

        Args:
            where: The name of a class, of a function of a class, such as ``Rename._apply``, or of
                a table or alias; the package has one of this name.
            code: A member of a class, statements of a function, or an item of a table or alias.
        """
        ((file, last),) = self._ends(where)
        text = file.read_text()
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        lines = text.splitlines(keepends=True)
        if isinstance(last, ast.stmt):
            at = last.lineno - 1 if isinstance(last, ast.Return) else last.end_lineno
            lines.insert(at, indent(code.strip("\n") + "\n", " " * last.col_offset))
        else:
            line, at = lines[last.end_lineno - 1], last.end_col_offset - 1
            before, own = "".join(lines[: last.end_lineno - 1]) + line[:at], code.strip()
            comma = "" if before.rstrip().endswith(",") else ", "
            lines[: last.end_lineno] = [before + comma + own + line[at:]]
        file.write_text("".join(lines))
        self.places += 1

    def _ends(self, where: str) -> list[tuple[Path, ast.stmt | ast.expr]]:
        """Return for each definition of a name its file, and its last statement or its value."""
        name, _, inner = where.partition(".")
        found: list[tuple[Path, ast.stmt | ast.expr]] = []
        for file in sorted(self.package.rglob("*.py")):
            text = file.read_text()
            if not re.search(rf"^(class )?{name}\b", text, re.MULTILINE):
                continue
            for each in ast.parse(text).body:
                if isinstance(each, ast.ClassDef) and each.name == name:
                    bodies = {"": each.body} | {
                        own.name: own.body
                        for own in each.body
                        if isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef)
                    }
                    found += [(file, bodies[inner][-1])] if inner in bodies else []
                elif isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
                    targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                    if [ast.unparse(target) for target in targets] == [where]:
                        found.append((file, each.value))
        return found

    def run(self, code: str) -> Done:
        """Run a program, with this copy in place of the library."""
        paths = os.pathsep.join([str(self._folder), str(_ROOT)])
        environment = os.environ | {"PYTHONPATH": paths}
        done = forked_anew(code, cwd=self._folder, env=environment)
        assert done.code == 0, done.err
        return done
