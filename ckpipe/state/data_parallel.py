"""Find the parameters that DistributedDataParallel keeps equal on the ranks of its process group.

Theory. DDP broadcasts all parameters of its list ``_module_parameters`` when it is made, frozen
ones too, and reduces the gradients of those that are trained. So they stay equal on the ranks of
its process group, and only they: not the parameters that it is told to ignore, not a frozen one
that is trained later, not buffers, and not copies that a ``state_dict`` makes. A tensor is
therefore equal if it lies in the memory of such a parameter, whatever its name is.

Three facts decide it that DDP itself keeps nowhere, or that a program may change:

* ``init_sync=False`` leaves out the broadcast, as copying a DDP object does, and DDP does not
  record it. So its constructor and its ``__setstate__`` are wrapped when this module is imported.
  Of a DDP object that was made before, torch's default is assumed, with which torch makes the
  weights equal; without it, torch demands equal weights.
* A parameter that was frozen then and is not now has no gradient reduced. Of an older DDP object
  only the number of reduced parameters is known, so if that differs, no trained one is equal.
* A communication hook may leave gradients unreduced, as that of post-local SGD does. Those of torch
  reduce them, except this one; one of the program counts as unequal.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Hashable, Iterable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpipe.state.tensors import PLAIN_TYPES, plain_parts

_frozen_when_made: WeakKeyDictionary[nn.Module, frozenset[int] | None] = WeakKeyDictionary()
"""For each DDP object the ids of parameters that were frozen; None if it has broadcast none."""

_make = DistributedDataParallel.__init__
_signature = inspect.signature(_make)


@wraps(_make)
def _make_and_note(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    _make(self, *args, **kwargs)
    synchronized = _signature.bind(self, *args, **kwargs).arguments.get("init_sync", True)
    frozen = frozenset(id(each) for each in self._module_parameters if not each.requires_grad)
    _frozen_when_made[self] = frozen if synchronized else None


_copy = DistributedDataParallel.__setstate__


@wraps(_copy)
def _copy_and_note(self: DistributedDataParallel, state: Any) -> None:
    _copy(self, state)  # type: ignore[no-untyped-call]
    _frozen_when_made[self] = None


DistributedDataParallel.__init__ = _make_and_note  # type: ignore[method-assign]
DistributedDataParallel.__setstate__ = _copy_and_note  # type: ignore[method-assign]


def place_of(tensor: Any) -> Hashable:
    """Return a key: equal for plain tensors of the same memory and layout, unique for others."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
        return object()
    if tensor.is_meta or not tensor.numel():
        return object()
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def equal_places(modules: Iterable[nn.Module]) -> dict[Hashable, tuple[int, ...]]:
    """Return the places that hold equal bytes, each with the global ranks on which they do.

    Args:
        modules: Modules that are wrapped in DDP, or contain wrapped ones; composable ``replicate``
            counts as such.
    """
    found: dict[Hashable, tuple[int, ...]] = {}
    if not (dist.is_available() and dist.is_initialized()):
        return found
    for wrapper in _wrappers(modules):
        ranks = _ranks_of(wrapper)
        for parameter in _reduced(wrapper) if ranks else ():
            for _, each in plain_parts(parameter):
                found.setdefault(place_of(each), ranks)
    return found


def _wrappers(modules: Iterable[nn.Module]) -> Iterator[DistributedDataParallel]:
    # A module that is not imported cannot be in use.
    composable = sys.modules.get("torch.distributed._composable.replicate")
    for top in modules:
        for each in top.modules():
            if isinstance(each, DistributedDataParallel):
                yield each
            elif composable is not None and isinstance(each, composable.DDP):
                hidden = getattr(composable.replicate.state(each), "_ddp", None)
                if hidden is not None:  # it is made in the first forward pass
                    yield hidden


def _ranks_of(wrapper: DistributedDataParallel) -> tuple[int, ...]:
    try:
        return tuple(sorted(dist.get_process_group_ranks(wrapper.process_group)))
    except (KeyError, ValueError, RuntimeError):  # the group was destroyed
        return ()


def _reduced(wrapper: DistributedDataParallel) -> Iterator[nn.Parameter]:
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    # If all gradients are reduced late, the constructor returns before the broadcast.
    if wrapper._delay_all_reduce_all_params or not all(map(_reduces, hooks)):
        return
    parameters = wrapper._module_parameters
    trained = [each for each in parameters if each.requires_grad]
    if wrapper in _frozen_when_made:
        frozen = _frozen_when_made[wrapper]
        if frozen is None:
            return
        unequal = {id(each) for each in trained} & frozen
    else:
        reduced = wrapper._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
        unequal = {id(each) for each in trained} if len(trained) > reduced else set()
    yield from (each for each in parameters if id(each) not in unequal)


def _reduces(hook: object) -> bool:
    name, home = getattr(hook, "__name__", ""), getattr(hook, "__module__", None) or ""
    return home.startswith("torch.distributed.") and name != "post_localSGD_hook"


def fsdp1_ranks(module: nn.Module) -> set[int]:
    """Return the ranks that hold a module with those of FSDP1's wrappers in it; empty without."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapper is None:
        return set()
    flat = [each for each in module.modules() if isinstance(each, wrapper)]
    groups = {each.process_group for each in flat}
    groups |= {getattr(each, "_inter_node_pg", None) for each in flat} - {None}
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}
