"""Iterate over a DataLoader from a position that a checkpoint keeps.

Theory. The order of an epoch follows from the epoch of the sampler, if it has one, and from the
random generators as they are when the sampler is first asked for an index. That moment lies inside
``iter(loader)`` with workers, and inside the first ``next`` without. Before it ``iter(loader)``
draws the base seed of the workers, but not if persistent workers are there already. So the
generators are recorded at that moment and not before ``iter``. An :class:`_Order` stands in for the
sampler to do so: in a copy of the loader, so that the program's loader stays as it is.

To go to a position, the order sets the generators to the recorded ones, asks the sampler for the
indices that were consumed, and drops them. Then it sets the generators to those of the saved step.
All that happens before an index is handed out, so no sample is loaded too early. The indices that
workers had prefetched are asked for as well before the generators are set: a generator of the
loader's own had moved on by them.

With ``exact_workers`` and for an ``IterableDataset`` without a state of its own the consumed
batches are loaded and dropped: only that moves the generators or datasets in the workers on.
"""

from __future__ import annotations

import copy
import inspect
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from ckpipe.errors import TargetMismatch, UsageError
from ckpipe.loading.stateful import LoadTargets, SavedObject
from ckpipe.preemption import note_batch, note_loader_error, workers_protected
from ckpipe.ranks.world import find_topology
from ckpipe.state.kinds import is_stateful
from ckpipe.state_helpers import (
    RngState,
    cpu_generators,
    generators_differ,
    python_form,
    python_state,
    set_cpu_generators,
)


class Batches:
    """The batches of a ``DataLoader``, in a loop that a checkpoint can leave and enter anywhere.

    Put the object into the state and iterate over it instead of over the loader::

        data = ckpipe.Batches(loader)
        state = {"model": model, "optimizer": optimizer, "data": data}
        with ckpipe.SyncPipeline("run") as pipeline:
            pipeline.load(state)
            for epoch in range(data.epoch, epochs):
                for batch in data:
                    ...
                    pipeline.save(state)

    The state has the epoch, the number of batches that the loop has received in it, and the random
    generators. After a load the next iteration goes on with the first batch that the loop had not
    received, in the same order. The samples before it are not loaded. The generators are those of
    the saved step before the first sample is loaded, also if the state has no :class:`RngState`.
    A checkpoint of the last batch of an epoch resumes with an empty rest of that epoch.

    Save after the step that used a batch: a batch counts as consumed as soon as the loop has it.
    A load while an epoch is iterated ends that iteration: its next batch raises ``UsageError``.
    Leave the loop and iterate again.

    ``len`` and all attributes of the loader, such as ``dataset`` and ``batch_size``, are there as
    well. The loader itself stays as it is, and can be iterated beside. Put neither the loader nor
    its sampler into the state as well.

    An iteration that you leave early, as by ``break``, goes on after a load. In the same process
    the next iteration begins the next epoch, as with the loader. If the loop leaves each epoch
    early, tell it with :meth:`set_epoch`.

    While a pipeline with ``preemption`` is open, workers that start survive the signals that
    announce the end; see :func:`ckpipe.preemption.worker_init`.

    Another number of workers resumes alike. Another number of ranks or another batch size does if
    the total batch divides the consumed samples. With another number of ranks the order has to be
    a function of seed and epoch: that of a ``DistributedSampler`` or without shuffling. Else the
    load raises ``TargetMismatch`` and touches nothing.

    Not exact are: a state that the dataset holds, ``in_order=False``, and, unless ``exact_workers``
    is set, random augmentations in workers. A sampler that gives another order than in the saved
    run, as one that draws from global generators as it goes, raises ``UsageError``.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or a subclass such as torchdata's
            ``StatefulDataLoader``.
        exact_workers: Whether a load makes random augmentations in workers exact too: the consumed
            batches of the epoch are loaded again and dropped, with the same number of workers.
            Impossible with ``persistent_workers``, whose generators run on over epochs.

    Raises:
        UsageError: If ``loader`` is no ``DataLoader``, or its workers are persistent and
            ``exact_workers`` is set, or it has loaded a position itself.
    """

    __slots__ = (
        "__weakref__", "_batch", "_begun", "_epoch", "_inner", "_loads", "_number", "_order",
        "_pending", "_randomness", "_seeded", "_source", "_start", "loader",
    )  # fmt: skip

    loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], *, exact_workers: bool = False) -> None:
        if not isinstance(loader, DataLoader):
            raise UsageError(
                f"Batches takes a DataLoader, not {type(loader).__qualname__}",
                hint="Put another source of batches into the state itself, with state_dict and "
                "load_state_dict that keep its position",
            )
        if exact_workers and loader.persistent_workers:
            raise UsageError(
                "The generators of persistent workers run on over epochs, so exact_workers is "
                "impossible",
                hint="Make the loader with persistent_workers=False, or leave exact_workers out",
            )
        if getattr(loader, "next_iter_state", None) is not None:
            raise UsageError(
                "The StatefulDataLoader has loaded a position, which a Batches does not know",
                hint="Iterate over the loader itself to the end of the epoch, then wrap it",
            )
        self.loader = loader
        self._source = _source_of(loader, exact_workers)
        self._randomness = _Randomness(loader)
        self._order = _Order(loader, self._randomness)
        self._epoch = self._batch = 0
        self._begun = False  # whether an iteration has begun the epoch
        self._number = 0  # of the newest iteration
        self._loads = 0
        self._pending: _Position | None = None  # loaded, and not iterated since
        self._seeded = False  # whether the first iteration after a load draws no base seed
        self._start: _Snapshot | None = None  # before iter(), if consumed batches are loaded again
        # iter() of a copy with another sampler is that of the loader's own class.
        self._inner = copy.copy(loader)
        # Workers that an iteration over the bare loader left have the indices of its own sampler.
        vars(self._inner).update(_iterator=None, _initial_iter_for_state_dict=False)
        if self._source == "sampler":
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            vars(self._inner)[name] = self._order

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0; between two iterations that of the next one."""
        return self._epoch

    @property
    def batch(self) -> int:
        """The number of batches that the loop has received in this epoch."""
        return self._batch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin this epoch, and tell it to the samplers and the dataset.

        If your loop calls ``sampler.set_epoch``, call this instead. While a loaded position waits,
        the call takes its epoch only, and keeps the position. If your loop leaves each epoch early,
        call ``set_epoch(epoch + 1)`` before it leaves: then a checkpoint has the end of the epoch.

        Args:
            epoch: The epoch, from 0.

        Raises:
            UsageError: If a loaded position in another epoch waits for the next iteration.
        """
        if self._pending is None:
            self._epoch, self._batch, self._begun = epoch, 0, False
            self._number += 1
        elif epoch != self._epoch:
            raise _other_epoch(self._epoch, epoch)
        for holder in self._randomness.epoch_holders().values():
            holder.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._loads, self._open())

    def _iterate(self, loads: int, batches: Iterator[Any]) -> Iterator[Any]:
        if loads != self._loads:  # the load came between iter() and the first next()
            batches = self._open()
        number = self._number
        while True:
            if number != self._number:
                raise UsageError(
                    "This iteration is over: since its last batch a checkpoint was loaded, an "
                    "epoch was set, or another iteration began",
                    hint="Leave the loop and iterate over the Batches again",
                )
            batch = self._next(batches)
            if batch is _END:
                break
            note_batch()  # before anything that the state tells of it
            if self._source == "sampler" and not self._order.consume():
                raise UsageError(
                    "The loader gives batches that it does not ask its own sampler for, so its "
                    "position is unknown",
                    hint="Wrap the DataLoader before another library wraps it",
                )
            self._batch += 1
            yield batch
        self._epoch, self._batch, self._begun = self._epoch + 1, 0, False

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, _END)
        except Exception as error:
            self._note(error)
            raise

    def _note(self, error: BaseException) -> None:
        if self._source != "state":  # whose own position may have moved on
            note_loader_error(error)

    def _open(self) -> Iterator[Any]:
        """Begin an iteration, at the loaded position or at the beginning of an epoch."""
        position = self._pending
        if position is not None:
            self._randomness.check_epochs(position.begun["epochs"] or {})
        else:
            self._epoch += bool(self._begun and self._batch)  # the last one was left early
            self._batch = 0
        before, seeded = self._randomness.snapshot(), self._seeded
        kept = before if position is not None or seeded else None
        self._pending, self._seeded, self._begun = None, False, True
        self._number += 1
        first, settle = self in _UNSETTLED, partial(self._settle, position, kept)
        try:
            with workers_protected(self._inner, self.loader.worker_init_fn):
                if self._source == "sampler":
                    self._order.begin(position, kept, settle)
                    batches: Iterator[Any] = iter(self._inner)
                    self._order.catch_up()
                else:
                    batches = self._open_source(position)
                    settle()
        except BaseException as error:
            # The position and the generators serve another attempt, and a save on leaving.
            self._pending, self._seeded, self._begun = position, seeded, position is not None
            self._randomness.restore(before)
            if first:
                _UNSETTLED.add(self)
            self._note(error)
            raise
        return batches

    def _open_source(self, position: _Position | None) -> Iterator[Any]:
        """Open a loader whose position is a state of its own or is reached by loading batches."""
        if self._source == "state":
            if position is not None:
                self._stateful().load_state_dict(position.begun["source"])
            return iter(self._inner)
        if position is not None:
            self._randomness.restore(position.begun["start"])
        self._start = self._randomness.snapshot()
        batches = iter(self._inner)
        for found in range(self._batch):
            if next(batches, _END) is _END:
                raise _too_short(found, self._batch)
        return batches

    def _settle(self, position: _Position | None, kept: _Snapshot | None) -> None:
        """Set the generators to those of the saved step, or take a base seed back.

        If the state has several Batches, the first one that is iterated sets the generators. The
        run may have drawn before a later one is iterated, so its iteration keeps them.
        """
        if kept is None:
            return
        first = self in _UNSETTLED
        if position is None:
            self._randomness.restore(kept)
            return
        if first and position.generators is not None:
            RngState().load_state_dict(dict(position.generators))
        else:
            self._randomness.restore_global(kept)
        if first:
            _UNSETTLED.clear()
        if not position.converted:
            self._randomness.set_own(position.own)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the generators, and the facts that the position depends on."""
        waiting = self._pending
        if waiting is not None:
            begun: Any = waiting.begun
            generators, own = waiting.generators, waiting.own
        else:
            begun = self._record() if self._begun else None
            generators, own = RngState().state_dict(), self._randomness.own()
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "begun": begun,
            "generators": generators,
            # Empty dicts would be loaded even where exclude leaves out all that has a label.
            "own": own or None,
            "epochs": self._randomness.epochs() or None,
            "seeded": self._seeded or _has_persistent_workers(self._inner),
            "loader": self._facts(),
        }

    def _record(self) -> dict[str, Any]:
        if self._source == "sampler":
            return self._order.record()
        source = self._stateful().state_dict() if self._source == "state" else None
        epochs = self._randomness.epochs() or None
        return dict(zip(_LOADED_PARTS, (self._start, source, epochs), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position for the next iteration, and set the generators.

        Raises:
            TargetMismatch: If the loader cannot go to the position; nothing is touched.
        """
        position = self._position(state, "")
        self._epoch, self._batch = state["epoch"], position.batch if position else 0
        self._pending, self._begun = position, position is not None
        self._seeded = state["seeded"]
        self._number += 1
        self._loads += 1
        self._inner._iterator = None  # persistent workers of an earlier run would draw no seed
        epochs = position.begun["epochs"] if position else state["epochs"]
        self._randomness.set_epochs(epochs or {})
        self._randomness.set_own(state.get("own") or {})
        generators = state.get("generators")
        if generators is not None:
            RngState().load_state_dict(generators)
        if position is not None:
            _UNSETTLED.add(self)
        else:
            _UNSETTLED.discard(self)

    def __ckpipe_targets__(self, saved: SavedObject) -> LoadTargets:
        self._position(saved.state, saved.label)
        made = dict.fromkeys(saved.state)
        return LoadTargets(made, lambda: self.load_state_dict(made))

    def _position(self, state: Mapping[str, Any], label: str) -> _Position | None:
        """Convert a saved position to one of this loader; None if no epoch has begun.

        Raises:
            TargetMismatch: If that is impossible.
        """
        now = self._facts()
        absent = sorted(_PARTS - state.keys())
        if not absent:
            absent = [f"loader.{fact}" for fact in now if fact not in state["loader"]]
        if not absent and state["begun"] and state["loader"]["source"] == self._source:
            parts = self._order.record() if self._source == "sampler" else _LOADED_PARTS
            absent = [f"begun.{part}" for part in parts if part not in state["begun"]]
        if absent:
            raise TargetMismatch(
                f"The saved position in the data lacks {', '.join(absent)}",
                key=label or None,
                hint="Load all of a Batches object, or leave it out with exclude",
            )
        if state["begun"] is None:
            return None
        saved = state["loader"]
        batch = _converted(state["batch"], saved, now)
        reason = batch if isinstance(batch, str) else ""
        if not now["by_epoch"] and "own" in state:
            differing = (state["own"] or {}).keys() ^ self._randomness.generators().keys()
            if differing:
                reason = f"the generators of loader and samplers differ: {sorted(differing)}"
        if reason:
            raise TargetMismatch(
                f"The checkpoint lies after batch {state['batch']} of epoch {state['epoch']}, and "
                f"this loader cannot go there: {reason}",
                key=label or None,
                hint="Load with a loader and a number of ranks as saved, or leave the position out "
                "with exclude and begin a new epoch",
            )
        own = state.get("own") or {}
        converted = _unit(saved) != _unit(now)
        assert isinstance(batch, int)
        return _Position(batch, state["begun"], state.get("generators"), own, converted)

    def _facts(self) -> dict[str, Any]:
        """Return the facts of the loader that a position depends on."""
        loader, sampler, size = self.loader, *_sampler_of(self.loader)
        order, shares = type(sampler).__name__, 1
        if self._order.by_epoch:
            order = "in sequence"
            if isinstance(sampler, DistributedSampler):
                shares = sampler.num_replicas
                order = f"shuffled with seed {sampler.seed}" if sampler.shuffle else order
        return {
            "source": self._source,
            "order": order,
            "by_epoch": self._order.by_epoch,
            "samples": _length(loader.dataset),
            "batches": _length(self._order),
            "batch_size": size,
            "shares": shares,
            "ranks": find_topology().world_size,
            "workers": loader.num_workers,
        }

    def _stateful(self) -> Any:
        return self._inner if is_stateful(self.loader) else self.loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Batches.__slots__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"Batches({self.loader!r}, epoch={self._epoch}, batch={self._batch})"


_END = object()
_PARTS = {"epoch", "batch", "begun", "epochs", "seeded", "loader"}
_LOADED_PARTS = ("start", "source", "epochs")
_UNSETTLED: WeakSet[Batches] = WeakSet()
"""Those that were loaded inside an epoch, and whose generators no iteration has set yet."""

_Snapshot = dict[str, Any]
"""The global generators, and those of the loader and its samplers."""


@dataclass(frozen=True, slots=True)
class _Position:
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


class _Order:
    """Stand in for the index sampler of a loader, and record the beginning of its order.

    Attributes:
        by_epoch: Whether the order is a function of seed and epoch alone.
        ahead: The indices of batches that the loop has not received yet.
    """

    def __init__(self, loader: DataLoader[Any], randomness: _Randomness) -> None:
        self._sampler: Any = loader._index_sampler
        self.by_epoch = _is_by_epoch(loader)
        self._randomness = randomness
        # Else iter() of the sampler may draw already.
        self._lazy = self.by_epoch or inspect.isgeneratorfunction(type(self._sampler).__iter__)
        self.begin(None, None, lambda: None)

    def begin(
        self, position: _Position | None, kept: _Snapshot | None, settle: Callable[[], None]
    ) -> None:
        """Begin an epoch.

        Args:
            position: The loaded position to go to.
            kept: The generators as they were before the iteration, if the draw of its base seed is
                to be taken back.
            settle: Sets the generators once the position is reached.
        """
        self._position, self._kept, self._settle = position, kept, settle
        self._before_iter: _Snapshot | None = None  # if iter() of the sampler draws
        self._before_first: _Snapshot | None = None
        self._kept_after_iter: _Snapshot = {}
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
            raise _too_short(passed, position.batch)
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

    def __init__(self, order: _Order, inner: Iterator[Any]) -> None:
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


class _Randomness:
    """The generators and epochs that the order of a loader depends on."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def snapshot(self) -> _Snapshot:
        # A list: a mapping would count as the generators of a rank, which another rank derives.
        return {"global": list(cpu_generators().values()), "own": self.own() or None}

    def restore(self, snapshot: _Snapshot) -> None:
        self.restore_global(snapshot)
        self.set_own(snapshot["own"] or {})

    def restore_global(self, snapshot: _Snapshot) -> None:
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
                raise _other_epoch(epoch, now[name])

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


_Source = Literal["sampler", "loading", "state"]
"""The way to a position: by the sampler, by loading batches, or by a state of its own."""


def _source_of(loader: DataLoader[Any], exact_workers: bool) -> _Source:
    if not isinstance(loader.dataset, IterableDataset):
        return "loading" if exact_workers and loader.num_workers else "sampler"
    # A StatefulDataLoader passes over a dataset without a state, but counts these batches twice.
    if is_stateful(loader.dataset) and (is_stateful(loader) or not loader.num_workers):
        return "state"
    return "loading"


def _sampler_of(loader: DataLoader[Any]) -> tuple[Any, int | None]:
    """Return the sampler of single samples and the batch size, or a custom batch sampler."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.sampler, 1
    if isinstance(batches, BatchSampler) and _iterates_as(batches, BatchSampler):
        return batches.sampler, batches.batch_size
    return batches, None


def _is_by_epoch(loader: DataLoader[Any]) -> bool:
    """Tell whether an order is a function of seed and epoch alone."""
    sampler, size = _sampler_of(loader)
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


def _has_persistent_workers(loader: DataLoader[Any]) -> bool:
    return loader.persistent_workers and loader._iterator is not None


def _length(obj: Any) -> int | None:
    try:
        return len(obj)
    except (TypeError, NotImplementedError):
        return None


def _unit(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the size of a batch, and the number of ranks that share the samples."""
    return facts["batch_size"], facts["shares"]


def _converted(batch: int, saved: Mapping[str, Any], now: Mapping[str, Any]) -> int | str:
    """Convert a number of consumed batches from one loader to another, or say what prevents it."""
    for fact, name in (("source", "way to it"), ("order", "order"), ("samples", "dataset's size")):
        if saved[fact] != now[fact]:
            return f"the {name} was {saved[fact]!r} and is {now[fact]!r}"
    if saved["ranks"] != now["ranks"] and not now["by_epoch"]:
        return (
            f"{saved['ranks']} ranks saved it and {now['ranks']} load it, and its order is no "
            "function of seed and epoch, as that of a DistributedSampler is"
        )
    if now["source"] != "sampler":
        differing = [
            name for name in ("workers", "batch_size", "shares") if saved[name] != now[name]
        ]
        return f"its {' and '.join(differing)} changed" if differing else batch
    if _unit(saved) == _unit(now):
        return batch
    if saved["batch_size"] is None or now["batch_size"] is None:
        return "its batch sampler does not tell the size of a batch, and the batches have changed"
    if batch == saved["batches"]:
        return int(now["batches"])
    consumed: int = batch * saved["batch_size"] * saved["shares"]
    total_batch: int = now["batch_size"] * now["shares"]
    if consumed % total_batch:
        return (
            f"{consumed} samples were consumed, which are no whole number of batches of "
            f"{now['shares']} times {now['batch_size']}"
        )
    return consumed // total_batch


def _other_epoch(loaded: int, asked: int) -> UsageError:
    return UsageError(
        f"The loaded checkpoint lies inside epoch {loaded}, and the loop has set epoch {asked}",
        hint="Begin the loop at the epoch of the Batches: for epoch in range(data.epoch, epochs)",
    )


def _too_short(found: int, wanted: int) -> UsageError:
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
