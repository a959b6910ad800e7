"""What ``state_dict()`` of a module returns, had without making a tensor of every parameter.

``torch.nn.Module.state_dict`` detaches each parameter and buffer, and throws nothing else away. For
a DTensor that costs more than all else that a walk does for it, and the walk looks at nothing of a
detached tensor that it could not see on the attached one. So modules are asked for their tensors
themselves (``keep_vars``), which the walk then takes for what ``detach`` would make of them.

That is exact only as long as torch's own code decides what stands in the state. A module that has
hooks behind its ``state_dict``, its own way to save, or extra state is asked as everybody asks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def attached_state(obj: Any) -> dict[str, torch.Tensor] | None:
    """What an object's ``state_dict()`` returns, each tensor before it is detached.

    Returns:
        None if only its ``state_dict()`` itself can tell.
    """
    if not isinstance(obj, nn.Module) or not _saves_as_torch_does(obj):
        return None
    state: dict[str, torch.Tensor] = obj.state_dict(keep_vars=True)
    return state


_WAYS_TO_SAVE = ("state_dict", "_save_to_state_dict", "get_extra_state")


def _saves_as_torch_does(module: nn.Module) -> bool:
    pending, seen, kinds = [module], {id(module)}, set()
    hooks: dict[int, Any] = {}  # mostly one for all modules
    while pending:
        each = pending.pop()
        if each._state_dict_hooks or not each.__dict__.keys().isdisjoint(_WAYS_TO_SAVE):
            return False
        for hook in each._state_dict_pre_hooks.values():
            hooks[id(hook)] = hook
        kinds.add(type(each))
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return all(map(_is_plain_kind, kinds)) and _are_torchs(hooks.values())


def _is_plain_kind(kind: type[nn.Module]) -> bool:
    own = any(getattr(kind, name) is not getattr(nn.Module, name) for name in _WAYS_TO_SAVE)
    return not own and not issubclass(kind, torch.jit.ScriptModule)


def _are_torchs(hooks: Iterable[Any]) -> bool:
    """Whether hooks are torch's, which do not ask for ``keep_vars``; ``fully_shard`` has some."""
    return all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


__all__ = ["attached_state"]
