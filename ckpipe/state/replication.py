"""Which plain tensors all ranks hold alike, as the objects of a state say themselves.

A plain tensor tells nothing of other ranks, so a save takes it for the rank's own, unless an object
vouches for it. An object with ``state_dict`` does that by a method::

    def __ckpipe_replicated__(self, label: str) -> bool: ...

``label`` names a tensor of its state, from the object on: ``model.layers.0.weight``. True means
that every rank from 0 to the world size holds a tensor of that name with the same bytes when it
saves, so that each byte needs to be written by one of them only. It is asked for every tensor of
every walk and should be fast.

``DistributedDataParallel`` is vouched for here: its parameters are alike on all ranks, its buffers
are not, since each rank's forward pass changes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpipe.format.keys import label_part

ReplicatedTest = Callable[[str], bool]
"""Tells by the label of a tensor, from its object on, whether all ranks hold it alike."""


def replicated_test(obj: Any) -> ReplicatedTest | None:
    """What an object says of its tensors; None if it says nothing."""
    own: ReplicatedTest | None = getattr(obj, "__ckpipe_replicated__", None)
    if own is not None:
        return own
    if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
        named = obj.named_parameters(remove_duplicate=False)
        return frozenset(label_part(name) for name, _ in named).__contains__
    return None
