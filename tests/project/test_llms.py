"""The page for language models has the calls as they are, and every error."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from pathlib import Path

import pytest

import ckpipe
from ckpipe import errors
from ckpipe.settings import PipelineFields

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "llms.txt").read_text(encoding="utf-8")
CALLS = re.findall(r"^([\w.]+)\(.*$", TEXT, re.MULTILINE)


def called(name: str) -> str:
    """The line of a call: its name, and its parameters with annotations and defaults."""
    signature = inspect.signature(attrgetter(name)(ckpipe))
    words: list[str] = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        bare = str(each.replace(annotation=each.empty, default=each.empty))
        default = "" if each.default is each.empty else f" = {each.default!r}"
        if each.name != "self":
            words.append(f"{bare}: {each.annotation}{default}")
    returns = signature.return_annotation
    ending = "" if returns in (None, "None", inspect.Signature.empty) else f" -> {returns}"
    return f"{name}({', '.join(words)}){ending}"


def test_the_calls_that_users_make_are_there() -> None:
    methods = {f"SyncPipeline.{name}" for name in dir(ckpipe.SyncPipeline) if name[0] != "_"}
    expected = {name for name in methods if callable(attrgetter(name)(ckpipe))}
    expected |= {
        f"SyncSaveHandle.{name}" for name in dir(ckpipe.SyncSaveHandle) if name.startswith("wait")
    }
    expected |= {each for each in ckpipe.__all__ if inspect.isfunction(getattr(ckpipe, each))}
    assert expected <= set(CALLS)
    assert len(CALLS) == len(set(CALLS))


def test_each_call_has_the_parameters_that_it_takes() -> None:
    assert {called(name) for name in CALLS} - set(TEXT.splitlines()) == set()


def test_its_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [loop] = re.findall(r"^```python\n(.+?)^```", TEXT, re.MULTILINE | re.DOTALL)
    program: dict[str, object] = {}
    exec(loop, program)
    assert program["step"] == 125


def test_all_settings_are_there() -> None:
    [listed] = re.findall(r"^Settings by name: (.+)\.$", TEXT, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", listed)) == set(PipelineFields.__annotations__)


def test_every_error_has_a_remedy() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", TEXT, re.MULTILINE))
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    public = {each.__name__ for each in kinds if issubclass(each, errors.CkpipeError)}
    assert set(rows) == public - {"CkpipeError"}


def test_its_form_is_that_of_llmstxt_org_and_its_links_lead_to_pages() -> None:
    assert re.match(r"# \w+\n\n> .+\n", TEXT)
    body, *lists = re.split(r"^## .+\n", TEXT, flags=re.MULTILINE)
    assert not re.search(r"^#", body.removeprefix("# "), re.MULTILINE)
    assert lists
    for each in lists:
        for line in each.strip().splitlines():
            link = re.fullmatch(r"- \[[^]]+\]\(([\w/]+)/\): .+", line)
            assert link is not None, line
            assert (DOCS / f"{link[1]}.md").is_file(), line
