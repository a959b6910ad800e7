"""Lightning with ckpipe: killed runs go on to the bit, and its features stay."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import shutil
import signal
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpipe
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    StoreError,
    UnsupportedState,
    UsageError,
)
from ckpipe.integrations.pointers import read_pointer
from ckpipe.testing import FaultyBackend
from ckpipe_local import LocalBackend
from tests.integrations.trainer_ranks import (
    Runs,
    check_kills_inside_saves,
    check_resumed,
    check_same,
    complete,
    forked,
    ids,
    keep_outcome,
    messages,
    new_case,
    of,
    outcomes,
    pointer_at,
    serve_runs,
    whole,
)
from tests.support.fork_server import Case
from tests.support.killed_runs import die
from tests.support.sampling import SEED

if TYPE_CHECKING or __name__ == "__main__":  # pytest does without it
    import lightning as pl
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.tuner import Tuner

    from ckpipe.integrations.lightning import (
        CkpipeCallback,
        CkpipeCheckpointIO,
        load_from_checkpoint,
    )
    from tests.integrations.lightning_runs import (
        BATCHES,
        HoldsSaves,
        Module,
        commits,
        fit,
        fit_anew,
        new_io,
        new_module,
        new_trainer,
        slow_store,
        step_of,
    )

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="the extra integrations is not installed"
)

STEPS, SAVE_STEPS = 30, 3
STRATEGIES: dict[str, dict[str, Any]] = {
    "alone": {"ranks": 1},
    "ddp": {"ranks": 2},
    "fsdp2": {"ranks": 2, "sharded": True},
}
QUIET = {"save_top_k": 0, "save_last": None}  # no saves by itself

feature = forked()


def train(case: Case) -> None:
    """Train from wherever the run is, and keep all that it has come to."""
    trainer = fit(case)
    module = trainer.lightning_module
    states = [module.state_dict(), trainer.optimizers[0].state_dict()]
    if case.get("sharded"):
        states = pickle.loads(pickle.dumps([whole(each) for each in states]))
    saves = trainer.checkpoint_callback
    keep_outcome(
        case,
        {
            "weights": states[0],
            "optimizer": states[1],
            "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "best": {os.path.basename(name): score for name, score in saves.best_k_models.items()},
            "random": (torch.rand(1).item(), float(np.random.rand()), random.random()),
            "losses": module.losses,
            "seen": module.seen,
        },
    )


@pytest.fixture(scope="module")
def undisturbed(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What runs of each strategy come to that nothing disturbs."""
    found = {}
    for name, strategy in STRATEGIES.items():
        case = new_case(tmp_path_factory.mktemp("undisturbed"))
        assert set(run(train, case, **strategy)) == {0}
        found[name] = outcomes(case, strategy["ranks"])
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("moment", ["inside an epoch", "after a save"])
def test_a_killed_run_goes_on_to_the_bit(
    run: Runs, undisturbed: dict[str, Any], tmp_path: Path, moment: str, strategy: str
) -> None:
    chance, how = random.Random(SEED), STRATEGIES[strategy]
    step = chance.randrange(SAVE_STEPS + 1, STEPS)
    if moment == "after a save":
        step = SAVE_STEPS * chance.randrange(1, STEPS // SAVE_STEPS)
    case, saved = new_case(tmp_path), step - step % SAVE_STEPS
    assert set(run(train, case, **how, dies=step, saved=saved)) == {None}
    assert set(run(train, case, **how)) == {0}
    check_resumed(case, undisturbed[strategy], done=saved)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    run: Runs, undisturbed: dict[str, Any], tmp_path: Path, strategy: str
) -> None:
    def case_of(name: str) -> Case:
        return new_case(tmp_path / name, url="mortal://store", **STRATEGIES[strategy])

    victims = None if strategy == "fsdp2" else 1
    check_kills_inside_saves(
        run, train, case_of, undisturbed[strategy], range(20, 90), victims=victims
    )


def names(case: Case) -> list[str]:
    return sorted(path.name for path in Path(case["out"]).iterdir())


@feature
def test_names_are_those_of_lightning(case: Case) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"save_last": "link"},
        {"save_top_k": 1, "mode": "max", "save_last": None},
        {"monitor": None, "save_top_k": 1},
        {"save_top_k": -1},
    ]
    for number, chosen in enumerate(cases):
        found = []
        for own in (True, False):
            one = of(case, f"{number}-{own}", names=chosen, path=None, ckpipe=own)
            trainer = fit_anew(one)
            best = trainer.checkpoint_callback
            assert Path(best.best_model_path).is_file()
            found.append((names(one), os.path.basename(best.best_model_path)))
        assert found[0] == found[1], chosen
        # What has no name is gone, but for the newest.
        one = of(case, f"{number}-True")
        named, left = ids(Path(one["out"]).iterdir()), ids(complete(one))
        assert named <= left
        assert left - named <= {max(left)}, chosen


@feature
def test_names_are_loaded(case: Case) -> None:
    one = of(case, "one", epochs=2)
    trainer = fit(one)
    best = trainer.checkpoint_callback
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
                check_same(dict(trainer.lightning_module.state_dict()), saved[name])
            with torch.no_grad():
                trainer.lightning_module.net[0].weight.zero_()
    with pytest.raises(CheckpointNotFound, match=f"was saved as {one['out']}/step=6.ckpt"):
        trainer.test(trainer.lightning_module, ckpt_path="/of/another/run/step=6.ckpt")
    trainer.strategy.checkpoint_io.remove_checkpoint("/of/another/run/step=6.ckpt")
    shutil.copytree(one["out"], f"{one['out']}-copy")
    shutil.rmtree(one["out"])  # as on another machine
    trainer.test(trainer.lightning_module, ckpt_path=f"{one['out']}/step=6.ckpt", verbose=False)
    os.rename(f"{one['out']}-copy", one["out"])
    assert fit({**one, "epochs": 3, "path": "last"}).global_step == 30
    with pytest.raises(CheckpointNotFound, match="'absent"):
        fit({**one, "path": "absent.ckpt"})
    made = load_from_checkpoint(Module, best.best_model_path, case=one)
    check_same(dict(made.state_dict()), saved["step=6.ckpt"])
    assert made.hparams == {"width": 8}
    # A name that was a link to another one leaves that one alone.
    links = of(case, "links", names={"save_top_k": -1, "save_last": "link"}, epochs=1)
    fit(links)
    more = {"names": {"save_top_k": -1}, "path": f"{links['out']}/step=6.ckpt", "epochs": 2}
    fit({**links, **more})
    assert ids(Path(links["out"]).iterdir()) <= ids(complete(links))
    # Files of Lightning are loaded and removed as ever.
    plain = of(case, "plain", epochs=2, names={"save_top_k": 1}, ckpipe=False)
    fit_anew(plain)
    path = f"{plain['out']}/last.ckpt"
    written = torch.load(path, weights_only=False)["state_dict"]
    made = load_from_checkpoint(Module, path, case=plain)
    check_same(dict(made.state_dict()), dict(written))
    fit({**plain, "ckpipe": True, "epochs": 3, "path": path})
    assert read_pointer(path) is not None


@feature
def test_names_are_there_at_once(case: Case) -> None:
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
            one = of(case, f"{number}-{own}", epochs=1, url=f"slow{number}://store", ckpipe=own)
            saves = [
                ModelCheckpoint(one["out"], **{"every_n_train_steps": 3, **each}) for each in chosen
            ]
            own_ones = [CkpipeCallback(), HoldsSaves(one)] if own else []
            fit_anew(one, saves=saves, callbacks=own_ones)
            left = {name: step_of(one, f"{one['out']}/{name}") for name in names(one)}
            best = [os.path.relpath(each.best_model_path, one["out"]) for each in saves]
            found.append((left, best, [left[each] for each in best]))
        assert found[0] == found[1], chosen


@feature
def test_loads_wait_for_the_save_of_their_name(case: Case) -> None:
    one = of(case, "one", url="slow://store", names=QUIET, epochs=1)
    store, name = slow_store(one), f"{one['out']}/final.ckpt"
    fit_anew(one).save_checkpoint(name)
    plain = f"{one['out']}/plain.ckpt"
    other = of(case, "plain", names={"save_top_k": 0}, epochs=1, ckpipe=False)
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
    assert io.newest() == pointer_at(name).id
    io.teardown()


@forked(ranks=2)
def test_all_ranks_wait_for_the_save_of_a_name(case: Case) -> None:
    one = {**case, "url": "slow://store", "names": QUIET}
    store, path = slow_store(one), f"{case['out']}/final.ckpt"
    trainer = fit_anew({**one, "epochs": 1})
    for number in (101, 102):
        trainer.lightning_module.step.fill_(number)
        store.hold()
        trainer.save_checkpoint(path)
        threading.Timer(0.2, store.release).start()
        assert step_of(one, path) == number
        io = trainer.strategy.checkpoint_io
        assert int(io.load_checkpoint(path)["state_dict"]["step"]) == number
        trainer.strategy.barrier()
    io.teardown()


@forked(ranks=2, sharded=True, tensor=True)
def test_names_of_tensor_parallel_ranks_stay(case: Case) -> None:
    one = {**case, "names": {"save_top_k": -1, "save_last": None}, "epochs": 1}
    losses = fit(one).lightning_module.losses
    dist.barrier()
    assert ids(Path(one["out"]).iterdir()) == ids(complete(one))
    assert set(names(one)) == {f"step={step}.ckpt" for step in range(3, 20, 3)}
    again = fit({**one, "path": f"{one['out']}/step=6.ckpt"}).lightning_module
    assert again.losses == losses[6:]


def dies_inside_saves(case: Case) -> None:
    """Leave three names of saves that are killed: a new one, one twice, and one complete."""
    one = {**case, "url": "slow://store", "names": QUIET}
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
        assert pointer_at(path).before is not None
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
        new_io(one).load_checkpoint(f"{one['out']}/absent.ckpt")
    # A run goes on from what the name led to, and gives the names back.
    said = messages(logging.INFO)
    assert fit({**one, "path": files["old"], "epochs": 2}).global_step == 20
    assert any("failed or was killed: it leads to step-" in each for each in said)
    assert "new.ckpt" not in names(one)
    for name, step in (("old", 3), ("older", 5), ("complete", 5)):
        assert step_of(one, f"{one['out']}/{name}.ckpt") == step
    assert all(pointer_at(f"{one['out']}/{each}").before is None for each in names(one))


def test_a_name_whose_save_was_killed_is_never_an_older_one(run: Runs, tmp_path: Path) -> None:
    case = new_case(tmp_path)
    assert run(dies_inside_saves, case) == [None]
    assert run(a_killed_name_is_never_an_older_one, case) == [0]


def dies_inside_its_saves(case: Case) -> None:
    class DiesAtItsEnd(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            die()

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
    said = messages(logging.INFO)
    assert fit(last).global_step == 20
    assert any("resumed step 9" in each for each in said) == case["complete"]
    assert step_of(case, f"{case['out']}/last.ckpt") == 18
    assert all(pointer_at(f"{case['out']}/{each}").before is None for each in names(case))


@pytest.mark.parametrize(("kept", "complete"), [(True, False), ("link", True)])
def test_last_goes_on_after_a_killed_save(
    run: Runs, tmp_path: Path, kept: Any, complete: bool
) -> None:
    names = {"save_last": kept, "save_top_k": -1}
    case = new_case(tmp_path, url="slow://store", complete=complete, names=names)
    assert run(dies_inside_its_saves, case) == [None]
    assert run(last_goes_on_after_a_killed_save, case) == [0]


@feature
def test_a_link_stays_in_place_of_a_late_save(case: Case) -> None:
    one = of(case, "one", url="slow://store", names=QUIET, epochs=1)
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


@feature
def test_a_failed_save_leaves_no_name(case: Case) -> None:
    one = of(case, "one", url="faulty://store", names=QUIET)
    one["settings"] = {"upload": {"retries": 0}}
    faulty = FaultyBackend(LocalBackend(one["root"]))
    ckpipe.register_backend("faulty", lambda url: faulty)
    trainer = fit_anew({**one, "epochs": 1})
    old, new = f"{one['out']}/old.ckpt", f"{one['out']}/new.ckpt"
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


@feature
def test_removals_are_remembered(case: Case) -> None:
    for number, settings in enumerate(({}, {"keep_last": 3})):
        one = of(case, f"tuner-{number}", epochs=1, names=QUIET, settings=settings)
        for kind in ("lr_find", "scale_batch_size"):
            trainer, module = new_trainer(one), new_module(one)
            module.lr, module.batch_size = 1e-3, 2
            found = {"num_training": 5} if kind == "lr_find" else {"max_trials": 2}
            getattr(Tuner(trainer), kind)(module, **found)
            io = trainer.strategy.checkpoint_io
            assert ckpipe.load(one["root"]).step == 0, "the core takes it"
            assert io.newest() is None
            io.teardown()
            assert new_io(one).newest() is None
        with pytest.raises(CheckpointNotFound, match="those of a tuner"):
            new_io({**one, "settings": {**settings, "resume": "must"}}).newest()
        trainer = fit({**one, "names": {**QUIET, "save_last": True}})
        kept = pointer_at(f"{one['out']}/last.ckpt")
        Tuner(trainer).lr_find(trainer.lightning_module, num_training=5, update_attr=False)
        assert new_io(one).newest() == trainer.strategy.checkpoint_io.newest() == kept.id
        assert fit({**one, "epochs": 2}).global_step == 20
        marks = {each.name for each in Path(one["root"], ".ckpipe", "removed").iterdir()}
        assert marks <= ids(complete(one)), "marks go with their checkpoints"
    # What top-k removes stays the newest as long as nothing else is there.
    two = of(case, "two", url="slow://store", epochs=1, names=QUIET)
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
    newest = pointer_at(files[2]).id
    assert other.newest() == newest
    other.remove_checkpoint(files[2])
    assert other.newest() == new_io(two).newest() == newest, "nothing else is left"
    other.teardown()


@feature
def test_slurm_requeues_what_is_durable(case: Case) -> None:
    one = of(case, "one", url="slow://store", names=QUIET)
    store = slow_store(one)
    store.latency = 0.3
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

    fit_anew(one, callbacks=[CkpipeCallback(), Requeues()])
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
    said = messages(logging.INFO)
    fit_anew(one)
    assert any("resumed step 4" in each for each in said)


@feature
def test_other_ways_work(case: Case) -> None:
    class Copies(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if trainer.global_step == 4:
                copied.extend(copy.deepcopy([trainer.callbacks, trainer.strategy.checkpoint_io]))

    copied: list[Any] = []
    one = of(case, "copies", epochs=1)
    trainer = fit_anew(one, callbacks=[CkpipeCallback(), Copies()])
    assert copied[1].newest() is not None
    # A file of Lightning by its URL.
    plain = of(case, "plain", epochs=1, ckpipe=False)
    fit_anew(plain).save_checkpoint("memory://runs/plain.ckpt")
    for path in ("memory://runs/plain.ckpt", f"file://{plain['out']}/last.ckpt"):
        trainer.test(trainer.lightning_module, ckpt_path=path, verbose=False)
        made = load_from_checkpoint(Module, path, case=one)
        check_same(dict(made.state_dict()), dict(trainer.lightning_module.state_dict()))
    trainer.strategy.checkpoint_io.remove_checkpoint("memory://runs/plain.ckpt")
    with pytest.raises(FileNotFoundError):
        trainer.test(trainer.lightning_module, ckpt_path="memory://runs/plain.ckpt")
    # A save after processes that have ended with their group.
    two = of(case, "two", epochs=1, names=QUIET)
    spawned = fit_anew(two, strategy="ddp_fork", devices=2)
    spawned.save_checkpoint(f"{two['out']}/after.ckpt")
    assert step_of(two, f"{two['out']}/after.ckpt") == 5
    spawned.strategy.checkpoint_io.teardown()


@feature
def test_other_numbers_are_told(case: Case) -> None:
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
        fit_anew(one, callbacks=callbacks, max_steps=3)
        said = messages(logging.INFO)
        trainer = new_trainer(one, callbacks=callbacks, together=more.get("together", 1))
        io = trainer.strategy.checkpoint_io
        trainer.fit(new_module({**one, **more}), ckpt_path=io.newest())
        assert any("the data go on" in each for each in said) == claims, more
        told = [each for each in said if "The epoch was begun with" in each]
        assert len(told) == (not claims), more
        assert all("'batch_size': [4]" in each or "batches': 2" in each for each in told)


@feature
def test_whole_epochs_go_on(case: Case) -> None:
    found = []
    for parts in ([3], [1, 2, 3]):
        one = of(case, f"{parts}", plain=True, names={"every_n_train_steps": None})
        for epochs in parts:
            trainer = fit({**one, "epochs": epochs})
            torch.rand(5), random.random(), np.random.rand()
        found.append((trainer.lightning_module.losses, dict(trainer.lightning_module.state_dict())))
    assert found[0][0][-BATCHES:] == found[1][0]
    check_same(found[1][1], found[0][1])


@feature
def test_signals_end_a_run_that_goes_on(case: Case) -> None:
    undisturbed = fit(of(case, "whole")).lightning_module
    one = of(case, "one", names={"save_on_exception": True})
    with pytest.raises(SystemExit):
        fit({**one, "ends": 13})
    again = fit(one)
    assert len(again.lightning_module.losses) == 16
    assert undisturbed.losses[-16:] == again.lightning_module.losses
    check_same(dict(again.lightning_module.state_dict()), dict(undisturbed.state_dict()))


@feature
def test_no_run_begins_in_silence(case: Case) -> None:
    said = messages(logging.INFO)
    one, must = of(case, "one", epochs=1), {"settings": {"resume": "must"}}
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        fit({**one, **must})
    assert new_io(one).newest() is None
    fit_anew(one)
    assert not any("run begins" in each for each in said)
    fit_anew(one)
    assert any("The run begins at step 0, though" in each for each in said)
    assert not any("resumed" in each for each in said)
    with pytest.raises(UsageError, match="The run begins at step 0, though"):
        new_trainer({**one, **must}).fit(new_module(one))
    shutil.rmtree(one["out"])
    assert fit({**one, **must, "epochs": 2}).global_step == 20
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
    fit_anew(four, callbacks=[CkpipeCallback(), weights])
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
        fit_anew(three, callbacks=[])
    del os.environ["CKPIPE_RESUME"]


@feature
def test_wrong_uses_are_refused(case: Case) -> None:
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


if __name__ == "__main__":
    serve_runs(
        quiet="lightning", MASTER_ADDR="localhost", MASTER_PORT="0",
        GROUP_RANK="0", TORCHELASTIC_RUN_ID="run",
    )  # fmt: skip
