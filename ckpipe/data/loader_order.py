"""Record the order of a DataLoader's samples, and go to a recorded position in it.

Theory. The order of an epoch follows from the epoch of the sampler, if it has one, and from the
random generators as they are when the sampler is first asked for an index. That moment lies inside
``iter(loader)`` with workers, and inside the first ``next`` without. Before it ``iter(loader)``
draws the base seed of the workers, but not if persistent workers are there already. So the
generators are recorded at that moment and not before ``iter``. A :class:`SampleOrder` stands in for
the sampler to do so: in a copy of the loader, so that the program's loader stays as it is.

To go to a position, the order sets the generators to the recorded ones, asks the sampler for the
indices that were consumed, and drops them. Then it sets the generators to those of the saved step.
All that happens before an index is handed out, so no sample is loaded too early. The indices that
workers had prefetched are asked for as well before the generators are set: a generator of the
loader's own had moved on by them.
"""

from __future__ import annotations

import inspect
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from ckpipe.errors import UsageError
from ckpipe.state_helpers import (
    cpu_generators,
    generators_differ,
    python_form,
    python_state,
    set_cpu_generators,
)

_END = object()

Snapshot = dict[str, Any]
"""The global generators, and those of the loader and its samplers."""


@dataclass(frozen=True, slots=True)
class Position:
    """A loaded position.

    Args:
        batch: The number of consumed batches, in those of the loader.
        begun: The record of the beginning of the epoch.
        generators: The global generators of the saved step; None if they were left out.
        own: The generators of the loader and its samplers at the saved step.
        converted: Whether the saved batches were of another size.
    """

    batch: int
    begun: Mapping[str, Any]
    generators: Mapping[str, Any] | None
    own: Mapping[str, Any]
    converted: bool


class SampleOrder:
    """Stand in for the index sampler of a loader, and record the beginning of its order.

    Attributes:
        by_epoch: Whether the order is a function of seed and epoch alone.
        ahead: The indices of batches that the loop has not received yet.
    """

    def __init__(self, loader: DataLoader[Any], randomness: Randomness) -> None:
        self._sampler: Any = loader._index_sampler
        self.by_epoch = _is_by_epoch(loader)
        self._randomness = randomness
        # Else iter() of the sampler may draw already.
        self._lazy = self.by_epoch or inspect.isgeneratorfunction(type(self._sampler).__iter__)
        self.begin(None, None, lambda: None)

    def begin(
        self, position: Position | None, kept: Snapshot | None, settle: Callable[[], None]
    ) -> None:
        """Begin an epoch.

        Args:
            position: The loaded position to go to.
            kept: The generators as they were before the iteration, if the draw of its base seed is
                to be taken back.
            settle: Sets the generators once the position is reached.
        """
        self._position, self._kept, self._settle = position, kept, settle
        self._before_iter: Snapshot | None = None  # if iter() of the sampler draws
        self._before_first: Snapshot | None = None
        self._kept_after_iter: Snapshot = {}
        self._epochs = self._randomness.epochs()
        self._indices: _Indices | None = None
        self._drawn, self._exhausted = 0, False
        self.ahead: deque[Any] = deque()
        self._last: Any = None  # indices of the batch that it has received last

    def consume(self) -> bool:
        """Take note that the loop received a batch; tell whether the loader asked for it here."""
        asked = bool(self.ahead)
        if asked:
            self._last = self.ahead.popleft()
        return asked

    def __iter__(self) -> _Indices:
        before = self._kept if self._position is None else self._position.begun["iter"]
        if before is not None:
            self._randomness.restore(before)
        if self._lazy:
            inner = iter(self._sampler)
        else:
            before = self._randomness.snapshot()
            inner = iter(self._sampler)
            drew = generators_differ(before, self._randomness.snapshot())
            self._before_iter = before if drew else None
        if self._kept is not None:
            self._kept_after_iter = self._randomness.snapshot()
        self._epochs = self._randomness.epochs()
        self._indices = _Indices(self, inner)
        return self._indices

    def catch_up(self) -> None:
        """Go to the loaded position now, unless the loader did so or has not begun yet."""
        if self._indices is not None:
            self._indices.catch_up()

    def pass_over(self, inner: Iterator[Any]) -> Iterator[Any]:
        """Ask for the consumed indices and drop them; return those that workers had prefetched."""
        position, self._position = self._position, None
        # The garbage collector would close the queues of persistent workers before it stops them.
        settle, self._settle = self._settle, lambda: None
        if position is None:
            if self._kept is not None:
                self._randomness.restore(self._kept_after_iter)
            return iter(())
        begun = position.begun
        self._before_first = begun["first"]
        if self._before_first is not None:
            self._randomness.restore(self._before_first)
        self._drawn = position.batch if position.converted else begun["drawn"]
        passed = 0
        for passed, self._last in enumerate(islice(inner, position.batch), 1):  # noqa: B007
            pass
        if passed < position.batch:
            raise too_short(passed, position.batch)
        if not position.converted and generators_differ([self._fingerprint()], [begun["last"]]):
            raise _other_order(position.batch)
        prefetched = list(islice(inner, self._drawn - position.batch))
        if begun["exhausted"] and not position.converted:
            prefetched += inner  # none; but a sampler may draw when it is asked once more
            self._exhausted = True
        settle()
        return iter(prefetched)

    def next_index(self, inner: Iterator[Any]) -> Any:
        if self._before_first is None and not self.by_epoch:
            self._before_first = self._randomness.snapshot()
            self._epochs = self._randomness.epochs()
        try:
            found = next(inner)
        except StopIteration:
            self._exhausted = True
            raise
        self._drawn += 1
        return found

    def _fingerprint(self) -> torch.Tensor | None:
        """Return a checksum of the last batch's indices, if they are ints and it is needed."""
        if self.by_epoch or self._last is None:
            return None
        try:
            indices = torch.as_tensor(self._last, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            return None
        # A tensor may belong to a rank, where a plain value would be refused for its difference.
        return torch.tensor(zlib.crc32(indices.numpy().tobytes()))

    def record(self) -> dict[str, Any]:
        """Return the beginning of the order, its last batch, and how far the sampler was asked."""
        return {
            "iter": self._before_iter,
            "first": self._before_first,
            "last": self._fingerprint(),
            "drawn": self._drawn,
            "exhausted": self._exhausted,
            "epochs": self._epochs or None,
        }

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        # A StatefulDataLoader would save a state of the sampler at each step.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Indices:
    """The indices of an epoch, from the loaded position on."""

    def __init__(self, order: SampleOrder, inner: Iterator[Any]) -> None:
        self._order, self._inner = order, inner
        self._prefetched: Iterator[Any] | None = None

    def catch_up(self) -> None:
        if self._prefetched is None:
            self._prefetched = self._order.pass_over(self._inner)

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        if self._prefetched is None:
            self.catch_up()
        assert self._prefetched is not None
        found = next(self._prefetched, _END)
        if found is _END:
            found = self._order.next_index(self._inner)
        self._order.ahead.append(found)
        return found


class Randomness:
    """The generators and epochs that the order of a loader depends on."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def snapshot(self) -> Snapshot:
        # A list: a mapping would count as the generators of a rank, which another rank derives.
        return {"global": list(cpu_generators().values()), "own": self.own() or None}

    def restore(self, snapshot: Snapshot) -> None:
        self.restore_global(snapshot)
        self.set_own(snapshot["own"] or {})

    def restore_global(self, snapshot: Snapshot) -> None:
        in_torch, in_numpy, in_python = snapshot["global"]
        set_cpu_generators({"torch": in_torch, "numpy": in_numpy, "python": in_python})

    def generators(self) -> dict[str, Any]:
        """Return the generators of the loader and its samplers, by name."""
        found = {"loader.generator": self._loader.generator}
        for name, holder in self._samplers().items():
            for attribute, value in getattr(holder, "__dict__", {}).items():
                found[f"{name}.{attribute}"] = value
        unique = {id(value): name for name, value in reversed(found.items())}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, _GENERATORS) and unique[id(value)] == name
        }

    def own(self) -> dict[str, Any]:
        return {name: _state_of(each) for name, each in self.generators().items()}

    def set_own(self, states: Mapping[str, Any]) -> None:
        generators = self.generators()
        for name, state in states.items():
            if name in generators:
                _set_state(generators[name], state)

    def epoch_holders(self) -> dict[str, Any]:
        """Return the samplers and the dataset to which a loop tells its epoch, by name."""
        holders = {**self._samplers(), "dataset": self._loader.dataset}
        return {
            name: each for name, each in holders.items() if callable(getattr(each, "set_epoch", 0))
        }

    def epochs(self) -> dict[str, int]:
        epochs = {name: getattr(each, "epoch", None) for name, each in self.epoch_holders().items()}
        return {name: epoch for name, epoch in epochs.items() if isinstance(epoch, int)}

    def set_epochs(self, epochs: Mapping[str, int]) -> None:
        holders = self.epoch_holders()
        for name, epoch in epochs.items():
            if name in holders:
                holders[name].set_epoch(epoch)

    def check_epochs(self, epochs: Mapping[str, int]) -> None:
        """Raise UsageError if the program has set another epoch since it was loaded."""
        now = self.epochs()
        for name, epoch in epochs.items():
            if now.get(name, epoch) != epoch:
                raise other_epoch(epoch, now[name])

    def _samplers(self) -> dict[str, Any]:
        """Return the samplers of the loader, and those that they hold, by name."""
        found: dict[str, Any] = {}
        open_ones = [
            ("sampler", self._loader.sampler),
            ("batch_sampler", self._loader.batch_sampler),
        ]
        while open_ones:
            name, sampler = open_ones.pop(0)
            if sampler is None or any(sampler is each for each in found.values()):
                continue
            found[name] = sampler
            open_ones += [
                (f"{name}.{inner}", getattr(sampler, inner, None))
                for inner in ("sampler", "batch_sampler")
            ]
        return found


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return python_form(generator.getstate())


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(python_state(state))


def sampler_of(loader: DataLoader[Any]) -> tuple[Any, int | None]:
    """Return the sampler of single samples and the batch size, or a custom batch sampler."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler, 1
    if isinstance(batches, BatchSampler) and _iterates_as(batches, BatchSampler):
        return batches.sampler, batches.batch_size
    return batches, None


def _is_by_epoch(loader: DataLoader[Any]) -> bool:
    """Tell whether an order is a function of seed and epoch alone."""
    sampler, size = sampler_of(loader)
    known = (SequentialSampler, DistributedSampler)
    return size is not None and any(
        isinstance(sampler, each) and _iterates_as(sampler, each) for each in known
    )


def _iterates_as(sampler: Any, kind: type[Any]) -> bool:
    """Tell whether a sampler has the order of a class of torch: as it is, or made by torchdata."""
    cls = type(sampler)
    return (
        cls.__iter__ is kind.__iter__ or cls.__module__ == "torchdata.stateful_dataloader.sampler"
    )


def other_epoch(loaded: int, asked: int) -> UsageError:
    return UsageError(
        f"The loaded checkpoint lies inside epoch {loaded}, and the loop has set epoch {asked}",
        hint="Begin the loop at the epoch of the Batches: for epoch in range(data.epoch, epochs)",
    )


def too_short(found: int, wanted: int) -> UsageError:
    return UsageError(
        f"The loader ended after {found} batches, and the checkpoint lies after batch {wanted}",
        hint="Use the dataset and the sampler of the saved run",
    )


def _other_order(batch: int) -> UsageError:
    return UsageError(
        f"The sampler does not give the order of the saved run: batch {batch} has other samples",
        hint="Let the order depend on set_epoch, on a generator that the sampler holds, or on one "
        "draw at its beginning; or leave the position out with exclude and begin a new epoch",
    )
