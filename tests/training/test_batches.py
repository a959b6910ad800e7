"""Batches: the position in the data, in all ways that loops and loaders come in."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpipe
from ckpipe import Batches, RngState, SyncPipeline
from ckpipe.errors import PerRankValue, TargetMismatch, UsageError
from tests.support.random_numbers import seed
from tests.support.rank_pipelines import ranks
from tests.training.batches_runs import Cell, Samples, make_loader

pytestmark = [
    pytest.mark.usefixtures("generators"),
    # torchdata calls what torch has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

Seen = list[tuple[list[float], float]]


def draw_beside(batches: Iterable[Any]) -> Iterator[tuple[list[float], float]]:
    """The samples of each batch, and a number that the loop draws after it."""
    for batch in batches:
        yield torch.as_tensor(batch[0]).flatten().tolist(), float(torch.rand(1))


def over(data: Any, epochs: int = 3) -> Seen:
    """Iterate to the end of the last epoch."""
    seen: Seen = []
    for _ in range(getattr(data, "epoch", 0), epochs):
        seen += draw_beside(data)
    return seen


def samples_of(seen: Iterable[tuple[list[float], float]]) -> list[float]:
    return [each for samples, _ in seen for each in samples]


def stopped(data: Batches, count: int) -> tuple[Seen, dict[str, Any]]:
    """Iterate over so many batches; return what was seen and the state inside the loop."""
    seen: Seen = []
    while True:
        for each in draw_beside(data):
            seen.append(each)
            if len(seen) == count:
                return seen, copy.deepcopy(data.state_dict())


def whole_and_stopped(
    make: Callable[[], DataLoader[Any]], count: int, **how: Any
) -> tuple[Seen, dict[str, Any]]:
    """What a run sees, and the state of another one that stops after some batches."""
    seed(1)
    whole = over(make())
    seed(1)
    first, state = stopped(Batches(make(), **how), count)
    assert first == whole[:count]
    return whole, state


def two_epochs(data: Any) -> list[Any]:
    """What is left of two epochs, with a number that the loop draws after each batch."""
    return [
        [each.tolist() for each in batch] + [float(torch.rand(1))]
        for _ in range(getattr(data, "epoch", 0), 2)
        for batch in data
    ]


def check_goes_on(make: Callable[[], DataLoader[Any]], counts: Iterable[int]) -> None:
    """Check that runs that stop after some batches go on as the whole run does."""
    for count in counts:
        whole, state = whole_and_stopped(make, count)
        assert resumed(make, state) == whole[count:]


def resumed(make: Callable[[], DataLoader[Any]], state: dict[str, Any], **how: Any) -> Seen:
    """Load a state into new objects, in a process that has drawn other numbers, and go on."""
    seed(5)
    data = Batches(make(), **how)
    data.load_state_dict(state)
    torch.rand(3)  # such as a new model draws
    return over(data)


class ByNumpy(Sampler[int]):
    """Shuffles by a generator of its own, one of those that numpy and Python have."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __iter__(self) -> Iterator[int]:
        order = list(range(24))
        self.own.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return 24


class EagerBatches(Sampler[list[int]]):
    """Draws from the global generators as soon as it is iterated."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(24).tolist()
        random.shuffle(order)
        return iter([order[first : first + 4] for first in range(0, 24, 4)])

    def __len__(self) -> int:
        return 6


class CountsEpochs(Sampler[int]):
    """Moves on to its next epoch by itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        made = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(24, generator=made).tolist()
        self.epoch += 1

    def __len__(self) -> int:
        return 24


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


DATA = Samples(draws=True)
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in sequence": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "by a generator": lambda: {"batch_size": 4, "shuffle": True, "generator": _generator()},
    "single samples": lambda: {"batch_size": None, "sampler": RandomSampler(DATA)},
    "with replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(DATA, replacement=True, generator=_generator()),
    },
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 24, 24)},
    "a subset": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(0, 24, 2))},
    "dropping": lambda: {"batch_size": 7, "shuffle": True, "drop_last": True},
    "a list": lambda: {"batch_size": 5, "sampler": list(range(23, -1, -1))},
    "by numpy": lambda: {"batch_size": 4, "sampler": ByNumpy(np.random.default_rng(1))},
    "by old numpy": lambda: {"batch_size": 4, "sampler": ByNumpy(np.random.RandomState(1))},
    "by Python": lambda: {"batch_size": 4, "sampler": ByNumpy(random.Random(1))},
    "own batches": lambda: {"batch_sampler": EagerBatches()},
    "batches of a sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(DATA), 5, drop_last=False)
    },
    "own epochs": lambda: {"batch_size": 4, "sampler": CountsEpochs()},
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("loader", ["DataLoader", "StatefulDataLoader"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_sampler_goes_on_in_the_same_order(loader: str, sampler: str) -> None:
    cls: Any = {"DataLoader": DataLoader, "StatefulDataLoader": StatefulDataLoader}[loader]

    def make() -> DataLoader[Any]:
        made: DataLoader[Any] = cls(DATA, **SAMPLERS[sampler]())
        return made

    batches = len(make())
    check_goes_on(make, [1, batches, batches + 2, 2 * batches, 3 * batches])


@pytest.mark.sample(2)
@pytest.mark.parametrize("loader", ["DataLoader", "StatefulDataLoader"])
@pytest.mark.parametrize("count", [1, 6, 8])
def test_persistent_workers_go_on_between_and_inside_epochs(loader: str, count: int) -> None:
    cell = Cell(loader, workers=1, persistent=True, draws=False)

    def make() -> DataLoader[Any]:
        return make_loader(cell, Samples(draws=False))

    seed(1)
    data = Batches(make())
    whole = over(data, epochs=2)
    between = copy.deepcopy(data.state_dict())
    whole += over(data)
    seed(1)
    first, state = stopped(Batches(make()), count)
    assert first == whole[:count]
    assert resumed(make, state) == whole[count:]
    for workers in (0, 1):
        seed(5)
        other = cell._replace(workers=workers, persistent=bool(workers))
        data = Batches(make_loader(other, Samples(draws=False)))
        data.load_state_dict(between)
        assert over(data) == whole[12:]
    data.load_state_dict(state)  # the workers that are there have drawn their seed before
    assert over(data) == whole[count:]


class DrawsAtItsEnd(Sampler[int]):
    """Draws from a global generator once it has given its last index."""

    def __iter__(self) -> Iterator[int]:
        yield from range(24)
        torch.rand(1)

    def __len__(self) -> int:
        return 24


PREFETCHED: dict[str, Callable[[], dict[str, Any]]] = {
    # RandomSampler draws from its generator at its end too, and with replacement on the way.
    "by a generator": SAMPLERS["by a generator"],
    "with replacement": lambda: {
        "sampler": RandomSampler(DATA, True, num_samples=96, generator=_generator())
    },
    "drawing at its end": lambda: {"sampler": DrawsAtItsEnd()},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("sampler", "count"), list(itertools.product(PREFETCHED, [2, 6, 8])))
def test_an_order_that_workers_had_prefetched_goes_on(sampler: str, count: int) -> None:
    def make() -> DataLoader[Any]:
        how = {"batch_size": 4} | PREFETCHED[sampler]()
        return DataLoader(Samples(draws=False), num_workers=1, prefetch_factor=10, **how)

    check_goes_on(make, [count])


class DrawsOfTheLoader(Dataset[Any]):
    """Draws from the generator of its loader."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        return [index + float(torch.rand(1, generator=self.generator))]


@pytest.mark.parametrize("count", [1, 6, 8])
def test_a_generator_that_the_dataset_draws_from_too_goes_on(count: int) -> None:
    def make() -> DataLoader[Any]:
        generator = _generator()
        dataset = DrawsOfTheLoader(generator)
        return DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)

    check_goes_on(make, [count])


def test_a_load_of_the_beginning_begins_again_with_persistent_workers(tmp_path: Path) -> None:
    data = Batches(make_loader(Cell(workers=1, persistent=True, draws=False), Samples(draws=False)))
    seed(1)
    state = {"data": data, "rng": RngState()}
    with SyncPipeline(tmp_path) as pipeline:
        pipeline.save(state, step=0, until="committed")
        whole = over(data)
        pipeline.load(state)
        assert over(data) == whole


def test_an_iteration_that_gives_no_batch_begins_no_epoch() -> None:
    data = Batches(DataLoader(Samples(draws=False), batch_size=4))
    iter(data)
    assert len(list(data)) == 6
    assert data.epoch == 1


def test_consumed_samples_are_not_loaded(tmp_path: Path) -> None:
    class Told(Dataset[int]):
        asked: list[int]

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            self.asked.append(index)
            return index

    data = Batches(DataLoader(Told(), batch_size=3))
    Told.asked = []
    with SyncPipeline(tmp_path) as pipeline:
        for _ in data:
            if data.batch == 3:
                break
        pipeline.save({"data": data}, step=1, until="committed")
        Told.asked = []
        data = Batches(DataLoader(Told(), batch_size=3))
        pipeline.load({"data": data})
    assert [batch.tolist() for batch in data] == [[9, 10, 11]]
    assert Told.asked == [9, 10, 11]


def shuffled(samples: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Samples(draws=True, samples=samples), batch_size=batch_size, shuffle=True)


@pytest.mark.parametrize("advanced", [False, True])
def test_a_load_after_iter_applies_or_ends_the_iteration(tmp_path: Path, advanced: bool) -> None:
    seed(1)
    whole = over(shuffled())
    seed(1)
    data = Batches(shuffled())
    with SyncPipeline(tmp_path) as pipeline:
        stopped(data, 2)
        pipeline.save({"data": data}, step=2, until="committed")
        iteration = iter(data)
        if advanced:
            next(iteration)
        pipeline.load({"data": data})
        if advanced:
            with pytest.raises(UsageError, match=r"a checkpoint was loaded.*iterate over the B"):
                next(iteration)
            iteration = iter(data)
        assert list(draw_beside(iteration)) == whole[2:6]
        assert (data.epoch, data.batch) == (1, 0)
        assert over(data) == whole[6:]


def test_a_position_that_waits_is_saved_as_it_is() -> None:
    whole, state = whole_and_stopped(shuffled, 8)
    data = Batches(shuffled())
    data.load_state_dict(state)
    torch.rand(1)
    assert (data.epoch, data.batch) == (1, 2)
    assert resumed(shuffled, data.state_dict()) == whole[8:]


def test_a_checkpoint_of_the_last_batch_has_an_empty_rest() -> None:
    seed(1)
    data = Batches(shuffled())
    _, state = stopped(data, 6)
    data = Batches(shuffled())
    data.load_state_dict(state)
    assert (data.epoch, data.batch) == (0, 6)
    assert list(data) == []
    assert (data.epoch, data.batch) == (1, 0)
    assert len(list(data)) == 6


def test_generators_between_epochs_are_those_of_the_load() -> None:
    # The loop draws at the beginning of an epoch: a resumed loop does so, too.
    def loop(data: Batches, epochs: int) -> list[float]:
        seen = []
        for _ in range(data.epoch, epochs):
            seen.append(float(torch.rand(1)))
            seen += [number for _, number in draw_beside(data)]
        return seen

    seed(1)
    whole = loop(Batches(shuffled()), 3)
    seed(1)
    data = Batches(shuffled())
    loop(data, 1)
    state = copy.deepcopy(data.state_dict())
    seed(2)
    data = Batches(shuffled())
    data.load_state_dict(state)
    assert loop(data, 3) == whole[7:]


def test_an_epoch_that_is_left_early_is_left_like_that_of_a_loader() -> None:
    def loop(data: Any, epochs: range, limit: int) -> Iterator[tuple[Any, Any]]:
        for epoch in epochs:
            if isinstance(data, Batches):
                data.set_epoch(epoch)
            for number, each in enumerate(draw_beside(data), getattr(data, "batch", 0)):
                if isinstance(data, Batches) and number + 1 == limit:
                    data.set_epoch(epoch + 1)
                yield each, data.state_dict() if isinstance(data, Batches) else None
                if number + 1 == limit:
                    break

    seed(1)
    whole = [each for each, _ in loop(shuffled(), range(3), 4)]
    for count in (3, 4, 5):
        seed(1)
        seen = list(itertools.islice(loop(Batches(shuffled()), range(3), 4), count))
        assert [each for each, _ in seen] == whole[:count]
        data = Batches(shuffled())
        data.load_state_dict(seen[-1][1])
        assert data.epoch == count // 4
        assert [each for each, _ in loop(data, range(data.epoch, 3), 4)] == whole[count:]


def test_without_set_epoch_an_epoch_that_is_left_early_counts_at_the_next() -> None:
    data = Batches(shuffled())
    for epoch in range(3):
        for _ in data:
            assert data.epoch == epoch
            if data.batch == 2:
                break
    assert (data.epoch, data.batch) == (2, 2)


def test_a_loop_that_begins_in_another_epoch_than_the_loaded_one_is_refused() -> None:
    dataset = Samples(draws=False)

    def make() -> DataLoader[Any]:
        sampler: Sampler[Any] = DistributedSampler(dataset, 1, 0)
        return DataLoader(dataset, batch_size=4, sampler=sampler)

    data = Batches(make())
    list(data)
    data.set_epoch(1)
    next(iter(data))
    state = data.state_dict()
    data = Batches(make())
    data.load_state_dict(state)
    with pytest.raises(UsageError, match=r"inside epoch 1, and the loop has set epoch 0"):
        data.set_epoch(0)
    data.sampler.set_epoch(0)
    with pytest.raises(UsageError, match=r"epoch 0.*range\(data.epoch, epochs\)"):
        iter(data)
    data.sampler.set_epoch(1)
    assert len(list(data)) == 5


def test_loops_without_epochs_and_with_a_loader_beside(tmp_path: Path) -> None:
    valid = DataLoader(Samples(draws=True), batch_size=8)

    def loop(root: Path, stop: int) -> list[Any]:
        seed(1)
        data = Batches(shuffled())
        seen: list[Any] = []
        with SyncPipeline(root) as pipeline:
            restored = pipeline.load({"data": data})
            step = restored.step if restored else 0
            while step < stop:
                for batch in data:
                    step += 1
                    seen.append((batch[0].tolist(), float(torch.rand(1))))
                    if step % 4 == 0:
                        seen.append(list(draw_beside(valid)))
                    if step == stop:
                        pipeline.save({"data": data}, step=step)
                        break
        return seen

    whole = loop(tmp_path / "whole", 14)
    assert loop(tmp_path / "parts", 7) + loop(tmp_path / "parts", 14) == whole


def two_loaders(late: bool, stop: int | None, state: Any = None) -> tuple[list[Any], Any]:
    """Iterate over two loaders at once, the second in a cycle of its own."""
    first, second = Batches(shuffled()), Batches(shuffled(samples=16))
    if state:
        first.load_state_dict(state[0])
        second.load_state_dict(state[1])
    seen: list[Any] = []
    other = None if late else iter(second)
    for batch in first:
        other = other or iter(second)
        beside = next(other, None)
        seen.append((batch[0].tolist(), beside and beside[0].tolist(), float(torch.rand(1))))
        if len(seen) == stop:
            return seen, copy.deepcopy((first.state_dict(), second.state_dict()))
    return seen, None


@pytest.mark.parametrize("late", [False, True])
def test_two_loaders_in_one_loop(late: bool) -> None:
    seed(1)
    whole, _ = two_loaders(late, None)
    seed(1)
    seen, state = two_loaders(late, 2)
    assert seen == whole[:2]
    seed(2)
    assert two_loaders(late, None, state)[0] == whole[2:]


@pytest.mark.parametrize("count", [4, 12, 24])
def test_workers_may_be_others(count: int) -> None:
    def make(workers: int) -> DataLoader[Any]:
        data = Samples(draws=False)
        return DataLoader(data, batch_size=1, shuffle=True, num_workers=workers)

    seed(1)
    whole = over(make(0), epochs=2)
    seed(1)
    first, state = stopped(Batches(make(2)), count)
    assert first == whole[:count]
    seed(2)
    data = Batches(make(1))
    data.load_state_dict(state)
    assert over(data, epochs=2) == whole[count:]


def test_batches_may_be_of_another_size_if_whole_ones_are_consumed() -> None:
    seed(1)
    _, state = stopped(Batches(shuffled()), 3)
    seed(1)
    whole = samples_of(draw_beside(Batches(shuffled())))
    data = Batches(shuffled(batch_size=6))
    data.load_state_dict(state)
    assert data.batch == 2
    assert samples_of(draw_beside(data)) == whole[12:]
    with pytest.raises(TargetMismatch, match=r"12 samples were consumed.*1 times 5"):
        Batches(shuffled(batch_size=5)).load_state_dict(state)


@pytest.mark.parametrize("change", ["samples", "shuffle", "generator", "batch_sampler"])
def test_a_loader_of_another_order_is_refused_before_anything_is_touched(
    tmp_path: Path, change: str
) -> None:
    other: dict[str, Callable[[], DataLoader[Any]]] = {
        "samples": lambda: shuffled(samples=28),
        "shuffle": lambda: DataLoader(DATA, batch_size=4),
        "generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=_generator()),
        "batch_sampler": lambda: DataLoader(DATA, batch_sampler=EagerBatches()),
    }
    data, net = Batches(shuffled()), torch.nn.Linear(2, 2)
    stopped(data, 3)
    with SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"net": net, "data": data}, step=3, until="committed")
        net.weight.data.zero_()
        seed(3)
        expected = float(torch.rand(1))
        seed(3)
        state: dict[str, Any] = {"net": net, "data": Batches(other[change]())}
        with pytest.raises(TargetMismatch, match=r"after batch 3 of epoch 0.*exclude") as caught:
            pipeline.load(state)
        assert (caught.value.key, caught.value.step) == ("data", 3)
        assert not net.weight.any()
        assert float(torch.rand(1)) == expected
        assert pipeline.load(state, exclude=["data"]) is not None
        assert len(list(state["data"])) == len(state["data"])


def distributed(rank: int, world_size: int, batch_size: int, shuffle: bool = True) -> Batches:
    dataset = Samples(draws=False, samples=48)
    sampler: Sampler[Any] = DistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=4)
    return Batches(DataLoader(dataset, batch_size=batch_size, sampler=sampler))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("consumed", "after", "before"),
    list(itertools.product([0, 16, 48], [1, 2, 4], [1, 2, 4])),
)
def test_another_number_of_ranks_takes_each_sample_once(
    tmp_path: Path, before: int, after: int, consumed: int
) -> None:
    seen: list[float] = []
    with ranks(str(tmp_path), before) as pipelines:
        for rank, pipeline in enumerate(pipelines):
            data = distributed(rank, before, 4)
            data.set_epoch(3)
            if consumed:
                seen += samples_of(stopped(data, consumed // 4 // before)[0])
            pipeline.save({"data": data}, step=1, until="committed")
    with ranks(str(tmp_path), after, attempt_id="other") as pipelines:
        for rank, pipeline in enumerate(pipelines):
            data = distributed(rank, after, 4)
            pipeline.load({"data": data}, per_rank="derive")
            assert data.epoch == 3
            data.set_epoch(data.epoch)
            seen += samples_of(draw_beside(data))
    assert sorted(seen) == list(range(48))


def test_ranks_that_no_order_fits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(str(tmp_path), 2) as pipelines:
        for rank, pipeline in enumerate(pipelines):
            seed(rank)
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
            state = {"parts": distributed(rank, 2, 4), "all": Batches(shuffled())}
            for data in state.values():
                stopped(data, 3)
            pipeline.save(state, step=1, until="committed")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(TargetMismatch, match=r"24 samples were consumed.*1 times 5"):
            pipeline.load({"parts": distributed(0, 1, 5)}, include=["parts"], per_rank="derive")
        with pytest.raises(TargetMismatch, match="2 ranks saved it and 1 load it"):
            pipeline.load({"all": Batches(shuffled())}, include=["all"], per_rank="derive")
        with pytest.raises(PerRankValue):
            pipeline.load({"parts": distributed(0, 1, 4)}, include=["parts"])
        data = distributed(0, 1, 4)
        seed(7)
        expected = float(torch.rand(1))
        seed(7)
        pipeline.load({"parts": data}, include=["parts"], per_rank="drop")
        assert data.batch == 6
        assert float(torch.rand(1)) == expected, "generators are left alone"


class Stream(IterableDataset[float]):
    """Each worker's share of some numbers, in an order that depends on its base seed or not."""

    def __init__(self, noisy: bool = False) -> None:
        self.noisy = noisy

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for number in range(info.id if info else 0, 24, info.num_workers if info else 1):
            yield [number, float(torch.rand(1)) if self.noisy else 0.0]


class StatefulStream(Stream):
    """The same, with a position of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = self.given = 0
        self.made = 0

    def __iter__(self) -> Iterator[Any]:
        self.given, self.loaded = self.loaded, 0
        for each in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            self.made += 1
            yield each

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = self.given = state["given"]


STREAMS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(Stream(), batch_size=4),
    "in workers": lambda: DataLoader(Stream(noisy=True), batch_size=4, num_workers=2),
    "plain in a loader with a state": lambda: StatefulDataLoader(Stream(), batch_size=4),
    "with a state": lambda: DataLoader(StatefulStream(), batch_size=4),
    "with a state in workers": lambda: stateful_loader(num_workers=2),
    "with a state in a loader with a state": lambda: stateful_loader(),
}


def stateful_loader(**options: Any) -> DataLoader[Any]:
    made: DataLoader[Any] = StatefulDataLoader(StatefulStream(), batch_size=4, **options)
    return made


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", STREAMS)
def test_an_iterable_dataset_goes_on(tmp_path: Path, kind: str) -> None:
    make = STREAMS[kind]
    seed(1)
    whole = two_epochs(make())
    for count in (2, 5, 6):
        seed(1)
        data = Batches(make())
        with SyncPipeline(tmp_path / str(count)) as pipeline:
            for step, batches in enumerate((count, 1)):  # a resumed run is resumed again
                stopped(data, batches)
                pipeline.save({"data": data}, step=step, until="committed")
                seed(2)
                data = Batches(make())
                pipeline.load({"data": data})
        assert two_epochs(data) == whole[count + 1 :]
        if kind == "with a state":
            assert data.dataset.made == 48 - 4 * (count + 1), "none was made twice"


def test_an_iterable_dataset_needs_its_number_of_workers() -> None:
    _, state = stopped(Batches(STREAMS["in workers"]()), 2)
    data = Batches(DataLoader(Stream(noisy=True), batch_size=4, num_workers=1))
    with pytest.raises(TargetMismatch, match="its workers changed"):
        data.load_state_dict(state)
    with pytest.raises(TargetMismatch, match="the way to it was 'loading' and is 'state'"):
        Batches(STREAMS["with a state"]()).load_state_dict(state)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [1, 6, 8])
def test_augmentations_in_workers_go_on_if_batches_are_loaded_again(count: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Samples(draws=True), batch_size=4, shuffle=True, num_workers=2)

    seed(1)
    whole = two_epochs(make())
    seed(1)
    _, state = stopped(Batches(make(), exact_workers=True), count)
    seed(2)
    data = Batches(make(), exact_workers=True)
    data.load_state_dict(state)
    assert two_epochs(data) == whole[count:]
    with pytest.raises(TargetMismatch, match="was 'loading' and is 'sampler'"):
        Batches(make()).load_state_dict(state)


class Unstable(DataLoader[Any]):
    """Its iterations begin, or else raise once they have drawn their seed."""

    fails = False

    def __iter__(self) -> Any:
        made = super().__iter__()
        if self.fails:
            raise ConnectionRefusedError
        return made


@pytest.mark.parametrize("exact_workers", [False, True])
@pytest.mark.parametrize("count", [2, 6])
def test_an_iteration_that_cannot_begin_moves_nothing(count: int, exact_workers: bool) -> None:
    def make() -> DataLoader[Any]:
        return Unstable(Samples(draws=True), batch_size=4, shuffle=True)

    def failed(data: Batches) -> dict[str, Any]:
        inner = data._inner
        inner.fails = True
        with pytest.raises(ConnectionRefusedError):
            iter(data)
        inner.fails = False
        return copy.deepcopy(data.state_dict())

    whole, state = whole_and_stopped(make, count, exact_workers=exact_workers)
    seed(5)
    data = Batches(make(), exact_workers=exact_workers)
    data.load_state_dict(state)
    state = failed(data)  # which has the loaded position still
    assert over(data) == whole[count:]
    assert resumed(make, state, exact_workers=exact_workers) == whole[count:]
    seed(1)
    data = Batches(make(), exact_workers=exact_workers)
    assert list(draw_beside(data)) == whole[:6]  # the first epoch, to its end
    state = failed(data)
    assert list(draw_beside(data)) == whole[6:12]
    data = Batches(make(), exact_workers=exact_workers)
    data.load_state_dict(state)
    assert over(data) == whole[6:]


def test_the_loader_stays_as_it_is_and_is_seen_through() -> None:
    loader = shuffled()
    before = dict(vars(loader))
    data = Batches(loader)
    list(data)
    assert vars(loader) == before
    assert data.loader is loader
    assert (len(data), data.batch_size, data.drop_last) == (6, 4, False)
    assert (data.dataset, data.sampler) == (loader.dataset, loader.sampler)
    assert repr(data).endswith("epoch=1, batch=0)")
    assert len(list(loader)) == 6
    with pytest.raises(AttributeError, match="nothing"):
        _ = data.nothing
    with pytest.raises(AttributeError):
        data.num_workers = 2  # type: ignore[attr-defined]


def test_loaders_without_a_position_are_refused() -> None:
    class Other(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(shuffled())

    with pytest.raises(UsageError, match="takes a DataLoader, not list"):
        Batches([1, 2])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not ask its own sampler for"):
        next(iter(Batches(Other(DATA))))
    loader = StatefulDataLoader(DATA)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="StatefulDataLoader has loaded a position"):
        Batches(loader)
    with pytest.raises(UsageError, match="exact_workers"):
        Batches(make_loader(Cell(workers=1, persistent=True), DATA), exact_workers=True)


def test_a_loader_that_opens_at_its_first_batch_goes_on() -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield [2 * each for each in batch]

    def make() -> DataLoader[Any]:
        return Doubling(DATA, batch_size=4, shuffle=True)

    check_goes_on(make, [8])


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_that_the_sampler_does_not_repeat_is_refused(count: int, workers: int) -> None:
    class Counts(Sampler[int]):
        def __init__(self) -> None:
            self.begun = 0

        def __iter__(self) -> Iterator[int]:
            self.begun += 1
            made = torch.Generator().manual_seed(self.begun)
            return iter(torch.randperm(24, generator=made).tolist())

        def __len__(self) -> int:
            return 24

    def make() -> Batches:
        data = Samples(draws=False)
        return Batches(DataLoader(data, 4, sampler=Counts(), num_workers=workers))

    _, state = stopped(make(), count)
    data = make()
    data.load_state_dict(state)
    if count < 6:
        assert len(over(data)) == 18 - count
    else:
        with pytest.raises(UsageError, match="batch 1 has other samples"):
            over(data)


def test_a_loader_may_have_been_iterated_before() -> None:
    cell = Cell(workers=1, persistent=True, draws=False, shuffle=False)
    loader = make_loader(cell, Samples(draws=False))
    list(loader)
    assert samples_of(draw_beside(Batches(loader))) == list(range(24))
    assert samples_of(draw_beside(loader)) == list(range(24))
    other: Any = make_loader(Cell("StatefulDataLoader", draws=False), Samples(draws=False))
    other.state_dict()
    assert len(list(Batches(other))) == 6


@pytest.mark.parametrize("loaded", [False, True])
def test_persistent_workers_end_with_the_last_reference(loaded: bool) -> None:
    # The garbage collector would close the queues of the workers before it stops them.
    data = Batches(make_loader(Cell(workers=1, persistent=True, draws=False), DATA))
    if loaded:
        data.load_state_dict(stopped(data, 2)[1])
    stopped(data, 8)
    gc.disable()
    try:
        gone = weakref.ref(data)
        del data
        assert gone() is None
    finally:
        gc.enable()


def test_a_part_of_a_position_is_refused(tmp_path: Path) -> None:
    data = Batches(shuffled())
    stopped(data, 3)
    with SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"data": data}, step=1, until="committed")
        for part in ("begun.first", "begun.drawn", "begun.last", "loader.order", "loader.source"):
            with pytest.raises(TargetMismatch, match=f"lacks {part}") as caught:
                pipeline.load({"data": Batches(shuffled())}, exclude=[f"data.{part}"])
            assert caught.value.key == "data"
        with pytest.raises(TargetMismatch, match="lacks begun, epochs, loader, seeded"):
            pipeline.load({"data": data}, include=["data.epoch", "data.batch"])


def test_torch_saves_and_loads_the_state(tmp_path: Path) -> None:
    whole, state = whole_and_stopped(shuffled, 8)
    torch.save(state, tmp_path / "state.pt")
    assert resumed(shuffled, torch.load(tmp_path / "state.pt")) == whole[8:]


async def test_a_coroutine_resumes_its_loop(tmp_path: Path) -> None:
    seed(1)
    whole = over(shuffled())
    seed(1)
    data = Batches(shuffled())
    state = {"data": data, "rng": RngState()}
    async with ckpipe.Pipeline(tmp_path) as pipeline:
        stopped(data, 8)
        await pipeline.save(state, step=8, until="committed")
        seed(2)
        state["data"] = data = Batches(shuffled())
        await pipeline.load(state)
        torch.rand(3)
    assert over(data) == whole[8:]


def test_generators_may_be_applied_later() -> None:
    seed(1)
    saved = RngState().state_dict()
    expected = [float(torch.rand(1)), random.random(), float(np.random.rand())]
    rng = RngState(apply="later")
    seed(2)
    rng.apply()  # nothing was loaded
    rng.load_state_dict(saved)
    assert float(torch.rand(1)) != expected[0]
    assert torch.equal(rng.state_dict()["torch"], saved["torch"]), "the loaded ones wait"
    rng.apply()
    assert [float(torch.rand(1)), random.random(), float(np.random.rand())] == expected
    rng.apply()
    assert float(torch.rand(1)) != expected[0]
    assert repr(rng) == "RngState(apply='later')"
    with pytest.raises(UsageError, match='"load" or "later"'):
        RngState(apply="first")  # type: ignore[arg-type]


def test_in_sequence_means_the_same_for_one_rank_and_several() -> None:
    data = Batches(DataLoader(Samples(draws=False, samples=48), batch_size=4))
    assert isinstance(data.sampler, SequentialSampler)
    _, state = stopped(data, 4)
    seen = []
    for rank in range(2):
        share = distributed(rank, 2, 4, shuffle=False)
        share.load_state_dict(state)
        seen += samples_of(draw_beside(share))
    assert sorted(seen) == list(range(16, 48))
