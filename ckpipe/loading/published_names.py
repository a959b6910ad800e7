"""Translate between the names of a model of transformers 5 and those of its files.

Theory. transformers 5 renames, stacks and joins weights between a file and a model. Its own table
and its own functions name each tensor here. Only its operations on tensors are translated: into
steps that place the boxes of the checkpoint, so nothing is copied. An operation that has no
translation is refused by its name.

Sources: ``core_model_loading.py`` and ``conversion_mapping.py`` of transformers 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import accumulate, chain, pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpipe.errors import ShapeMismatch, StructureMismatch, UsageError
from ckpipe.format.box_steps import Lift, Regroup, Shift, Step, Steps, Take
from ckpipe.format.edit import ManifestEdit, two_with_one_name
from ckpipe.format.labels import join
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import MAPPINGS, children_of, walk
from ckpipe.loading.collectives import fsdp1_ranks
from ckpipe.loading.reshapes import Made, check_plain, put
from ckpipe.loading.stateful import bare_names
from ckpipe.loading.transforms import Rename, Transform

_INSTEAD = "Load the folder with from_pretrained, and save what it returns with ckpipe"


def table_hint(target: Any, rows: Iterable[TensorRow], above: str) -> str:
    """Return the hint for a load whose names are those of a file of transformers; else nothing.

    Args:
        target: The target, which may have models inside.
        rows: The tensors of the checkpoint.
        above: The label below which the names of a foreign checkpoint were moved.
    """
    found = list(target.values()) if isinstance(target, dict) else [target]
    for each in list(found):
        found += each.__ckpipe_modules__() if hasattr(type(each), "__ckpipe_modules__") else ()
    names = [row.label.removeprefix(f"{above}.") for row in rows]
    for model in map(_bare, found):
        kinds = {(each.__module__, each.__name__) for each in type(model).__mro__}
        # The state_dict of FSDP1 is a collective.
        if ("transformers.modeling_utils", "PreTrainedModel") in kinds and not fsdp1_ranks(model):
            try:
                if PublishedNames(model).gives(names):
                    table = "ckpipe.name_table('transformers', model=model)"
                    return f"transformers saves its model under other names: pass transform={table}"
            except UsageError as error:
                return f"{error.message}. {error.hint}"
    return ""


class _Group(NamedTuple):
    """Tensors of which one converter of transformers makes others; None only renames one."""

    converter: Any
    names: dict[str, list[str]]  # by the pattern that names match


class _Tensor(NamedTuple):
    """A tensor that is made of others, each with the steps that place its boxes."""

    row: TensorRow
    shape: tuple[int, ...]
    sources: Sequence[tuple[str, tuple[Step, ...]]]

    def then(self, step: Step, shape: Iterable[int]) -> _Tensor:
        sources = [(label, (*steps, step)) for label, steps in self.sources]
        return _Tensor(self.row, tuple(shape), sources)


class PublishedNames(Transform):
    """Give tensors of a file the names and shapes of a model of transformers, or back.

    Args:
        model: The model, its config, or the path of its ``config.json``.
        back: Whether to go from the model's names to those that ``save_pretrained`` writes.

    Raises:
        UsageError: If it is no such model, or has an operation that has no translation.
    """

    def __init__(self, model: Any, *, back: bool = False) -> None:
        self._model, self._back = _model_of(model), back
        state = self._model.state_dict()
        self._own = {name: getattr(each, "shape", ()) for name, each in state.items()}
        self._conversions()

    def exported(self) -> Transform:
        return PublishedNames(self._model, back=True)

    def gives(self, names: Iterable[str]) -> set[str]:
        """Return the names that tensors get and that none has before."""
        given = list(names)
        return self._groups(given).keys() - set(given)

    def tied_names(self) -> set[str]:
        """Return the names in a file of all that the model ties to another tensor."""
        back = PublishedNames(self._model, back=True)
        return {*back._groups(self._model.all_tied_weights_keys)}

    def _apply(self, edit: ManifestEdit) -> None:
        rows, names, made = edit.tensors(), dict[str, str](), list[Made]()
        gone: list[str] = []
        fits = False
        for head, labels in _by_container(edit, rows, bare=self._back).items():
            groups = self._groups(labels)
            fits = fits or bool(groups)
            gone += [label for key, label in labels.items() if groups and self._ignores(key)]
            for new, (converter, of) in groups.items():
                if converter is None:
                    names |= {labels[old]: join(head, new) for old in chain(*of.values())}
                    continue
                given = {
                    pattern: [_tensor(self, labels[old], rows) for old in olds]
                    for pattern, olds in of.items()
                }
                for name, each in self._converted(new, converter, given).items():
                    sources = [(label, Steps(steps)) for label, steps in each.sources]
                    made.append((join(head, name), each.shape, sources))
        if not fits:
            raise StructureMismatch(
                f"The checkpoint has no tensor of a {type(self._model).__name__}",
                hint="Pass the model whose weights are loaded or exported",
            )
        edit.note({}, gone)
        for draft in edit.drafts if gone else ():
            draft.move({label: [] for label in gone if label in draft.leaves()})
        put(edit, made)
        if any(old != new for old, new in names.items()):
            Rename(lambda label: names.get(label, label))._apply(edit)

    def _ignores(self, name: str) -> bool:
        """Tell whether ``save_pretrained`` leaves a tensor out, or ``from_pretrained`` does."""
        if self._back:
            return name in (self._model._keys_to_ignore_on_save or ())
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        return name not in self._own and any(re.search(each, name) for each in patterns)

    def _conversions(self) -> tuple[list[Any], list[Any]]:
        """Return new renamings and new converters, as they remember which names they met.

        Raises:
            UsageError: If one has no translation.
        """
        core, model = _module("core_model_loading"), self._model
        table = _module("conversion_mapping").get_model_conversion_mapping
        found = table(model, add_legacy=not self._back)
        if self._back:  # as revert_weight_conversion chooses
            used = getattr(model, "_weight_conversions", None)
            kept = [each for each in found if not isinstance(each, core.PrefixChange)]
            found = [each.reverse_transform() for each in reversed(kept if used is None else used)]
        renamings = [each for each in found if isinstance(each, core.WeightRenaming)]
        converters = [each for each in found if not isinstance(each, core.WeightRenaming)]
        for each in converters:
            known = type(each) is core.WeightConverter
            for part in each.operations if known else [each]:
                _translation(core, model, part)
        return renamings, converters

    def _groups(self, names: Iterable[str]) -> dict[str, _Group]:
        """Return for each new name, or the first of several, what it is made of."""
        core, own = _module("core_model_loading"), self._own
        renamings, converters, prefix = *self._conversions(), self._model.base_model_prefix
        by_pattern = {key: each for each in converters for key in each.source_patterns}
        found: dict[str, _Group] = {}
        for name in sorted(names, key=core.dot_natural_key):
            if self._back:
                if name not in own or self._ignores(name):
                    continue
                new, pattern = core.apply_converters(name, converters)
                if pattern is None:
                    new = core.apply_renamings(name, renamings)
            else:
                new, pattern = core.rename_source_key(name, renamings, converters, prefix, own)
                if new not in own and name in own:
                    new, pattern = core.rename_source_key(name, [], [], prefix, own)
                if new not in own:
                    continue
            group = found.setdefault(new, _Group(by_pattern.get(pattern), {}))
            group.names.setdefault(pattern or name, []).append(name)
        return found

    def _converted(
        self, new: str, converter: Any, given: dict[str, list[_Tensor]]
    ) -> dict[str, _Tensor]:
        """Return the tensors that a converter makes, by their names."""
        core, targets = _module("core_model_loading"), converter.target_patterns
        for operation in converter.operations:
            call = _translation(core, self._model, operation)
            given = call(_Call(operation, new, converter, self._model.config, self._own), given)
        if len(given) == len(targets) == 1:
            given = {targets[0]: next(iter(given.values()))}
        full = new.replace("*.", "0.")
        head, _, tail = next((full.partition(key) for key in given if key in full), ("", "", ""))
        renamings = self._conversions()[0] if self._back else []
        return {
            core.apply_renamings(f"{head}{key}{tail}", renamings): _single(key, each)
            for key, each in given.items()
        }


# Operations, each on tensors by the patterns of their names, as transformers defines it


class _Call(NamedTuple):
    """An operation, the first new name, the converter, and the model's config and shapes."""

    operation: Any
    new: str
    converter: Any
    config: Any
    own: Mapping[str, Sequence[int]]

    def target(self, given: Mapping[str, object], key: str) -> str:
        """Return the name after an operation, which is that of the target for the last one."""
        targets = self.converter.target_patterns
        return str(targets[0]) if len(given) == len(targets) == 1 else key


_Given = dict[str, list[_Tensor]]


def _chunk(call: _Call, given: _Given) -> _Given:
    names = call.operation.get_target_patterns(call.converter.target_patterns, config=call.config)
    tensor = _only(given)
    dim, size = _sized(call, tensor)
    each = -(-size // len(names))
    return _cut(tensor, dim, names, [min(each * n, size) for n in range(len(names) + 1)])


def _split(call: _Call, given: _Given) -> _Given:
    names, tensor = call.converter.target_patterns, _only(given)
    dim, _ = _sized(call, tensor)
    sizes = [call.own[call.new.replace(names[0], name)][dim] for name in names]
    return _cut(tensor, dim, names, list(accumulate(sizes, initial=0)))


def _cut(tensor: _Tensor, dim: int, names: Sequence[str], bounds: Sequence[int]) -> _Given:
    if bounds[-1] != tensor.shape[dim]:
        raise ShapeMismatch(
            f"Dimension {dim} of the shape {list(tensor.shape)} is to be cut at {list(bounds)}",
            key=tensor.sources[0][0],
            hint="Check that the checkpoint is one of this model",
        )
    return {
        name: [tensor.then(Shift(dim, -low, high - low), _with(tensor.shape, dim, high - low))]
        for name, (low, high) in zip(names, pairwise(bounds), strict=True)
    }


def _concatenate(call: _Call, given: _Given) -> _Given:
    patterns = [each for each in call.converter.source_patterns if each in given]
    parts = [each for pattern in patterns or given for each in given[pattern]]
    dim, _ = _sized(call, parts[0])
    *starts, size = accumulate((each.shape[dim] for each in parts), initial=0)
    moved = [
        each.then(Shift(dim, at, size), _with(each.shape, dim, size))
        for at, each in zip(starts, parts, strict=True)
    ]
    return {call.converter.target_patterns[0]: [_joined(moved)]}


def _merge(call: _Call, given: _Given) -> _Given:
    dim, found = call.operation.dim, _Given()
    for key, parts in given.items():
        stack = _joined(
            [each.then(Lift(n), (len(parts), *each.shape)) for n, each in enumerate(parts)]
        )
        order = _moved(len(stack.shape), 0, dim)
        found[call.target(given, key)] = [_permuted(stack, order) if dim else stack]
    return found


def _unmerge(call: _Call, given: _Given) -> _Given:
    found = _Given()
    for key, tensors in given.items():
        tensor = _single(key, tensors)
        dim, size = _sized(call, tensor)
        front = _permuted(tensor, _moved(len(tensor.shape), dim, 0)) if dim else tensor
        name = call.target(given, key)
        for n in range(size):
            found[name.replace("*", str(n))] = [front.then(Take(n), front.shape[1:])]
    return found


def _transpose(call: _Call, given: _Given) -> _Given:
    tensor, operation = _only(given), call.operation
    if not operation.check_dims or call.own.get(call.new) != tensor.shape:
        order = [*range(len(tensor.shape))]
        one, other = operation.dim0, operation.dim1
        order[one], order[other] = order[other], order[one]
        tensor = _permuted(tensor, order)
    return {call.target(given, next(iter(given))): [tensor]}


def _interleave(call: _Call, given: _Given) -> _Given:
    tensor = _only(given)
    dim, size = _sized(call, tensor)
    parts = (2, size // 2) if call.operation.inverse else (size // 2, 2)
    made = _turned(tensor, dim, parts, (1, 0))
    return {call.target(given, next(iter(given))): [made]}


def _permute_for_rope(call: _Call, given: _Given) -> _Given:
    operation, config = call.operation, call.config
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    heads, found = getattr(config, "num_attention_heads", 1), _Given()
    for key, tensors in given.items():
        wanted = operation.permute_layer_names
        if wanted is None or any(each in key for each in wanted):
            tensor = _single(key, tensors)
            half = tensor.shape[0] // heads // 2
            parts = (heads, *((2, half) if operation.inverse else (half, 2)))
            tensors = [_turned(tensor, 0, parts, (0, 2, 1))]
        found[call.target(given, key)] = tensors
    return found


_OPERATIONS: dict[str, tuple[set[str], Callable[[_Call, _Given], _Given]]] = {
    "Chunk": ({"dim", "num_shards_attribute"}, _chunk),
    "Concatenate": ({"dim", "num_shards_attribute"}, _concatenate),
    "Interleave": ({"dim", "inverse"}, _interleave),
    "MergeModulelist": ({"dim"}, _merge),
    "PermuteForRope": ({"subconfig_key", "inverse", "permute_layer_names"}, _permute_for_rope),
    "Split": ({"dim"}, _split),
    "SplitModulelist": ({"dim"}, _unmerge),
    "Transpose": ({"dim0", "dim1", "check_dims"}, _transpose),
}
"""The operations by their names, each with its attributes and its translation."""


def _translation(core: Any, model: Any, operation: Any) -> Callable[[_Call, _Given], _Given]:
    fields, call = _OPERATIONS.get(type(operation).__name__, (None, None))
    if (
        call is None
        or type(operation).__module__ != core.__name__
        or vars(operation).keys() != fields
    ):
        raise UsageError(
            f"transformers converts the names of {type(model).__name__} with {operation!r:.200}, "
            "which ckpipe cannot translate",
            hint=_INSTEAD,
        )
    return call


def _sized(call: _Call, tensor: _Tensor) -> tuple[int, int]:
    """Return the dimension of an operation, counted from the front, and its size."""
    dim = call.operation.dim % len(tensor.shape)
    return dim, tensor.shape[dim]


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return *shape[:dim], size, *shape[dim + 1 :]


def _moved(count: int, old: int, new: int) -> list[int]:
    """Return the order of dimensions in which one has moved to another place."""
    order = [n for n in range(count) if n != old]
    order.insert(new % count, old)
    return order


def _permuted(tensor: _Tensor, order: Sequence[int]) -> _Tensor:
    step = Regroup(tuple((n,) for n in tensor.shape), tuple((n,) for n in order))
    return tensor.then(step, [tensor.shape[n] for n in order])


def _turned(tensor: _Tensor, dim: int, parts: tuple[int, ...], order: tuple[int, ...]) -> _Tensor:
    """Divide a dimension into parts, and join them in another order."""
    shape, more = tensor.shape, len(parts)
    if torch.Size(parts).numel() != shape[dim]:
        raise ShapeMismatch(
            f"Dimension {dim} of the shape {list(shape)} cannot be divided into {list(parts)}",
            key=tensor.sources[0][0],
            hint="Check that the checkpoint is one of this model",
        )
    sizes = [parts if n == dim else (size,) for n, size in enumerate(shape)]
    after = [(n if n < dim else n + more - 1,) for n in range(len(shape))]
    after[dim] = tuple(dim + n for n in order)
    return tensor.then(Regroup(tuple(sizes), tuple(after)), shape)


def _joined(parts: Sequence[_Tensor]) -> _Tensor:
    first = parts[0]
    for each in parts:
        other = each.row.dtype, each.row.cast, each.shape
        if other != (first.row.dtype, first.row.cast, first.shape):
            raise StructureMismatch(
                f"These tensors become one: {first.sources[0][0]!r} is {first.row.dtype} "
                f"{list(first.shape)}, and {each.sources[0][0]!r} {each.row.dtype} "
                f"{list(each.shape)}, placed in it",
                key=each.sources[0][0],
                hint="Check that the checkpoint is one of this model",
            )
    return first._replace(sources=[*chain.from_iterable(each.sources for each in parts)])


def _single(key: str, tensors: Sequence[_Tensor]) -> _Tensor:
    if len(tensors) != 1:
        raise two_with_one_name(key, [label for each in tensors for label, _ in each.sources])
    return tensors[0]


def _only(given: _Given) -> _Tensor:
    return _single(next(iter(given)), [*chain.from_iterable(given.values())])


# The checkpoint and the model


def _tensor(transform: Transform, label: str, rows: Mapping[str, TensorRow]) -> _Tensor:
    row = rows[label]
    check_plain(transform, label, row)
    return _Tensor(row, tuple(row.shape), [(label, ())])


def _by_container(
    edit: ManifestEdit, rows: Mapping[str, TensorRow], *, bare: bool
) -> dict[str, dict[str, str]]:
    """Return the labels of tensors by their container and their name in it."""
    found: dict[str, dict[str, str]] = {}
    for draft in edit.drafts:
        for node, head in walk(draft.tree):
            children = children_of(node, head) if node[0] in MAPPINGS else ()
            labels = {key: label for key, _, label in children if label in rows}
            names = {key: label for key, label in labels.items() if isinstance(key, str)}
            new = bare_names(names) if bare else {key: key for key in names}
            found.setdefault(head, {}).update({new[key]: label for key, label in names.items()})
    return found


_NEEDED = {
    "core_model_loading": "apply_converters apply_renamings dot_natural_key rename_source_key",
    "conversion_mapping": "get_model_conversion_mapping",
}


def _module(name: str) -> Any:
    """Return a module of transformers.

    Raises:
        UsageError: If it is not installed, or lacks one of the functions that are called.
    """
    try:
        module = import_module(f"transformers.{name}")
        for each in _NEEDED[name].split():
            getattr(module, each)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"The installed transformers has no table of names that ckpipe knows: {error}",
            hint=f"Install transformers 5.24. {_INSTEAD}",
        ) from None
    return module


def _bare(model: Any) -> Any:
    """Return a model without the wrappers of DDP and torch.compile."""
    inside = dict(model.named_children()) if isinstance(model, torch.nn.Module) else {}
    inner = inside.get("module", inside.get("_orig_mod"))
    return model if inner is None else _bare(inner)


def _model_of(model: Any) -> Any:
    """Return a model of transformers, made without memory if its config is given.

    Raises:
        UsageError: If it is none.
    """
    _module("core_model_loading")
    transformers = import_module("transformers")
    if isinstance(model, str | PathLike):
        if not Path(model).exists():
            raise UsageError(f"There is no {model}", hint="Name config.json or its folder")
        model = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
    if isinstance(model, transformers.PreTrainedConfig):
        name = (model.architectures or ["nothing"])[0]
        cls = getattr(transformers, name, None)
        if cls is None:
            raise UsageError(
                f"The config names no class of transformers in architectures, but {name!r:.100}",
                hint="Pass the model itself",
            )
        with torch.device("meta"):
            model = cls(model)
    found = _bare(model)
    if not isinstance(found, transformers.PreTrainedModel):
        raise UsageError(
            f"model is a model of transformers, not a {type(found).__name__}",
            hint="Pass the model, its config, or the path of its config.json",
        )
    return found
