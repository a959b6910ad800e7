"""Compare the facts about a state's tensors with those of the last save, column by column.

Reading one attribute of a thousand tensors by ``map`` and comparing the list with that of the last
save runs in C; working out each tensor's leaf anew costs ten times as much. Only public attributes
are read: torch's guards of compiled code are faster, and end the process at a nested tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import compress, count
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from ckpipe.state.captured import Captured
from ckpipe.state.dtensors import Shardings, is_dtensor_type
from ckpipe.state.tensors import PLAIN_TYPES, TensorLeaf, attributes_of, leaf_of


class Differs(Exception):  # a finding, not an error
    """A state is not like the one that was walked."""


def check(alike: bool) -> None:
    """Ends an attempt if something is not as it was.

    Raises:
        Differs: If it is not.
    """
    if not alike:
        raise Differs


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


class LeafFacts:
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
            Differs: If a leaf would be another, but for its address.
            UnsupportedState: If an array cannot be saved.
        """
        try:
            return self._look_at(objects)
        except RuntimeError as error:  # such as that there are no strides
            raise Differs from error

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
    """Whether an object is a DTensor of which its kind and local part are told at a glance."""
    return is_dtensor_type(type(obj)) and type(obj._local_tensor) is torch.Tensor


def _decorated(tensors: list[torch.Tensor]) -> list[int]:
    """Which tensors a program has set attributes of."""
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
    """Whether two lists of one length hold the very same objects."""
    return all(map(is_, now, before))


__all__ = ["Differs", "LeafFacts", "check"]
