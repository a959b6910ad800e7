"""Match the saved state of a model and its optimizers with the live ones that a load fills.

The match ends, and new tensors are made, before a byte is read. So a mismatch changes nothing. New
state of optimizers is attached once all bytes are verified.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpipe.errors import StructureMismatch
from ckpipe.loading.rehearsal import rehearse
from ckpipe.loading.stateful import (
    LoadTargets,
    SavedObject,
    SavedTensor,
    is_extra_state,
    loads_as_torch_does,
    mismatch,
    saves_as_torch_does,
    writable,
)
from ckpipe.reading.live_tensors import tie_of, without_ties
from ckpipe.state.training_form import MODEL, OPTIMIZER, STATE, VERSIONS
from ckpipe.training.names import ModelNames
from ckpipe.training.optimizer_loading import OptimizerMatch, refuse_meta
from ckpipe.training.optimizers import NamedOptimizer, fsdp1_ties, load_model_state_dict


def load_targets(
    saved: SavedObject,
    modules: Sequence[nn.Module],
    model: ModelNames,
    optimizers: Sequence[NamedOptimizer],
    *,
    stages: bool,
) -> LoadTargets:
    """Match a saved state with a model and its optimizers.

    Args:
        saved: The saved state, in the form of :mod:`ckpipe.state.training_form` or of DCP.
        modules: The model, or stages of it.
        model: The tensors of the modules, by name.
        optimizers: The optimizers.
        stages: True if other ranks may have other stages of the model, with other names.

    Raises:
        TargetMismatch: If they do not fit; nothing is touched.
    """
    if not isinstance(saved.state, Mapping):
        raise StructureMismatch("The saved object is no training state", key=saved.label or None)
    others = dist.is_initialized() and dist.get_world_size() > 1

    def elsewhere(label: str) -> bool:
        """True if another rank may have a name that this rank lacks."""
        return others and (stages or not saved.is_everywhere(label))

    tree: dict[str, Any] = {}
    found = LoadTargets(tree, lambda: None)
    steps: list[Callable[[], None]] = []
    if MODEL in saved.state:
        loads = _loads_of(saved, modules, model)
        tree[MODEL] = _match_model(saved, model, loads, found, elsewhere)
        if VERSIONS in saved.state:
            tree[VERSIONS] = dict.fromkeys(saved.state[VERSIONS])
        steps += [partial(each.load, tree[MODEL]) for each in loads]
    elif any(saved.selects(MODEL, name) for name, _ in model.tensors()):
        raise mismatch(
            [saved.at(MODEL)], [], saved.label, hint="Load it into a state of the same form"
        )
    if _has_optimizers(saved, optimizers, found):
        matching = OptimizerMatch(saved, model, optimizers, found, elsewhere, stages=stages)
        tree[OPTIMIZER] = matching.tree
        steps.append(matching.attach)

    def attach_all() -> None:
        for step in steps:
            step()

    found.attach = attach_all
    return found


def _has_optimizers(
    saved: SavedObject, optimizers: Sequence[NamedOptimizer], found: LoadTargets
) -> bool:
    """Tell whether there is a state of optimizers, and optimizers to load it into.

    Raises:
        StructureMismatch: If there is none, and the load selects it; or something else is there.
    """
    hint = f"To load the model alone, pass include=[{saved.at(MODEL)!r}]"
    there = saved.state.get(OPTIMIZER, {})
    if not isinstance(there, Mapping):
        raise StructureMismatch(
            f"This is no state of optimizers but a {type(there).__name__}",
            key=saved.at(OPTIMIZER),
            hint=hint,
        )
    if OPTIMIZER in saved.state:
        found.unexpected += [] if optimizers else [saved.at(OPTIMIZER)]
        return bool(optimizers)
    names = (names[0] for each in optimizers for names in each.names)
    if any(saved.selects(OPTIMIZER, STATE, name) for name in names):
        raise StructureMismatch(
            "The checkpoint has no optimizer", key=saved.at(OPTIMIZER), hint=hint
        )
    return False


# The model


@dataclass(slots=True)
class _ModuleLoad:
    """A load of one module by its own ``load_state_dict``.

    Args:
        module: The module.
        state: Its current state.
        names: The name of each key of its state, and of each saved key that only it knows.
        metadata: The versions of its modules that were saved; None if there are none.
        strict: Whether the load is to give it all its keys.
        found: The tensor to fill for each saved key; None if the module need not be asked, or
            cannot be.
    """

    module: nn.Module
    state: Mapping[str, Any]
    names: dict[str, str]
    metadata: dict[str, Any] | None
    strict: bool
    found: Mapping[str, torch.Tensor | None] | None = None

    def add_names(self, names: Iterable[str]) -> None:
        """Add saved names that the module's own code may know, such as those of an old version."""
        every = self.names.items()
        prefixes = {key.removesuffix(name) for key, name in every}
        if len(prefixes) == 1 and all(key.endswith(name) for key, name in every):
            (prefix,) = prefixes
            self.names |= {prefix + name: name for name in names}

    def given(self, values: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return the module's state of values by their names."""
        names = self.names.items()
        new = OrderedDict((key, values[name]) for key, name in names if name in values)
        if self.metadata is not None:
            new._metadata = self.metadata  # type: ignore[attr-defined]
        return new

    def ask(self, saved: SavedObject) -> None:
        """Ask a module with code of its own whether it takes the saved state.

        Raises:
            TargetMismatch: If it does not.
        """
        module = self.module
        if loads_as_torch_does(module) and saves_as_torch_does(module):
            return
        self.found = rehearse(
            module,
            self.given(saved.state[MODEL]),
            self.state,
            partial(module.load_state_dict, strict=self.strict),
            saved.label,
            lambda key: saved.at(MODEL, self.names.get(key, key)),
        )

    def target(self, key: str, value: Any) -> torch.Tensor | None:
        """Return the tensor to fill with a saved value; None to make it anew."""
        if self.found is not None and key in self.found:
            return self.found[key]
        live = self.state.get(key)
        if not isinstance(live, torch.Tensor):
            return None
        if is_extra_state(key) and isinstance(value, SavedTensor):
            fits = (live.shape, live.dtype) == (value.shape, value.dtype)
            return live if fits else None
        return live

    def load(self, made: Mapping[str, Any]) -> None:
        """Call ``load_state_dict``, mostly with own tensors: hooks and extra state count."""
        with writable(self.module):
            load_model_state_dict(self.module, self.given(made), strict=self.strict)


def _loads_of(
    saved: SavedObject, modules: Sequence[nn.Module], model: ModelNames
) -> list[_ModuleLoad]:
    there, versions = saved.state[MODEL], saved.state.get(VERSIONS)
    loads = []
    every = zip(modules, model.states, model.names, model.modules, strict=True)
    for module, state, names, inner in every:
        metadata = (
            None
            if versions is None
            else {
                path: {**facts, "version": versions.get(inner.get(path, path), 1)}
                for path, facts in getattr(state, "_metadata", {}).items()
            }
        )
        given = _with_ties(names, state, there)
        strict = all(name in there or saved.selects(MODEL, name) for name in given.values())
        loads.append(_ModuleLoad(module, state, given, metadata, strict))
    return loads


def _with_ties(
    names: Mapping[str, str], state: Mapping[str, Any], there: Mapping[str, Any]
) -> dict[str, str]:
    """Return names of keys, with another name of a tied tensor for one that was not saved.

    Other programs write a tied tensor once.
    """
    saved = {tie_of(state[key]): name for key, name in names.items() if name in there}
    return {
        key: name if name in there else saved.get(tie_of(state[key]), name)
        for key, name in names.items()
    }


def _match_model(
    saved: SavedObject,
    model: ModelNames,
    loads: Sequence[_ModuleLoad],
    found: LoadTargets,
    elsewhere: Callable[[str], bool],
) -> dict[str, Any]:
    """Return the target tensors of a model.

    FSDP1 has a new tensor for each name. Tied names get one, so that their values must agree.

    Raises:
        TargetMismatch: If checkpoint and target have different names, a tensor is on the ``meta``
            device, or a module refuses its state.
    """
    live, there = dict(model.tensors()), saved.state[MODEL]
    missing = [name for name in live if name not in there and saved.selects(MODEL, name)]
    surplus = [name for name in there if name not in live]
    unexpected = [name for name in surplus if not elsewhere(saved.at(MODEL, name))]
    found.unexpected += [saved.at(MODEL, name) for name in surplus if name not in unexpected]
    for name in there:
        refuse_meta(live.get(name), saved.at(MODEL, name))
    tree: dict[str, Any] = {}
    for each in loads:
        if len(loads) == 1:
            each.add_names(unexpected)
        each.ask(saved)
        tree |= {
            name: each.target(key, there[name]) for key, name in each.names.items() if name in there
        }
    # Code of the module may give a tensor the values of another name.
    taken = {tie_of(t) for each in loads for t in (each.found or {}).values() if t is not None}
    taken |= {tie_of(live[name]) for name in there if name in live}  # it is tied to the missing one
    missing = [name for name in without_ties(missing, live) if tie_of(live[name]) not in taken]
    missing = [saved.at(MODEL, name) for name in missing]
    unexpected = [saved.at(MODEL, name) for name in unexpected if tree.get(name) is None]
    if missing or unexpected:
        hint = "Load it into a model of the same layers"
        names = [saved.at(MODEL, name) for name in there]
        raise mismatch(missing, unexpected, saved.label, hint=hint, names=names, above=saved.above)
    for each in loads:
        for names in fsdp1_ties(each.module, model).values():
            tree |= {name: live[names[0]] for name in names if name in tree}
    return tree
