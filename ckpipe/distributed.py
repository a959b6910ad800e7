"""Models and optimizers of distributed programs as one object of a state.

Names are those of the bare model under any wrapper: FSDP, DDP, tensor parallel, pipeline stages,
compiled or none. So a state that was saved under one wrapper loads under any other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpipe.errors import DtypeMismatch, ShapeMismatch, StructureMismatch, UsageError
from ckpipe.format.labels import LabelFilter, join
from ckpipe.loading.stateful import LoadTargets, SavedObject, SavedTensor
from ckpipe.loading.wrappers import fitting_parts
from ckpipe.reading.live_tensors import is_placed
from ckpipe.state.data_parallel import equal_places, fsdp1_ranks, place_of
from ckpipe.state.kinds import open_wrapper
from ckpipe.state.tensors import is_wrapper, local_part, plain_parts
from ckpipe.state.training_form import MODEL, OPTIMIZER, VERSIONS
from ckpipe.training.loading import load_targets
from ckpipe.training.names import ModelNames, is_sharded, names_of
from ckpipe.training.optimizers import (
    NamedOptimizer,
    is_fsdp1,
    model_state_dict,
    named_optimizers,
    named_state,
    optimizers_state,
    parameter_names,
)

__all__ = ["TrainingState", "training_state"]


def training_state(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    *optimizers: Optimizer,
    replicated: bool | str | Sequence[str] = False,
) -> TrainingState:
    """Make a model and its optimizers one object of a state, for any way to distribute them.

    A load is right to the bit, or raises a :class:`~ckpipe.errors.CkpipeError` that names the key
    before anything is touched.

    Args:
        model: The model, sharded or wrapped or not: FSDP2 (``fully_shard``), DDP, tensor parallel,
            ``torch.compile``, activation checkpointing, FSDP1 with a device mesh, or a bare
            module. Or a list of the pipeline stages that this rank has, whose names must differ. Or
            several models by name, each wrapped in its own way: their tensors are saved below these
            names.
        optimizers: Those that step its parameters, if they are to be saved. The wrapper that
            ``accelerate`` puts around an optimizer is taken off.
        replicated: Tensors that your program keeps equal on all ranks, so that each byte is written
            once, beside those that ckpipe knows to be equal (see :class:`TrainingState`). True
            names all parameters and their optimizer state, but no buffer and no extra state: for a
            bare model whose gradients your program reduces, plain parameters of a tensor-parallel
            model, and FSDP1 with ``NO_SHARD``. Or a glob or globs of names in this object, such as
            ``["model.head.*", "optimizer.state.head.*"]``; these name any tensor. If a named tensor
            differs between ranks, the checkpoint mixes the values.

    Returns:
        An object with ``state_dict`` and ``load_state_dict``. They call no collective, except with
        FSDP1, whose flat parameters torch gathers.

    Raises:
        UsageError: If ``replicated`` is of another form, or the name of a model is empty or has a
            dot.
    """
    return TrainingState(model, optimizers, replicated=replicated)


class TrainingState:
    """A model and its optimizers; :func:`training_state` makes it.

    Each rank saves the shards that it holds of sharded tensors. Written once are the replicas of a
    sharded tensor; the parameters that DDP or composable ``replicate`` keeps equal, on the ranks of
    its process group; the state of an optimizer all of whose parameters are such, without tensors
    of one element; and tensors that ``replicated`` names. Every other tensor is the rank's own:
    buffers, extra state, parameters that DDP ignores or did not synchronize (``init_sync=False``),
    copies that a ``state_dict`` makes. It goes back to its rank. If all ranks saved the same value,
    it loads into any number of ranks.

    No state is invented: an optimizer that has not stepped is saved without state, and has no state
    after a load. A parameter without saved state, such as one that never had a gradient, has none
    after the load, and is named in ``missing``. Param groups are matched by the names of their
    parameters; saved options replace those of the target, except ``foreach``, ``fused``,
    ``capturable`` and ``differentiable``. State keeps the dtype that was saved.

    To load the model alone, include its ``model``; to load the optimizers alone, ``optimizer``.

    Args:
        model: The model, a list of stages of it, or several models by name.
        optimizers: Their optimizers.
        replicated: As for :func:`training_state`.
    """

    __ckpipe_weights__ = MODEL

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        replicated: bool | str | Sequence[str] = False,
    ) -> None:
        if isinstance(model, Mapping):
            model = _together(model)
        self._modules = [model] if isinstance(model, nn.Module) else list(model)
        self._stages = not isinstance(model, nn.Module)
        self._optimizers = tuple(map(_bare, optimizers))
        globs = [replicated] if isinstance(replicated, str) else replicated
        if not (
            isinstance(globs, bool)
            or (isinstance(globs, list | tuple) and all(isinstance(each, str) for each in globs))
        ):
            raise UsageError(
                f"replicated is True, False, a glob or a list of globs, not {replicated!r:.100}",
                hint='Name tensors of this object, such as ["model.head.*"]',
            )
        self._all_equal = globs is True
        self._named_equal = LabelFilter([] if isinstance(globs, bool) else list(globs))
        self._equal: dict[str, bool | tuple[int, ...]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state: the model under ``model``, optimizers under ``optimizer``, by name.

        Raises:
            UsageError: If two tensors of a list of stages have the same name.
            UnsupportedState: If an optimizer steps a tensor that is not the model's, or keeps
                sharded state that no other world size could load; and with FSDP1 without a device
                mesh.
        """
        model, optimizers = self._look()
        # Sharded tensors are detached as plain ones are, so that no gradient flows through a state.
        tensors = {
            name: value.detach()
            if isinstance(value, torch.Tensor) and not is_wrapper(value)
            else value
            for name, value in model.tensors()
        }
        state: dict[str, Any] = {MODEL: tensors, VERSIONS: model.versions}
        if optimizers:
            state[OPTIMIZER] = optimizers_state(optimizers)
        self._equal = self._equal_labels(model, optimizers)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned, here or under another wrapper.

        A pipeline's ``load`` reads straight into the model and the optimizers; this method is for
        states in memory. Tensors are copied.

        Raises:
            TargetMismatch: If it does not fit; nothing is touched.
        """
        _fill_from(self, state)

    def __ckpipe_targets__(self, saved: SavedObject) -> LoadTargets:
        model, optimizers = saved.memo.once(self, self._look)
        return load_targets(saved, self._modules, model, optimizers, stages=self._stages)

    def __ckpipe_replicated__(self, label: str) -> bool | tuple[int, ...]:
        return self._named_equal(label) or self._equal.get(label, False)

    def __ckpipe_collectives__(self) -> set[int]:
        return set().union(*map(fsdp1_ranks, self._modules))

    def __ckpipe_modules__(self) -> Sequence[torch.nn.Module]:
        return self._modules

    def __ckpipe_look__(self) -> tuple[ModelNames, list[NamedOptimizer]]:
        return self._look()

    def _look(self) -> tuple[ModelNames, list[NamedOptimizer]]:
        # The state comes first, since it makes sharded modules put sharded parameters in place.
        flat = [is_fsdp1(each) for each in self._modules]
        states = [model_state_dict(*each) for each in zip(self._modules, flat, strict=True)]
        model = names_of(self._modules, states)
        return model, named_optimizers(self._modules, model, self._optimizers, fsdp1=any(flat))

    def _equal_labels(
        self, model: ModelNames, optimizers: Sequence[NamedOptimizer]
    ) -> dict[str, bool | tuple[int, ...]]:
        """Return the labels of tensors that several ranks hold alike, with these ranks."""
        places = equal_places(self._modules)
        found: dict[str, bool | tuple[int, ...]] = {}
        for name, value in model.tensors():
            for label, tensor in _tensors_by_label(value, join(MODEL, name)):
                place = place_of(tensor)
                if place in places:
                    found[label] = places[place]
        if self._all_equal:
            names = parameter_names(self._modules, model)
            found |= {join(MODEL, name): True for name in names}
        for each in optimizers:
            parameters = [param for param in each.parameters if param.numel()]
            groups = {
                places.get(place_of(part)) for param in parameters for _, part in plain_parts(param)
            }
            ranks = groups.pop() if len(groups) == 1 else None
            for path, parameter, value in named_state(each):
                for label, tensor in _tensors_by_label(value, reduce(join, path, OPTIMIZER)):
                    # Plain state of a sharded parameter is that of its shard.
                    of_shard = is_sharded(parameter) and not isinstance(tensor, DTensor)
                    if self._all_equal and not of_shard:
                        found[label] = True
                    elif ranks is not None and tensor.numel() > 1:
                        found[label] = ranks
        return found


def _together(models: Mapping[str, nn.Module]) -> nn.Module:
    """Return one module that has the models under their names."""
    try:
        return nn.ModuleDict(dict(models))
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"Several models are given by name, and these names cannot be used: {error}",
            hint="Name each by a text without a dot: training_state({'generator': g, 'critic': c})",
        ) from error


def _bare(optimizer: Optimizer) -> Optimizer:
    """Take off the wrapper of ``accelerate``, whose class says nothing of the optimizer."""
    while type(optimizer).__module__ == "accelerate.optimizer":
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def _tensors_by_label(value: Any, label: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in plain containers with their labels in the state."""
    if isinstance(value, torch.Tensor):
        yield from plain_parts(value, label)
    elif type(value) in (dict, list, tuple):
        for key, inner in value.items() if type(value) is dict else enumerate(value):
            yield from _tensors_by_label(inner, join(label, key))


def _fill_from(obj: Any, state: Any) -> None:
    """Copy a state in memory into an object that has ``__ckpipe_targets__``.

    Raises:
        TargetMismatch: If it does not fit; nothing is touched.
    """
    found: LoadTargets = obj.__ckpipe_targets__(SavedObject(_described(state)))
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    _match_in_memory(found.tree, state, "", copies)
    with torch.no_grad():
        for target, value in copies:
            target.copy_(value)
        _put_in_memory(found.tree, state)
        found.attach()


def _described(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        like = partial(_copied, state) if is_wrapper(state) else None
        return SavedTensor(state.dtype, tuple(state.shape), like=like)
    if isinstance(state, Mapping):
        return {key: _described(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)([_described(value) for value in state])
    return state


def _copied(tensor: Any, placed: Any, device: torch.device) -> torch.Tensor:
    """Copy a wrapper tensor by its inner tensors, as not all classes can be cloned."""
    if isinstance(tensor, DTensor):
        return DTensor.from_local(
            _copied(local_part(tensor), None, device), tensor.device_mesh, tensor.placements,
            run_check=False, shape=tensor.shape, stride=tensor.stride(),
        )  # fmt: skip
    if not is_wrapper(tensor):
        return tensor.detach().to(device, copy=True)  # type: ignore[no-any-return]
    names, context = tensor.__tensor_flatten__()
    inner = {name: _copied(getattr(tensor, name), None, device) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(
        inner, context, tensor.shape, tensor.stride()
    )
    return made


def _match_in_memory(
    target: Any, value: Any, label: str, copies: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Collect pairs of target and value in ``copies``.

    Raises:
        TargetMismatch: If a value does not fit.
    """
    if isinstance(target, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            raise StructureMismatch(f"This is no tensor but a {type(value).__name__}", key=label)
        if is_wrapper(target) and is_wrapper(value):
            saved = open_wrapper(value, label)
            parts = fitting_parts(saved.facts, list(saved.inner), target, label)
            for name, part in parts.items():
                _match_in_memory(part, saved.inner[name], join(label, name), copies)
            return
        if is_wrapper(target) or is_wrapper(value):
            raise StructureMismatch("A wrapper tensor takes another one only", key=label)
        if value.shape != target.shape:
            shapes = f"{list(value.shape)}, and the target {list(target.shape)}"
            raise ShapeMismatch(f"The tensor has the shape {shapes}", key=label)
        if value.dtype != target.dtype:
            raise DtypeMismatch(
                f"The tensor is {value.dtype}, and the target {target.dtype}",
                key=label,
                hint="Convert it, or load from a checkpoint with cast=True",
            )
        copies.append(_local_copy(target.detach(), value.detach(), label))
    elif isinstance(target, dict):
        for key, inner in target.items():
            _match_in_memory(inner, value[key], join(label, key), copies)
    elif isinstance(target, list):
        for number, inner in enumerate(target):
            _match_in_memory(inner, value[number], join(label, number), copies)


def _local_copy(
    target: torch.Tensor, value: torch.Tensor, label: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local tensors to copy between, of tensors that may be sharded."""
    if not is_placed(target) and not is_placed(value):
        return target, value
    if is_placed(target) and is_placed(value):
        same = target.placements == value.placements  # type: ignore[attr-defined]
        if same and target.device_mesh == value.device_mesh:  # type: ignore[attr-defined]
            return local_part(target), local_part(value)
    raise StructureMismatch(
        "The tensor is not sharded like the target",
        key=label,
        hint="Save it to a checkpoint and load that, which shards anew",
    )


def _put_in_memory(target: Any, value: Any) -> None:
    """Fill the None slots in the containers of the targets with deep copies of the values."""
    if isinstance(target, dict | list):
        keys = list(target) if isinstance(target, dict) else range(len(target))
        for key in keys:
            if target[key] is None:
                target[key] = copy.deepcopy(value[key])
            else:
                _put_in_memory(target[key], value[key])
