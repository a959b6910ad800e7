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
import inspect

def check_shown(function):
    option = inspect.signature(function).parameters["made_up"]
    assert (option.kind, option.annotation, option.default) == (option.KEYWORD_ONLY, "str", "none")
    text = inspect.getdoc(function)
    assert "\\n    made_up: Do what is made up.\\n" in text, text
"""


def test_an_option_of_a_load_is_three_places(copy: ChangedTree) -> None:
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
    assert ran.out == "made_up is 'none' or 'some', not 'more'\n"


def test_an_option_of_a_save_is_three_places(copy: ChangedTree) -> None:
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
    assert ran.out == "made_up is 'none' or 'some', not 'more' [step 4]\n"
