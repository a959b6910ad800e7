"""Translate between the names of a model of transformers 5 and those of its files.

Theory. transformers 5 renames, stacks and joins weights between a file and a model. Its own table
and its own functions name each tensor here. Only its operations on tensors are translated: into
transforms, which copy nothing. Tensors that become others by one converter, and have one shape, get
names that differ in the place of a number only, so that one transform takes all of them. An
operation without a translation is refused by its name.

Sources: ``core_model_loading.py`` and ``conversion_mapping.py`` of transformers 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import compress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpipe.errors import StructureMismatch, TargetMismatch, UsageError
from ckpipe.format.labels import bare_names, join
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import MAPPINGS, children_of, walk
from ckpipe.state.data_parallel import fsdp1_ranks
from ckpipe.transforms.edit import ManifestEdit
from ckpipe.transforms.reshapes import Fuse, Rearrange, Split, Stack, Unstack
from ckpipe.transforms.transform import Rename, Transform

_INSTEAD = "Load the folder with from_pretrained, and save what it returns with ckpipe"

_OPERATIONS: dict[str, dict[str, Any]] = {
    "Chunk": {"dim": ..., "num_shards_attribute": None},
    "Concatenate": {"dim": ..., "num_shards_attribute": None},
    "MergeModulelist": {"dim": 0},
    "PermuteForRope": {"subconfig_key": ..., "inverse": ..., "permute_layer_names": ...},
    "Split": {"dim": ...},
    "SplitModulelist": {"dim": 0},
    "Transpose": {"dim0": ..., "dim1": ..., "check_dims": ...},
}
"""The operations that are known: their attributes, with the value that one must have."""


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
    names = {row.label.removeprefix(f"{above}.") for row in rows}
    for model in map(_bare, found):
        kinds = {(each.__module__, each.__name__) for each in type(model).__mro__}
        # The state_dict of FSDP1 is a collective.
        if ("transformers.modeling_utils", "PreTrainedModel") in kinds and not fsdp1_ranks(model):
            try:
                if PublishedNames(model)._groups(names).keys() - names:
                    table = "ckpipe.name_table('transformers', model=model)"
                    return f"transformers saves its model under other names: pass transform={table}"
            except UsageError as error:
                return f"{error.message}. {error.hint}"
    return ""


class _Conversion(NamedTuple):
    """Tensors of which one converter makes others, by its pattern; None only renames."""

    converter: Any
    names: dict[str, list[str]]


class _Alike(NamedTuple):
    """The key of groups that one transform takes together."""

    converter: Any
    patterns: tuple[str, ...]
    shape: tuple[int, ...]  # of a tensor before, and of all that are wanted
    wanted: tuple[tuple[int, ...], ...]


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
        self._own = {name: tuple(getattr(each, "shape", ())) for name, each in state.items()}
        self._conversions()

    def exported(self) -> Transform:
        return PublishedNames(self._model, back=True)

    def tied_names(self) -> set[str]:
        """Return the names in a file of all that the model ties to another tensor."""
        back = PublishedNames(self._model, back=True)
        return {*back._groups(self._model.all_tied_weights_keys)}

    def _apply(self, edit: ManifestEdit) -> None:
        rows, names, gone = edit.tensors(), dict[str, str](), dict[str, list[Any]]()
        places = dict[str, str]()
        alike: dict[_Alike, list[str]] = {}  # the first new name of each group
        fits = False
        known: dict[
            tuple[str, ...], dict[str, _Conversion]
        ] = {}  # as states of parameters are alike
        for head, labels in _by_container(edit, rows, bare=self._back).items():
            groups = known.get((*labels,))
            if groups is None:
                groups = known[*labels,] = self._groups(labels)
            fits = fits or bool(groups)
            used = {
                old for group in groups.values() for olds in group.names.values() for old in olds
            }
            gone |= {labels[key]: [] for key in labels.keys() - used if used and self._ignores(key)}
            for new, (converter, of) in groups.items():
                if converter is None:
                    names |= {labels[old]: join(head, new) for olds in of.values() for old in olds}
                    continue
                shape = rows[labels[next(iter(of.values()))[0]]].shape
                first, *_ = targets = converter.target_patterns
                wanted = tuple(self._own.get(new.replace(first, each), ()) for each in targets)
                patterns = tuple(each for each in converter.source_patterns if each in of)
                key = _Alike(converter, patterns, shape, wanted)
                group = alike.setdefault(key, [])
                place = join(head, f":{[*alike].index(key)}.{len(group)}.s")
                group.append(new)
                stacks = type(converter.operations[0]).__name__ == "MergeModulelist"
                for n, each in enumerate(patterns):
                    ends = (f".{at}" if stacks else "" for at in range(len(of[each])))
                    places |= {labels[old]: f"{place}{n}{next(ends)}" for old in of[each]}
        if not fits:
            raise StructureMismatch(
                f"The checkpoint has no tensor of a {type(self._model).__name__}",
                hint="Pass the model whose weights are loaded or exported",
            )
        edit.note({}, gone)
        for draft in edit.drafts if gone else ():
            draft.move({label: [] for label in gone.keys() & draft.leaves().keys()})
        _rename(edit, places, _WeightsRename)
        _rename(edit, names)
        try:
            self._convert(edit, alike)
        except TargetMismatch as error:
            error.key, *_ = edit.origins.get(error.key or "", (error.key,))
            raise

    def _convert(self, edit: ManifestEdit, alike: Mapping[_Alike, Sequence[str]]) -> None:
        results = []
        for number, each in enumerate(alike):
            steps, slots = self._translated(f"*:{number}.*.", each)
            results.append((slots, [*alike.values()][number]))
            for step in steps:
                step._apply(edit)
        renamings = self._conversions()[0] if self._back else []

        def final(head: str, number: str, group: str, slot: str, element: str | None) -> str:
            slots, firsts = results[int(number)]
            full = firsts[int(group)].replace("*.", "0.")
            zeros = [name.replace("*", "0") for name in slots.values()]
            before, _, after = next(full.partition(zero) for zero in zeros if zero in full)
            name = slots[slot].replace("*", element or "*")
            core = _module("core_model_loading")
            return head + str(core.apply_renamings(f"{before}{name}{after}", renamings))

        placed = re.compile(r"(.*):(\d+)\.(\d+)\.(s\w+)(?:\.(\d+))?", re.DOTALL)
        found = {label: placed.fullmatch(label) for label in edit.origins}
        made = {label: final(*each.groups()) for label, each in found.items() if each}
        _rename(edit, made, _WeightsRename)

    def _translated(self, at: str, alike: _Alike) -> tuple[list[Transform], dict[str, str]]:
        """Return the transforms of a converter, and for each slot that they leave its pattern."""
        targets, found = alike.converter.target_patterns, list[Transform]()
        slots, shape = {f"s{n}": name for n, name in enumerate(alike.patterns)}, alike.shape
        for operation in alike.converter.operations:
            first, *_ = globs = [at + slot for slot in slots]
            cut = {f"{next(iter(slots))}t{n}": name for n, name in enumerate(targets)}
            match type(operation).__name__:
                case "MergeModulelist":
                    found += [Stack(f"{each}.{{}}", each) for each in globs]
                    shape = (0, *shape)
                case "SplitModulelist":
                    found += [Unstack(each, f"{each}.{{}}") for each in globs]
                case "Concatenate":
                    found.append(Fuse(globs, at + next(iter(cut)), operation.dim))
                    slots = cut
                case "Chunk" | "Split" as kind:
                    sizes = [each[operation.dim] for each in alike.wanted if kind == "Split"]
                    into = [at + slot for slot in cut]
                    found.append(Split(first, into, operation.dim, sizes=sizes or None))
                    slots = cut
                case "Transpose":
                    order = [*range(len(shape))]
                    one, other = operation.dim0, operation.dim1
                    order[one], order[other] = order[other], order[one]
                    if not operation.check_dims or alike.wanted[0] != shape:
                        found.append(Rearrange(first, [-1] * len(order), order))
                case _:
                    found += self._rotary(operation, globs, [*slots.values()], len(shape))
        return found, dict(zip(slots, targets, strict=True)) if len(slots) == len(
            targets
        ) else slots

    def _rotary(
        self, operation: Any, globs: Sequence[str], names: Sequence[str], dimensions: int
    ) -> list[Transform]:
        """Return the transforms that bring rows of heads from pairs to halves, or back."""
        config, layers = self._model.config, operation.permute_layer_names
        config = getattr(config, operation.subconfig_key or "", config)
        parts = [getattr(config, "num_attention_heads", 1), -1, 2]
        if operation.inverse:
            parts[1:] = [2, -1]
        shape: list[Any] = [parts, *[-1] * (dimensions - 1)]
        order: list[Any] = [[0, 2, 1], *range(3, dimensions + 2)]
        chosen = [layers is None or any(each in name for each in layers) for name in names]
        return [Rearrange(each, shape, order) for each in compress(globs, chosen)]

    def _ignores(self, name: str) -> bool:
        """Tell whether ``save_pretrained`` leaves a tensor out, or ``from_pretrained`` does."""
        if self._back:
            return name in (self._model._keys_to_ignore_on_save or ())
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(each, name) for each in patterns)

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
                _check_known(core, model, part)
        return renamings, converters

    def _groups(self, names: Iterable[str]) -> dict[str, _Conversion]:
        """Return for each new name, or the first of several, what it is made of."""
        core, own = _module("core_model_loading"), self._own
        renamings, converters, prefix = *self._conversions(), self._model.base_model_prefix
        by_pattern = {key: each for each in converters for key in each.source_patterns}
        found: dict[str, _Conversion] = {}
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
            group = found.setdefault(new, _Conversion(by_pattern.get(pattern), {}))
            group.names.setdefault(pattern or name, []).append(name)
        return found


def _check_known(core: Any, model: Any, part: Any) -> None:
    """Refuse an operation, or another kind of converter, that has no translation."""
    fields = _OPERATIONS.get(type(part).__name__)
    if (
        fields is None
        or type(part).__module__ != core.__name__
        or vars(part).keys() != fields.keys()
        or any(each not in (..., getattr(part, name)) for name, each in fields.items())
    ):
        raise UsageError(
            f"transformers converts the names of {type(model).__name__} with {part!r:.200}, "
            "which ckpipe cannot translate",
            hint=_INSTEAD,
        )


class _WeightsRename(Rename):
    """Rename tensors that a converter changes; the state of their optimizers cannot follow."""

    _leads = False


def _rename(edit: ManifestEdit, names: Mapping[str, str], kind: type[Rename] = Rename) -> None:
    if any(old != new for old, new in names.items()):
        kind(lambda label: names.get(label, label))._apply(edit)


def _by_container(
    edit: ManifestEdit, rows: Mapping[str, TensorRow], *, bare: bool
) -> dict[str, dict[str, str]]:
    """Return the labels of tensors by their container and their name in it."""
    found: dict[str, dict[str, str]] = {}
    for draft in edit.drafts:
        for node, head in walk(draft.tree):
            children = children_of(node, head) if node.kind in MAPPINGS else ()
            labels = {key: at for key, _, at in children if at in rows and isinstance(key, str)}
            new = bare_names(labels) if bare else dict.fromkeys(labels)
            if labels:
                found.setdefault(head, {}).update({new[key] or key: labels[key] for key in labels})
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
