"""What the documentation shows is what happens: python fences run, and links lead on."""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer

from ckpipe import errors
from ckpipe.cli.app import make_app
from ckpipe.cli.commands import COMMANDS
from tests.support.fork_server import FRESH

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
RESUMES = "restored.step + 1 if restored"
RUN_ONCE = {"docs/tutorials/resume.md"}  # it kills its run only where there is nothing to resume
# Only make test-all installs these.
NEEDS = {
    "docs/tutorials/lightning.md": "lightning",
    "docs/tutorials/torchtitan.md": "torchtitan",
    "examples/with_verl/README.md": "verl",
}
SECONDS = 300

_FENCE = re.compile(r"```python(?:\s.*?)?(?:title=\"(?P<title>[^\"]+)\".*)?")
_OPT_OUT = re.compile(r"<!-- not run: (.+) -->")


class Fence(NamedTuple):
    """A piece of python in a page: its first line, text and title, and why it is not run."""

    line: int
    text: str
    title: str | None
    not_run: str | None


def fences(page: Path) -> list[Fence]:
    """The python fences of a page."""
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.fullmatch(lines[number])
        if opening is None:
            number += 1
            continue
        end = lines.index("```", number)
        above = _OPT_OUT.fullmatch(lines[number - 1]) if number else None
        text = "\n".join(lines[number + 1 : end])
        found.append(Fence(number + 1, text, opening["title"], above[1] if above else None))
        number = end + 1
    return found


def run_page(page: Path, folder: Path) -> tuple[int | None, str]:
    """Run the fences of a page in a process of its own, for its exit status and output.

    They are one program, like the cells of a notebook, with their places in tracebacks. The
    process is forked from one that has torch imported and nothing else, which saves seconds.
    """
    process = FRESH.Process(target=_run_fences, args=(page, folder))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, (folder / "output").read_text(encoding="utf-8")


def _run_fences(page: Path, folder: Path) -> None:
    """Run in the new process."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    program = ModuleType("__main__")
    sys.modules["__main__"] = program
    for fence in fences(page):
        if not fence.not_run:
            code = compile("\n" * fence.line + fence.text, str(page), "exec")
            exec(code, program.__dict__)


def name(page: Path) -> str:
    """How a page is called in the name of a test."""
    return str(page.relative_to(ROOT))


def resumes(page: Path) -> bool:
    """Whether the program of a page goes on after what it finds, however often it is started."""
    again = any(RESUMES in each.text for each in fences(page) if not each.not_run)
    return again and name(page) not in RUN_ONCE


@pytest.mark.parametrize(
    "page", [page for page in PAGES if fences(page) and not resumes(page)], ids=name
)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    if find_spec(needed := NEEDS.get(name(page), "torch")) is None:
        pytest.skip(f"{needed} is not installed")
    status, output = run_page(page, tmp_path)
    assert status == 0, output


@pytest.mark.parametrize("page", [each for each in PAGES if resumes(each)], ids=name)
def test_python_of_a_page_that_resumes_runs_again_where_it_ran(page: Path, tmp_path: Path) -> None:
    for _ in range(2):
        status, output = run_page(page, tmp_path)
        assert status == 0, output


def test_pages_with_python_are_found() -> None:
    with_python = {name(page) for page in PAGES if fences(page)}
    assert {"README.md", "docs/index.md", "docs/tutorials/resume.md"} <= with_python
    again = {name(page) for page in PAGES if resumes(page)}
    assert {"README.md", "docs/index.md", "docs/tutorials/one_gpu.md"} <= again


def shell_lines(page: Path) -> list[list[str]]:
    """The commands in a page, as words; a line that goes on is one."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^ *```sh\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for block in found for line in block.splitlines()]


def test_commands_that_pages_show_are_understood() -> None:
    group: Any = typer.main.get_command(make_app([each.name for each in COMMANDS]))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = set()
    for page in PAGES:
        for words in shell_lines(page):
            if words[:1] == ["make"]:
                assert set(words[1:]) <= targets, (page, words)
            if words[:1] == ["ckpipe"]:
                # Fails where an argument is missing or an option is unknown; nothing is run.
                group.commands[words[1]].make_context(words[1], words[2:])
                seen.add(words[1])
    assert seen >= {"ls", "info", "verify", "diff", "cp", "timeline", "prune"}


def test_pages_promise_the_oldest_torch_that_pip_accepts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [accepted] = [each for each in project["dependencies"] if each.startswith("torch")]
    promised = {
        name(page): set(re.findall(r"torch (\S+)\s+or\s+newer", page.read_text(encoding="utf-8")))
        for page in PAGES
    }
    oldest = {accepted.removeprefix("torch>=")}
    assert promised["README.md"] == promised["docs/install.md"] == oldest
    assert all(each <= oldest for each in promised.values())


def test_the_tutorial_shows_the_example_as_it_is() -> None:
    page = ROOT / "docs" / "tutorials" / "write_a_backend.md"
    shown = [fence for fence in fences(page) if fence.title]
    assert len(shown) > 5
    for fence in shown:
        file = ROOT / "examples" / "custom_backend" / str(fence.title)
        # A method stands in a page without the indentation of its class.
        forms = (fence.text, textwrap.indent(fence.text, "    "))
        assert any(f"{form}\n" in file.read_text(encoding="utf-8") for form in forms), fence.line


def test_every_error_has_its_row_where_troubles_are_explained() -> None:
    lines = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    first_cells = [line.split("|")[1] for line in lines if line.startswith("| ")]
    headings = [line for line in lines if line.startswith("## ")]  # those of a whole group
    named = set(re.findall(r"`(\w+)`", " ".join(first_cells + headings)))
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    public = {each.__name__ for each in kinds if issubclass(each, errors.CkpipeError)}
    assert public - {"CkpipeError"} <= named


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_files_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    files = [target for target in targets if "://" not in target]
    assert [target for target in files if not (page.parent / target).exists()] == []


def test_decision_notes_are_numbered_and_cited_by_their_numbers() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^#### (\d+)\. ", design, re.MULTILINE)]
    assert numbers == [*range(1, len(numbers) + 1)]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "ckpipe").rglob("*.py")]
    cited = [
        int(number)
        for text in sources
        for notes in re.findall(r"\b[Nn]otes? ([\d and]+) of\s+``docs/design.md``", text)
        for number in re.findall(r"\d+", notes)
    ]
    assert len(cited) > 5
    assert set(cited) <= set(numbers)


def test_files_that_the_design_names_are_there() -> None:
    named = set(
        re.findall(
            r"\b([a-z_]+(?:/[a-z_]+)+\.py)\b",
            (ROOT / "docs" / "design.md").read_text(encoding="utf-8"),
        )
    )
    roots = [ROOT, ROOT / "ckpipe", ROOT / "backends"]
    assert len(named) > 15
    assert {each for each in named if not any((root / each).is_file() for root in roots)} == set()
