"""Iterate over a DataLoader from a position that a checkpoint keeps.

A :class:`~ckpipe.data.loader_order.SampleOrder` records the order of an epoch, and goes to a
position without loading a sample. With ``exact_workers`` and for an ``IterableDataset`` without a
state of its own the consumed batches are loaded and dropped: only that moves the generators or
datasets in the workers on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ckpipe.data.loader_order import (
    Position,
    Randomness,
    SampleOrder,
    Snapshot,
    other_epoch,
    sampler_of,
    too_short,
)
from ckpipe.data.loader_streams import Stream
from ckpipe.errors import TargetMismatch, UsageError
from ckpipe.loading.stateful import LoadTargets, SavedObject, check_generators
from ckpipe.preemption.signals import note_batch, note_loader_error, workers_protected
from ckpipe.ranks.world import find_topology
from ckpipe.state.kinds import is_stateful
from ckpipe.state_helpers import RngState


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

    An ``IterableDataset`` with a state of its own goes on by it. If a load holds for each of its
    iterations, it is undone for the next epoch, or that raises ``UsageError``.

    Not exact are: a state of a dataset with indices, a shuffle buffer that is in no state,
    ``in_order=False``, and, unless ``exact_workers`` is set, random augmentations in workers. A
    sampler that gives another order than in the saved run, as one that draws from global generators
    as it goes, raises ``UsageError``.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or a subclass such as torchdata's
            ``StatefulDataLoader``.
        exact_workers: Whether a load makes random augmentations in workers exact too: the consumed
            batches of the epoch are loaded again and dropped, with the same number of workers.
            Impossible with ``persistent_workers``, whose generators run on over epochs.

    Raises:
        UsageError: If ``loader`` is no ``DataLoader``, or its workers are persistent and
            ``exact_workers`` is set or a ``StatefulDataLoader`` has them over a dataset with a
            state, or it has loaded a position itself.
    """

    __slots__ = (
        "__weakref__", "_batch", "_begun", "_ended", "_epoch", "_follows", "_inner", "_loads",
        "_number", "_order", "_origin", "_pending", "_randomness", "_seeded", "_source", "_stream",
        "loader",
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
        if self._source == "state" and loader.persistent_workers:
            raise UsageError(
                "A StatefulDataLoader keeps no whole position of a dataset in persistent workers",
                hint="Make the loader with persistent_workers=False, or use torch's DataLoader: a "
                "load then loads the consumed batches again",
            )
        self._randomness = Randomness(loader)
        self._order = SampleOrder(loader, self._randomness)
        self._epoch = self._batch = 0
        self._begun = False  # whether an iteration has begun the epoch
        self._number = 0  # of the newest iteration
        self._loads = 0
        self._pending: Position | None = None  # loaded, and not iterated since
        self._seeded = False  # whether the first iteration after a load draws no base seed
        # The generators or the state that this iteration began with, and the batches before it.
        self._origin: tuple[Snapshot | None, Any, int] = None, None, 0
        self._ended: Any = None  # the dataset's state since it ended, if it has one here
        self._follows = False  # whether that was loaded, for the next iteration to follow it
        # iter() of a copy with another sampler is that of the loader's own class.
        self._inner = copy.copy(loader)
        # Workers that an iteration over the bare loader left have the indices of its own sampler.
        vars(self._inner).update(_iterator=None, _initial_iter_for_state_dict=False)
        if self._source == "sampler":
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            vars(self._inner)[name] = self._order
        remembers = self._source == "state" and not loader.num_workers
        self._stream = Stream(self._inner, self._randomness) if remembers else None

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
            raise other_epoch(self._epoch, epoch)
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
            if self._stream is not None and self._ended is None:
                self._ended = self._stream.end_state(batch is _END)
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

    def _note(self, error: Exception) -> None:
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
        unsettled, settle = set(_UNSETTLED), partial(self._settle, position, kept)
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
            _UNSETTLED.update(unsettled)
            if isinstance(error, Exception):
                self._note(error)
            raise
        if position is None:
            self._ended, self._follows = None, False
        return batches

    def _open_source(self, position: Position | None) -> Iterator[Any]:
        """Open a loader whose position is a state of its own or is reached by loading batches."""
        if self._stream is not None:
            if position is not None and self._follows:
                return iter(())
            if position is not None:
                return self._stream.begin_at(self._stateful(), position.begun["source"])
            return self._stream.begin_after(self._ended) if self._follows else self._stream.begin()
        start, source, reached = None, None, 0
        if position is None:
            start = self._randomness.snapshot()
        elif (source := position.begun["source"]) is None:
            start = position.begun["start"]
            self._randomness.restore(start)
        else:
            reached = position.begun.get("reached", position.batch)
            self._stateful().load_state_dict(source)
        self._origin = start, source, reached
        batches = iter(self._inner)
        for found in range(reached, self._batch):
            if next(batches, _END) is _END:
                raise too_short(found, self._batch)
        return batches

    def _settle(self, position: Position | None, kept: Snapshot | None) -> None:
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
        waiting, facts = self._pending, self._facts()
        # Between epochs another number of ranks may load it, and this may differ between ranks.
        ended = self._ended if self._begun or facts["ranks"] == 1 else None
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
            "ended": ended or None,
            "epochs": self._randomness.epochs() or None,
            "seeded": self._seeded or _has_persistent_workers(self._inner),
            "loader": facts,
        }

    def _record(self) -> dict[str, Any]:
        if self._source == "sampler":
            return self._order.record()
        start, source, reached = self._origin
        every = getattr(self.loader, "snapshot_every_n_steps", 1) or self._batch + 1
        # The loader knows the position of a worker's dataset once it has given a batch.
        known = self._batch - reached > self.loader.num_workers + every - 2
        if self._stream is not None or (known and self._source == "state"):
            start, source, reached = None, self._stateful().state_dict(), self._batch
        epochs = self._randomness.epochs() or None
        return {"start": start, "source": source, "reached": reached, "epochs": epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position for the next iteration, and set the generators.

        Raises:
            TargetMismatch: If the loader cannot go to the position; nothing is touched.
        """
        position = self._position(state, "")
        self._epoch, self._batch = state["epoch"], position.batch if position else 0
        self._pending, self._begun = position, position is not None
        self._seeded = state["seeded"]
        same = self._stream is not None and state["loader"]["ranks"] == self._facts()["ranks"]
        self._ended = state.get("ended") if same else None
        self._follows = self._ended is not None
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
        if saved.select.selects_all:
            # Whatever load_state_dict would raise for is raised here, before anything is read.
            int(saved.state["epoch"])
            for part in ("own", "epochs"):
                dict(saved.state.get(part) or ())
            dict((saved.state["begun"] or {}).get("epochs") or ())
            check_generators(saved.state.get("generators"), RngState().state_dict())
        made = dict.fromkeys(saved.state)
        return LoadTargets(made, lambda: self.load_state_dict(made))

    def _position(self, state: Mapping[str, Any], label: str) -> Position | None:
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
        return Position(batch, state["begun"], state.get("generators"), own, converted)

    def _facts(self) -> dict[str, Any]:
        """Return the facts of the loader that a position depends on."""
        loader, sampler, size = self.loader, *sampler_of(self.loader)
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

_Source = Literal["sampler", "loading", "state"]
"""The way to a position: by the sampler, by loading batches, or by a state of its own."""


def _source_of(loader: DataLoader[Any], exact_workers: bool) -> _Source:
    if not isinstance(loader.dataset, IterableDataset):
        return "loading" if exact_workers and loader.num_workers else "sampler"
    # A StatefulDataLoader passes over a dataset without a state, but counts these batches twice.
    if is_stateful(loader.dataset) and (is_stateful(loader) or not loader.num_workers):
        return "state"
    return "loading"


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
