"""Find the state that a Hugging Face trainer holds beside model, optimizer and trainer_state.json.

Trainers of trl use a batch of generated texts for several steps and move reference models; peft
trains modules with buffers. Attributes are those of trl 1.16, for which the page has a table. All
else that holds tensors and changes is found by samples of these, so that a save can warn of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Trainer
from transformers.trainer_callback import ExportableState

_BUFFERS = (
    "_step _buffer_step _buffered_inputs _buffered_on_policy _buffered_on_policy_flags "
    "_buffered_text_logs"
)
_HELD = (
    f"{_BUFFERS} _metrics stats _total_train_tokens entropy_coef _last_world_entropy "
    "_entropy_window_stats _matched_sum _unmatched_sum _matched_step_eq _unmatched_step_eq "
    "_on_policy_loss_total _on_policy_step_equiv _off_policy_loss_total _off_policy_step_equiv"
)
_KNOWN = frozenset(inspect.unwrap(Trainer.__init__).__code__.co_names) | {"_tr_loss"}
_MOST_VALUES = 10_000


def held(trainer: Any) -> dict[str, Any]:
    """Return the attributes of a trainer of trl that change from step to step."""
    if not any(each.__module__.startswith("trl.") for each in type(trainer).__mro__):
        return {}
    return {name: value for name, value in vars(trainer).items() if name in _HELD.split()}


def put_back(trainer: Any, saved: dict[str, Any], *, buffers: bool) -> None:
    """Set what :func:`held` has returned; without ``buffers`` new texts are generated."""
    found = {
        name: value for name, value in saved.items() if buffers or name not in _BUFFERS.split()
    }
    found = tree_map_only(torch.Tensor, lambda each: each.to(trainer.args.device), found)
    vars(trainer).update(found)


def references(trainer: Any) -> list[nn.Module]:
    """Return the models that callbacks move after the trained one, as with ``sync_ref_model``."""
    found = [getattr(each, "ref_model", None) for each in trainer.callback_handler.callbacks]
    return [each for each in found if isinstance(each, nn.Module)]


def trained_buffers(model: nn.Module) -> Iterator[str]:
    """List the buffers of a peft model that training changes, and all of ``modules_to_save``."""
    for path, module in model.named_modules():
        if "modules_to_save." in path or isinstance(module, _NormBase):
            for name, _ in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}"


def sampler_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader's samplers, which go on from one epoch to the next."""
    found: list[torch.Generator] = []
    below: list[Any] = [loader]
    while below:
        inside = getattr(below.pop(), "__dict__", {})
        names = ("base_dataloader", "batch_sampler", "sampler")
        below += [inside[name] for name in names if inside.get(name) is not None]
        if isinstance(own := inside.get("generator"), torch.Generator) and own not in found:
            found.append(own)
    return found


def samples(trainer: Any) -> dict[str, str]:
    """Take samples of the tensors that a trainer and its callbacks hold and no checkpoint has."""
    modules = [trainer.model, *references(trainer)]
    saved = {id(each) for one in modules for each in (*one.parameters(), *one.buffers())}
    found = {}
    for owner in (trainer, *trainer.callback_handler.callbacks):
        if isinstance(owner, ExportableState):
            continue
        left_out = _KNOWN.union(_HELD.split()) if owner is trainer else ()
        for name, value in vars(owner).items():
            tensors = [] if name in left_out else _tensors(value)
            if texts := [_sample(each) for each in tensors if id(each) not in saved]:
                found[f"{type(owner).__qualname__}.{name}"] = ", ".join(texts)
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, list | tuple | dict) and len(value) > _MOST_VALUES:
        return
    for each in tree_leaves(value):
        inside = (*each.parameters(), *each.buffers()) if isinstance(each, nn.Module) else (each,)
        # Other classes of tensors are quantized or sharded.
        yield from (one for one in inside if type(one) in (torch.Tensor, nn.Parameter))


def _sample(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return ""
    return str(tensor.detach().flatten()[:: max(1, tensor.numel() // 8)].tolist())
