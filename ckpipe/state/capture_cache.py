"""Reuse the last capture of a state that has hardly changed since.

From one save to the next a training state changes in the bytes of its tensors and in some numbers.
So the opened containers of a state are compared with those of the last save, and its tensors with
the tensors of that save. Each comparison covers all facts, but in bulk: reading one attribute of a
thousand tensors by ``map`` and comparing the list with the last one runs in C, and costs a tenth of
making all leaves anew. Any difference that could change the tree, a leaf or the plan is a miss, and
the tree is made anew. Two kinds of facts may differ: inline values, which are encoded anew, and
addresses of tensors, which get new leaves.

Two states have the same tree if containers of the same kinds with the same keys are in the same
places, if tensors have the same facts, and if repeated tensors repeat in the same places. A state
has no cache if a container is in two places, a tensor has attributes, a key is a float or a tuple,
or an object is pickled. Such states are rare, and their trees are made anew at every save.

Only public attributes of tensors are read: torch's guards of compiled code are faster, but end the
process at a nested tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from ckpipe.format.labels import LabelFilter
from ckpipe.state.flatten import Captured, Flattened, OpenedState
from ckpipe.state.kinds import ReplicaGroup, replica_group
from ckpipe.state.tensors import (
    PLAIN_TYPES,
    Shardings,
    TensorLeaf,
    attributes_of,
    dtensor_type,
    leaf_of,
)
from ckpipe.state.values import NotInline, encode_value


class CacheMiss(Exception):  # a result, not an error
    """A state is not like the captured one."""


def check(alike: bool) -> None:
    """Raise unless facts are unchanged.

    Raises:
        CacheMiss: If they are not.
    """
    if not alike:
        raise CacheMiss


def capture_cache_of(flattened: Flattened) -> CaptureCache | None:
    """Make the cache of a state whose objects are still alive and unchanged, or return None.

    Args:
        flattened: The flattened state.
    """
    containers = _container_facts(flattened.opened)
    usable = flattened.repeatable and _PLAIN_KEYS.issuperset(map(type, containers[-1]))
    return CaptureCache(flattened, containers) if usable else None


class CaptureCache:
    """The record of a capture, which serves states that are like the captured one.

    It references no tensor, no array and no container of that state, and never changes, so several
    threads may use it.

    Args:
        flattened: The flattened state.
        containers: The facts of its containers.
    """

    def __init__(self, flattened: Flattened, containers: tuple[list[Any], ...]) -> None:
        captured, attached = flattened.captured, flattened.attached
        self._patterns = flattened.select.patterns
        self._containers = containers
        self._like = captured.again(captured.tensors, captured.values, [], [])
        self._tensors, self._values = flattened.tensors, flattened.values
        self._repeats, self._left_out = flattened.repeats, flattened.left_out
        asking = [each for each in flattened.opened.containers if each.is_replicated]
        self._asked = [flattened.asked.get(id(each), []) for each in asking]
        self._leaves = TensorFingerprints(captured, attached)
        self._bound = [n for n in range(len(captured.tensors)) if n not in attached]
        # Distinct numbers, no matter which objects have these addresses now.
        self._distinct_ids = _ids(captured.objects, self._bound)

    def capture(self, opened: OpenedState, select: LabelFilter) -> Captured | None:
        """Capture a state like the last one; return None if its tree must be made anew.

        Args:
            opened: The state.
            select: The filter of labels to keep.

        Raises:
            UnsupportedState: If an array in it cannot be saved.
        """
        if select.patterns != self._patterns or opened.repeated:
            return None
        try:
            return self._captured(opened)
        except (CacheMiss, NotInline, RuntimeError):  # such as a tensor without strides
            return None

    def _captured(self, opened: OpenedState) -> Captured:
        check(_container_facts(opened) == self._containers)
        like, met = self._like, opened.met
        objects = list(map(met.__getitem__, self._tensors))
        self._check_identities(met, objects)
        replicated: dict[int, ReplicaGroup] = {}
        tests = [each.is_replicated for each in opened.containers if each.is_replicated]
        for is_replicated, asked in zip(tests, self._asked, strict=True):
            for label, number in asked:
                told = is_replicated(label, objects[number])
                if told:
                    replicated.setdefault(number, replica_group(told))
        check(replicated == like.replicated)
        values = [
            # JSON's own values are encoded as themselves.
            was if met[place] is was else encode_value(met[place])
            for place, was in zip(self._values, like.values, strict=True)
        ]
        memory, moved = self._leaves.look_at(objects)
        leaves = like.tensors
        if moved:
            leaves = [moved.get(number, leaf) for number, leaf in enumerate(leaves)]
        return like.again(leaves, values, memory, objects)

    def _check_identities(self, met: list[Any], objects: list[Any]) -> None:
        """Check that each tensor is in the same places as before."""
        # An attached tensor is saved as a new detached one, which is in no other place.
        ids = _ids(objects, self._bound)
        check(ids == self._distinct_ids or len(set(ids)) == len(ids))
        check(all(met[place] is objects[number] for place, number in self._repeats))
        left_out = {id(met[place]) for place in self._left_out}
        check(not left_out or left_out.isdisjoint(ids))


def _ids(objects: list[Any], numbers: list[int]) -> array[int]:
    return array("Q", map(id, _of(objects, numbers)))


_PLAIN_KEYS = frozenset((str, int, bool, type(None)))
"""Classes whose equal keys are the same key."""


def _container_facts(opened: OpenedState) -> tuple[list[Any], ...]:
    """Return the facts of opened containers, in lists that compare fast; the last are the keys.

    Classes of keys are compared before the keys: keys of different classes may be equal, or have
    an equality of their own.
    """
    facts = [
        (one.kind, one.first, one.attached, one.is_replicated is None, tuple(one.inner),
         None if one.head is None else repr(one.head))  # as text, in which 1 and True differ
        for one in opened.containers
    ]  # fmt: skip
    keys = list(chain.from_iterable(one.keys or () for one in opened.containers))
    return list(map(type, opened.met)), facts, list(map(type, keys)), keys


_FACTS: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
    attrgetter("device"),
    attrgetter("requires_grad"),
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
"""All facts of a plain tensor's leaf, together with its class and address; the others follow.

A nested tensor has no strides, and a sparse one no address: both raise.
"""

_WRAPPER_FACTS = (attrgetter("shape"), attrgetter("requires_grad"))
_PLACED = (attrgetter("_spec.mesh"), attrgetter("_spec.placements"))
"""The mesh and placements of a DTensor, which are immutable."""


class TensorFingerprints:
    """Fingerprints of a state's tensors: their leaves and the facts behind them.

    Plain tensors, parameters and local tensors of DTensors are compared in bulk. Arrays and tensors
    of other classes are few, and their leaves are made anew and compared.

    Args:
        captured: The tensors.
        attached: The numbers of tensors that are saved as if they were detached, which drops the
            attributes that a program has set on them.
    """

    def __init__(self, captured: Captured, attached: set[int]) -> None:
        leaves, objects = captured.tensors, captured.objects
        numbers = range(len(leaves))
        self._leaves, self._attached = leaves, attached
        self._wrapped = [n for n in numbers if _is_simple_dtensor(objects[n])]
        simple = {n for n in numbers if type(objects[n]) in PLAIN_TYPES}.union(self._wrapped)
        self._bulk = sorted(simple)
        self._single = [n for n in numbers if n not in simple]
        self._bare = [
            n for n in numbers if n not in attached and not isinstance(objects[n], np.ndarray)
        ]
        self._marks = self._marks_of(objects)
        bases = self._bases(objects)
        self._facts = _facts(_FACTS, bases)
        self._addresses = [leaves[n].address for n in self._bulk]
        self._detached = [
            place
            for place, each in enumerate(bases)
            if type(each) is not torch.Tensor or each.requires_grad
        ]
        wrapped = _of(objects, self._wrapped)
        self._wrapper_facts, self._placed = _wrapper_facts(wrapped), _facts(_PLACED, wrapped)

    def look_at(self, objects: list[Any]) -> tuple[list[torch.Tensor], dict[int, TensorLeaf]]:
        """Compare the tensors of a state whose other facts are unchanged.

        Args:
            objects: The tensors and arrays, each of the same class as before.

        Returns:
            For each the plain tensor on its memory, and the leaves of those that have moved, by
            number.

        Raises:
            CacheMiss: If a leaf would differ by more than its address.
            RuntimeError: If a tensor has no strides, or lacks another fact.
            UnsupportedState: If an array cannot be saved.
        """
        check(self._marks_of(objects) == self._marks)
        self._check_wrappers(_of(objects, self._wrapped))
        bulk = self._bases(objects)
        check(_facts(_FACTS, bulk) == self._facts)
        addresses = list(map(torch.Tensor.data_ptr, bulk))
        moved: dict[int, TensorLeaf] = {}
        if addresses != self._addresses:
            for n, now, before in zip(self._bulk, addresses, self._addresses, strict=True):
                if now != before:
                    check(now != 0)  # its storage may have been freed
                    moved[n] = replace(self._leaves[n], address=now)
        for place in self._detached:
            bulk[place] = bulk[place].detach()
        if not self._single:
            return bulk, moved
        memory, shardings = dict(zip(self._bulk, bulk, strict=True)), Shardings()
        for n in self._single:
            was = self._leaves[n]
            each = objects[n].detach() if n in self._attached else objects[n]
            leaf, memory[n] = leaf_of(each, was.label, shardings)
            check(replace(leaf, address=was.address) == was)
            if leaf.address != was.address:
                moved[n] = leaf
        return [memory[n] for n in range(len(self._leaves))], moved

    def _marks_of(self, objects: list[Any]) -> dict[int, dict[str, Any]]:
        """Return torch's marks of DTensors that are parameters; any other attribute is a miss."""
        marked = compress(self._bare, map(attrgetter("__dict__"), _of(objects, self._bare)))
        marks = {n: dict(vars(objects[n])) for n in marked}
        check(not any(attributes_of(objects[n], self._leaves[n]) for n in marks))
        return marks

    def _bases(self, objects: list[Any]) -> list[torch.Tensor]:
        """Return the tensors that are compared in bulk; for DTensors, the local tensors."""
        bases = list(objects)
        for n in self._wrapped:
            bases[n] = objects[n]._local_tensor
            check(type(bases[n]) is torch.Tensor)
        return _of(bases, self._bulk)

    def _check_wrappers(self, wrapped: list[Any]) -> None:
        check(_wrapper_facts(wrapped) == self._wrapper_facts)
        placed = _facts(_PLACED, wrapped)
        if all(map(is_, chain.from_iterable(placed), chain.from_iterable(self._placed))):
            return
        # Other objects may be equal. Then the shardings that are made of them are compared.
        shardings = Shardings()
        for n, each in zip(self._wrapped, wrapped, strict=True):
            leaf = self._leaves[n]
            check(shardings.of(each, leaf.label) == leaf.sharding)


def _of(items: list[Any], numbers: list[int]) -> list[Any]:
    return list(map(items.__getitem__, numbers))


def _is_simple_dtensor(obj: Any) -> bool:
    """True for a plain DTensor over a plain local tensor."""
    return type(obj) is dtensor_type() and type(obj._local_tensor) is torch.Tensor


def _facts(facts: tuple[Callable[[Any], Any], ...], tensors: list[Any]) -> list[list[Any]]:
    return [list(map(fact, tensors)) for fact in facts]


def _wrapper_facts(wrapped: list[Any]) -> list[list[Any]]:
    # DTensors override none of these functions, and the check for overrides would cost the most.
    with torch._C.DisableTorchFunctionSubclass():
        return _facts(_WRAPPER_FACTS, wrapped)
