"""Find at a save what a load could not give back.

That are optimizers which step tensors that nothing in the state holds, and modules which refuse
what they save. A tensor is held if it shares memory with one in the state, or if one there has its
global shape and dtype, as weights that were gathered or cloned for the save. Moments of optimizers
do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpipe.errors import UnsupportedState
from ckpipe.state.flatten import OpenedState
from ckpipe.state.tensors import (
    PLAIN_TYPES,
    TensorLeaf,
    dtensor_type,
    is_freed,
    local_part,
    overlapping,
    plain_parts,
    tensors_in,
    window_bytes,
)


def parameters_not_held(
    opened: OpenedState, is_new: Callable[[str], bool]
) -> Iterator[tuple[str, Optimizer, list[Any]]]:
    """Yield the optimizers of a state that step trained parameters which it does not hold.

    Labels that ``include`` and ``exclude`` leave out count as held. Parameters without memory of
    their own, such as those of FSDP1, are not asked.

    Args:
        opened: The state.
        is_new: Tells by its label whether to look at an optimizer.

    Yields:
        The label, the optimizer, and its parameters that are not held.
    """
    optimizers = {
        each.label: each.obj for each in opened.containers if isinstance(each.obj, Optimizer)
    }
    new = {label: each for label, each in optimizers.items() if is_new(label)}
    if not new:
        return
    moments = {id(each) for one in optimizers.values() for each in tensors_in(one.state)}
    held = [each for each in opened.met if isinstance(each, torch.Tensor | np.ndarray)]
    forms = {_form(each) for each in held if id(each) not in moments}
    windows = [each for one in held for each in _windows(one)]
    for label, optimizer in new.items():
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        others = [each for each in parameters if each.requires_grad and _form(each) not in forms]
        found = _lie_apart(others, windows)
        if found:
            yield label, optimizer, found


def check_taken_back(opened: OpenedState, saved: Sequence[TensorLeaf]) -> None:
    """Refuse modules whose ``load_state_dict`` refuses keys that they save.

    Those of bitsandbytes with four bits do so: by their own code no load could fill them in place.

    Args:
        opened: The state.
        saved: The tensors of it that are saved.

    Raises:
        UnsupportedState: If such a key is among them, or a part of such a module.
    """
    for each in opened.containers:
        is_module = isinstance(each.obj, nn.Module)
        below = f"{each.label}." if each.label else ""
        for root in [each.obj] if is_module else getattr(each.obj, "_modules", ()):
            if type(root).load_state_dict is not nn.Module.load_state_dict:
                continue
            for key, kind in _refused_keys(root):
                for label in (leaf.label for leaf in saved):
                    if label.startswith(below) and (is_module or f".{label}".endswith(key)):
                        raise UnsupportedState(
                            f"A {kind} saves {key[1:]!r}, and its own load_state_dict refuses it, "
                            "so no load could fill the module",
                            key=label,
                            hint="Train adapters on it, and save these alone; or save "
                            "model.state_dict(), which loads as a fresh dict",
                        )


def _refused_keys(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the ends of labels that torch's ``load_state_dict`` does not know, and their class."""
    kind = type(module)
    own_load = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    if own_load or module._load_state_dict_pre_hooks:
        return
    if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
        found: dict[str, Any] = {}
        module._save_to_state_dict(found, "", True)
        known = {*module._parameters, *module._buffers, "_extra_state"}
        yield from ((f".{key}", kind.__qualname__) for key in found if key not in known)
    for child in (each for each in module._modules.values() if each is not None):
        yield from _refused_keys(child)


def _form(obj: Any) -> Hashable:
    try:
        return tuple(obj.shape), str(obj.dtype).removeprefix("torch.")
    except RuntimeError:  # it is lazy or nested
        return None


def _lie_apart(parameters: Sequence[Any], held: Sequence[tuple[str, int, int]]) -> list[Any]:
    """Return the parameters that have memory, of which no held window overlaps any."""
    own = [(n, each) for n, one in enumerate(parameters) for each in _windows(one)]
    groups = overlapping([*(each for _, each in own), *held])
    shared = [place for group in groups if max(group) >= len(own) for place in group]
    apart = {n for n, _ in own} - {own[place][0] for place in shared if place < len(own)}
    return [parameters[n] for n in sorted(apart)]


def _windows(tensor: Any) -> Iterator[tuple[str, int, int]]:
    """Yield device, address and bytes of the plain memory in which a tensor has its values."""
    if isinstance(tensor, np.ndarray) or hasattr(tensor, "_fsdp_flattened"):
        return
    for _, part in plain_parts(tensor):
        part = local_part(part) if type(part) is dtensor_type() else part
        plain = type(part) in PLAIN_TYPES and part.layout is torch.strided and not part.is_nested
        if plain and part.numel() and not part.is_meta and not is_freed(part):
            yield "cpu" if part.is_cpu else str(part.device), part.data_ptr(), window_bytes(part)
