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
places. The last is so if every object is met once, or again where the trail says; a state in which
a container stands in two places has no trail.

Reading one attribute of a thousand tensors by ``map`` and comparing the list with that of the last
save runs in C; working out each tensor's leaf anew costs ten times as much. Only public attributes
are read: torch's guards of compiled code are faster, and end the process at a nested tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, count
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from ckpipe.format.keys import LabelFilter, canonical, encode_key
from ckpipe.format.tree import Node
from ckpipe.state.flatten import Captured, ContainerVisit, Walked
from ckpipe.state.kinds import IMMUTABLE, contents_of, kind_of, replicated_test
from ckpipe.state.tensors import (
    PLAIN_TYPES,
    Shardings,
    TensorLeaf,
    attributes_of,
    is_dtensor_type,
    leaf_of,
)
from ckpipe.state.values import PLAIN_VALUES, NotInline, encode_value


def capture_cache_of(walked: Walked, select: LabelFilter) -> CaptureCache | None:
    """The trail of a walk whose objects are still alive and unchanged; None if there can be none.

    Args:
        walked: The walk.
        select: Which labels it kept.
    """
    return CaptureCache(walked, select) if walked.repeatable else None


class CaptureCache:
    """The record of a walk, by which a state that is like the walked one is captured.

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
        self._leaves = TensorFingerprints(walked.captured, walked.attached)
        numbers = range(len(walked.captured.tensors))
        self._bound = [n for n in numbers if n not in walked.attached]
        # Numbers that are distinct, whatever lies at these addresses by now.
        self._distinct_ids = _ids(walked.captured.objects, self._bound)

    def follow(self, state: Any, select: LabelFilter) -> Captured | None:
        """Capture a state as the walk would; None if it has to be walked.

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
        except (CacheMiss, NotInline, RecursionError):
            return None

    def _followed(self, state: Any) -> Captured:
        way, places, like = _Traversal([state]), self._places, self._like
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

    def _check_identities(self, way: _Traversal, objects: list[Any]) -> None:
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

    passage: ContainerVisit
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


def _stop(passage: ContainerVisit, onward: list[tuple[int, _Stop]]) -> _Stop:
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
    """The places of leaves in the list of all that is met.

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
    """Goes through passages in the order in which :class:`_Traversal` goes through containers."""

    def __init__(self) -> None:
        self._types: list[type[Any]] = []
        self._tensors: dict[int, int] = {}
        self._values: dict[int, int] = {}
        self._repeats: list[tuple[int, int]] = []
        self._left_out: list[int] = []
        self._odd: list[int] = []

    def enter(self, passage: ContainerVisit) -> _Stop:
        first = len(self._types)
        self._types += [
            each.type if isinstance(each, ContainerVisit) else each[0] for each in passage.met
        ]
        further: list[tuple[int, ContainerVisit]] = []
        for index, each in enumerate(passage.met):
            if isinstance(each, ContainerVisit):
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


class _Traversal:
    """The traversal of a state that may be like the one that was walked.

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
            CacheMiss: If it is not like the one at this stop.
        """
        kind = stop.type
        if type(obj) is not kind:
            raise CacheMiss
        children: Sequence[Any]
        if kind is dict:
            if not _same_keys(obj, stop):
                raise CacheMiss
            children = list(obj.values())
        elif kind is list or kind is tuple:
            children = obj
        else:
            children = self._contents(stop, obj)
        if len(children) != stop.size:
            raise CacheMiss
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


class CacheMiss(Exception):  # a finding, not an error
    """A state is not like the one that was walked."""


def check(alike: bool) -> None:
    """Ends an attempt if something is not as it was.

    Raises:
        CacheMiss: If it is not.
    """
    if not alike:
        raise CacheMiss


_FACTS: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
    attrgetter("device"),
    attrgetter("layout"),
    attrgetter("requires_grad"),
    torch.Tensor.is_neg,
)
"""With class, address and conjugation all that a leaf says of a plain tensor; the rest follows.

The layout is asked for since some that are sparse have strides. A tensor without strides or a
shape, such as a nested one, raises.
"""


class TensorFingerprints:
    """The tensors of a walk, as they were: their leaves and the facts behind them.

    Plain tensors, parameters and the local parts of DTensors are compared in bulk. Arrays and
    tensors of other classes are few, and their leaves are made anew and compared.

    Args:
        captured: What the walk has found.
        attached: The numbers of those that stand for what ``detach`` makes of them, which drops
            what a program has set on them.
    """

    def __init__(self, captured: Captured, attached: frozenset[int]) -> None:
        leaves, objects = captured.tensors, captured.objects
        self._leaves, self._attached = leaves, attached
        numbers = range(len(leaves))
        self._wrapped = [
            n
            for n in numbers
            if _is_simple_dtensor(objects[n]) and (n in attached or not vars(objects[n]))
        ]
        simple = {n for n in numbers if type(objects[n]) in PLAIN_TYPES}.union(self._wrapped)
        self._bulk = sorted(simple)
        self._single = [n for n in numbers if n not in simple]
        self._torch = [
            n for n in numbers if n not in attached and not isinstance(objects[n], np.ndarray)
        ]
        self._decorated = _decorated(_of(objects, self._torch))
        self._marked = [
            n for n in self._torch if vars(objects[n]) and not attributes_of(objects[n], leaves[n])
        ]
        bases = self._bases(objects)
        self._facts = _facts(bases)
        self._complex = [place for place, each in enumerate(bases) if each.is_complex()]
        self._conjugated = [bases[place].is_conj() for place in self._complex]
        self._addresses = [leaves[n].address for n in self._bulk]
        self._detached = [
            place
            for place, each in enumerate(bases)
            if type(each) is not torch.Tensor or each.requires_grad
        ]
        wrapped = _of(objects, self._wrapped)
        self._wrapper_facts = _wrapper_facts(wrapped)
        self._specs = _specs(wrapped)
        self._distinct = list({id(each): each for each in self._specs}.values())
        self._placed, self._placed_distinct = _placed(self._specs), _placed(self._distinct)

    def look_at(self, objects: list[Any]) -> tuple[list[torch.Tensor], dict[int, TensorLeaf]]:
        """Looks at the tensors of a state that has gone the same way so far.

        Args:
            objects: The tensors and arrays, each of the same class as before.

        Returns:
            For each the plain tensor on its memory, and the leaves of those that have moved, by
            number.

        Raises:
            CacheMiss: If a leaf would be another, but for its address.
            UnsupportedState: If an array cannot be saved.
        """
        try:
            return self._look_at(objects)
        except RuntimeError as error:  # such as that there are no strides
            raise CacheMiss from error

    def _look_at(self, objects: list[Any]) -> tuple[list[torch.Tensor], dict[int, TensorLeaf]]:
        check(_decorated(_of(objects, self._torch)) == self._decorated)
        check(not any(attributes_of(objects[n], self._leaves[n]) for n in self._marked))
        self._check_wrappers(_of(objects, self._wrapped))
        bulk = self._bases(objects)
        check(_facts(bulk) == self._facts)
        check([bulk[place].is_conj() for place in self._complex] == self._conjugated)
        addresses = list(map(torch.Tensor.data_ptr, bulk))
        moved: dict[int, TensorLeaf] = {}
        if addresses != self._addresses:
            for n, now, before in zip(self._bulk, addresses, self._addresses, strict=True):
                if now != before:
                    check(now != 0)  # it may have been freed
                    moved[n] = replace(self._leaves[n], address=now)
        attached = [bulk[place] for place in self._detached]
        for place, each in zip(self._detached, map(torch.Tensor.detach, attached), strict=True):
            bulk[place] = each
        return self._with_singles(objects, bulk, moved), moved

    def _bases(self, objects: list[Any]) -> list[torch.Tensor]:
        """The tensors that are compared in bulk; of DTensors, the local parts."""
        bases = list(objects)
        local = list(map(attrgetter("_local_tensor"), _of(objects, self._wrapped)))
        check(set(map(type, local)) <= {torch.Tensor})
        for n, each in zip(self._wrapped, local, strict=True):
            bases[n] = each
        return _of(bases, self._bulk)

    def _check_wrappers(self, wrapped: list[Any]) -> None:
        check(_wrapper_facts(wrapped) == self._wrapper_facts)
        specs = _specs(wrapped)
        # A few serve all DTensors, as a rule the same as before; what they say may be another.
        if _same(specs, self._specs) and _same(_placed(self._distinct), self._placed_distinct):
            return
        if _same(_placed(specs), self._placed):
            return
        # Other objects may say the same; DTensors are compared by what is made of them then.
        shardings = Shardings()
        for n, each in zip(self._wrapped, wrapped, strict=True):
            leaf = self._leaves[n]
            check(shardings.of(each, leaf.label) == leaf.sharding)

    def _with_singles(
        self, objects: list[Any], bulk: list[torch.Tensor], moved: dict[int, TensorLeaf]
    ) -> list[torch.Tensor]:
        if not self._single:
            return bulk
        found = dict(zip(self._bulk, bulk, strict=True))
        shardings = Shardings()
        for n in self._single:
            was = self._leaves[n]
            each = objects[n].detach() if n in self._attached else objects[n]
            leaf, found[n] = leaf_of(each, was.label, shardings)
            leaf.attributes = was.attributes
            check(replace(leaf, address=was.address) == was)
            if leaf.address != was.address:
                moved[n] = leaf
        return [found[n] for n in range(len(self._leaves))]


def _of(items: list[Any], numbers: list[int]) -> list[Any]:
    if len(numbers) == len(items):
        return list(items)
    return [items[n] for n in numbers]


def _is_simple_dtensor(obj: Any) -> bool:
    """Tell at a glance whether this is a DTensor of known kind and local part."""
    return is_dtensor_type(type(obj)) and type(obj._local_tensor) is torch.Tensor


def _decorated(tensors: list[torch.Tensor]) -> list[int]:
    """The tensors that a program has set attributes of."""
    return list(compress(count(), map(attrgetter("__dict__"), tensors)))


def _facts(tensors: list[torch.Tensor]) -> list[list[Any]]:
    return [list(map(fact, tensors)) for fact in _FACTS]


def _wrapper_facts(wrapped: list[Any]) -> list[list[Any]]:
    # DTensors override no function of this kind, and to be asked whether they do costs them most.
    with torch._C.DisableTorchFunctionSubclass():
        return [list(map(fact, wrapped)) for fact in _WRAPPER_FACTS]


_WRAPPER_FACTS = (attrgetter("shape"), attrgetter("requires_grad"))


def _specs(wrapped: list[Any]) -> list[Any]:
    return list(map(attrgetter("_spec"), wrapped))


def _placed(specs: list[Any]) -> list[Any]:
    """The meshes and placements of DTensors, neither of which ever changes in itself."""
    return [*map(attrgetter("mesh"), specs), *map(attrgetter("placements"), specs)]


def _same(now: list[Any], before: list[Any]) -> bool:
    return all(map(is_, now, before))
