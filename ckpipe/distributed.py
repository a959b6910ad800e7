"""Models and optimizers of distributed programs as one object of a state.

Names are those of the bare model whatever it is wrapped in: FSDP2, DDP, tensor parallel, compiled
or nothing. So what one saves, any other loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpipe.format.keys import label_part

__all__ = ["TrainingState", "training_state"]


def training_state(model: torch.nn.Module, *optimizers: Optimizer) -> TrainingState:
    """A model and its optimizers, to be put into the state that is saved and loaded.

    Args:
        model: The model, sharded or wrapped or not: FSDP2 (``fully_shard``), DDP, tensor
            parallel, ``torch.compile``, or a bare module.
        optimizers: Those that step its parameters, if they are to be saved.

    Returns:
        An object with ``state_dict`` and ``load_state_dict``, which call no collective.
    """
    return TrainingState(model, optimizers)


class TrainingState:
    """What :func:`training_state` makes.

    Sharded tensors are saved by those who hold them. Of plain tensors, the parameters and what
    optimizers keep for them count as the same on all ranks, as data-parallel and tensor-parallel
    training keeps them, and are written once. Buffers count as each rank's own, since a forward
    pass changes them: those that turn out the same on all ranks load into any number of ranks.
    A model that keeps different plain parameters under one name on different ranks is not for
    this class; put its ``state_dict`` into the state itself.

    An optimizer that has not stepped yet has no state. Its tensors are made for the checkpoint,
    so that names and shards are always the same, and the optimizer is left as it was. Which
    optimizers had stepped is saved as ``begun``: to load optimizers without their model, include
    ``optimizer`` and ``begun``; to load the model alone, include ``model``. A load of one without
    the other is refused, since an optimizer would be reset, or go on from a state made up for it.

    Args:
        model: The model.
        optimizers: Its optimizers.
    """

    __ckpipe_together__ = (("optimizer", "state"), ("begun",))

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, tuple(optimizers)
        self._own: frozenset[str] = frozenset()

    def state_dict(self) -> dict[str, Any]:
        """The model under ``model``; optimizers under ``optimizer`` by parameter names."""
        if not self._optimizers:
            model = get_model_state_dict(self._model)
            self._note_buffers(model)
            return {"model": model}
        begun = self._begun()
        with _gradients_aside(self._optimizers):
            model, optimizer = get_state_dict(self._model, self._optimizers)
            self._forget(begun)
        self._note_buffers(model)
        return {"model": model, "optimizer": optimizer, "begun": begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned, here or under another wrapper."""
        # Torch renames entries of what it is given.
        model = dict(state["model"])
        if not self._optimizers:
            set_model_state_dict(self._model, model)
            return
        optimizer = {name: _copied(value) for name, value in state["optimizer"].items()}
        with _gradients_aside(self._optimizers):
            set_state_dict(
                self._model,
                self._optimizers,
                model_state_dict=model,
                optim_state_dict=optimizer,
            )
            self._forget(state.get("begun", []))

    def __ckpipe_replicated__(self, label: str) -> bool:
        return label not in self._own

    def _begun(self) -> list[bool]:
        return [bool(optimizer.state) for optimizer in self._optimizers]

    def _forget(self, begun: Sequence[bool]) -> None:
        """Takes from optimizers that have not stepped what torch has made up for them."""
        for optimizer, has_stepped in zip(self._optimizers, begun, strict=False):
            if not has_stepped:
                optimizer.state.clear()

    def _note_buffers(self, model: dict[str, Any]) -> None:
        buffers = {_place(buffer) for buffer in self._model.buffers()}
        self._own = frozenset(
            f"model.{label_part(name)}"
            for name, value in model.items()
            if isinstance(value, torch.Tensor) and _place(value) in buffers
        )


@contextlib.contextmanager
def _gradients_aside(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Takes gradients away meanwhile; torch makes no optimizer state where it finds any."""
    parameters = [
        parameter
        for optimizer in optimizers
        if not optimizer.state
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _copied(value: Any) -> Any:
    """A copy of the containers of an optimizer's state; tensors stay the same."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _place(tensor: torch.Tensor) -> object:
    """What tells whether two plain tensors are the same memory; nothing for sharded ones."""
    if isinstance(tensor, DTensor) or tensor.is_meta:
        return object()
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
