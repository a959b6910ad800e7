"""accelerate with ckpipe: killed runs go on to the bit, and its features stay."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ckpipe
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    SettingsError,
    StoreError,
    UnsupportedState,
    UsageError,
)
from ckpipe.integrations.shared import check_names
from ckpipe.testing import FaultyBackend
from ckpipe_local import LocalBackend
from tests.integrations.trainer_ranks import (
    Runs,
    Strange,
    check_end,
    check_kills_inside_saves,
    check_resumed,
    complete,
    forked,
    ids,
    keep_outcome,
    messages,
    new_case,
    of,
    outcomes,
    serve_runs,
)
from tests.support.fork_server import Case
from tests.support.sampling import SEED, sample
from tests.training.streams import ByEpoch, Each, Once, Stream

if TYPE_CHECKING or __name__ == "__main__":  # pytest does without it
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from ckpipe.integrations.accelerate import attach
    from tests.integrations.accelerate_runs import EPOCHS, Average, Run

SAVE_STEPS = 4
STEPS = {1: 60, 2: 30}
"""The steps of a run, by the number of ranks."""

MOMENTS = ["inside an epoch", "while it saves", "after a save", "after an epoch"]
KILLS = list(itertools.product(MOMENTS, [1, 2], [True, False]))

feature = forked(sample=4)


def train(case: Case) -> None:
    """Go on from the newest checkpoint to the end, and keep all that it has come to."""
    with Run(case) as made:
        chosen = made.accelerator.load_state()
        if chosen is not None and chosen.step % made.batches:
            made.evaluate()  # at the end of an epoch the generators are back before
        made.train(0 if chosen is None else chosen.step)
        keep_outcome(case, made.outcome())


@pytest.fixture(scope="module")
def undisturbed(
    run: Runs, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, bool], list[Any]]:
    """What runs of one and two ranks come to that nothing disturbs; stateful loaders draw more."""

    @cache
    def found(ranks: int, stateful: bool) -> list[Any]:
        case = new_case(tmp_path_factory.mktemp("undisturbed"), stateful=stateful)
        assert run(train, case, ranks) == [0] * ranks
        return outcomes(case, ranks)

    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(("moment", "ranks", "stateful"), KILLS)
def test_a_killed_run_goes_on_to_the_bit(
    run: Runs,
    undisturbed: Callable[[int, bool], list[Any]],
    tmp_path: Path,
    moment: str,
    ranks: int,
    stateful: bool,
) -> None:
    chance = random.Random(SEED)
    step = chance.randrange(SAVE_STEPS + 1, STEPS[ranks])
    if moment != "inside an epoch":
        step = SAVE_STEPS * chance.randrange(1, STEPS[ranks] // SAVE_STEPS)
    if moment == "after an epoch":
        step = 20
    saving = moment == "while it saves"
    case = new_case(tmp_path, stateful=stateful)
    assert run(train, case, ranks, dies=step, just_saved=saving) == [None] * ranks
    assert run(train, case, ranks) == [0] * ranks
    done = 0 if saving else step - step % SAVE_STEPS
    check_resumed(case, undisturbed(ranks, stateful), done=done)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    run: Runs, undisturbed: Callable[[int, bool], list[Any]], tmp_path: Path, ranks: int
) -> None:
    def case_of(name: str) -> Case:
        return new_case(tmp_path / name, url="mortal://store")

    check_kills_inside_saves(run, train, case_of, undisturbed(ranks, True), range(8, 40))


def names(case: Case) -> list[str]:
    return sorted(path.name for path in Path(case["out"], "checkpoints").iterdir())


def other_ranks_go_on(case: Case) -> None:
    with Run(case) as made, pytest.raises(CkpipeError, match="per_rank"):
        made.accelerator.load_state()
    with Run({**case, "settings": {"per_rank": "drop"}}) as made:
        assert made.accelerator.load_state().step == 8
        made.train(0, made.batches)
        assert len(made.seen) == 20


def test_other_ranks_go_on_with_new_loaders(run: Runs, tmp_path: Path) -> None:
    case = new_case(tmp_path)
    assert run(train, case, 2, dies=9) == [None] * 2
    assert run(other_ranks_go_on, case) == [0]


@forked(ranks=2)
def test_ranks_load_by_name_what_they_have_just_saved(case: Case) -> None:
    """All ranks take the checkpoint of the name that they have just saved."""
    folder = str(Path(case["out"], "last"))
    with Run({**case, "naming": False}) as run:
        for _ in range(3):
            run.train(0, 2)
            saved = run.accelerator.save_state(folder)
            weights = [each.detach().clone() for each in run.model.parameters()]
            run.train(0, 1)
            assert run.accelerator.load_state(folder).id == saved.id
            assert all(map(torch.equal, run.model.parameters(), weights))


@feature
def test_names_are_those_of_accelerate(case: Case) -> None:
    for limit in (None, 1, 2):
        found = []
        for attached in (False, True):
            one = of(case, f"{limit}-{attached}", project={"total_limit": limit})
            with Run(one, attached=attached) as run:
                for _ in range(4):
                    run.accelerator.save_state()
            found.append(names(one))
        assert found[0] == found[1], (limit, found)
        assert ids(complete(one)) == ids(Path(one["out"], "checkpoints", name) for name in found[1])
        with Run(one) as again:  # accelerate alone would meet a name that is there
            assert again.accelerator.load_state() is not None
            again.accelerator.save_state()
            assert again.accelerator.save_iteration == 5


@feature
def test_another_run_deletes_nothing(case: Case) -> None:
    for number, more in enumerate(
        ({"project": {"total_limit": 1}}, {"settings": {"keep_last": 1}})
    ):
        one = of(case, f"{number}", **more)
        for saves in (3, 2):
            with Run(one) as run:
                run.accelerator.project_configuration.iteration = 10 * saves
                for _ in range(saves):
                    run.accelerator.save_state()
        assert names(one) == ["checkpoint_21", "checkpoint_32"], names(one)
        assert ids(complete(one)) == ids(Path(one["out"], "checkpoints").iterdir())


@feature
def test_names_are_loaded(case: Case) -> None:
    one = of(case, "one", naming=False)
    weights, folders = {}, [Path(one["out"], name) for name in ("a", "b", "a", "of/a")]
    with Run(one) as run:
        for folder in folders:
            run.train(0, 2)
            run.accelerator.save_state(str(folder))
            weights[folder] = [each.clone() for each in run.model.parameters()]
        run.accelerator.save_state()  # without a name
    with Run(one) as again:
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
    with Run(of(case, "other", naming=False)) as other:
        other.accelerator.save_state(str(Path(case["out"], "other", "b")))
    with pytest.raises(CheckpointNotFound, match="other/root"):
        Run(one).accelerator.load_state(str(Path(case["out"], "other", "b")))
    # What accelerate wrote by itself is loaded as ever, also under a name that ckpipe has saved.
    plain = Run(one, attached=False)
    plain.train(0, 3)
    plain.accelerator.save_state(str(folders[1]))
    with Run(one) as mixed:
        for more in ({}, {"map_location": "cpu"}):
            assert mixed.accelerator.load_state(str(folders[1]), **more) is None
            assert all(map(torch.equal, mixed.model.parameters(), plain.model.parameters()))


@feature
def test_loads_by_name_wait_for_their_save(case: Case) -> None:
    """A load directly after a save under a name that is there takes the new one."""
    one = of(case, "one", naming=False, url="waiting://store")
    slow = FaultyBackend(LocalBackend(one["root"]))
    ckpipe.register_backend("waiting", lambda url: slow)
    folder = str(Path(one["out"], "last"))
    for launch in range(2):
        with Run(one) as run:
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
        assert ids([Path(folder)]) == {last.id}
    # After a save that failed the older one is not taken for it.
    with Run({**one, "settings": {"on_error": "warn", "upload": {"retries": 0}}}) as run:
        run.accelerator.load_state(folder)
        slow.fail(StoreError("broken"), lambda each: each.key.endswith(".json"), times=None)
        run.accelerator.save_state(folder)
        with pytest.raises(CkpipeError, match="broken"):
            run.accelerator.load_state(folder)
        slow.heal()


@feature
def test_pickled_objects_go_on(case: Case) -> None:
    class Odd(Average):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "odd": Strange()}

    def new(settings: dict[str, Any]) -> Run:
        run = Run(of(case, "one", settings=settings))
        run.accelerator.register_for_checkpointing(Odd())
        return run

    text = r'pickle="allow" in the arguments of attach\(\)'
    with new({}) as refused:
        with pytest.raises(UnsupportedState, match=text) as caught:
            refused.accelerator.save_state()
        assert "exclude" not in str(caught.value)
    with new({"pickle": "allow"}) as run:
        run.accelerator.save_state()
        assert run.accelerator.load_state() is not None
    with new({}) as refused:
        with pytest.raises(UnsupportedState, match=text) as caught:
            refused.accelerator.load_state()
        assert "exclude" not in str(caught.value)


@feature
def test_names_that_cannot_be_written_are_told(case: Case) -> None:
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
        with Run(one) as run:
            assert run.accelerator.load_state() is not None
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


@feature
def test_saves_of_accelerate_stay(case: Case) -> None:
    one = of(case, "one", project={"total_limit": 1})
    plain = Run({**one, "project": {}}, attached=False)
    for _ in range(3):
        plain.accelerator.save_state()
    before = names(one)
    told = messages()
    with Run(one) as run:
        assert run.accelerator.load_state() is None
        assert "fresh beside checkpoints" in told[0]
        assert "checkpoint_2" in told[0]
        told.clear()
        for place in (one["out"], str(Path(one["out"], "checkpoints"))):
            with Run({**one, "url": place, "naming": False}) as there:
                assert there.accelerator.load_state() is None
                assert "training starts fresh" in told.pop()
        run.train(0, 2)
        run.accelerator.save_state()
        run.accelerator.save_state()
    # The newest with ckpipe has taken the name of one of them.
    moved = ["before-ckpipe.checkpoint_0", "before-ckpipe.checkpoint_1"]
    assert names(one) == [*moved, "checkpoint_1", *before[2:]]
    with Run({**one, "settings": {"resume": "never"}}) as again:
        assert again.accelerator.load_state() is None
        assert again.accelerator.load_state(str(Path(one["out"], "checkpoints", moved[0]))) is None
        assert not any("fresh" in each for each in told[1:])


@feature
def test_settings_come_from_the_environment(case: Case) -> None:
    one = of(case, "one", project={"total_limit": 1})
    for value, left in (("2", 2), ("", 1)):
        os.environ["CKPIPE_KEEP_LAST"] = value
        with Run(other := {**one, "root": f"{one['root']}-{left}"}) as run:
            for _ in range(4):
                run.accelerator.save_state()
        assert len(complete(other)) == left
    os.environ["CKPIPE_INITIAL"] = "/weights"
    with pytest.raises(UsageError, match="CKPIPE_INITIAL"):
        Run(one)


@feature
def test_scalers_go_on(case: Case) -> None:
    one = of(case, "one", scaler=True)
    with Run(one) as run:
        run.train(0, 14)
    with Run(one) as again:
        assert again.accelerator.load_state().step == 12
        again.train(12, 14)
        scalers = [each.accelerator.scaler.state_dict() for each in (run, again)]
        assert scalers[0] == scalers[1]
        assert scalers[0]["scale"] > 65536
        assert all(map(torch.equal, run.model.parameters(), again.model.parameters()))


@feature
def test_persistent_streams_are_refused(case: Case) -> None:
    matrix = itertools.product((Stream, Once, Each, ByEpoch), (False, True))
    for kind, persistent in sample(matrix, 2):
        with Run(of(case, f"{kind.__name__}-{persistent}")) as run:
            run.accelerator.prepare(
                DataLoader(kind(), num_workers=2, persistent_workers=persistent)
            )
            refused = persistent and kind in (Once, Each)
            match = pytest.raises(UsageError, match="persistent_workers=False")
            with match if refused else nullcontext():
                run.accelerator.save_state()


def evaluated(case: Case, last: int | None = None) -> Run:
    """Train to a step from wherever the run is, with an evaluation after each epoch."""
    with Run(case) as run:
        chosen = run.accelerator.load_state()
        step = 0 if chosen is None else chosen.step
        while step < (last or EPOCHS * run.batches):
            ends = min(step - step % run.batches + run.batches, last or 1000)
            run.train(step, ends)
            step = ends
            if step % run.batches == 0:
                run.evaluate()
    return run


@feature
def test_loaders_of_evaluations_go_on(case: Case) -> None:
    kinds = [{"shuffle": False}, {"shuffle": True}, {"shuffle": False, "num_workers": 1}]
    matrix = itertools.product(kinds, [True, False], [(8,), (24,), (8, 12), (24, 28)])
    for number, (others, stateful, stops) in enumerate(sample(matrix, 3)):
        more = {"others": others, "stateful": stateful, "naming": False}
        whole = evaluated(of(case, f"whole-{number}", **more)).outcome()
        one = of(case, f"{number}", **more)
        for step in stops:
            evaluated(one, step)
        found = evaluated(one).outcome()
        check_end(found, whole)


@feature
def test_other_batches_are_told(case: Case) -> None:
    one = of(case, "one")
    with Run(one) as run:
        run.train(0, 8)
    for change, expected in [
        ({}, None),
        ({"batch": 4}, "batch size of a loader was 2 at step 8 and is 4"),
        ({"accumulated": 1}, "gradient_accumulation_steps was 2 at step 8 and is 1"),
    ]:
        said = messages(logging.INFO)
        with Run({**one, **change}) as again:
            again.accelerator.load_state()
        assert [each for each in said if "left out" in each] == (
            [] if expected is None else [f"The {expected}: samples may be left out or come twice"]
        )
        assert any("the data go on" in each for each in said) == ("batch" not in change), said


@feature
def test_orders_go_on_or_are_told(case: Case) -> None:
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
        with Run(of(case, f"{number}", **before)) as run:
            if loads:
                run.accelerator.load_state()
            run.train(0, 8)
        said = messages(logging.INFO)
        with Run(of(case, f"{number}", **after)) as again:
            again.accelerator.load_state()
            assert any("the data go on" in each for each in said) == kept, (number, said)
            assert any("in another order" in each for each in said) != kept, (number, said)
            again.train(8, again.batches)
        seen = {each for batch in run.seen + again.seen for each in batch}
        assert not kept or len(seen) == 40, (number, seen)


@feature
def test_persistent_workers_are_told(case: Case) -> None:
    for persistent in (False, True):
        said = messages()
        workers = {"num_workers": 1, "persistent_workers": persistent}
        with Run(of(case, f"{persistent}", others=workers)) as run:
            run.train(0, 8)
        assert len([each for each in said if "persistent_workers=True" in each]) == persistent


@feature
def test_wrong_uses_are_refused(case: Case) -> None:
    with Run(of(case, "one")) as run:
        run.accelerator.save_state()
        with pytest.raises(UsageError, match="strict, map_location"):
            run.accelerator.load_state(load_kwargs={"strict": False}, map_location="cpu")
        with pytest.raises(TypeError, match="steps"):
            run.accelerator.save_state(steps=3)
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


@feature
def test_hooks_are_called(case: Case) -> None:
    def write(models: list[Any], weights: list[Any], folder: str) -> None:
        Path(folder, "mine.txt").write_text(f"{len(models)} {len(weights)}")
        weights.pop()

    def read(models: list[Any], folder: str) -> None:
        assert Path(folder, "mine.txt").read_text() == "1 1"
        models.pop()

    one = of(case, "one")
    with Run(one) as run:
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
    assert "model" not in ckpipe.load(one["root"]).state["training"]
    with Run(of(case, "unnamed", naming=False)) as unnamed:
        unnamed.accelerator.register_save_state_pre_hook(write)
        with pytest.raises(UsageError, match="write into a folder"):
            unnamed.accelerator.save_state()


@feature
def test_lost_gradients_are_told(case: Case) -> None:
    one, said = of(case, "one"), messages()
    with Run(one) as run:
        run.train(0, 2)
        run.accelerator.save_state()
        assert said == []
        run.train(2, 3)
        run.accelerator.save_state()
        assert "gradients" in said[0]


@feature
def test_several_models_go_on(case: Case) -> None:
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


@feature
def test_resume_obeys_its_setting(case: Case) -> None:
    one = of(case, "one", settings={"resume": "must"})
    with Run(one) as run, pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        run.accelerator.load_state()
    one["settings"] = {}
    with Run(one) as run:
        assert run.accelerator.load_state() is None
        run.train(0, 4)
    assert run.pipeline is not None
    assert "closed" in repr(run.pipeline)
    shutil.rmtree(Path(one["out"], "checkpoints"))
    with Run({**one, "settings": {"resume": "must"}}) as again:
        assert again.accelerator.load_state().step == 4
    said, choices = messages(), ({"resume": "auto"}, {"resume": "never"}, {"resume": "must"})
    for settings in choices:
        with Run({**one, "settings": settings}) as begins:
            with suppress(CkpipeError):
                begins.accelerator.load_state("absent")
            must = settings["resume"] == "must"
            text = "The run begins anew, though .* has step-"
            for _ in range(2):
                with pytest.raises(UsageError, match=text) if must else nullcontext():
                    begins.accelerator.save_state()
        told = [each for each in said if re.search(text, each)]
        assert len(told) == (settings["resume"] == "auto")
        said.clear()
    with pytest.raises(UsageError, match="initial has no effect"):
        Run({**one, "settings": {"initial": "/weights"}})


if __name__ == "__main__":
    serve_runs()
