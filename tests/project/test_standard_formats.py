"""Standard changes of forms, formats, containers, transforms, verbs and trainers, in a copy.

The table of standard changes is in ``docs/design.md``. Each test makes one of them, and a program
uses it: if the change needs one place more than the test edits, the program fails.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args

import pytest

import ckpipe
from tests.support.changed_tree import ChangedTree

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture
def tree(tmp_path: Path) -> ChangedTree:
    return ChangedTree(tmp_path)


RAW_FILES = '''
def raw(self) -> list[File]:
    """Plan one file with the bytes of all tensors."""
    rows = self._named(None).values()
    tensors = {each.label: torch.empty(each.shape, dtype=DTYPES[each.dtype]) for each in rows}
    return [File("all.raw", [Gap(like.nbytes, {label: like}) for label, like in tensors.items()])]
'''
RAW_EXPORTS = """
import inspect, ckpipe, torch
from pathlib import Path
from ckpipe.cli.app import run

model = {"a": torch.arange(5, dtype=torch.int8), "b": torch.tensor([9, 10], dtype=torch.uint8)}
with ckpipe.SyncPipeline("run", final_format="raw") as pipeline:
    pipeline.save({"model": model}, 1, final=True)
with ckpipe.SyncPipeline("again") as pipeline:
    pipeline.save({"model": model}, 1, export="raw")
done = ckpipe.export("run", form="raw", target="out")
assert (done.files, done.bytes) == (("all.raw",), 7)
assert run(["export", "run", "by_command", "--form", "raw"]) == 0
files = [path for path in Path().rglob("*.raw") if path.is_file()]
assert [path.read_bytes() for path in files] == [bytes([0, 1, 2, 3, 4, 9, 10])] * 4, files

export = inspect.signature(ckpipe.SyncPipeline.save).parameters["export"]
assert "raw" in export.annotation

def refusal(**arguments):
    try:
        ckpipe.export("run", **arguments)
    except ckpipe.CkpipeError as error:
        print(error.message)

refusal(form="none", target="other")
refusal(form="torch", target="out")  # all.raw is there, which a reader of this form might take
refusal(form="torch", target="other", extra=["out/all.raw"])
"""


@pytest.mark.sample(2, of="changes")
def test_a_form_of_an_export_is_three_places(tree: ChangedTree) -> None:
    tree.add("Form", '"raw"')
    tree.add("_FORMS", '"raw": (_ExportPlan.raw, (".raw",))')
    tree.add("_ExportPlan", RAW_FILES)
    assert tree.places == 3
    assert tree.run(RAW_EXPORTS).out.splitlines()[1:] == [
        "form is 'torch', 'hf', 'dcp' or 'raw', not 'none'",
        "This file belongs to another export",
        "Extra files need names of their own; these are all.raw",
    ]


def test_each_form_of_an_export_is_described() -> None:
    setting = ckpipe.Settings.model_fields["final_format"]
    _, *forms = get_args(setting.annotation)
    assert "hf" in forms
    for form in forms:
        assert f'``"{form}"``' in (inspect.getdoc(ckpipe.export) or "")
        assert f'``"{form}"``' in (setting.description or "")
        assert f'| `"{form}"` |' in (REFERENCE / "pipeline.md").read_text()
        assert f"`{form}`" in (REFERENCE / "cli.md").read_text()


MADE_UP_SOURCE = '''
"""A format of another program: a file is one tensor of bytes."""

from ckpipe import sources


class MadeUpSource:
    name = "made up"

    def recognizes(self, listing):
        return any(each.key.endswith(".made") for each in listing)

    async def describe(self, store, listing, place):
        files = [each for each in listing if each.key.endswith(".made")]
        state = {}
        for each in files:
            extent = sources.Extent(each.key, 0, each.size)
            state[each.key[:-5]] = sources.ForeignTensor("uint8", (each.size,), (extent,))
        return sources.virtual_manifest(state, files, place)
'''
FOREIGN_LOADS = """
import ckpipe, torch
from pathlib import Path

Path("folder").mkdir()
for path in ("a.made", "folder/a.made"):
    Path(path).write_bytes(bytes([5, 6]))
state = {"a": torch.zeros(2, dtype=torch.uint8)}
for place in ("a.made", "folder"):
    assert ckpipe.load(place).state["a"].tolist() == [5, 6]
    with ckpipe.SyncPipeline("run") as pipeline:
        pipeline.load(state, source=place)
    assert state["a"].tolist() == [5, 6]
    info = ckpipe.import_checkpoint(place, "imported", step=1)
    assert ckpipe.verify(place).files == 1
"""


@pytest.mark.sample(2, of="changes")
def test_a_format_to_read_is_two_places(tree: ChangedTree) -> None:
    tree.create("foreign/made_up.py", MADE_UP_SOURCE)
    tree.add("_OWN_SOURCES", '"ckpipe.foreign.made_up:MadeUpSource": (".made",)')
    assert tree.places == 2
    tree.run(FOREIGN_LOADS)


MADE_UP_TRANSFORM = '''

class MadeUp(Transform):
    """Append a word to all labels."""

    def __init__(self, word: str) -> None:
        self._word = word

    def _apply(self, edit: ManifestEdit) -> None:
        Rename({"*": f"*{self._word}"})._apply(edit)
'''
TRANSFORMED_LOADS = """
import ckpipe, torch
from ckpipe.cli.app import run
from pathlib import Path

Path("file.toml").write_text('[[transform]]\\nkind = "MadeUp"\\nword = "_new"\\n')
with ckpipe.SyncPipeline("run") as pipeline:
    pipeline.save({"a": torch.ones(2)}, 1)
assert ckpipe.load("run", transform=[ckpipe.MadeUp("_new")]).state["a_new"].tolist() == [1, 1]
assert run(["import", "run", "imported", "--transform", "file.toml"]) == 0
assert ckpipe.load("imported").state["a_new"].tolist() == [1, 1]
assert "MadeUp" in dir(ckpipe)
Path("file.toml").write_text('[[transform]]\\nkind = "MadeUp"\\nword = 1\\n')
assert run(["import", "run", "again", "--transform", "file.toml"]) != 0
"""


@pytest.mark.sample(2, of="changes")
def test_a_transform_is_its_class_and_its_name(tree: ChangedTree) -> None:
    module = ckpipe.Rename.__module__
    path, last = f"{module.partition('.')[2].replace('.', '/')}.py", "import Rename as Rename\n"
    tree.append(path, MADE_UP_TRANSFORM)
    tree.insert("__init__.py", '"Rename"', ', "MadeUp"')
    tree.insert("__init__.py", last, f"    from {module} import MadeUp as MadeUp\n")
    assert tree.places == 3
    said = tree.run(TRANSFORMED_LOADS).err
    assert "MadeUp: word is 1: " in said


BUILT = """
def _user_list(self, node: Node, label: str, live: Any, use: Use | None) -> Factory:
    from collections import UserList

    makers = self._elements(node, label, list(live) if isinstance(live, UserList) else NOTHING, use)
    return lambda: UserList([make() for make in makers])
"""
CONTAINER_LOADS = """
import ckpipe, torch
from collections import UserList
from ckpipe.cli.app import run

inner = UserList([torch.ones(2), "text", {"b": 3}])
state = {"a": inner, "again": inner, "plain": [4]}
with ckpipe.SyncPipeline("run") as pipeline:
    pipeline.save(state, 1)
    pipeline.save(state, 2, include=["a.0"])
for transform in ([], [ckpipe.Rename({"a": "new", "again": "new_again"})]):
    loaded = ckpipe.load("run", step=1, transform=transform).state
    made = loaded["new" if transform else "a"]
    assert type(made) is UserList and made is loaded["new_again" if transform else "again"]
    assert made[0].tolist() == [1, 1] and made[1:] == ["text", {"b": 3}]
(one, *_) = ckpipe.load("run", step=2).state["a"]
assert one.tolist() == [1, 1]
target = {"a": UserList([torch.zeros(2), "", {"b": 0}])}
tensor = target["a"][0]
with ckpipe.SyncPipeline("run") as pipeline:
    pipeline.load(target, 1, strict=False)
assert target["a"][0] is tensor and tensor.tolist() == [1, 1] and target["a"][2] == {"b": 3}
assert ckpipe.inspect("run", 1).tensors[0].label == "a.0"
for command in (["info", "run", "1"], ["diff", "run", "1", "1"], ["verify", "run"]):
    assert run(command) == 0
"""


@pytest.mark.sample(2, of="changes")
def test_a_container_is_an_entry_in_three_tables(tree: ChangedTree) -> None:
    tree.add("FORMS", '"user_list": ("nodes",),')
    tree.add("_EXACT", '__import__("collections").UserList: Kind("user_list", _sequence),')
    tree.add("_PLANS", '"user_list": Matching._user_list,')
    tree.add("Matching", BUILT)
    assert tree.places == 4
    tree.run(CONTAINER_LOADS)


IN_CATALOG = '''
async def oldest(self) -> CheckpointInfo | None:
    """Find the oldest complete checkpoint."""
    return next((each for each in await self.steps(metadata=False) if each.complete), None)
'''
IN_PIPELINE = '''
async def oldest(self) -> CheckpointInfo | None:
    """Find the oldest complete checkpoint."""
    return await self._run(self._engine.catalog.oldest)
'''
IN_SYNC_PIPELINE = '''
def oldest(self) -> CheckpointInfo | None:
    """Find the oldest complete checkpoint."""
    return self._call(self._engine.catalog.oldest)
'''
IN_COMMANDS = '''
def oldest(ctx: typer.Context, url: Url) -> None:
    """Find the oldest complete checkpoint."""

    async def work(screen: Screen) -> int:
        async with open_store(url, screen.settings, Access.READ) as store:
            info = await Catalog(store).oldest()
        screen.result({"step": info.step}, Text(f"step {info.step}"))
        return OK

    serve(ctx, work)
'''
ASKS_FOR_THE_OLDEST = """
import asyncio, ckpipe
from ckpipe.cli.app import run

async def main():
    async with ckpipe.Pipeline("run") as pipeline:
        for step in (3, 4):
            await (await pipeline.save({"a": 1}, step))
        assert (await pipeline.oldest()).step == 3

asyncio.run(main())
with ckpipe.SyncPipeline("run") as pipeline:
    assert pipeline.oldest().step == 3
assert run(["oldest", "run"]) == 0
"""
TELLS_OF_THE_SURFACE = """
from tests.api import test_public_surface as surface

def tells(test, *arguments):
    try:
        test(*arguments)
    except AssertionError:
        return True
    return False

print(
    tells(surface.test_both_pipelines_take_the_same),
    tells(surface.test_signatures_are_these, "Pipeline"),
    tells(surface.test_signatures_are_these, "SyncPipeline"),
)
"""


@pytest.mark.sample(2, of="changes")
def test_a_verb_is_three_methods_and_a_command_is_two_places(tree: ChangedTree) -> None:
    tree.add("Catalog", IN_CATALOG)
    tree.add("Pipeline", IN_PIPELINE)
    assert tree.run(TELLS_OF_THE_SURFACE).out == "True True False\n"
    tree.add("SyncPipeline", IN_SYNC_PIPELINE)
    tree.append("cli/housekeeping.py", IN_COMMANDS)
    tree.add("COMMANDS", 'Command("oldest", "housekeeping:oldest", "Find the oldest checkpoint."),')
    assert tree.places == 5
    assert tree.run(ASKS_FOR_THE_OLDEST + TELLS_OF_THE_SURFACE).out == "step 3\nFalse True True\n"


MADE_UP_TRAINER = '''
"""A callback for a trainer that calls ``after_step``."""

from ckpipe.integrations.shared import TrainerPipeline


class MadeUpCallback:
    def __init__(self, url):
        self.pipeline = TrainerPipeline(url, "MadeUpCallback", "resume", keep_last=2).open()

    def after_step(self, step, state):
        self.pipeline.save(state, step)

    def resume(self, state):
        found = self.pipeline.load(state)
        return 0 if found is None else found.step

    def end(self):
        self.pipeline.close()
'''
TRAINS = """
from ckpipe.integrations.made_up import MadeUpCallback

state = {"a": 0}
for _ in range(2):
    callback = MadeUpCallback("run")
    first = callback.resume(state)
    for step in range(first + 1, first + 4):
        state["a"] += step
        callback.after_step(step, state)
    callback.end()
print(first, state["a"])
"""


@pytest.mark.sample(2, of="changes")
def test_a_trainer_is_one_file(tree: ChangedTree) -> None:
    tree.create("integrations/made_up.py", MADE_UP_TRAINER)
    assert tree.places == 1
    assert tree.run(TRAINS).out == "3 21\n"
