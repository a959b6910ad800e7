"""Each standard change is made in a copy of the library, at as many places as are promised.

The table of standard changes is in ``docs/design.md``. A test here makes one of them and runs the
copy: if the change needs one place more than the test edits, the copy does not do it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.changed_tree import ChangedTree


@pytest.fixture
def copy(tmp_path: Path) -> ChangedTree:
    return ChangedTree(tmp_path)


SHOWN = """
import asyncio
import inspect
import ckpipe

state = {"a": 1}

def check_shown(function):
    option = inspect.signature(function).parameters["made_up"]
    assert (option.kind, option.annotation, option.default) == (option.KEYWORD_ONLY, "str", "none")
    text = inspect.getdoc(function)
    assert "\\n    made_up: Do what is made up.\\n" in text, text
"""


LOADS = """
for function in (ckpipe.load, ckpipe.Pipeline.load, ckpipe.SyncPipeline.load):
    check_shown(function)

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
SAVES = """
for function in (ckpipe.Pipeline.save, ckpipe.SyncPipeline.save):
    check_shown(function)

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
OPTIONS = {
    "Load": ("", "MatchedLoad.apply", "self.missing = (*self.missing, self.request.made_up)"),
    "Save": (", step=step", "Save.__init__", 'request.metadata["made up"] = request.made_up'),
}
"""Of each call what its refusal names besides, and what the option does, and where."""


@pytest.mark.parametrize(
    ("call", "program", "where"), [("Load", LOADS, ""), ("Save", SAVES, " [step 4]")]
)
def test_an_option_of_a_call_is_three_places(
    copy: ChangedTree, call: str, program: str, where: str
) -> None:
    named, place, effect = OPTIONS[call]
    copy.add(f"{call}Options", 'made_up: Annotated[str, "none"]\n"""Do what is made up."""')
    checked = f'one_of("made_up", given["made_up"], "none", "some"{named})'
    copy.add(f"{call}Request.__init__", f"self.made_up = {checked}")
    copy.add(place, effect)
    assert copy.places == 3
    assert copy.run(SHOWN + program).out == f"made_up is 'none' or 'some', not 'more'{where}\n"
