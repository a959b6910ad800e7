"""Optimizers with names for their parameters: make their state by name, and load it.

:mod:`ckpipe.state.training_form` has the form of the saved state.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpipe.errors import UnsupportedState
from ckpipe.state.tensors import tensors_in
from ckpipe.state.training_form import EMPTY, GROUPS, JOINT, NO_OPTIONS, PLAIN, STATE
from ckpipe.state.values import optimizer_kind
from ckpipe.training.names import ModelNames, is_sharded


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer whose parameters have names.

    Args:
        optimizer: The optimizer.
        taken: Its ``state_dict()``; with FSDP1, keyed by names.
        numbers: The key of each parameter in ``taken``, in the order of the groups.
        parameters: The parameters, in that order; with FSDP1, sharded tensors in their place.
        names: All names of each parameter.
        fsdp: The FSDP1 model whose flat parameters it steps, or None.
        units: Names of parameters that form one flat parameter: all of them have state, or none.
    """

    optimizer: Optimizer
    taken: Mapping[str, Any]
    numbers: Sequence[Any]
    parameters: Sequence[torch.Tensor]
    names: Sequence[Sequence[str]]
    fsdp: nn.Module | None = None
    units: Sequence[Sequence[str]] = ()

    @property
    def groups(self) -> list[tuple[dict[str, Any], dict[str, Any], range]]:
        """Each group with its entry in ``taken``, and the indices of its parameters."""
        found, start = [], 0
        for live, taken in zip(
            self.optimizer.param_groups, self.taken["param_groups"], strict=True
        ):
            stop = start + len(taken["params"])
            found.append((live, taken, range(start, stop)))
            start = stop
        return found

    @property
    def kept_together(self) -> dict[str, Any] | None:
        """State that belongs to no single parameter, and other keys of the ``state_dict``, or None.

        LBFGS keeps the concatenated state of all its parameters under the first. Other optimizers
        that do so are recognized by a flat tensor there, as long as all parameters together.
        """
        states, numbers = self.taken["state"], self.numbers
        known = set(numbers)
        state = {key: value for key, value in states.items() if key not in known}
        if list(states) == list(numbers[:1]) and len(numbers) > 1:
            total = sum(each.numel() for each in self.parameters)
            first = states[numbers[0]]
            flat = any(getattr(each, "shape", None) == (total,) for each in first.values())
            if flat or isinstance(self.optimizer, torch.optim.LBFGS):
                state[0] = first
        extra = {k: v for k, v in self.taken.items() if k not in ("state", "param_groups")}
        return {"state": state, "extra": extra} if state or extra else None


def named_optimizers(
    modules: Sequence[nn.Module],
    model: ModelNames,
    optimizers: Sequence[Optimizer],
    *,
    fsdp1: bool,
) -> list[NamedOptimizer]:
    """Get the state of optimizers, and name their parameters.

    Args:
        modules: The modules that they step.
        model: The tensors of the modules, by name.
        optimizers: The optimizers.
        fsdp1: True if FSDP1 has flattened parameters of a module.

    Raises:
        UnsupportedState: If a parameter of an optimizer is not one of the model.
    """
    if fsdp1:
        return [_of_fsdp1(modules, model, each) for each in optimizers]
    found = []
    for optimizer in optimizers:
        taken = optimizer.state_dict()
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        numbers = [number for group in taken["param_groups"] for number in group["params"]]
        names = []
        for place, parameter in enumerate(parameters):
            known = model.parameters.get(id(parameter))
            if known is None:
                raise UnsupportedState(
                    f"Parameter {place} of the {type(optimizer).__name__}, of shape "
                    f"{list(parameter.shape)}, is no parameter of the model",
                    hint="Pass training_state the model that the optimizer steps, and make the "
                    "optimizer after the model is sharded or moved",
                )
            names.append(known)
        found.append(NamedOptimizer(optimizer, taken, numbers, parameters, names))
    return found


def attach(
    named: NamedOptimizer,
    states: Mapping[int, dict[str, Any] | None],
    options: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    together: Mapping[str, Any] | None,
    *,
    of_another_class: bool,
) -> None:
    """Put loaded state into an optimizer.

    Its groups stay the same dicts, and tensors in them the same tensors. An optimizer with a
    ``load_state_dict`` of its own, or with hooks on it or on ``state_dict``, gets all state by that
    method; so does one that gets the state of another class, which torch converts a little.

    Args:
        named: The optimizer.
        states: The new state of parameters, by their indices; None removes it.
        options: Groups with their new options.
        together: State of no single parameter, and other keys of the ``state_dict``.
        of_another_class: Whether the state is of another class of optimizer.
    """
    for group, new in options:
        for key, value in new.items():
            live = group.get(key)
            if isinstance(live, torch.Tensor) and not isinstance(value, torch.Tensor):
                live.fill_(value)
            else:
                group[key] = value
    if named.fsdp is not None or of_another_class or _loads_its_own_way(named.optimizer):
        _load_state_dict(named, states, together, keep_dtypes=not of_another_class)
    else:
        _put_state(named.optimizer.state, named.parameters, states, together)


def _put_state(
    into: MutableMapping[Any, Any],
    keys: Sequence[Any],
    states: Mapping[int, dict[str, Any] | None],
    together: Mapping[str, Any] | None,
) -> None:
    """Put new state into a mapping that has these keys for the parameters."""
    for place, new_state in states.items():
        if new_state is None:
            into.pop(keys[place], None)
        else:
            into[keys[place]] = new_state
    for key, value in (together or {}).get("state", {}).items():
        into[keys[0] if key == 0 else key] = value


def _load_state_dict(
    named: NamedOptimizer,
    states: Mapping[int, dict[str, Any] | None],
    together: Mapping[str, Any] | None,
    *,
    keep_dtypes: bool,
) -> None:
    optimizer = named.optimizer
    packed = {**named.taken, **(together or {}).get("extra", {})}
    packed["state"] = dict(named.taken["state"])
    _put_state(packed["state"], named.numbers, states, together)
    packed["param_groups"] = [
        {
            **{key: value for key, value in live.items() if key != "params"},
            "params": taken["params"],
        }
        for live, taken, _ in named.groups
    ]
    groups, contents = list(optimizer.param_groups), [dict(g) for g in optimizer.param_groups]
    if named.fsdp is not None:
        with _sharded_state_dicts(named.fsdp):
            packed = FullyShardedDataParallel.optim_state_dict_to_load(
                named.fsdp, optimizer, packed
            )
    # Hooks may convert state, so state that is not loaded does not take the way through them.
    untouched = {
        parameter: optimizer.state[parameter]
        for place, parameter in enumerate(named.parameters)
        if place not in states and parameter in optimizer.state
    }
    with _dtypes_kept(optimizer, packed) if keep_dtypes else contextlib.nullcontext():
        optimizer.load_state_dict(packed)
    if together is None:
        optimizer.state.update(untouched)
    for group, content, new in zip(groups, contents, optimizer.param_groups, strict=True):
        for key, value in new.items():
            old = content.get(key)
            if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
                new[key] = old.copy_(value) if value is not old else old
        group.clear()
        group.update(new)
    optimizer.param_groups[:] = groups


@contextlib.contextmanager
def _dtypes_kept(optimizer: Optimizer, packed: Mapping[str, Any]) -> Iterator[None]:
    """Undo torch's casts of state to the dtype of its parameter, between the user's hooks.

    Hooks before the load make the state that the optimizer is to have, and hooks after it find
    that. If a hook changes the saved ``state_dict``, its dtypes say nothing of the optimizer's own:
    what no hook converts back keeps the dtype that torch gives it.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        yield
        return
    given: dict[str, Any] = {}
    is_changed = bool(optimizer._optimizer_state_dict_post_hooks)

    def note(_: Optimizer, state: dict[str, Any]) -> None:
        given.update(state)

    def undo(_: Optimizer) -> None:
        _undo_casts(optimizer, given, packed["state"] if is_changed else {})

    hooks = (
        optimizer.register_load_state_dict_pre_hook(note),
        optimizer.register_load_state_dict_post_hook(undo, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _undo_casts(
    optimizer: Optimizer, given: Mapping[str, Any], but: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Restore the dtypes of state that torch has cast to the dtype of its parameter.

    Args:
        optimizer: The optimizer.
        given: The state that it was given.
        but: State whose casts stand.
    """
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        live = optimizer.state.get(parameter, {})
        left = but.get(number, {})
        for key, value in given["state"].get(number, {}).items():
            if key in live and not (key in left and _dtypes(left[key]) == _dtypes(value)):
                live[key] = _uncast(live[key], value, parameter.dtype)


def _dtypes(value: Any) -> list[torch.dtype]:
    return [each.dtype for each in tensors_in(value)]


def _uncast(found: Any, value: Any, dtype: torch.dtype) -> Any:
    """Return a value as it was before torch has cast the tensors in it to a dtype."""
    if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
        return value.to(found.device) if value.dtype != found.dtype == dtype else found
    if isinstance(value, dict) and isinstance(found, dict):
        return {key: _uncast(each, value.get(key), dtype) for key, each in found.items()}
    if type(value) in (list, tuple) and type(found) is type(value) and len(found) == len(value):
        pairs = zip(found, value, strict=True)
        return type(value)([_uncast(*each, dtype) for each in pairs])
    return found


def _loads_its_own_way(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    own = any(
        name in vars(each) and not each.__module__.startswith("torch.")
        for each in kind.__mro__
        for name in ("load_state_dict", "__setstate__")
    )
    return bool(
        own
        or kind.load_state_dict is not Optimizer.load_state_dict
        or optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
        or optimizer._optimizer_state_dict_post_hooks
    )


# FSDP1: torch makes named, sharded tensors of flat parameters by collectives.


def is_fsdp1(module: nn.Module) -> bool:
    """True if a module is wrapped in FSDP1, or contains a wrapped one.

    Raises:
        UnsupportedState: If a wrapper has no mesh, so that its shards have no known place.
    """
    flat = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
    if any(getattr(each, "_device_mesh", None) is None for each in flat):
        raise UnsupportedState(
            "The model is wrapped in FullyShardedDataParallel without a device mesh, so the place "
            "of its shards is unknown",
            hint="Wrap it with device_mesh=init_device_mesh(...), or use fully_shard",
        )
    return bool(flat)


def model_state_dict(module: nn.Module, is_flat: bool) -> dict[str, Any]:
    """Return the state of a module with its own parameters; with FSDP1, new sharded tensors."""
    if is_flat:
        with _sharded_state_dicts(module):
            return module.state_dict()
    try:
        state: dict[str, Any] = module.state_dict(keep_vars=True)
    except TypeError:  # a subclass without that argument
        state = module.state_dict()
    return state


def load_model_state_dict(module: nn.Module, state: dict[str, Any], *, strict: bool) -> None:
    """Load a state of its own keys into a module."""
    if not is_fsdp1(module):
        module.load_state_dict(state, strict=strict)
        return
    with _sharded_state_dicts(module):
        module.load_state_dict(state, strict=strict)


@contextlib.contextmanager
def _sharded_state_dicts(module: nn.Module) -> Iterator[None]:
    with warnings.catch_warnings():
        # torch warns of its own deprecated functions, but has no replacement for them here.
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            yield


def _of_fsdp1(
    modules: Sequence[nn.Module], model: ModelNames, optimizer: Optimizer
) -> NamedOptimizer:
    if len(modules) != 1:
        raise UnsupportedState(
            "A list of modules is not saved with FSDP1",
            hint="Use fully_shard for the stages of a model",
        )
    for path, each in _flat_units(modules[0]):
        flat = each._flat_param
        for name, extension in zip(flat._fqns, flat._param_extensions, strict=True):
            if extension is not None:  # the original parameter is a DTensor
                raise UnsupportedState(
                    "FullyShardedDataParallel wraps a tensor-parallel parameter, and torch mixes "
                    f"up the state that a {type(optimizer).__name__} has for it",
                    key=_bare(f"{path}.{name}", model),
                    hint="Use fully_shard, or save the model without the optimizer",
                )
    try:
        with _sharded_state_dicts(modules[0]):
            taken = FullyShardedDataParallel.optim_state_dict(modules[0], optimizer)
    except RuntimeError as error:
        raise UnsupportedState(
            f"FullyShardedDataParallel cannot name the state of a {type(optimizer).__name__}",
            hint="Give it all parameters of the model and step it once, or use fully_shard",
        ) from error
    tensors = dict(model.tensors())
    numbers = [number for group in taken["param_groups"] for number in group["params"]]
    aliases = fsdp1_ties(modules[0], model)
    bare = [model.names[0].get(number, number) for number in numbers]
    names = [[name, *(each for each in aliases.get(name, ()) if each != name)] for name in bare]
    for number, name in zip(numbers, bare, strict=True):
        for key, value in taken["state"].get(number, {}).items():
            if isinstance(value, DTensor) and not isinstance(tensors[name], DTensor):
                taken["state"][number][key] = value.full_tensor()
    parameters = [tensors[name] for name in bare]
    units = list(_units(modules[0], model))
    return NamedOptimizer(optimizer, taken, numbers, parameters, names, modules[0], units)


def fsdp1_ties(module: nn.Module, model: ModelNames) -> dict[str, list[str]]:
    """Return the names of parameters that FSDP1 has flattened as one, by each of these names."""
    ties: dict[str, list[str]] = {}
    for path, each in _flat_units(module):
        for info in each._flat_param._shared_param_infos:
            prime, tied = (
                ".".join(filter(None, (path, *inside)))
                for inside in (
                    (info.prim_module_name, info.prim_param_name),
                    (info.module_name, info.param_name),
                )
            )
            first, name = _bare(prime, model), _bare(tied, model)
            names = ties.setdefault(first, [first])
            names.append(name)
            ties[name] = names
    return ties


def _flat_units(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers of FSDP1 in a module that have a flat parameter, by their paths."""
    for path, each in module.named_modules():
        if isinstance(each, FullyShardedDataParallel) and each._flat_param is not None:
            yield path, each


def _units(module: nn.Module, model: ModelNames) -> Iterator[list[str]]:
    """Yield the names of the parameters that each flat parameter of FSDP1 stands for."""
    for path, each in _flat_units(module):
        if not each._use_orig_params:
            yield [_bare(f"{path}.{name}", model) for name in each._flat_param._fqns]


def parameter_names(modules: Sequence[nn.Module], model: ModelNames) -> set[str]:
    """Return the names of all parameters, those in flat parameters of FSDP1 among them."""
    found = {name for names in model.parameters.values() for name in names}
    for each in modules:
        found.update(*_units(each, model), fsdp1_ties(each, model))
    return found


def _bare(path: str, model: ModelNames) -> str:
    """Return the name of a parameter that FSDP1 has flattened, from its path with all wrappers."""
    inside, _, name = path.lstrip(".").rpartition(".")
    bare = model.modules[0].get(inside, inside)
    return f"{bare}.{name}" if bare else name


def optimizers_state(optimizers: Sequence[NamedOptimizer]) -> dict[str, Any]:
    """Return the state of optimizers by the names of their parameters.

    Raises:
        UnsupportedState: If a parameter belongs to two optimizers, or if state is sharded in a way
            that no other world size could load.
    """
    groups: dict[str, Any] = {}
    states: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    joint: dict[str, Any] = {}
    empty: dict[str, dict[int, Any]] = {}
    taken: set[str] = set()
    for each in optimizers:
        for names in each.names:
            if names[0] in taken:
                raise UnsupportedState(
                    "Two optimizers step one parameter", key=names[0], hint="Give it to one of them"
                )
            taken.add(names[0])
        groups.update(_groups(each))
        for group in _empty_groups(each):
            of_first = empty.setdefault(each.names[0][0] if each.names else "", {})
            of_first[len(of_first)] = group
        together = each.kept_together
        if together is not None:
            _refuse_sharded(each, together)
            ordered = [names[0] for names in each.names]
            joint[ordered[0]] = {"params": ordered, **together}
        kept = each.taken["state"]
        alone = together is None or 0 not in together["state"]
        for number, parameter, names in zip(each.numbers, each.parameters, each.names, strict=True):
            state = kept.get(number)
            if not state or not alone:
                continue
            exceptions = [
                key for key, value in state.items() if _is_exception(key, value, parameter, names)
            ]
            for name in names:
                # Each has its own dict, since a dict in two places is slow to save.
                states[name] = dict(state)
                if exceptions:
                    plain[name] = list(exceptions)
    more = {PLAIN: plain, JOINT: joint, EMPTY: empty}
    return {GROUPS: groups, STATE: states, **{key: each for key, each in more.items() if each}}


def is_placed_like(key: str, shape: Sequence[int], parameter: torch.Tensor) -> bool:
    """True if a tensor of this shape is placed like its parameter, unless ``plain`` names it."""
    return key != "step" and parameter.shape == shape


def named_state(each: NamedOptimizer) -> Iterator[tuple[tuple[str, ...], torch.Tensor | None, Any]]:
    """Yield the state of an optimizer: its path, its parameter, and its value.

    State of no single parameter has no parameter.
    """
    together = each.kept_together
    if together is not None:
        yield (JOINT, each.names[0][0]), None, together
    if together is None or 0 not in together["state"]:
        for number, parameter, names in zip(each.numbers, each.parameters, each.names, strict=True):
            for key, value in each.taken["state"].get(number, {}).items():
                yield from (((STATE, name, key), parameter, value) for name in names)


def _groups(each: NamedOptimizer) -> Iterator[tuple[str, Any]]:
    for _, taken, places in each.groups:
        shapes = {
            name: each.parameters[place].shape for place in places for name in each.names[place]
        }
        if shapes:
            yield next(iter(shapes)), {**_options(each, taken), "params": shapes}


def _empty_groups(each: NamedOptimizer) -> list[dict[str, Any]]:
    return [_options(each, taken) for _, taken, places in each.groups if not places]


def _options(each: NamedOptimizer, taken: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in taken.items() if key not in NO_OPTIONS}
    return {"optimizer": optimizer_kind(each.optimizer), "options": options}


def _is_exception(key: str, value: Any, parameter: torch.Tensor, names: Sequence[str]) -> bool:
    """True if a value has its parameter's shape but is plain.

    Raises:
        UnsupportedState: If it is sharded in another way than its parameter.
    """
    if not isinstance(value, torch.Tensor):
        if any(isinstance(each, DTensor) for each in tensors_in(value)):
            raise _sharded_otherwise(key, names[0], "it is inside of a container")
        return False
    placed = isinstance(parameter, DTensor)
    like = is_placed_like(key, value.shape, parameter)
    if not isinstance(value, DTensor):
        return like and placed
    if not (like and placed):
        shapes = f"its shape is {list(value.shape)}, that of the parameter {list(parameter.shape)}"
        raise _sharded_otherwise(key, names[0], shapes)
    return False


def _sharded_otherwise(key: str, name: str, why: str) -> UnsupportedState:
    return UnsupportedState(
        f"The optimizer keeps {key!r} as a DTensor that is not sharded like its parameter: {why}",
        key=name,
        hint="Use an optimizer whose sharded state has the shapes of its parameters, or leave "
        "this one out of training_state",
    )


def _refuse_sharded(each: NamedOptimizer, together: Mapping[str, Any]) -> None:
    for parameter, names in zip(each.parameters, each.names, strict=True):
        if together["state"] and is_sharded(parameter):
            raise UnsupportedState(
                f"A {type(each.optimizer).__name__} keeps state for all its parameters together, "
                "and this one is sharded, so no other world size could load it",
                key=names[0],
                hint="Use another optimizer for sharded parameters, or leave it out",
            )
