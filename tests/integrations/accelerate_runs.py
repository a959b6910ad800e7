"""Runs of a plain loop with accelerate in processes of their own, which a case may kill.

As a script this is a process that has imported accelerate and forks the ranks of each case.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import shutil
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpipe
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    SettingsError,
    StoreError,
    UnsupportedState,
    UsageError,
)
from ckpipe.integrations.accelerate import attach
from ckpipe.integrations.pointers import read_pointer
from ckpipe.integrations.shared import check_names
from ckpipe.testing import FaultyBackend
from ckpipe_local import LocalBackend
from tests.integrations.trainer_ranks import of, serve_runs
from tests.support.differences import difference
from tests.support.fork_server import Case
from tests.support.killed_runs import die, mortal_backend
from tests.support.sampling import sample
from tests.training.streams import ByEpoch, Each, Once, Stream

EPOCHS, SAVE_STEPS = 3, 4


class Average:
    """A registered object: the mean of the losses."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.count = state["sum"], state["count"]


class Run:
    """A model with dropout, its optimizer, a schedule and a shuffled loader under accelerate."""

    def __init__(self, case: Case, *, attached: bool = True) -> None:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        self.case, self.out = case, case["out"]
        naming = case.get("naming", True)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=case.get("accumulated", 2),
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=case.get("seedable", True),
                use_stateful_dataloader=case.get("stateful", True),
            ),
            project_config=ProjectConfiguration(
                project_dir=self.out, automatic_checkpoint_naming=naming, **case.get("project", {})
            ),
        )
        if case.get("scaler"):  # as with mixed precision on a GPU
            self.accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        samples = TensorDataset(torch.arange(40.0).view(40, 1) * torch.ones(4))
        order = {"shuffle": True, **case.get("loader", {})}
        loader = DataLoader(samples, batch_size=case.get("batch", 2), **order)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        others = DataLoader(samples, batch_size=4, **{"shuffle": True, **case.get("others", {})})
        self.others = self.accelerator.prepare(others)
        self.average = Average()
        self.seen: list[list[float]] = []
        self.losses: list[float] = []
        self.accelerator.register_for_checkpointing(self.average)
        self.batches = len(self.loader)
        self.pipeline = None
        if attached:
            url = case.get("url") or case["root"]
            self.pipeline = attach(self.accelerator, url, **case.get("settings", {}))

    def train(self, first: int = 0, last: int | None = None) -> None:
        """Take the steps from one to another, and save now and then."""
        last = EPOCHS * self.batches if last is None else last
        step = first
        while step < last:
            epoch, done = divmod(step, self.batches)
            self.loader.set_epoch(epoch)
            loader = self.loader
            if done and not self.case.get("stateful", True):
                loader = self.accelerator.skip_first_batches(loader, done)
            for (inputs,) in loader:
                self.step(inputs)
                step += 1
                if step % SAVE_STEPS == 0:
                    self.accelerator.save_state(**self.case.get("save", {}), step=step)
                    self.end_here(step, just_saved=True)
                self.end_here(step)
                if step == last:
                    return

    def evaluate(self) -> None:
        """Draw numbers, as an evaluation does."""
        self.model.eval()
        with torch.no_grad():
            for (inputs,) in self.others:
                self.model(inputs + torch.rand(1))
        self.model.train()

    def step(self, inputs: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.average.sum += loss.item()
        self.average.count += 1
        self.seen.append(inputs[:, 0].tolist())
        self.losses.append(loss.item())

    def end_here(self, step: int, *, just_saved: bool = False) -> None:
        """Kill the process where the case says so; between steps, once the last save has ended."""
        if self.case.get("dies") != step or self.case.get("just_saved", False) != just_saved:
            return
        name = f"checkpoint_{step // SAVE_STEPS - 1}"
        while not just_saved and not Path(self.out, "checkpoints", name).is_dir():
            os.sched_yield()
        if dist.is_initialized():
            dist.barrier()
        die()

    def outcome(self) -> dict[str, Any]:
        return {
            "weights": self.accelerator.unwrap_model(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "average": self.average.state_dict(),
            "iteration": self.accelerator.save_iteration,
            "random": (torch.rand(1).item(), float(np.random.rand()), random.random()),
            "losses": self.losses,
            "seen": self.seen,
        }


def train(case: Case) -> None:
    """Go on from the newest checkpoint to the end, and note all that it has come to."""
    if "url" in case:
        rank = dist.get_rank() if dist.is_initialized() else 0
        mortal_backend(case if case.get("victim") == rank else {"root": case["root"]})
    run = Run(case)
    chosen = run.accelerator.load_state()
    if chosen is not None and chosen.step % run.batches:
        run.evaluate()  # at the end of an epoch the generators are back before
    run.train(0 if chosen is None else chosen.step)
    rank = run.accelerator.process_index
    torch.save(run.outcome(), f"{case['out']}.result-{rank}")
    run.accelerator.end_training()


def names(case: Case) -> list[str]:
    return sorted(path.name for path in Path(case["out"], "checkpoints").glob("*"))


def names_are_those_of_accelerate(case: Case) -> None:
    for limit in (None, 1, 2):
        found = []
        for attached in (False, True):
            one = of(case, f"{limit}-{attached}", project={"total_limit": limit})
            run = Run(one, attached=attached)
            for _ in range(4):
                run.accelerator.save_state()
            run.accelerator.end_training()
            found.append(names(one))
        assert found[0] == found[1], (limit, found)
        with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
            complete = {info.id for info in pipeline.steps() if info.complete}
        pointers = [read_pointer(Path(one["out"], "checkpoints", name)) for name in found[1]]
        assert complete == {each.id for each in pointers if each is not None}
        again = Run(one)  # accelerate alone would meet a name that is there
        assert again.accelerator.load_state() is not None
        again.accelerator.save_state()
        assert again.accelerator.save_iteration == 5
        again.accelerator.end_training()


def another_run_deletes_nothing(case: Case) -> None:
    for number, more in enumerate(
        ({"project": {"total_limit": 1}}, {"settings": {"keep_last": 1}})
    ):
        one = of(case, f"{number}", **more)
        for saves in (3, 2):
            run = Run(one)
            run.accelerator.project_configuration.iteration = 10 * saves
            for _ in range(saves):
                run.accelerator.save_state()
            run.accelerator.end_training()
        assert names(one) == ["checkpoint_21", "checkpoint_32"], names(one)
        with ckpipe.SyncPipeline(one["root"], read_only=True) as pipeline:
            complete = {info.id for info in pipeline.steps() if info.complete}
        pointers = [read_pointer(Path(one["out"], "checkpoints", name)) for name in names(one)]
        assert complete == {each.id for each in pointers if each is not None}


def names_are_loaded(case: Case) -> None:
    one = of(case, "one", naming=False)
    run, weights = Run(one), {}
    folders = [Path(one["out"], name) for name in ("a", "b", "a", "of/a")]
    for folder in folders:
        run.train(0, 2)
        run.accelerator.save_state(str(folder))
        weights[folder] = [each.clone() for each in run.model.parameters()]
    run.accelerator.save_state()  # without a name
    run.accelerator.end_training()
    again = Run(one)
    for gone in (False, True):
        for folder in folders[1:]:
            if gone:
                shutil.rmtree(folder)
            # The path of another run is refused, and so is an older one of the same name.
            if gone and folder == folders[2]:
                with pytest.raises(CheckpointNotFound, match="of/a"):
                    again.accelerator.load_state(str(folder))
                continue
            assert again.accelerator.load_state(str(folder)) is not None
            assert all(map(torch.equal, again.model.parameters(), weights[folder]))
    assert again.accelerator.load_state("a") is not None
    assert all(map(torch.equal, again.model.parameters(), weights[folders[-1]]))
    for absent in ("c", "/of/another/run/b"):
        with pytest.raises(CheckpointNotFound, match=absent):
            again.accelerator.load_state(absent)
    again.accelerator.end_training()
    other = Run(of(case, "other", naming=False))
    other.accelerator.save_state(str(Path(case["out"], "other", "b")))
    other.accelerator.end_training()
    with pytest.raises(CheckpointNotFound, match="other/root"):
        Run(one).accelerator.load_state(str(Path(case["out"], "other", "b")))
    # What accelerate wrote by itself is loaded as ever, also under a name that ckpipe has saved.
    plain = Run(one, attached=False)
    plain.train(0, 3)
    plain.accelerator.save_state(str(folders[1]))
    mixed = Run(one)
    for more in ({}, {"map_location": "cpu"}):
        assert mixed.accelerator.load_state(str(folders[1]), **more) is None
        assert all(map(torch.equal, mixed.model.parameters(), plain.model.parameters()))
    mixed.accelerator.end_training()


def loads_by_name_wait_for_their_save(case: Case) -> None:
    """A load directly after a save under a name that is there takes the new one."""
    one = of(case, "one", naming=False, url="waiting://store")
    slow = FaultyBackend(LocalBackend(one["root"]))
    ckpipe.register_backend("waiting", lambda url: slow)
    folder = str(Path(one["out"], "last"))
    for launch in range(2):
        run = Run(one)
        if launch:  # the name is one of an earlier launch
            run.accelerator.load_state(folder)
        for _ in range(2):
            run.train(0, 2)
            gate = slow.pause(lambda each: each.verb == "put" and each.key.endswith(".json"))
            run.accelerator.save_state(folder)
            weights = [each.detach().clone() for each in run.model.parameters()]
            run.train(0, 1)
            gate.wait_until_held()
            threading.Timer(0.3, gate.release).start()
            assert run.accelerator.load_state(folder) is not None
            assert all(map(torch.equal, run.model.parameters(), weights))
        # Of two saves under one name the second counts, in whichever order they are complete.
        gate = slow.pause(lambda each: each.verb == "put" and each.key.endswith(".json"))
        run.accelerator.save_state(folder)
        gate.wait_until_held()
        run.train(0, 2)
        last = run.accelerator.save_state(folder)
        last.wait()
        gate.release()
        run.accelerator.end_training()
        pointer = read_pointer(folder)
        assert pointer is not None
        assert pointer.id == last.id
    # After a save that failed the older one is not taken for it.
    run = Run({**one, "settings": {"on_error": "warn", "upload": {"retries": 0}}})
    run.accelerator.load_state(folder)
    slow.fail(StoreError("broken"), lambda each: each.key.endswith(".json"), times=None)
    run.accelerator.save_state(folder)
    with pytest.raises(CkpipeError, match="broken"):
        run.accelerator.load_state(folder)
    slow.heal()
    run.accelerator.end_training()


def ranks_load_by_name(case: Case) -> None:
    """All ranks take the checkpoint of the name that they have just saved."""
    run, folder = Run({**case, "naming": False}), str(Path(case["out"], "last"))
    saved: list[str] = []
    for _ in range(3):
        run.train(0, 2)
        saved.append(run.accelerator.save_state(folder).id)
        weights = [each.detach().clone() for each in run.model.parameters()]
        run.train(0, 1)
        chosen = run.accelerator.load_state(folder)
        assert chosen is not None
        assert chosen.id == saved[-1]
        assert all(map(torch.equal, run.model.parameters(), weights))
    run.accelerator.end_training()


class Strange:
    """An object that only pickle can save."""


def pickled_objects_go_on(case: Case) -> None:
    class Odd(Average):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "odd": Strange()}

    def new(settings: dict[str, Any]) -> Run:
        run = Run(of(case, "one", settings=settings))
        run.accelerator.register_for_checkpointing(Odd())
        return run

    text = r'pickle="allow" in the arguments of attach\(\)'
    refused = new({})
    with pytest.raises(UnsupportedState, match=text) as caught:
        refused.accelerator.save_state()
    assert "exclude" not in str(caught.value)
    refused.accelerator.end_training()
    run = new({"pickle": "allow"})
    run.accelerator.save_state()
    assert run.accelerator.load_state() is not None
    run.accelerator.end_training()
    refused = new({})
    with pytest.raises(UnsupportedState, match=text) as caught:
        refused.accelerator.load_state()
    assert "exclude" not in str(caught.value)
    refused.accelerator.end_training()


def names_that_cannot_be_written_are_told(case: Case) -> None:
    said = messages()
    for number, place in enumerate(("checkpoints/checkpoint_0", "checkpoints")):
        one = of(case, f"{number}")
        file = Path(one["out"], place)
        file.parent.mkdir(exist_ok=True)
        file.touch()
        run = Run(one)
        run.accelerator.save_state()
        with pytest.raises(CkpipeError, match=f"checkpoint_0 .*is complete at {one['root']}"):
            run.accelerator.end_training()
        run = Run(one)
        assert run.accelerator.load_state() is not None
        run.accelerator.end_training()
        for onward in ("raise", "warn"):
            run = Run({**one, "settings": {"on_error": onward}})
            run.accelerator.load_state()
            run.accelerator.project_configuration.iteration = 0
            run.accelerator.save_state()
            with pytest.raises(CkpipeError) if onward == "raise" else pytest.warns() as caught:
                run.accelerator.end_training()
            told = caught if isinstance(caught, list) else [caught]
            said += [str(each) for each in told]
    assert not any("A checkpoint failed" in each for each in said)


def saves_of_accelerate_stay(case: Case) -> None:
    one = of(case, "one", project={"total_limit": 1})
    plain = Run({**one, "project": {}}, attached=False)
    for _ in range(3):
        plain.accelerator.save_state()
    before = names(one)
    told = messages()
    run = Run(one)
    assert run.accelerator.load_state() is None
    assert "fresh beside checkpoints" in told[0]
    assert "checkpoint_2" in told[0]
    told.clear()
    for place in (one["out"], str(Path(one["out"], "checkpoints"))):
        there = Run({**one, "url": place, "naming": False})
        assert there.accelerator.load_state() is None
        assert "training starts fresh" in told.pop()
        there.accelerator.end_training()
    run.train(0, 2)
    run.accelerator.save_state()
    run.accelerator.save_state()
    run.accelerator.end_training()
    # The newest with ckpipe has taken the name of one of them.
    moved = ["before-ckpipe.checkpoint_0", "before-ckpipe.checkpoint_1"]
    assert names(one) == [*moved, "checkpoint_1", *before[2:]]
    again = Run({**one, "settings": {"resume": "never"}})
    assert again.accelerator.load_state() is None
    assert again.accelerator.load_state(str(Path(one["out"], "checkpoints", moved[0]))) is None
    assert not any("fresh" in each for each in told[1:])
    again.accelerator.end_training()


def settings_come_from_the_environment(case: Case) -> None:
    one = of(case, "one", project={"total_limit": 1})
    for value, left in (("2", 2), ("", 1)):
        os.environ["CKPIPE_KEEP_LAST"] = value
        run = Run({**one, "root": f"{one['root']}-{left}"})
        for _ in range(4):
            run.accelerator.save_state()
        run.accelerator.end_training()
        with ckpipe.SyncPipeline(f"{one['root']}-{left}", read_only=True) as pipeline:
            assert sum(info.complete for info in pipeline.steps()) == left
    os.environ["CKPIPE_INITIAL"] = "/weights"
    with pytest.raises(UsageError, match="CKPIPE_INITIAL"):
        Run(one)


def scalers_go_on(case: Case) -> None:
    one = of(case, "one", scaler=True)
    run = Run(one)
    run.train(0, 14)
    run.accelerator.end_training()
    again = Run(one)
    chosen = again.accelerator.load_state()
    assert chosen is not None
    assert chosen.step == 12
    again.train(12, 14)
    scalers = [each.accelerator.scaler.state_dict() for each in (run, again)]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] > 65536
    assert all(map(torch.equal, run.model.parameters(), again.model.parameters()))
    again.accelerator.end_training()


def other_ranks_go_on(case: Case) -> None:
    """Resume with one rank what two have saved."""
    run = Run(case)
    with pytest.raises(CkpipeError, match="per_rank"):
        run.accelerator.load_state()
    run.accelerator.end_training()
    run = Run({**case, "settings": {"per_rank": "drop"}})
    chosen = run.accelerator.load_state()
    assert chosen is not None
    assert chosen.step == 8
    run.train(0, run.batches)
    assert len(run.seen) == 20
    run.accelerator.end_training()


def persistent_streams_are_refused(case: Case) -> None:
    for kind, persistent in itertools.product((Stream, Once, Each, ByEpoch), (False, True)):
        run = Run(of(case, f"{kind.__name__}-{persistent}"))
        run.accelerator.prepare(DataLoader(kind(), num_workers=2, persistent_workers=persistent))
        refused = persistent and kind in (Once, Each)
        match = pytest.raises(UsageError, match="persistent_workers=False")
        with match if refused else nullcontext():
            run.accelerator.save_state()
        run.accelerator.end_training()


def evaluated(case: Case, last: int | None = None) -> Run:
    """Train to a step from wherever the run is, with an evaluation after each epoch."""
    run = Run(case)
    chosen = run.accelerator.load_state()
    step = 0 if chosen is None else chosen.step
    while step < (last or EPOCHS * run.batches):
        ends = min(step - step % run.batches + run.batches, last or 1000)
        run.train(step, ends)
        step = ends
        if step % run.batches == 0:
            run.evaluate()
    run.accelerator.end_training()
    return run


def loaders_of_evaluations_go_on(case: Case) -> None:
    kinds = [{"shuffle": False}, {"shuffle": True}, {"shuffle": False, "num_workers": 1}]
    matrix = itertools.product(kinds, [True, False], [(8,), (24,), (8, 12), (24, 28)])
    for number, (others, stateful, stops) in enumerate(sample(matrix, 3)):
        more = {"others": others, "stateful": stateful, "naming": False}
        whole = evaluated(of(case, f"whole-{number}", **more)).outcome()
        one = of(case, f"{number}", **more)
        for step in stops:
            evaluated(one, step)
        found = evaluated(one).outcome()
        for name in ("losses", "seen"):
            whole[name] = whole[name][len(whole[name]) - len(found[name]) :]
        if (other := difference(found, whole)) is not None:
            raise AssertionError((others, stateful, stops, other))


def other_batches_are_told(case: Case) -> None:
    one = of(case, "one")
    run = Run(one)
    run.train(0, 8)
    run.accelerator.end_training()
    for change, expected in [
        ({}, None),
        ({"batch": 4}, "batch size of a loader was 2 at step 8 and is 4"),
        ({"accumulated": 1}, "gradient_accumulation_steps was 2 at step 8 and is 1"),
    ]:
        said = messages(logging.INFO)
        again = Run({**one, **change})
        again.accelerator.load_state()
        again.accelerator.end_training()
        assert [each for each in said if "left out" in each] == (
            [] if expected is None else [f"The {expected}: samples may be left out or come twice"]
        )
        assert any("the data go on" in each for each in said) == ("batch" not in change), said


def orders_go_on_or_are_told(case: Case) -> None:
    seedable, other = {"seedable": True}, {"seedable": False}
    in_turn = {"seedable": False, "loader": {"shuffle": False, "num_workers": 1}}
    workers = {"loader": {"num_workers": 1}}
    kinds: list[tuple[dict[str, Any], dict[str, Any], bool, bool]] = [
        (seedable, seedable, False, True),
        (seedable | workers, seedable | workers, True, True),
        (seedable | workers, seedable | workers, False, False),
        (other, other, True, False),
        (other | workers, other | workers, True, False),
        (in_turn, in_turn, False, True),
        (seedable, other, True, False),
        (other, seedable, True, False),
    ]
    for number, (before, after, loads, kept) in enumerate(kinds):
        run = Run(of(case, f"{number}", **before))
        if loads:
            run.accelerator.load_state()
        run.train(0, 8)
        run.accelerator.end_training()
        said = messages(logging.INFO)
        again = Run(of(case, f"{number}", **after))
        again.accelerator.load_state()
        assert any("the data go on" in each for each in said) == kept, (number, said)
        assert any("in another order" in each for each in said) != kept, (number, said)
        again.train(8, again.batches)
        again.accelerator.end_training()
        seen = {each for batch in run.seen + again.seen for each in batch}
        assert not kept or len(seen) == 40, (number, seen)


def persistent_workers_are_told(case: Case) -> None:
    for persistent in (False, True):
        said = messages()
        workers = {"num_workers": 1, "persistent_workers": persistent}
        run = Run(of(case, f"{persistent}", others=workers))
        run.train(0, 8)
        run.accelerator.end_training()
        assert len([each for each in said if "persistent_workers=True" in each]) == persistent


def wrong_uses_are_refused(case: Case) -> None:
    run = Run(of(case, "one"))
    run.accelerator.save_state()
    with pytest.raises(UsageError, match="strict, map_location"):
        run.accelerator.load_state(load_kwargs={"strict": False}, map_location="cpu")
    with pytest.raises(TypeError, match="steps"):
        run.accelerator.save_state(steps=3)
    run.accelerator.end_training()
    with pytest.raises(SettingsError, match="keep_lst"):
        Run(of(case, "unknown", settings={"keep_lst": 1}))
    with pytest.raises(UsageError, match=r"accelerate 1\.\S+ is here.* no_such"):
        check_names("accelerate", "0.1", {Accelerator: "prepare no_such"})
    with pytest.raises(UsageError, match="no_such"):
        check_names("accelerate", "0.1", {Accelerator.__init__: "_models no_such"})
    # The end of training is reached, also if a save fails.
    faulty, ended = FaultyBackend(LocalBackend(case["root"])), []
    faulty.fail(StoreError("broken"), lambda each: each.key.endswith(".json"), times=None)
    ckpipe.register_backend("faulty", lambda url: faulty)
    run = Run(of(case, "failing", url="faulty://store"), attached=False)
    run.accelerator.end_training = lambda: ended.append(True)
    attach(run.accelerator, "faulty://store", upload={"retries": 0})
    run.accelerator.save_state()
    with pytest.raises(CkpipeError):
        run.accelerator.end_training()
    assert ended == [True]
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        run.accelerator.state.distributed_type = kind
        with pytest.raises(UsageError, match="a form of its own"):
            attach(run.accelerator, case["root"])


def hooks_are_called(case: Case) -> None:
    def write(models: list[Any], weights: list[Any], folder: str) -> None:
        Path(folder, "mine.txt").write_text(f"{len(models)} {len(weights)}")
        weights.pop()

    def read(models: list[Any], folder: str) -> None:
        assert Path(folder, "mine.txt").read_text() == "1 1"
        models.pop()

    one = of(case, "one")
    run = Run(one)
    run.accelerator.register_save_state_pre_hook(write)
    run.accelerator.register_load_state_pre_hook(read)
    run.train(0, 4)
    folder = str(Path(one["out"], "checkpoints", "checkpoint_0"))
    before = [each.clone() for each in run.model.parameters()]
    run.train(4, 6)
    after = [each.clone() for each in run.model.parameters()]
    run.accelerator.load_state(folder)
    assert all(map(torch.equal, run.model.parameters(), after))
    assert not all(map(torch.equal, after, before))
    assert run.average.count == 4
    assert run.accelerator.load_state() is not None  # the hook gets its folder
    run.accelerator.end_training()
    assert "model" not in ckpipe.load(one["root"]).state["training"]
    unnamed = Run(of(case, "unnamed", naming=False))
    unnamed.accelerator.register_save_state_pre_hook(write)
    with pytest.raises(UsageError, match="write into a folder"):
        unnamed.accelerator.save_state()
    unnamed.accelerator.end_training()


def messages(level: int = logging.WARNING) -> list[str]:
    """A list that grows with what ckpipe logs."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpipe").addHandler(handler)
    logging.getLogger("ckpipe").setLevel(level)
    return said


def lost_gradients_are_told(case: Case) -> None:
    one, said = of(case, "one"), messages()
    run = Run(one)
    run.train(0, 2)
    run.accelerator.save_state()
    assert said == []
    run.train(2, 3)
    run.accelerator.save_state()
    assert "gradients" in said[0]
    run.accelerator.end_training()


def several_models_go_on(case: Case) -> None:
    def new() -> tuple[Any, list[Any]]:
        torch.manual_seed(3)
        accelerator = Accelerator(cpu=True)
        nets = [nn.Linear(3, 3), nn.Linear(3, 3)]
        optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
        prepared = list(accelerator.prepare(*nets, *optimizers))
        attach(accelerator, case["root"])
        return accelerator, prepared

    def step(parts: list[Any]) -> list[torch.Tensor]:
        for net, optimizer in zip(parts[:2], parts[2:], strict=True):
            optimizer.zero_grad()
            net(torch.ones(3)).square().sum().backward()
            optimizer.step()
        return [each.detach().clone() for net in parts[:2] for each in net.parameters()]

    accelerator, parts = new()
    step(parts)
    accelerator.save_state()
    accelerator.end_training()
    expected = step(parts)
    again, others = new()
    assert again.load_state() is not None
    assert all(map(torch.equal, step(others), expected))
    again.end_training()


def resume_obeys_its_setting(case: Case) -> None:
    one = of(case, "one", settings={"resume": "must"})
    run = Run(one)
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        run.accelerator.load_state()
    run.accelerator.end_training()
    one["settings"] = {}
    run = Run(one)
    assert run.accelerator.load_state() is None
    run.train(0, 4)
    run.accelerator.end_training()
    assert run.pipeline is not None
    assert "closed" in repr(run.pipeline)
    shutil.rmtree(Path(one["out"], "checkpoints"))
    again = Run({**one, "settings": {"resume": "must"}})
    chosen = again.accelerator.load_state()
    assert chosen is not None
    assert chosen.step == 4
    again.accelerator.end_training()
    said, choices = messages(), ({"resume": "auto"}, {"resume": "never"}, {"resume": "must"})
    for settings in choices:
        begins = Run({**one, "settings": settings})
        with suppress(CkpipeError):
            begins.accelerator.load_state("absent")
        must = settings["resume"] == "must"
        text = "The run begins anew, though .* has step-"
        for _ in range(2):
            with pytest.raises(UsageError, match=text) if must else nullcontext():
                begins.accelerator.save_state()
        begins.accelerator.end_training()
        told = [each for each in said if re.search(text, each)]
        assert len(told) == (settings["resume"] == "auto")
        said.clear()
    with pytest.raises(UsageError, match="initial has no effect"):
        Run({**one, "settings": {"initial": "/weights"}})


if __name__ == "__main__":
    serve_runs()
