"""Iterate over a dataset that remembers its position, and let each load hold for one iteration.

Theory. A loaded state holds for the next iteration of some datasets, and for every iteration of
others, such as those of Hugging Face. Others have one position that runs on over epochs. A state
does not tell which. So the state after the first batch of a loaded iteration is compared with that
of the iteration after it. If a value that this batch has changed is the same, both began at the
loaded position: the attributes that the load has set get their earlier values, and the second
iteration begins anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader

from ckpipe.data.loader_order import Randomness, Snapshot
from ckpipe.errors import UsageError
from ckpipe.state.kinds import is_stateful
from ckpipe.state_helpers import generators_differ

_END = object()


class Stream:
    """Begin the iterations of a loader without workers over a dataset with a state."""

    def __init__(self, loader: DataLoader[Any], randomness: Randomness) -> None:
        self._loader, self._randomness = loader, randomness
        self._dataset: Any = loader.dataset
        # Attributes of the dataset and of what it holds, with their values before and after a load.
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._after: list[dict[str, Any]] = []
        self._loaded: Any = None
        self._noted: Any = _END  # the place of the loaded iteration after its first batch

    def begin_at(self, stateful: Any, state: Any) -> Iterator[Any]:
        """Begin an iteration at a position; end at once if no batch is left."""
        return self._note(self._load(stateful, state))

    def begin_after(self, state: Any) -> Iterator[Any]:
        """Begin the iteration that follows the end of an epoch, which this state is of."""
        kept = self._randomness.snapshot()
        return self._note(self._load(self._dataset, state), kept)

    def begin(self) -> Iterator[Any]:
        """Begin an iteration as if the dataset had loaded nothing."""
        batches = self._iter()
        return self._check(batches) if self._before else batches

    def end_state(self, over: bool) -> Any:
        """Return the dataset's state if it has ended: with its last batch if that is smaller."""
        over = over or getattr(getattr(self._batches, "_dataset_fetcher", None), "ended", False)
        return copy.deepcopy(self._dataset.state_dict()) if over else None

    def _iter(self) -> Iterator[Any]:
        self._batches = iter(self._loader)
        return self._batches

    def _load(self, stateful: Any, state: Any) -> Iterator[Any]:
        if not self._before:  # else an earlier load holds still
            self._before = [(own, dict(own)) for own in _attributes(self._dataset)]
        stateful.load_state_dict(state)
        batches = self._iter()
        self._loaded = copy.deepcopy(self._dataset.state_dict())
        self._after = [dict(own) for own, _ in self._before]
        return batches

    def _note(self, batches: Iterator[Any], kept: Snapshot | None = None) -> Iterator[Any]:
        first = next(batches, _END)
        self._noted = copy.deepcopy(self._place(first))
        if kept is None:
            yield from _joined(first, batches)
        elif first is _END:
            self._randomness.restore(kept)
            yield from self.begin()
        else:  # the position runs on, so it is that of the next epoch
            self._before = []
            yield from _joined(first, batches)

    def _check(self, batches: Iterator[Any]) -> Iterator[Any]:
        drawn = self._randomness.snapshot()
        first = next(batches, _END)
        same = self._is_loaded_place(first)
        if same or self._keeps_a_value(first):
            undone = self._undo_load()
            if same or undone:
                batches = self._iter()
                self._randomness.restore(drawn)
                first = next(batches, _END)
            if same and (not undone or self._is_loaded_place(first)):
                raise UsageError(
                    f"The dataset {type(self._dataset).__qualname__} begins each iteration "
                    "at the position that it has loaded, or its state holds no position",
                    hint="Let its state hold the position of each sample, and its "
                    "load_state_dict hold for the next iteration only",
                )
        self._before = []
        yield from _joined(first, batches)

    def _place(self, first: Any) -> Any:
        """Return the state after the first batch, if there was one."""
        return None if first is _END else [self._dataset.state_dict()]

    def _is_loaded_place(self, first: Any) -> bool:
        return not generators_differ(self._noted, self._place(first))

    def _keeps_a_value(self, first: Any) -> bool:
        """Tell whether a value that the first batch has changed is that of the loaded iteration."""
        if first is _END or self._noted is None:
            return False
        before, after, now = map(_leaves, ([self._loaded], self._noted, self._place(first)))
        moved = [each for each in after if generators_differ(before.get(each), after[each])]
        return any(
            not isinstance(after[each], bool) and not generators_differ(after[each], now.get(each))
            for each in moved
        )

    def _undo_load(self) -> bool:
        """Put attributes back that still have what the load has set; tell whether any do."""
        undone = False
        for (own, before), after in zip(self._before, self._after, strict=True):
            for name, value in after.items():
                if own.get(name, _END) is value and before.get(name, _END) is not value:
                    undone = True
                    del own[name]
                    own.update({name: before[name]} if name in before else {})
        return undone


def _joined(first: Any, batches: Iterator[Any]) -> Iterator[Any]:
    return iter(()) if first is _END else chain([first], batches)


def _attributes(dataset: Any) -> list[dict[str, Any]]:
    """Return the attributes of a dataset, and of the objects with a state that it holds."""
    found: dict[int, dict[str, Any]] = {}
    pending = [dataset]
    while pending:
        each = pending.pop()
        if is_stateful(each) and id(each) not in found:
            found[id(each)] = getattr(each, "__dict__", {})
            pending += found[id(each)].values()
        elif isinstance(each, list | tuple | dict):
            pending += each.values() if isinstance(each, dict) else each
    return list(found.values())


def _leaves(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the values of nested dicts and lists by their path."""
    if not isinstance(state, dict | list | tuple):
        return {path: state}
    pairs = [*(state.items() if isinstance(state, dict) else enumerate(state))]
    return {k: v for key, each in pairs for k, v in _leaves(each, (*path, key)).items()}
