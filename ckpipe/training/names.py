"""Fully qualified names of a model's tensors: those of the bare model, under any wrapper."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckpipe.errors import UsageError

# The module and name of the class, the attribute that holds the wrapped module, and True if keys of
# a state_dict contain the attribute's name. (torch 2.13: nn/parallel, _dynamo/eval_frame.py,
# distributed/algorithms/_checkpoint/checkpoint_wrapper.py, distributed/fsdp/_state_dict_utils.py)
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module", True),
    ("torch.nn.parallel", "DataParallel", "module", True),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", True),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        False,
    ),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module", False),
)


@dataclass(slots=True)
class ModelNames:
    """The tensors of a model, or of some of its stages, by their fully qualified names.

    Args:
        states: For each module, its ``state_dict(keep_vars=True)``, by its own keys.
        names: For each module, the fully qualified name of each key.
        parameters: All names of each parameter, by its identity: several if it is tied.
        modules: For each module, the names of its submodules, by its own paths.
        versions: The versions of modules that are not 1, by the names of the modules.
    """

    states: list[Mapping[str, Any]]
    names: list[dict[str, str]]
    parameters: dict[int, list[str]]
    modules: list[dict[str, str]]
    versions: dict[str, int]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of all state of the modules."""
        for state, names in zip(self.states, self.names, strict=True):
            for key, value in state.items():
                yield names[key], value


def names_of(modules: Sequence[nn.Module], states: Sequence[Mapping[str, Any]]) -> ModelNames:
    """Name the state of modules.

    Args:
        modules: The modules.
        states: For each, its ``state_dict``. It is called before this function, since it makes
            sharded modules put their sharded parameters in place.

    Raises:
        UsageError: If two tensors would have the same name.
    """
    found = ModelNames(list(states), [], {}, [], {})
    taken: set[str] = set()
    for module, state in zip(modules, states, strict=True):
        prefixes = dict(_prefixes(module))
        names = {key: _named(key, prefixes) for key in state}
        for name in names.values():
            if name in taken:
                raise UsageError(
                    f"Two tensors of the model are named {name!r}",
                    key=name,
                    hint="Give the modules of a list different names, as the stages of one model "
                    "have",
                )
            taken.add(name)
        found.names.append(names)
        for key, parameter in module.named_parameters(remove_duplicate=False):
            name = _named(key, prefixes)
            known = found.parameters.setdefault(id(parameter), [])
            if name not in known:
                known.append(name)
        inner = {prefix[:-1]: bare[:-1] for prefix, bare in prefixes.items()}
        found.modules.append(inner)
        for path, facts in (getattr(state, "_metadata", None) or {}).items():
            if facts.get("version", 1) != 1:
                found.versions[inner.get(path, path)] = facts["version"]
    return found


def _prefixes(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the prefixes that keys of a ``state_dict`` may have, with those of the bare model."""
    # A wrapper whose module is not imported cannot be in use, and some take a second to import.
    wrappers = [
        (getattr(sys.modules[home], name), attribute, in_keys)
        for home, name, attribute, in_keys in _WRAPPERS
        if home in sys.modules
    ]
    pending: list[tuple[nn.Module, tuple[str, ...], str]] = [(module, ("",), "")]
    while pending:
        here, prefixes, bare = pending.pop()
        for prefix in prefixes:
            yield prefix, bare
        wrapper = next((each for each in wrappers if isinstance(here, each[0])), None)
        for name, child in here._modules.items():
            if child is None:
                continue
            below = tuple([f"{prefix}{name}." for prefix in prefixes])
            if wrapper is None or name != wrapper[1]:
                pending.append((child, below, f"{bare}{name}."))
            elif wrapper[2]:
                pending.append((child, below, bare))
            else:
                pending.append((child, below + prefixes, bare))


def _named(key: str, prefixes: Mapping[str, str]) -> str:
    """Return the name of a key: replace its longest known prefix by that of the bare model."""
    end = key.rfind(".") + 1
    while end and key[:end] not in prefixes:
        end = key.rfind(".", 0, end - 1) + 1
    return prefixes.get(key[:end], key[:end]) + key[end:]


def is_sharded(tensor: Any) -> bool:
    """True if a tensor is a DTensor of which ranks hold different shards."""
    placements: Iterable[Any] = getattr(tensor, "placements", ())
    return any(not each.is_replicate() for each in placements)
