"""Objects of a target that call collectives when their state is read or loaded.

A rank that raises while the others are inside of a collective leaves them there until its timeout.
So the ranks of such an object load *jointly*: each tells the others through the Store of
``torch.distributed`` that it can go on, or that it has failed, before any of them calls the object
(:mod:`ckpipe.running.loads`). Other loads pay for the search of such objects only.

FSDP1 is known to call collectives. Another object says so by a method, which returns the ranks that
take part::

    def __ckpipe_collectives__(self) -> Iterable[int]: ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckpipe.format.labels import LabelFilter, join, label_order
from ckpipe.interpreter import user_code
from ckpipe.loading.stateful import InspectionMemo, live_state
from ckpipe.state.data_parallel import fsdp1_ranks
from ckpipe.state.kinds import is_stateful


@dataclass(frozen=True, slots=True)
class CollectiveObjects:
    """The objects of a target that call collectives.

    Args:
        ranks: The ranks that take part, in order.
        objects: The labels and objects, in the order in which all ranks call them.
    """

    ranks: tuple[int, ...]
    objects: tuple[tuple[str, Any], ...]

    def look(self, memo: InspectionMemo) -> None:
        """Read the present state of all objects, so that the match, which may fail, finds it."""
        with torch.no_grad():
            for label, obj in self.objects:
                look = getattr(obj, "__ckpipe_look__", None)
                if look is None and not hasattr(type(obj), "__ckpipe_targets__"):
                    look = partial(live_state, obj)
                if look is not None:
                    with user_code("state_dict", label):
                        memo.once(obj, look)


def collective_objects(target: Any, select: LabelFilter) -> CollectiveObjects | None:
    """Find the objects of a target that call collectives with other ranks; None if there are none.

    Args:
        target: The target.
        select: The filter of labels to load.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    ranks: set[int] = set()
    objects: list[tuple[str, Any]] = []
    seen: set[int] = set()
    pending = [("", target)]
    while pending:
        label, obj = pending.pop()
        if isinstance(obj, torch.Tensor | np.ndarray | str | type) or id(obj) in seen:
            continue
        seen.add(id(obj))
        if not is_stateful(obj):
            pending += reversed(_children(obj, label))
        elif (found := _ranks_of(obj, label)) and select.may_select(label):
            ranks.update(found)
            objects.append((label, obj))
    if ranks <= {dist.get_rank()}:
        return None
    return CollectiveObjects(tuple(sorted(ranks)), tuple(objects))


def _children(obj: Any, label: str) -> list[tuple[str, Any]]:
    if isinstance(obj, dict):
        keys = list(obj)
        return [(join(label, key), obj[key]) for key in map(keys.__getitem__, label_order(keys))]
    if isinstance(obj, list | tuple) and not isinstance(obj, torch.Size):
        return [(join(label, number), each) for number, each in enumerate(obj)]
    if dataclasses.is_dataclass(obj):
        names = {field.name for field in dataclasses.fields(obj)} | vars(obj).keys()
        held = [name for name in sorted(names) if hasattr(obj, name)]
        return [(join(label, name), getattr(obj, name)) for name in held]
    return []


def _ranks_of(obj: Any, label: str) -> Iterable[int]:
    own = getattr(obj, "__ckpipe_collectives__", None)
    if own is not None:
        with user_code("__ckpipe_collectives__", label):
            ranks: Iterable[int] = own()
        return ranks
    return fsdp1_ranks(obj) if isinstance(obj, torch.nn.Module) else ()
