"""Runs of Lightning's Trainer in processes of their own, which a case may kill.

As a script this is a process that has imported lightning and forks the ranks of each case.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lightning as pl
import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpipe
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    StoreError,
    UnsupportedState,
    UsageError,
)
from ckpipe.integrations.lightning import (
    CkpipeCallback,
    CkpipeCheckpointIO,
    CkpipeModelParallelStrategy,
    load_from_checkpoint,
)
from ckpipe.integrations.pointers import read_pointer
from ckpipe.testing import FaultyBackend, Operation, SlowBackend
from ckpipe_local import LocalBackend
from tests.integrations.trainer_ranks import begin_rank, whole
from tests.support.differences import difference
from tests.support.fork_server import Case, serve
from tests.support.killed_runs import die, mortal_backend

T = TypeVar("T")
BATCHES, EPOCHS = 10, 3


class Module(pl.LightningModule):
    """A model with dropout that notes its samples and losses; its metric goes up and down."""

    def __init__(self, case: Case, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.case = case
        self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.Linear(width, 1))
        self.register_buffer("step", torch.tensor(0))
        self.seen: list[list[float]] = []
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        samples = TensorDataset(torch.arange(20.0 * self.case["ranks"]).view(-1, 1) * torch.ones(4))
        kind = torch.utils.data.DataLoader if self.case.get("plain") else StatefulDataLoader
        if self.case["ranks"] == 1:
            size = self.case.get("batch", getattr(self, "batch_size", 2))
            return kind(samples, batch_size=size, shuffle=True)
        # The order of the sampler that Lightning would put in place is lost at a resume.
        shards: Any = {"num_replicas": 1, "rank": 0} if self.case.get("tensor") else {}
        sampler: Any = DistributedSampler(samples, **shards)
        sampler.set_epoch(self.trainer.current_epoch)
        return kind(samples, batch_size=2, sampler=sampler)

    def configure_model(self) -> None:
        if self.case.get("tensor"):
            cuts = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], cuts)
        elif self.case.get("sharded"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        (inputs,) = batch
        self.step.fill_(self.global_step + 1)
        loss: torch.Tensor = (self.net(inputs) - inputs.sum(1, keepdim=True) / 40).square().mean()
        self.seen.append(inputs[:, 0].tolist())
        self.losses.append(loss.item())
        self.log("score", torch.tensor(float(self.global_step * 7 % 5)))
        return loss

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.net(batch[0])

    predict_step = test_step

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.net(batch[0])

    def val_dataloader(self) -> Any:
        return []

    def test_dataloader(self) -> Any:
        return self.train_dataloader()

    predict_dataloader = test_dataloader


class Dies(pl.Callback):
    """Ends the process before a step, or right after its save; SIGTERM only asks it to end."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        step = trainer.global_step
        if step == self.case.get("dies"):
            last = Path(self.case["out"], "last.ckpt")
            while (
                (found := read_pointer(last)) is None
                or found.before is not None
                or found.step < self.case["saved"]
            ):
                os.sched_yield()
            trainer.strategy.barrier()
            die()
        if step == self.case.get("ends"):
            os.kill(os.getpid(), signal.SIGTERM)


def new_io(case: Case) -> CkpipeCheckpointIO:
    settings = {"staging": {"block_bytes": 65536}, **case.get("settings", {})}
    return CkpipeCheckpointIO(case.get("url") or case["root"], **settings)


def new_trainer(case: Case, **more: Any) -> pl.Trainer:
    """The trainer of a case."""
    names = {"every_n_train_steps": 3, "save_last": True, "monitor": "score", "save_top_k": 2}
    saves = [ModelCheckpoint(case["out"], "{step}", **{**names, **case.get("names", {})})]
    several = case["ranks"] > 1
    strategy: Any = "auto"
    if case.get("sharded"):
        strategy = CkpipeModelParallelStrategy(
            new_io(case), process_group_backend="gloo",
            data_parallel_size=1 if case.get("tensor") else 2,
            tensor_parallel_size=2 if case.get("tensor") else 1,
        )  # fmt: skip
    elif several:
        strategy = DDPStrategy(process_group_backend="gloo")
    plugins = [new_io(case)] if case.get("with", True) and not case.get("sharded") else []
    if several:
        plugins.append(TorchElasticEnvironment())
    return pl.Trainer(
        accelerator="cpu", devices=more.get("devices", case["ranks"]), plugins=plugins,
        strategy=more.get("strategy", strategy), max_steps=more.get("max_steps", -1),
        accumulate_grad_batches=more.get("together", 1),
        max_epochs=case.get("epochs", EPOCHS), default_root_dir=case["out"], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            *more.get("callbacks", [CkpipeCallback()]), *more.get("saves", saves), Dies(case)
        ],
    )  # fmt: skip


def new_module(case: Case) -> Module:
    torch.manual_seed(7)
    module = Module(case)
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(8 + rank)
    random.seed(8 + rank)
    np.random.seed(8 + rank)
    return module


def fit(case: Case) -> pl.Trainer:
    """Train from wherever the run is."""
    trainer, module = new_trainer(case), new_module(case)
    io: Any = trainer.strategy.checkpoint_io
    trainer.fit(module, ckpt_path=case.get("path") or io.newest())
    return trainer


def train(case: Case) -> None:
    """Train from wherever the run is, and note all that it has come to."""
    rank = int(os.environ.get("RANK", 0))
    if "url" in case:
        mortal_backend(case if case.get("victim") == rank else {"root": case["root"]})
    trainer = fit(case)
    module: Any = trainer.lightning_module
    states = [module.state_dict(), trainer.optimizers[0].state_dict()]
    if case.get("sharded"):
        states = pickle.loads(pickle.dumps([whole(each) for each in states]))
    saves: Any = trainer.checkpoint_callback
    outcome = {
        "weights": states[0],
        "optimizer": states[1],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "best": {os.path.basename(name): score for name, score in saves.best_k_models.items()},
        "random": (torch.rand(1).item(), float(np.random.rand()), random.random()),
        "losses": module.losses,
        "seen": module.seen,
    }
    torch.save(outcome, f"{case['out']}.result-{rank}")


def of(case: Case, name: str, **more: Any) -> Case:
    folder = Path(case["out"]) / name
    return {**case, "out": str(folder / "out"), "root": str(folder / "root"), **more}


def names(case: Case) -> list[str]:
    return sorted(path.name for path in Path(case["out"]).iterdir())


def complete(case: Case) -> set[str]:
    with ckpipe.SyncPipeline(case["root"], read_only=True) as pipeline:
        return {info.id for info in pipeline.steps() if info.complete}


def names_are_those_of_lightning(case: Case) -> None:
    for number, chosen in enumerate(
        [
            {},
            {"save_last": "link"},
            {"save_top_k": 1, "mode": "max", "save_last": None},
            {"monitor": None, "save_top_k": 1},
            {"save_top_k": -1},
        ]
    ):
        found = []
        for own in (True, False):
            one = of(case, f"{number}-{own}", names=chosen, path=None, **{"with": own})
            trainer = new_trainer(one)
            trainer.fit(new_module(one))
            best: Any = trainer.checkpoint_callback
            assert Path(best.best_model_path).is_file()
            found.append((names(one), os.path.basename(best.best_model_path)))
        assert found[0] == found[1], chosen
        # What has no name is gone, but for the newest.
        one = of(case, f"{number}-True")
        pointers = [read_pointer(Path(one["out"], name)) for name in names(one)]
        named = {each.id for each in pointers if each is not None}
        assert named <= complete(one)
        assert complete(one) - named <= {max(complete(one))}, chosen


def names_are_loaded(case: Case) -> None:
    one = of(case, "one", epochs=2)
    trainer = fit(one)
    best: Any = trainer.checkpoint_callback
    saved = {
        name: ckpipe.load(one["root"], step=pointer.id).state["state_dict"]
        for name in names(one)
        if (pointer := read_pointer(Path(one["out"], name))) is not None
    }
    for name, path in (
        ("last.ckpt", "last"),
        (os.path.basename(best.best_model_path), "best"),
        ("step=6.ckpt", f"{one['out']}/step=6.ckpt"),
        ("step=6.ckpt", "step=6.ckpt"),
    ):
        for number, does in enumerate((trainer.test, trainer.validate, trainer.predict)):
            if name == "last.ckpt" or not number:
                loader = trainer.lightning_module.train_dataloader()
                does(trainer.lightning_module, loader, ckpt_path=path)
                found = dict(trainer.lightning_module.state_dict())
                assert difference(found, saved[name]) is None
            with torch.no_grad():
                trainer.lightning_module.net[0].weight.zero_()
    with pytest.raises(CheckpointNotFound, match=f"was saved as {one['out']}/step=6.ckpt"):
        trainer.test(trainer.lightning_module, ckpt_path="/of/another/run/step=6.ckpt")
    trainer.strategy.checkpoint_io.remove_checkpoint("/of/another/run/step=6.ckpt")
    shutil.copytree(one["out"], f"{one['out']}-copy")
    shutil.rmtree(one["out"])  # as on another machine
    trainer.test(trainer.lightning_module, ckpt_path=f"{one['out']}/step=6.ckpt", verbose=False)
    os.rename(f"{one['out']}-copy", one["out"])
    again: Any = new_trainer({**one, "epochs": 3})
    again.fit(new_module(one), ckpt_path="last")
    assert again.global_step == 30
    with pytest.raises(CheckpointNotFound, match="'absent"):
        fit({**one, "path": "absent.ckpt"})
    made = load_from_checkpoint(Module, best.best_model_path, case=one)
    assert difference(dict(made.state_dict()), saved["step=6.ckpt"]) is None
    assert made.hparams == {"width": 8}
    # A name that was a link to another one leaves that one alone.
    links = of(case, "links", names={"save_top_k": -1, "save_last": "link"}, epochs=1)
    fit(links)
    more = {"names": {"save_top_k": -1}, "path": f"{links['out']}/step=6.ckpt", "epochs": 2}
    fit({**links, **more})
    pointers = [read_pointer(Path(links["out"], name)) for name in names(links)]
    assert {each.id for each in pointers if each is not None} <= complete(links)
    # Files of Lightning are loaded and removed as ever.
    plain = of(case, "plain", epochs=2, names={"save_top_k": 1}, **{"with": False})
    other = new_trainer(plain)
    other.fit(new_module(plain))
    path = f"{plain['out']}/last.ckpt"
    written = torch.load(path, weights_only=False)["state_dict"]
    made = load_from_checkpoint(Module, path, case=plain)
    assert difference(dict(made.state_dict()), dict(written)) is None
    fit({**plain, "with": True, "epochs": 3, "path": path})
    assert read_pointer(path) is not None


def commits(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.startswith("step-")


class Slow(SlowBackend):
    """A store that holds what commits a save, while it is told to."""

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        if commits(operation):
            return await super().around(operation, call)
        return await call()


def slow_store(case: Case) -> Slow:
    store = Slow(LocalBackend(case["root"]))
    ckpipe.register_backend(case["url"].partition(":")[0], lambda url: store)
    return store


class HoldsSaves(pl.Callback):
    """Lets no save end before training does."""

    def __init__(self, case: Case) -> None:
        self.store = slow_store(case)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.store.hold()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.store.release()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.store.release()


def step_of(case: Case, path: str) -> int:
    return int(load_from_checkpoint(Module, path, case=case).step)


def names_are_there_at_once(case: Case) -> None:
    fixed = {"filename": "model", "monitor": "score"}
    cases: list[list[dict[str, Any]]] = [
        [{"monitor": "score"}, {"save_top_k": -1}],
        [{"monitor": "score", "mode": "max"}, {"save_last": True}],
        [{"monitor": None, "save_top_k": 1}, {"save_top_k": -1, "every_n_train_steps": 1}],
        [{**fixed, "save_top_k": 3}],
        [{**fixed, "save_top_k": 2, "save_last": "link", "every_n_train_steps": 1}],
        [{**fixed, "save_top_k": 1, "enable_version_counter": False}],
        [{"filename": "{score:.0f}", "monitor": "score", "save_top_k": -1}],
    ]
    for number, chosen in enumerate(cases):
        found = []
        for own in (True, False):
            one = of(
                case, f"{number}-{own}", epochs=1, url=f"slow{number}://store", **{"with": own}
            )
            saves = [
                ModelCheckpoint(one["out"], **{"every_n_train_steps": 3, **each}) for each in chosen
            ]
            own_ones = [CkpipeCallback(), HoldsSaves(one)] if own else []
            trainer = new_trainer(one, saves=saves, callbacks=own_ones)
            trainer.fit(new_module(one))
            left = {name: step_of(one, f"{one['out']}/{name}") for name in names(one)}
            best = [os.path.relpath(each.best_model_path, one["out"]) for each in saves]
            found.append((left, best, [left[each] for each in best]))
        assert found[0] == found[1], chosen


def loads_wait_for_the_save_of_their_name(case: Case) -> None:
    one = of(case, "one", url="slow://store", names={"save_top_k": 0, "save_last": None}, epochs=1)
    store, name = slow_store(one), f"{one['out']}/final.ckpt"
    fit_anew(one).save_checkpoint(name)
    plain = f"{one['out']}/plain.ckpt"
    other = of(case, "plain", names={"save_top_k": 0}, epochs=1, **{"with": False})
    fit_anew(other).save_checkpoint(plain)
    trainer = fit_anew({**one, "epochs": 2})
    module, io = trainer.lightning_module, trainer.strategy.checkpoint_io
    os.symlink("final.ckpt", f"{one['out']}/link.ckpt")
    for number, (saved, ways) in enumerate(
        (
            (name, ["test", "validate", "predict", "load_from_checkpoint", "load_checkpoint"]),
            (name, ["link.ckpt", "id"]),
            (plain, ["load_from_checkpoint", "load_checkpoint"]),
            (f"{one['out']}/new.ckpt", ["load_from_checkpoint", "load_checkpoint", "alone"]),
        )
    ):
        for way in ways:
            module.step.fill_(number + 100)
            store.hold()
            trainer.save_checkpoint(saved)
            module.step.fill_(0)
            store.gate.wait_until_held()
            pointer = read_pointer(saved)
            assert saved == plain or (pointer is not None and pointer.before is not None)
            threading.Timer(0.2, store.release).start()
            if way == "load_from_checkpoint":
                found: Any = step_of(one, saved)
            elif way in ("test", "validate", "predict"):
                getattr(trainer, way)(module, module.train_dataloader(), ckpt_path=saved)
                found = module.step
            else:
                link = f"{one['out']}/link.ckpt"
                paths = {"id": pointer and pointer.id, "alone": "new.ckpt", "link.ckpt": link}
                found = io.load_checkpoint(paths.get(way, saved))["state_dict"]["step"]
            assert int(found) == number + 100, (saved, way)
            store.release()
            if saved.endswith("new.ckpt"):
                io.remove_checkpoint(saved)
    store.hold()
    trainer.save_checkpoint(name)
    threading.Timer(0.2, store.release).start()
    assert io.newest() == read_pointer(name).id  # type: ignore[union-attr]
    io.teardown()


def ranks_wait_for_a_name(case: Case) -> None:
    one = {**case, "url": "slow://store", "names": {"save_top_k": 0, "save_last": None}}
    store, path = slow_store(one), f"{case['out']}/final.ckpt"
    trainer = fit_anew({**one, "epochs": 1})
    for number in (101, 102):
        trainer.lightning_module.step.fill_(number)
        store.hold()
        trainer.save_checkpoint(path)
        threading.Timer(0.2, store.release).start()
        assert step_of(one, path) == number
        io: Any = trainer.strategy.checkpoint_io
        assert int(io.load_checkpoint(path)["state_dict"]["step"]) == number
        trainer.strategy.barrier()
    io.teardown()


def fit_anew(case: Case) -> pl.Trainer:
    trainer = new_trainer(case)
    trainer.fit(new_module(case))
    return trainer


def dies_inside_saves(case: Case) -> None:
    """Leave three names of saves that are killed: a new one, one twice, and one complete."""
    one = {**case, "url": "slow://store", "names": {"save_top_k": 0, "save_last": None}}
    store, trainer = slow_store(one), fit_anew({**one, "epochs": 1})
    for name in ("old", "older"):
        trainer.lightning_module.step.fill_(len(name))
        trainer.save_checkpoint(f"{case['out']}/{name}.ckpt")
    trainer.save_checkpoint(f"{case['out']}/complete.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    store.hold()
    trainer.lightning_module.step.fill_(9)
    for name in ("new", "old", "older", "older"):
        trainer.save_checkpoint(f"{case['out']}/{name}.ckpt")
    die()


def a_killed_name_is_never_an_older_one(case: Case) -> None:
    one = {**case, "url": "slow://store", "epochs": 1}
    slow_store(one)
    trainer = new_trainer(one)
    module, files = new_module(one), {name: f"{one['out']}/{name}.ckpt" for name in ("new", "old")}
    for path in files.values():
        assert read_pointer(path).before is not None  # type: ignore[union-attr]
        for load in (
            lambda path=path: trainer.test(module, ckpt_path=path),
            lambda path=path: step_of(one, path),
            lambda path=path: new_io(one).load_checkpoint(path),
        ):
            with pytest.raises(FileNotFoundError, match="not ended, or it failed or was killed"):
                load()
    assert step_of(one, f"{one['out']}/complete.ckpt") == 5
    with pytest.raises(FileNotFoundError, match="not ended, or it failed or was killed"):
        fit({**one, "path": files["new"]})
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        load_from_checkpoint_absent(one)
    # A run goes on from what the name led to, and gives the names back.
    with heard() as said:
        again = fit({**one, "path": files["old"], "epochs": 2})
    assert again.global_step == 20
    assert any("failed or was killed: it leads to step-" in each for each in said)
    assert "new.ckpt" not in names(one)
    assert [step_of(one, f"{one['out']}/{name}.ckpt") for name in ("old", "older", "complete")] == [
        3, 5, 5,
    ]  # fmt: skip
    assert all(read_pointer(f"{one['out']}/{each}").before is None for each in names(one))  # type: ignore[union-attr]


class DiesAtItsEnd(pl.Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        die()


def dies_inside_its_saves(case: Case) -> None:
    store = slow_store(case)
    if case["complete"]:
        fit_anew({**case, "epochs": 1})
    store.hold()
    trainer = new_trainer({**case, "epochs": 2}, callbacks=[CkpipeCallback(), DiesAtItsEnd()])
    trainer.fit(new_module(case), ckpt_path=new_io(case).newest())


def last_goes_on_after_a_killed_save(case: Case) -> None:
    slow_store(case)
    last = {**case, "path": "last", "epochs": 2}
    if not case["complete"]:
        with pytest.raises(FileNotFoundError, match=r"has not ended, or .* killed \[step 18\]"):
            fit(last)
    with heard() as said:
        assert fit(last).global_step == 20
    resumed = [each for each in said if "resumed step 9" in each]
    assert len(resumed) == case["complete"]
    assert step_of(case, f"{case['out']}/last.ckpt") == 18
    assert all(read_pointer(f"{case['out']}/{each}").before is None for each in names(case))  # type: ignore[union-attr]


def a_link_stays_in_place_of_a_late_save(case: Case) -> None:
    one = of(case, "one", url="slow://store", names={"save_top_k": 0, "save_last": None}, epochs=1)
    store, trainer = slow_store(one), fit_anew(one)
    module, folder = trainer.lightning_module, Path(one["out"])
    for name, step in (("older", 7), ("last", 8), ("newer", 9)):
        module.step.fill_(step)
        if name == "last":
            store.hold()
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        if name == "last":
            (folder / "last.ckpt").unlink()
            (folder / "last.ckpt").symlink_to("newer.ckpt")
    store.release()
    trainer.strategy.checkpoint_io.teardown()
    assert (folder / "last.ckpt").is_symlink()
    assert step_of(one, f"{folder}/last.ckpt") == 9
    # Files that the next fit cannot read, or that are none, do not matter.
    (folder / "other.ckpt").write_text("other")
    (folder / "other.ckpt").chmod(0)
    (folder / "folder.ckpt").mkdir()
    fit({**one, "epochs": 2})
    assert {"other.ckpt", "folder.ckpt"} <= set(names(one))
    # A file in place of the folder.
    with pytest.raises(CkpipeError, match="cannot be written"):
        trainer.save_checkpoint(folder / "older.ckpt" / "new.ckpt")


def load_from_checkpoint_absent(case: Case) -> None:
    new_io(case).load_checkpoint(f"{case['out']}/absent.ckpt")


def a_failed_save_leaves_no_name(case: Case) -> None:
    one = of(case, "one", url="faulty://store", names={"save_top_k": 0, "save_last": None})
    one["settings"] = {"upload": {"retries": 0}}
    faulty = FaultyBackend(LocalBackend(one["root"]))
    ckpipe.register_backend("faulty", lambda url: faulty)
    trainer, old, new = (
        fit_anew({**one, "epochs": 1}),
        f"{one['out']}/old.ckpt",
        f"{one['out']}/new.ckpt",
    )
    trainer.save_checkpoint(old)
    trainer.strategy.checkpoint_io.load_checkpoint(old)
    faulty.fail(StoreError("broken"), commits, times=None)
    for path in (old, new):
        trainer.save_checkpoint(path)
        with pytest.raises(CkpipeError, match="broken"):
            trainer.strategy.checkpoint_io.load_checkpoint(path)
        with pytest.raises(CkpipeError, match=r"broken|not ended, or it failed or was killed"):
            step_of(one, path)
    faulty.heal()
    trainer.strategy.checkpoint_io.teardown()
    fit({**one, "epochs": 2})
    assert names(one) == ["old.ckpt"]
    assert step_of(one, old) == 10


def removals_are_remembered(case: Case) -> None:
    quiet = {"save_top_k": 0, "save_last": None}
    for number, settings in enumerate(({}, {"keep_last": 3})):
        one = of(case, f"tuner-{number}", epochs=1, names=quiet, settings=settings)
        for kind in ("lr_find", "scale_batch_size"):
            trainer, module = new_trainer(one), new_module(one)
            module.lr, module.batch_size = 1e-3, 2
            found = {"num_training": 5} if kind == "lr_find" else {"max_trials": 2}
            getattr(Tuner(trainer), kind)(module, **found)
            io: Any = trainer.strategy.checkpoint_io
            assert ckpipe.load(one["root"]).step == 0, "the core takes it"
            assert io.newest() is None
            io.teardown()
            assert new_io(one).newest() is None
        with pytest.raises(CheckpointNotFound, match="those of a tuner"):
            new_io({**one, "settings": {**settings, "resume": "must"}}).newest()
        trainer = fit({**one, "names": {**quiet, "save_last": True}})
        kept = read_pointer(f"{one['out']}/last.ckpt")
        assert kept is not None
        Tuner(trainer).lr_find(trainer.lightning_module, num_training=5, update_attr=False)
        assert new_io(one).newest() == trainer.strategy.checkpoint_io.newest() == kept.id
        assert fit({**one, "epochs": 2}).global_step == 20
        marks = {each.name for each in Path(one["root"], ".ckpipe", "removed").iterdir()}
        assert marks <= complete(one), "marks go with their checkpoints"
    # What top-k removes stays the newest as long as nothing else is there.
    two = of(case, "two", url="slow://store", epochs=1, names=quiet)
    store, trainer = slow_store(two), fit_anew({**two, "epochs": 1})
    io, files = trainer.strategy.checkpoint_io, [f"{two['out']}/{n}.ckpt" for n in range(3)]
    trainer.save_checkpoint(files[0])
    first = io.newest()
    store.hold()
    trainer.save_checkpoint(files[1])
    io.remove_checkpoint(files[0])
    assert new_io(two).newest() == first, "the newer one may yet fail"
    io.remove_checkpoint(files[1])  # its save is under way
    store.release()
    io.teardown()
    assert not list(Path(two["out"]).glob("?.ckpt"))
    assert new_io(two).newest() is not None, "nothing else is left"
    # Another launch removes it.
    trainer.save_checkpoint(files[2])
    io.teardown()
    other = new_io(two)
    newest = read_pointer(files[2]).id  # type: ignore[union-attr]
    assert other.newest() == newest
    other.remove_checkpoint(files[2])
    assert other.newest() == new_io(two).newest() == newest, "nothing else is left"
    other.teardown()


def slurm_requeues_what_is_durable(case: Case) -> None:
    one = of(case, "one", url="slow://store", names={"save_top_k": 0, "save_last": None})
    store = slow_store(one)
    store.latency = 0.3
    Path(one["out"]).mkdir(parents=True)
    told = Path(one["out"], "told")
    tool = Path(one["out"], "bin", "scontrol")
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho $@ > {told}\nls {one['root']} >> {told}\n")
    tool.chmod(0o755)
    os.environ.update(
        PATH=f"{tool.parent}:{os.environ['PATH']}", SLURM_NTASKS="1", SLURM_JOB_ID="7",
        SLURM_LOCALID="0", SLURM_PROCID="0", SLURM_NODEID="0", SLURM_JOB_NAME="run",
    )  # fmt: skip

    class Requeues(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = new_trainer(one, callbacks=[CkpipeCallback(), Requeues()])
    trainer.fit(new_module(one))
    assert "requeue 7" in told.read_text()
    assert ".json" in told.read_text(), "no complete checkpoint"
    assert step_of(one, f"{one['out']}/hpc_ckpt_1.ckpt") == 4
    # The signal comes inside a save.
    two = of(case, "two", url="faulty://store", epochs=1)
    faulty = FaultyBackend(LocalBackend(two["root"]))
    faulty.call(lambda _: os.kill(os.getpid(), signal.SIGUSR1), "open_upload")
    ckpipe.register_backend("faulty", lambda url: faulty)
    fit_anew(two)
    assert step_of(two, f"{two['out']}/hpc_ckpt_1.ckpt") == 3
    assert told.read_text().count("requeue 7") == 1, "it is written anew"
    told.unlink()
    with heard() as said:
        fit_anew(one)
    assert any("resumed step 4" in each for each in said)


def other_ways_work(case: Case) -> None:
    class Copies(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if trainer.global_step == 4:
                copied = copy.deepcopy([trainer.callbacks, trainer.strategy.checkpoint_io])
                assert copied[1].newest() is not None

    one = of(case, "copies", epochs=1)
    trainer = new_trainer(one, callbacks=[CkpipeCallback(), Copies()])
    trainer.fit(new_module(one))
    # A file of Lightning by its URL.
    plain = of(case, "plain", epochs=1, **{"with": False})
    fit_anew(plain).save_checkpoint("memory://runs/plain.ckpt")
    for path in ("memory://runs/plain.ckpt", f"file://{plain['out']}/last.ckpt"):
        trainer.test(trainer.lightning_module, ckpt_path=path, verbose=False)
        made = load_from_checkpoint(Module, path, case=one)
        assert (
            difference(dict(made.state_dict()), dict(trainer.lightning_module.state_dict())) is None
        )
    trainer.strategy.checkpoint_io.remove_checkpoint("memory://runs/plain.ckpt")
    with pytest.raises(FileNotFoundError):
        trainer.test(trainer.lightning_module, ckpt_path="memory://runs/plain.ckpt")
    # A save after processes that have ended with their group.
    two = of(case, "two", epochs=1, names={"save_top_k": 0, "save_last": None})
    spawned: Any = new_trainer(two, strategy="ddp_fork", devices=2)
    spawned.fit(new_module(two))
    spawned.save_checkpoint(f"{two['out']}/after.ckpt")
    assert step_of(two, f"{two['out']}/after.ckpt") == 5
    spawned.strategy.checkpoint_io.teardown()


def other_numbers_are_told(case: Case) -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"batch": 4}, False),
        ({"together": 2}, False),
        ({"scheduled": True}, True),
    ]
    for number, (more, claims) in enumerate(cases):
        one = of(case, f"{number}", epochs=1)
        callbacks = [CkpipeCallback()]
        if "scheduled" in more:
            callbacks.append(GradientAccumulationScheduler({0: 3}))
        new_trainer(one, callbacks=callbacks, max_steps=3).fit(new_module(one))
        with heard() as said:
            trainer = new_trainer(one, callbacks=callbacks, together=more.get("together", 1))
            io: Any = trainer.strategy.checkpoint_io
            trainer.fit(new_module({**one, **more}), ckpt_path=io.newest())
        assert any("the data go on" in each for each in said) == claims, more
        told = [each for each in said if "The epoch was begun with" in each]
        assert len(told) == (not claims), more
        assert all("'batch_size': [4]" in each or "batches': 2" in each for each in told)


def whole_epochs_go_on(case: Case) -> None:
    found = []
    for parts in ([3], [1, 2, 3]):
        one = of(case, f"{parts}", plain=True, names={"every_n_train_steps": None})
        for epochs in parts:
            trainer = fit({**one, "epochs": epochs})
            torch.rand(5), random.random(), np.random.rand()
        found.append((trainer.lightning_module.losses, dict(trainer.lightning_module.state_dict())))
    assert found[0][0][-BATCHES:] == found[1][0]
    assert difference(found[1][1], found[0][1]) is None


def names_of_shards_stay(case: Case) -> None:
    one = {**case, "names": {"save_top_k": -1, "save_last": None}, "epochs": 1}
    losses = fit(one).lightning_module.losses
    dist.barrier()
    pointers = [read_pointer(Path(one["out"], name)) for name in names(one)]
    assert {each.id for each in pointers if each is not None} == complete(one)
    assert set(names(one)) == {f"step={step}.ckpt" for step in range(3, 20, 3)}
    again = fit({**one, "path": f"{one['out']}/step=6.ckpt"}).lightning_module
    assert again.losses == losses[6:]


def signals_end_a_run_that_goes_on(case: Case) -> None:
    whole = fit(of(case, "whole")).lightning_module
    one = of(case, "one", names={"save_on_exception": True})
    with pytest.raises(SystemExit):
        fit({**one, "ends": 13})
    again: Any = fit(one)
    assert len(again.lightning_module.losses) == 16
    assert whole.losses[-16:] == again.lightning_module.losses
    assert difference(dict(again.lightning_module.state_dict()), dict(whole.state_dict())) is None


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the log."""
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpipe").addHandler(handler)
    logging.getLogger("ckpipe").setLevel(logging.INFO)
    yield said
    logging.getLogger("ckpipe").removeHandler(handler)


def no_run_begins_in_silence(case: Case) -> None:
    with heard() as said:
        _no_run_begins_in_silence(case, said)


def _no_run_begins_in_silence(case: Case, said: list[str]) -> None:
    one, must = of(case, "one", epochs=1), {"settings": {"resume": "must"}}
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        fit({**one, **must})
    assert new_io(one).newest() is None
    new_trainer(one).fit(new_module(one))
    assert not any("run begins" in each for each in said)
    new_trainer(one).fit(new_module(one))
    assert any("The run begins at step 0, though" in each for each in said)
    assert not any("resumed" in each for each in said)
    with pytest.raises(UsageError, match="The run begins at step 0, though"):
        new_trainer({**one, **must}).fit(new_module(one))
    shutil.rmtree(one["out"])
    again = fit({**one, **must, "epochs": 2})
    assert again.global_step == 20
    (line,) = [each for each in said if "resumed" in each]
    assert "resumed step 9 from step-" in line
    assert line.endswith("the data go on in epoch 0 after batch 9")
    for plain, step, text in (
        (True, 6, "a loader keeps no position, so its data begin anew"),
        (True, 10, "the data go on with the next epoch"),
        (False, 6, "the data go on in epoch 0 after batch 6"),
        (False, 10, None),  # Lightning skips an epoch
    ):
        every = {"every_n_train_steps": step, "save_last": None, "save_top_k": -1}
        two = of(case, f"{plain}-{step}", epochs=1, plain=plain, names=every)
        fit(two)
        said.clear()
        fit({**two, "epochs": 2})
        (line,) = [each for each in said if "resumed" in each]
        assert line.partition(": ")[2] == (text or "")
    # A checkpoint of weights alone cannot be resumed from; the last one is of step 20.
    weights = ModelCheckpoint(two["out"], "w{step}", every_n_train_steps=5, save_weights_only=True)
    four = of(case, "four", epochs=2, names={"every_n_train_steps": 6, "save_top_k": -1})
    new_trainer(four, callbacks=[CkpipeCallback(), weights]).fit(new_module(four))
    newest = new_io(four).newest()
    index = Path(new_io(four).root, f"{newest}.json")
    data = index.read_bytes()
    index.write_bytes(data[:-9])
    assert new_io(four).newest() == newest, "no older one in silence"
    index.write_bytes(data)
    said.clear()
    assert fit({**four, "epochs": 3}).global_step == 30
    assert any("resumed step 18" in each for each in said)
    os.environ["CKPIPE_RESUME"] = "must"
    three = of(case, "three", epochs=1)
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        fit(three)
    with pytest.raises(UsageError, match="no effect without CkpipeCallback"):
        new_trainer(three, callbacks=[]).fit(new_module(three))
    del os.environ["CKPIPE_RESUME"]


def wrong_uses_are_refused(case: Case) -> None:
    for setting in ({"preemption": True}, {"initial": "weights"}, {"save_every_steps": 3}):
        with pytest.raises(UsageError, match="has no effect with Lightning"):
            CkpipeCheckpointIO(case["root"], **setting)
    os.environ["CKPIPE_SAVE_EVERY_STEPS"] = "3"
    with pytest.raises(UsageError, match="from CKPIPE_SAVE_EVERY_STEPS"):
        CkpipeCheckpointIO(case["root"])
    del os.environ["CKPIPE_SAVE_EVERY_STEPS"]
    io = new_io(case)
    with pytest.raises(UsageError, match="that of a file"):
        io.save_checkpoint({"global_step": 1}, "s3://bucket/last.ckpt")
    with pytest.raises(UsageError, match="storage_options"):
        io.save_checkpoint({"global_step": 1}, "last.ckpt", {"a": 1})
    assert not Path(case["root"]).exists()
    past = ModelParallelStrategy(process_group_backend="gloo")
    trainer = pl.Trainer(accelerator="cpu", strategy=past, plugins=[io], logger=False)
    with pytest.raises(UsageError, match="ModelParallelStrategy saves and loads past"):
        CkpipeCallback().setup(trainer, new_module(case), "fit")
    module = new_module(case)
    module.hparams["own"] = trainer
    with pytest.raises(UnsupportedState, match="hyper_parameters"):
        new_trainer(case).fit(module)
    # The environment keeps other checkpoints than names do.
    os.environ["CKPIPE_KEEP_LAST"] = "1"
    one = of(case, "one", epochs=1, names={"save_top_k": -1})
    fit(one)
    assert len(complete(one)) == 1


def _live(case: Case, rank: int, number: int) -> None:
    elastic = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "run"}
    begin_rank(case, rank, number, MASTER_ADDR="localhost", MASTER_PORT="0", **elastic)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    vars(sys.modules[__name__])[case["do"]](case)


if __name__ == "__main__":
    serve(_live)
