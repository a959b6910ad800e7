"""The way a walk took through a state, kept so that the next save can go the same way faster.

Theory. From one save to the next a training state hardly ever changes but for the bytes of its
tensors and some numbers. A trail is a walk written down: each container with its class and its
keys, each leaf with all that the walk found out about it, but none of the objects themselves.
Following it looks at everything that the walk would look at: every container is opened, every
``state_dict`` is called, and of every tensor address, shape, strides, dtype and so on are read.
The difference is that they are read in bulk and compared with what was found before, instead of
being worked out one by one. Any difference that could change the tree, a leaf or the plan ends the
attempt, and the state is walked as if for the first time. Two things may differ: inline values,
which are encoded anew, and where tensors lie, which makes their leaves anew.

What makes this exact: two walks have the same result if they meet containers of the same kinds
with the same keys, leaves of which they find out the same, and the same objects in the same
places. The last is so if every object is met once, or again where the trail says; a state in
which a container stands in two places has no trail.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import numpy as np

from ckpipe.format.canonical_json import canonical
from ckpipe.format.keys import LabelFilter, encode_key
from ckpipe.format.trees import Node
from ckpipe.state.captured import Captured, Passage, Walked
from ckpipe.state.containers import IMMUTABLE, contents_of, kind_of
from ckpipe.state.dtensors import is_dtensor_type
from ckpipe.state.leaf_facts import Differs, LeafFacts, check
from ckpipe.state.replication import replicated_test
from ckpipe.state.tensors import PLAIN_TYPES, attributes_of
from ckpipe.state.values import PLAIN_VALUES, NotInline, encode_value


def trail_of(walked: Walked, select: LabelFilter) -> Trail | None:
    """The trail of a walk whose objects are still alive and unchanged; None if there can be none.

    Args:
        walked: The walk.
        select: Which labels it kept.
    """
    return Trail(walked, select) if walked.repeatable else None


class Trail:
    """What is needed to take a state apart that is like one that was walked.

    Holds no tensor, no array and no container of that state, and never changes, so that several
    threads may follow it.

    Args:
        walked: The walk; it is repeatable.
        select: Which labels it kept.
    """

    def __init__(self, walked: Walked, select: LabelFilter) -> None:
        self._patterns = select.patterns
        self._values = walked.captured.values
        self._like = walked.captured.again([], [], [])
        places = _PlacesBuilder()
        self._root = places.enter(walked.root)
        attributes = sorted(walked.attributes, key=lambda each: each[0])
        self._attributes = [(number, places.enter(passage)) for number, passage in attributes]
        self._places = places.finished()
        self._leaves = LeafFacts(walked.captured, walked.attached)
        numbers = range(len(walked.captured.tensors))
        self._bound = [n for n in numbers if n not in walked.attached]
        # Numbers that are distinct, whatever lies at these addresses by now.
        self._distinct_ids = _ids(walked.captured.objects, self._bound)

    def follow(self, state: Any, select: LabelFilter) -> Captured | None:
        """What the walk over a state would find; None if it has to be walked.

        Args:
            state: The state.
            select: Which labels to keep.

        Raises:
            UnsupportedState: If a part of it cannot be saved.
        """
        if select.patterns != self._patterns:
            return None
        try:
            return self._followed(state)
        except (Differs, NotInline, RecursionError):
            return None

    def _followed(self, state: Any) -> Captured:
        way, places, like = _Way([state]), self._places, self._like
        way.go_on(self._root, [state])
        for number, stop in self._attributes:
            place = places.tensors[number]
            way.go(stop, attributes_of(way.met[place], like.tensors[number]))
        check(list(map(type, way.met)) == places.types)
        check(all(kind_of(way.met[place]) is None for place in places.odd))
        check(way.replicated == like.replicated)
        objects = list(map(way.met.__getitem__, places.tensors))
        self._check_identities(way, objects)
        values = [
            # Those that JSON has are encoded as themselves.
            was if way.met[place] is was else encode_value(way.met[place])
            for place, was in zip(places.values, self._values, strict=True)
        ]
        memory, moved = self._leaves.look_at(objects)
        if not moved:
            return like.again(values, memory, objects)
        leaves = [moved.get(number, leaf) for number, leaf in enumerate(like.tensors)]
        return like.moved(leaves, values, memory, objects)

    def _check_identities(self, way: _Way, objects: list[Any]) -> None:
        """Finds what stands in other places than before, or in one more or one less."""
        check(len(set(map(id, way.once))) == len(way.once))
        # Of an attached tensor a new one would have been made, which stands nowhere else.
        ids = _ids(objects, self._bound)
        check(ids == self._distinct_ids or len(set(ids)) == len(ids))
        check(all(way.met[place] is objects[number] for place, number in self._places.repeats))
        left_out = {id(way.met[place]) for place in self._places.left_out}
        check(not left_out or left_out.isdisjoint(ids))


def _ids(objects: list[Any], numbers: list[int]) -> array[int]:
    return array("Q", map(id, map(objects.__getitem__, numbers)))


@dataclass(slots=True)
class _Stop:
    """A container on the way.

    Args:
        passage: How the walk went through it.
        type: Its class.
        size: How many children it has.
        keys: Their keys.
        onward: The places among its children of those that are containers themselves; of a run,
            that of its first.
        key_types: The classes of its keys.
        odd_keys: Its keys as text, if comparing them does not tell them apart.
        head: What else belongs to it, as text.
    """

    passage: Passage
    type: type[Any]
    size: int
    keys: list[Any]
    onward: list[tuple[int, _Stop | _Run]]
    key_types: list[Any]
    odd_keys: str | None
    head: str


@dataclass(slots=True)
class _Run:
    """Dicts that stand side by side in a container and hold leaves only.

    An optimizer has one for each parameter, and a module's ``state_dict`` one for each part.

    Args:
        stops: The dicts.
        sizes: How many children each has.
        keys: The keys of all.
    """

    stops: list[_Stop]
    sizes: list[int]
    keys: list[Any]


_LEAST_RUN = 4
"""Fewer dicts are gone into one by one."""


def _in_runs(onward: list[tuple[int, _Stop]]) -> list[tuple[int, _Stop | _Run]]:
    """Containers among the children of one, with those in runs that can be looked at together."""
    found: list[tuple[int, _Stop | _Run]] = []
    run: list[tuple[int, _Stop]] = []
    for index, stop in onward:
        bare = stop.type is dict and not stop.onward
        if not bare or (run and index != run[-1][0] + 1):
            found += _closed(run)
            run = []
        if bare:
            run.append((index, stop))
        else:
            found.append((index, stop))
    return found + _closed(run)


def _closed(run: list[tuple[int, _Stop]]) -> list[tuple[int, _Stop | _Run]]:
    if len(run) < _LEAST_RUN:
        return list(run)
    stops = [stop for _, stop in run]
    keys = list(chain.from_iterable(stop.keys for stop in stops))
    return [(run[0][0], _Run(stops, [stop.size for stop in stops], keys))]


_PLAIN_KEYS = frozenset((str, int, bool, type(None)))


def _stop(passage: Passage, onward: list[tuple[int, _Stop]]) -> _Stop:
    keys = passage.keys or []
    types = list(map(type, keys))
    odd = None if _PLAIN_KEYS.issuperset(types) else _key_text(keys)
    head = canonical(passage.head)
    size = len(passage.met)
    return _Stop(passage, passage.type, size, keys, _in_runs(onward), types, odd, head)


def _key_text(keys: Iterable[Any]) -> str:
    return canonical([encode_key(key) for key in keys])


@dataclass(frozen=True, slots=True)
class _Places:
    """Where in the list of all that is met the leaves stand.

    Args:
        types: The class of everything that is met.
        tensors: For each tensor, where it stands.
        values: For each inline value, where it stands.
        repeats: Where else tensors stand, with their numbers.
        left_out: Where leaves stand that were not selected.
        odd: Where leaves stand that only a closer look tells from containers.
    """

    types: list[type[Any]]
    tensors: list[int]
    values: list[int]
    repeats: list[tuple[int, int]]
    left_out: list[int]
    odd: list[int]


class _PlacesBuilder:
    """Goes through passages in the order in which :class:`_Way` goes through containers."""

    def __init__(self) -> None:
        self._types: list[type[Any]] = []
        self._tensors: dict[int, int] = {}
        self._values: dict[int, int] = {}
        self._repeats: list[tuple[int, int]] = []
        self._left_out: list[int] = []
        self._odd: list[int] = []

    def enter(self, passage: Passage) -> _Stop:
        first = len(self._types)
        self._types += [each.type if isinstance(each, Passage) else each[0] for each in passage.met]
        further: list[tuple[int, Passage]] = []
        for index, each in enumerate(passage.met):
            if isinstance(each, Passage):
                further.append((index, each))
            else:
                self._leaf(first + index, *each, attached=passage.attached)
        return _stop(passage, [(index, self.enter(each)) for index, each in further])

    def _leaf(self, place: int, kind: type[Any], node: Node | None, *, attached: bool) -> None:
        if kind not in _SURE_LEAVES and not is_dtensor_type(kind):
            self._odd.append(place)
        match node:
            case ["tensor", number] if number in self._tensors:
                self._repeats.append((place, number))
            case ["tensor", number]:
                self._tensors[number] = place
            case ["value", number]:
                self._values[number] = place
            case _ if not attached:
                self._left_out.append(place)

    def finished(self) -> _Places:
        return _Places(
            self._types,
            [self._tensors[number] for number in range(len(self._tensors))],
            [self._values[number] for number in range(len(self._values))],
            self._repeats,
            self._left_out,
            self._odd,
        )


_SURE_LEAVES = PLAIN_VALUES.union(PLAIN_TYPES, (np.ndarray,))


class _Way:
    """What is met on the way through a state that may be like the one that was walked.

    Args:
        met: What is met; all of it is kept alive, so that ids name it.
    """

    def __init__(self, met: list[Any]) -> None:
        self.met = met
        self.once: list[Any] = []
        self.replicated: set[int] = set()

    def go(self, stop: _Stop, obj: Any) -> None:
        """Goes into a container and all that are in it.

        Raises:
            Differs: If it is not like the one at this stop.
        """
        kind = stop.type
        if type(obj) is not kind:
            raise Differs
        children: Sequence[Any]
        if kind is dict:
            if not _same_keys(obj, stop):
                raise Differs
            children = list(obj.values())
        elif kind is list or kind is tuple:
            children = obj
        else:
            children = self._contents(stop, obj)
        if len(children) != stop.size:
            raise Differs
        if kind not in IMMUTABLE:
            self.once.append(obj)
        self.met += children
        if stop.onward:
            self.go_on(stop, children)

    def go_on(self, stop: _Stop, children: Sequence[Any]) -> None:
        """Goes into those children of a container that are containers themselves."""
        for index, further in stop.onward:
            if isinstance(further, _Run):
                self._go_along(further, children[index : index + len(further.stops)])
            else:
                self.go(further, children[index])

    def _go_along(self, run: _Run, dicts: Sequence[Any]) -> None:
        """Goes into the dicts of a run: all at once, if their keys are the very objects."""
        if (
            set(map(type, dicts)) == {dict}
            and list(map(len, dicts)) == run.sizes
            and all(map(is_, chain.from_iterable(dicts), run.keys))
        ):
            children = list(chain.from_iterable(map(dict.values, dicts)))
            check(len(children) == len(run.keys))
            self.once += dicts
            self.met += children
            return
        for stop, each in zip(run.stops, dicts, strict=True):
            self.go(stop, each)

    def _contents(self, stop: _Stop, obj: Any) -> list[Any]:
        passage = stop.passage
        check(kind_of(obj) == passage.kind)
        is_replicated = replicated_test(obj) if passage.kind == "stateful" else None
        check((is_replicated is not None) == passage.replicas)
        contents = contents_of(passage.kind, obj, passage.label)
        check(passage.kind != "stateful" or contents.attached == passage.attached)
        check(contents.keys is None or _same_keys(contents.keys, stop))
        check(canonical(contents.head) == stop.head)
        if is_replicated is not None:
            asked = passage.claimed
            self.replicated.update(number for label, number in asked if is_replicated(label))
        return contents.children


def _same_keys(keys: Collection[Any], stop: _Stop) -> bool:
    known = stop.keys
    if len(keys) != len(known):
        return False
    if all(map(is_, keys, known)):
        return True
    if stop.odd_keys is not None:
        return _key_text(keys) == stop.odd_keys
    return list(map(type, keys)) == stop.key_types and list(keys) == known


__all__ = ["Trail", "trail_of"]
