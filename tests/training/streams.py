"""Streams that remember their position, each in another way, for tests of Batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

SAMPLES = 22
"""The last batch is smaller than the others, in one process and in each of two workers."""


class Stream(IterableDataset[Any]):
    """Each worker's share of some numbers; one without workers draws a number for each."""

    given = 0

    def share(self) -> list[int]:
        info = get_worker_info()
        return list(range(info.id if info else 0, SAMPLES, info.num_workers if info else 1))

    def sample(self, number: int) -> list[float]:
        return [float(number), 0.0 if get_worker_info() else float(torch.rand(1))]

    def begin(self) -> int:
        return 0

    def __iter__(self) -> Iterator[list[float]]:
        self.given = self.begin()
        for number in self.share()[self.given :]:
            self.given += 1
            yield self.sample(number)


class Once(Stream):
    """Takes a loaded position for one iteration."""

    loaded = 0

    def begin(self) -> int:
        first, self.loaded = self.loaded, 0
        return first

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = self.given = state["given"]


class Each(Stream):
    """Begins each iteration at a loaded position."""

    first = 0

    def begin(self) -> int:
        return self.first

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["given"]


class EachBeside(Each):
    """The same with a generator and a count of its own beside the position."""

    def __init__(self) -> None:
        self.draws, self.total = random.Random(3), 0

    def __iter__(self) -> Any:
        for each in super().__iter__():
            self.draws.random()
            self.total += 1
            yield each

    def state_dict(self) -> dict[str, Any]:
        state = [list(each) if isinstance(each, tuple) else each for each in self.draws.getstate()]
        return {**super().state_dict(), "draws": state, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        version, inner, gauss = state["draws"]
        self.draws.setstate((version, tuple(inner), gauss))
        self.total = state["total"]


class Listed(Stream):
    """Holds such a stream in a list."""

    def __init__(self) -> None:
        self.parts = [Each()]

    def __iter__(self) -> Iterator[list[float]]:
        return iter(self.parts[0])

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [each.state_dict() for each in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each, saved in zip(self.parts, state["parts"], strict=True):
            each.load_state_dict(saved)


class Hidden(Each):
    """Keeps the loaded position where nothing finds it."""

    def __init__(self) -> None:
        self.place = [0]

    def begin(self) -> int:
        return self.place[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place[0] = state["given"]


class Around(Stream):
    """Holds a stream that begins each iteration at a loaded position."""

    def __init__(self) -> None:
        self.inner = Each()

    def __iter__(self) -> Iterator[list[float]]:
        yield from self.inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])


class RunsOn(Stream):
    """Has one position that runs on, counts its rounds, and has a seed of its own in its state."""

    rounds = 0

    def __init__(self) -> None:
        self.seed = int(torch.randint(100, ()))

    def __iter__(self) -> Iterator[list[float]]:
        share = self.share()
        while self.given < len(share):
            self.given += 1
            yield self.sample(share[self.given - 1] + 100 * self.rounds + 1000 * self.seed)
        self.given, self.rounds = 0, self.rounds + 1

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "rounds": self.rounds, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.rounds, self.seed = state["given"], state["rounds"], state["seed"]


class ByEpoch(Stream):
    """Begins each iteration of one epoch at a loaded position; workers see its epoch too."""

    def __init__(self) -> None:
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.started: dict[str, Any] = {"given": 0, "epoch": 0}

    @property
    def epoch(self) -> int:
        return int(self.shared)

    def set_epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch)

    def begin(self) -> int:
        return int(self.started["given"]) if self.started["epoch"] == self.epoch else 0

    def sample(self, number: int) -> list[float]:
        return super().sample(number + 100 * self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started = state


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": list(range(SAMPLES))}).to_iterable_dataset(4)


def interleaved() -> Any:
    # Older ones go on with other samples from their own state.
    datasets = pytest.importorskip("datasets", minversion="5")
    both = [hugging_face(), hugging_face().map(lambda row: {"x": row["x"] + 100})]
    return datasets.interleave_datasets(both, probabilities=[0.5, 0.5], seed=3)


def looked_at() -> Any:
    made = hugging_face()
    next(iter(made))
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "without a state": Stream,
    "once": Once,
    "each": Each,
    "each beside others": EachBeside,
    "each in a list": Listed,
    "around": Around,
    "runs on": RunsOn,
    "by epoch": ByEpoch,
    "Hugging Face": hugging_face,
    "interleaved": interleaved,
    "looked at": looked_at,
}
