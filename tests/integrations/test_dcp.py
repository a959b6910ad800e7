"""``dcp.save``, ``dcp.async_save`` and ``dcp.load`` with the storage of ckpipe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

import ckpipe
from ckpipe.errors import UsageError
from ckpipe.integrations.dcp import CkpipeStorageReader, CkpipeStorageWriter
from tests.support.rank_processes import Gang, told
from tests.support.s3_servers import S3Server
from tests.support.sampling import EVERY, sample

dcp: Any = torch.distributed.checkpoint  # it does not export what it has
RUNS = "tests.integrations.dcp_runs:"


def test_saves_load_into_other_ranks_and_wrappers(world: Gang, tmp_path: Path) -> None:
    root = tmp_path / "run"
    saves = [("fsdp", "nested"), ("fsdp", "flat"), ("ddp", "nested")]
    assert world.run(f"{RUNS}save_kinds", root, 2, saves=saves) == [0, 0]
    for ranks, kind in ((1, "fsdp"), (4, "hsdp")):
        loads = sample([(*saved, kind) for saved in saves], 2)
        assert world.run(f"{RUNS}load_kinds", root, ranks, loads=loads) == [0] * ranks
    plain, expected = ckpipe.load(root), torch.load(f"{root}.ddp.pt")
    assert plain.metadata["name"] == "ddp-nested"
    model = plain.state["model"]
    assert model.keys() <= expected.keys()
    for name, value in model.items():
        assert torch.equal(value, expected[name])


@pytest.mark.skipif(not EVERY, reason="the long form tries it")
def test_meshes_of_two_dimensions(world: Gang, tmp_path: Path) -> None:
    root = tmp_path / "run"
    saves = [(kind, "nested") for kind in ("2d", "tp", "hsdp")]
    assert world.run(f"{RUNS}save_kinds", root, 4, saves=saves) == [0] * 4
    loads = [("2d", "nested", "tp"), ("tp", "nested", "plain"), ("hsdp", "nested", "ddp")]
    assert world.run(f"{RUNS}load_kinds", root, 2, loads=loads) == [0, 0]


def test_failures_reach_all_ranks_and_leave_nothing(world: Gang, tmp_path: Path) -> None:
    assert world.run(f"{RUNS}fail", tmp_path / "run", 2) == [0, 0]


def test_recipes_of_pytorch(world: Gang, tmp_path: Path) -> None:
    assert world.run(f"{RUNS}follow_recipes", tmp_path / "run", 2) == [0, 0]


def test_planners_that_cut_tensors(world: Gang, tmp_path: Path) -> None:
    assert world.run(f"{RUNS}cut", tmp_path / "run", 2) == [0, 0]


def test_cached_plans(world: Gang, tmp_path: Path) -> None:
    assert world.run(f"{RUNS}cache_plans", tmp_path / "run", 2) == [0, 0]


def test_two_saves_at_once_do_not_mix(world: Gang, tmp_path: Path) -> None:
    assert world.run(f"{RUNS}save_at_once", tmp_path / "run", 2) == [0, 0]


class PlannerWithAnotherLoad(DefaultLoadPlanner):
    """Loads the checkpoint b in another thread, while a load has begun."""

    def __init__(self, reader: CkpipeStorageReader) -> None:
        super().__init__()
        self._reader = reader

    def create_local_plan(self) -> LoadPlan:
        with ThreadPoolExecutor() as pool:
            pool.submit(load, "b", self._reader).result()
        return super().create_local_plan()


def load(name: str, reader: CkpipeStorageReader, planner: Any = None) -> int:
    state = {"n": torch.tensor(-1)}
    dcp.load(state, checkpoint_id=name, storage_reader=reader, planner=planner, no_dist=True)
    return int(state["n"])


class RemakingPlanner(DefaultLoadPlanner):
    """Makes the plan anew in one step, with fields of its own; others see them in the next."""

    def __init__(self, step: str, remade: Any) -> None:
        super().__init__()
        self._step, self._remade, self.seen = step, remade, None

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return self._remade(plan) if self._step == "local" else plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [self._remade(each) if self._step == "global" else each for each in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.seen = central_plan.storage_data
        return self._remade(central_plan) if self._step == "finish" else central_plan


class PlanOfOnesOwn(LoadPlan):
    """A plan of another class."""


REMADE: dict[str, Any] = {
    "without data": lambda plan: LoadPlan(plan.items),
    "with data": lambda plan: LoadPlan(plan.items, {"own": 1}, {"of": "it"}),
    "with text": lambda plan: LoadPlan(plan.items, "own"),
    "another class": lambda plan: PlanOfOnesOwn(plan.items),
    "replaced": lambda plan: replace(plan, items=plan.items, storage_data=("own",)),
}


@pytest.mark.filterwarnings("ignore")
def test_a_load_planner_may_make_plans_anew(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        state = {"n": torch.tensor(number)}
        writer = CkpipeStorageWriter(tmp_path)
        dcp.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True)
    for (kind, remade), step in product(REMADE.items(), ("local", "global", "finish")):
        planner = RemakingPlanner(step, remade)
        assert load("a", CkpipeStorageReader(tmp_path), planner) == 0, (kind, step)
        own = remade(LoadPlan([])).storage_data
        assert planner.seen == (None if step == "finish" else own), (kind, step)


def test_load_planners_of_several_ranks(world: Gang, tmp_path: Path) -> None:
    assert world.run(f"{RUNS}remake_plans", tmp_path / "run", 2) == [0, 0]


class ForgetfulPlanner(DefaultSavePlanner):
    """Makes plans anew in one step of a save."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        if self._step == "global":
            plans = [SavePlan(plan.items, storage_data={"own": 1}) for plan in plans]
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        return SavePlan(plan.items) if self._step == "finish" else plan


@pytest.mark.filterwarnings("ignore")
def test_a_save_planner_may_make_plans_anew_until_the_last_step(tmp_path: Path) -> None:
    for step in ("global", "finish"):
        planner, writer = ForgetfulPlanner(step), CkpipeStorageWriter(tmp_path)
        told = pytest.raises(CheckpointException, match="finish_plan of a planner has made it anew")
        with nullcontext() if step == "global" else told:
            state = {"n": torch.tensor(3)}
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    assert load("", CkpipeStorageReader(tmp_path)) == 3


KEYS: list[Any] = [
    *({key: 1.0, "x": 2.0} for key in ("", ".", "~", "~0", "a.b", "a@b", "__metadata__")),
    {7: 1.0, 8: {"": 2.0}},  # dcp.load sorts the first keys
    {None: 1.0},
    {"": {"": 1.0}, "x": 2.0},
    {"": {"a": 1.0}, "a": 2.0},
    {"": "text", "a": {"": "more", "~": 1.0}},
    {"": 1.0, "~": 2.0, "~0": 3.0, "~~": 4.0, "~~0": 5.0},
    {"": [1.0, {"": 2.0}], "__metadata__": {"": 3.0}, "~__metadata__": {"": 4.0}},
    {"a": {"": {"": 1.0, "b": 2.0}, ".b.": 3.0}, "~": {"a": 4.0}, "\ud800": 5.0},
    {("a", 1): 1.0, ("b",): {2: 2.0, "3": 3.0, "": 4.0}},
]
"""States with keys that are unusual; a number stands for a tensor."""


def with_tensors(state: Any, scale: float) -> Any:
    """Return a state with tensors in the place of its numbers."""
    if isinstance(state, dict):
        return {key: with_tensors(value, scale) for key, value in state.items()}
    if isinstance(state, list):
        return [with_tensors(value, scale) for value in state]
    return torch.full((2,), state * scale) if isinstance(state, float) else state


@pytest.mark.filterwarnings("ignore")
def test_every_key_that_dcp_saves_loads(tmp_path: Path) -> None:
    for number, state in enumerate(KEYS):
        root, filled, found = tmp_path / f"{number}", with_tensors(state, 1), with_tensors(state, 0)
        dcp.save(filled, storage_writer=CkpipeStorageWriter(root), no_dist=True)
        dcp.load(found, storage_reader=CkpipeStorageReader(root), no_dist=True)
        assert repr(found) == repr(filled)


class ListeningPlanner(DefaultSavePlanner):
    """Notes the meta of the storage."""

    ids: ClassVar[list[str | None]] = []

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.ids.append(storage_meta.save_id)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


@pytest.mark.filterwarnings("ignore")
def test_metadata_have_what_torch_gives_them(tmp_path: Path) -> None:
    ours, reader = CkpipeStorageWriter(tmp_path / "ours"), CkpipeStorageReader(tmp_path / "ours")
    assert ours.storage_meta().save_id
    loads = set()
    for number in range(2):
        saved = [
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner, no_dist=True)
            for writer, planner in (
                (ours, ListeningPlanner()),
                (dcp.FileSystemWriter(tmp_path / f"{number}"), None),
            )
        ]
        assert saved[0].storage_meta.save_id == ours.save_id
        read: Any = reader.read_metadata()
        for each in (saved[0], read):
            assert each.version == saved[1].version
            assert each.storage_meta.save_id == ListeningPlanner.ids[number]
            assert each.storage_data.keys() == saved[1].storage_data.keys()
        assert read.storage_meta.load_id == reader.load_id
        loads.add(reader.load_id)
    assert len(set(ListeningPlanner.ids)) == len(loads) == 2
    before = ours.storage_meta().save_id
    ours.reset("another")
    assert ours.storage_meta().save_id not in {before, *ListeningPlanner.ids}


@pytest.mark.filterwarnings("ignore")
def test_two_loads_at_once_do_not_mix(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        writer = CkpipeStorageWriter(tmp_path)
        state = {"n": torch.tensor(number)}
        dcp.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True)
    reader, other = CkpipeStorageReader(tmp_path), CkpipeStorageReader(tmp_path)
    with pytest.raises(CheckpointException, match="use one CkpipeStorageReader at once"):
        load("a", reader, PlannerWithAnotherLoad(reader))
    assert load("a", reader, PlannerWithAnotherLoad(other)) == 0
    assert load("b", reader) == 1


def test_s3(world: Gang, tmp_path: Path, moto_server: S3Server) -> None:
    moto_server.make_bucket("dcp")
    case = {"endpoint": moto_server.url, "bucket": "s3://dcp/run"}
    assert world.run(f"{RUNS}on_s3", tmp_path / "run", 2, **case) == [0, 0]


DEATHS: list[dict[str, Any]] = [
    {"verb": verb, "key": key, "nth": nth, "landing": landing, "victim": victim}
    for victim in (0, 1)
    for verb, key in (("put", "m/0/"), ("open_upload", "rank-"))
    for nth in (3, 4)
    for landing in ("before", "after")
] + [{"verb": "put", "key": ".0.json", "nth": 3, "landing": "before", "victim": 0}]
"""Operations of the saves that a rank dies at: of its manifests, data files and the index."""


Told = dict[str, dict[int, list[Any]]]


def run(world: Gang, root: Path, *, ranks: int = 2, **case: Any) -> list[int | None]:
    """Run the training on some ranks; return their exit codes."""
    return world.run(f"{RUNS}train", root, ranks, **{"steps": 6, "resume": False, **case})


@pytest.fixture(scope="module")
def undisturbed(world: Gang, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Told]:
    """What a run without a fault tells, by the number of its ranks."""
    found = {}
    for ranks in (1, 2):
        root = tmp_path_factory.mktemp("undisturbed") / "run"
        assert run(world, root, ranks=ranks, mode="sync") == [0] * ranks
        found[ranks] = {"loss": told(root, "loss"), "sums": told(root, "sums")}
    return found


def check_resumed(
    world: Gang, root: Path, undisturbed: Told, at_least: int, *, ranks: int = 2, mode: str
) -> None:
    """Resume a run, and compare it with the undisturbed one to the bit."""
    assert run(world, root, ranks=ranks, mode=mode, resume=True) == [0] * ranks
    ((first,),) = {tuple(each) for each in told(root, "resumed").values()}
    assert at_least <= first < 6
    for rank in range(ranks):
        assert told(root, "loss")[rank][first - 6 :] == undisturbed["loss"][rank][first:]
    sums = {rank: [each[-1]] for rank, each in told(root, "sums").items()}
    assert sums == undisturbed["sums"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_killed_in_a_save_it_resumes_to_the_bit(
    world: Gang, tmp_path: Path, undisturbed: dict[int, Told], mode: str
) -> None:
    for number, death in enumerate(sample(DEATHS, 1)):
        root = tmp_path / f"run{number}"
        codes = run(world, root, mode=mode, **death)
        assert codes[death["victim"]] is None, death
        check_resumed(world, root, undisturbed[2], at_least=1, mode=mode)


def test_process_mode_resumes_to_the_bit(
    world: Gang, tmp_path: Path, undisturbed: dict[int, Told]
) -> None:
    root, ranks = tmp_path / "run", 2 if EVERY else 1
    codes = run(world, root, ranks=ranks, mode="process", steps=3, keep_last=2)
    assert codes == [0] * ranks
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        pipeline.verify(2)
    check_resumed(world, root, undisturbed[ranks], at_least=3, ranks=ranks, mode="sync")


@pytest.mark.parametrize(
    ("given", "variable"),
    [({"solo": True}, None), ({"plan": "global"}, None), ({"preemption": True}, None)]
    + [({}, name) for name in ("SOLO=1", "READ_ONLY=1", "ATTEMPT_ID=a", "SAVE_EVERY_STEPS=3")],
)
def test_settings_without_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: Any, variable: str | None
) -> None:
    name, _, value = (variable or "").partition("=")
    if variable is not None:
        monkeypatch.setenv(f"CKPIPE_{name}", value)
    name = name or next(iter(given))
    where = f" \\(from CKPIPE_{name}\\)" if variable else ""
    with pytest.raises(UsageError, match=f"setting {name.lower()}{where} has no effect with DCP"):
        CkpipeStorageWriter("root", **given)


def test_damage_is_found(world: Gang, tmp_path: Path) -> None:
    assert world.run(f"{RUNS}damage", tmp_path / "run", 2) == [0, 0]
