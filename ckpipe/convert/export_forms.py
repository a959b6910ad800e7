"""Plan the files of an export: the bytes that are known, and the ranges that tensors fill.

Theory. What torch or DCP write around tensors comes from themselves: they save a state whose
tensors have memory that nothing has touched, and leave the bytes of tensors out. So a plan reads
nothing, and is the same on all ranks.

Sources: the files that ``save_pretrained`` of transformers 5 writes; ``FileSystemWriter`` of
``torch.distributed.checkpoint`` (torch 2.13), whose classes write its metadata here too.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from ckpipe.catalog.inspect import batches, check_expansion, leaf_labels
from ckpipe.catalog.opened import Opened
from ckpipe.errors import UnsupportedState, UsageError
from ckpipe.format.data_file import FOREIGN_DTYPES, encode_header, stored_dtype
from ckpipe.format.dtypes import DTYPES, NAMES
from ckpipe.format.labels import Json, LabelFilter, bare_names, join, key_of, label_filter
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import MAPPINGS, Node, walk, wrappers_in
from ckpipe.loading.labelled_tensors import LabelledTensors
from ckpipe.loading.load import match_all
from ckpipe.loading.request import LoadRequest
from ckpipe.loading.stateful import InspectionMemo
from ckpipe.settings import Export
from ckpipe.state.tensors import lazy_bits
from ckpipe.state.training_form import grouped_heads, in_torch_form, is_of_state
from ckpipe.state.values import UNREAD
from ckpipe.transforms.published_names import PublishedNames
from ckpipe.transforms.scales import refuse_codes, with_scales
from ckpipe.transforms.transform import transformed, transforms_of
from ckpipe.types import Form, first_of

TORCH_FILE, DCP_METADATA = "state.pt", ".metadata"

logger = logging.getLogger("ckpipe")

_HEAD = re.compile(
    r"(^|[._])(head|cls|predictions|pred_layer|lm_loss|mlm_score|vocab_projector|embed_out"
    r"|proj_out|output|output_projection)\."
)
"""Names of layers of transformers that may be tied to an embedding, which comes later then."""

_FLAT_MODEL = re.compile(r"((?:[^.]+\.)?model)\.")

_ALIGNMENT = 64
"""The alignment of tensors in a file of ``torch.save``, in bytes."""

_PLAIN_NODES = ("tensor", "value", "absent", "set", "list", "tuple", "dict", "ordered_dict",
                "stateful", "wrapper_tensor", "shared", "ref")  # fmt: skip
_PLAIN_VALUES = ("int", "float", "complex", "bytes", "bytearray", "dtype", "device", "size",
                 "layout", UNREAD)  # fmt: skip
"""The nodes of a tree, and the kinds of values, that ``torch.load`` reads with ``weights_only``,
and those that the match refuses by itself."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of a file that tensors fill.

    Args:
        nbytes: Its size.
        tensors: The tensors by label, without values: their offsets in it, shapes and strides.
    """

    nbytes: int
    tensors: Mapping[str, torch.Tensor]


Part = bytes | Gap


@dataclass(frozen=True, slots=True)
class File:
    """A file of an export.

    Args:
        name: Its name.
        parts: Its content.
    """

    name: str
    parts: Sequence[Part]


def size_of(part: Part) -> int:
    """Return the bytes of a part of a file."""
    return part.nbytes if isinstance(part, Gap) else len(part)


def plan_files(
    opened: Opened, form: Form, asked: Export, *, expanded: bool
) -> tuple[Opened, list[File]]:
    """Plan the files of an export.

    Args:
        opened: The checkpoint.
        form: The form.
        asked: The content.
        expanded: Whether the files may have far more bytes than the checkpoint stores.

    Returns:
        The checkpoint from which the tensors are read, and the files. The last one makes the
        export whole.

    Raises:
        UsageError: If the part to export is missing, or takes far more bytes than are stored.
        TargetMismatch: If a transform does not fit the checkpoint.
        UnsupportedState: If the form cannot hold something; names it.
    """
    globs: list[str] | None = [] if form == "hf" else None  # weights have no optimizer
    select = LabelFilter([asked.part] if asked.part else globs)
    plan = _ExportPlan(opened, asked, select, expanded=expanded)
    plan_form, _ = _FORMS[form]
    files = plan_form(plan)
    return Opened(opened.store, plan.document), files


class _ExportPlan:
    def __init__(
        self, opened: Opened, asked: Export, select: LabelFilter, *, expanded: bool
    ) -> None:
        self._store, document = opened.store, opened.document
        if transforms := transforms_of(asked.transform):
            document, _ = transformed(document, [each.exported() for each in transforms], select)
        self.document, self._asked, self._expanded = document, asked, expanded

    def torch_file(self) -> list[File]:
        """Plan one file that ``torch.load`` reads; it holds expanded tensors as they are stored."""
        state, made = self._state()
        return [File(TORCH_FILE, _saved(state, _by_storage(made)))]

    def weights(self) -> list[File]:
        """Plan safetensors: a single file, or several with an index."""
        named = _without_wrappers(self._named(self._asked.part))
        self._cast(named)
        labels = [row.label for row in named.values()]
        made = LabelledTensors(Opened(self._store, self.document)).fresh(labels, self._unwrap)[1]()
        tied = defaultdict[Any, list[tuple[str, torch.Tensor, TensorRow]]](list)
        for name, row in named.items():
            tensor = made[row.label]
            tied[_place(tensor) if tensor.numel() else name].append((name, tensor, row))
        tables = [each for each in self._asked.transform if isinstance(each, PublishedNames)]
        later = {name for each in tables for name in each.tied_names()}

        def rank(each: tuple[str, torch.Tensor, TensorRow]) -> tuple[bool, bool]:
            return each[0] in later, bool(_HEAD.search(each[0]))

        # Of tied tensors transformers keeps the name of the embedding, from which any head begins.
        chosen = [min(each, key=rank) for each in tied.values()]
        found = sorted(chosen, key=lambda each: -each[1].itemsize)
        self._check_size({row.label: tensor.nbytes for _, tensor, row in found})
        shards = list(batches(found, lambda each: each[1].nbytes, self._asked.max_shard_bytes))
        single = self._asked.file_name
        if len(shards) == 1:
            return [_shard(single, found)]
        stem, end = os.path.splitext(single)
        names = [f"{stem}-{n + 1:05d}-of-{len(shards):05d}{end}" for n in range(len(shards))]
        weights = {name: file for file, of in zip(names, shards, strict=True) for name, *_ in of}
        # Buffers of integers are no parameters; those of floats cannot be told from them.
        counted = [each for _, each, row in found if row.kind != "buffer"]
        metadata = {
            "total_parameters": sum(t.numel() for t in counted if t.is_floating_point()),
            "total_size": sum(tensor.nbytes for _, tensor, _ in found),
        }
        index = {"metadata": metadata, "weight_map": dict(sorted(weights.items()))}
        text = json.dumps(index, indent=2).encode()
        return [*map(_shard, names, shards), File(f"{single}.index.json", [text])]

    def dcp_folder(self) -> list[File]:
        """Plan a folder of ``torch.distributed.checkpoint``, as its own writer does."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
        from torch.distributed.checkpoint.metadata import StorageMeta

        state, made = self._state()
        if not isinstance(state, Mapping):
            raise UsageError(
                f"DCP holds a dict at the top, and this is of the type {type(state).__name__}",
                hint='Export it as "torch"',
            )
        _keeps_lists(state, "")
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner(dict(state), is_coordinator=True)
            (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
        except ValueError as error:
            raise UnsupportedState(f"DCP cannot hold this state: {error}") from error
        values = {item.index: planner.state_dict[item.index.fqn] for item in plan.items}
        tensors = {key: each for key, each in values.items() if isinstance(each, torch.Tensor)}
        self._check_size({key.fqn: each.nbytes for key, each in tensors.items()})
        storages, labels = _by_storage(made), {_place(each): name for name, each in made.items()}
        items = [
            (key, _saved(each, storages)) for key, each in values.items() if key not in tensors
        ]
        for key, each in tensors.items():
            plain = torch.empty(each.shape, dtype=each.dtype)
            items.append((key, _saved(plain, _by_storage({labels.get(_place(each), ""): plain}))))
        files: list[File] = []
        metadata.storage_data = {}
        most = self._asked.max_shard_bytes
        for batch in batches(items, lambda item: sum(map(size_of, item[1])), most):
            name, parts, at = f"__{len(files)}_0.distcp", list[Part](), 0
            for key, archive in batch:
                length = sum(map(size_of, archive))
                metadata.storage_data[key] = _StorageInfo(name, at, length)
                parts += [*archive, bytes(-length % _ALIGNMENT)]
                at += length + -length % _ALIGNMENT
            files.append(File(name, parts))
        metadata.storage_meta = StorageMeta(save_id=self.document.name)
        metadata.version = CURRENT_DCP_VERSION
        return [*files, File(DCP_METADATA, [pickle.dumps(metadata)])]

    def _state(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the state to export with tensors that have no values, and these by label."""
        part = self._asked.part
        self._cast(self._named(part or "", needs_tensors=False))
        for structure, values in self._structures():
            _check_plain(structure.tree, structure.tensors, values, part)
        select = label_filter([glob.escape(part)] if part else None)
        state, made = self._without_values(select)
        label = ""
        while part and label != part:
            inside = state if isinstance(state, Mapping) else {}
            below = {join(label, key): key for key in inside}
            label = max((each for each in below if f"{part}.".startswith(f"{each}.")), default="")
            if not label:
                raise _no_part(part)
            state = inside[below[label]]
        return _as_torch_has_it(state), made

    def _structures(self) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield each structure with the values of the lowest rank that has it."""
        first = {part.structure: part for part in reversed(self.document.parts)}
        for number, structure in enumerate(self.document.structures):
            yield structure, first[number].values

    def _without_values(self, select: LabelFilter) -> tuple[Any, dict[str, torch.Tensor]]:
        plain: dict[str, torch.Tensor] = {}

        def unwrap(label: str, facts: Mapping[str, Json], make: Callable[[], Any]) -> torch.Tensor:
            plain[label] = self._unwrap(label, facts, make)
            return plain[label]

        request = LoadRequest(select=select, strict=False, per_rank="rank0", unwrap=unwrap)
        load = match_all(self.document, request, 0, 1, InspectionMemo())
        state = load.make()
        load.matching.forget()
        return state, load.targets.made | plain

    def _unwrap(
        self, _label: str, facts: Mapping[str, Json], _make: Callable[[], Any]
    ) -> torch.Tensor:
        """Make a plain tensor without values in place of a wrapper tensor."""
        dtype = DTYPES[self._asked.dtype or facts["dtype"]]
        return torch.empty(facts["size"], dtype=dtype, device="cpu")

    def _named(self, part: str | None, *, needs_tensors: bool = True) -> dict[str, TensorRow]:
        """Return the tensors of a part by their names in it, in the order of the state.

        Args:
            part: The label of the part, empty for all of the state. None takes ``model`` if the
                state has it at its top or one level below, also as the beginning of flat names
                beside an optimizer; else all of the state.
            needs_tensors: Whether to refuse a part without tensors.
        """
        rows: dict[str, TensorRow] = {}
        wrapped: dict[str, Node] = {}
        for structure in self.document.structures:
            wrappers = dict(wrappers_in(structure.tree))
            inside = tuple(f"{label}." for label in wrappers)
            for label, number in leaf_labels(structure.tree, "tensor"):
                if not label.startswith(inside):
                    rows.setdefault(label, structure.tensors[number])
            wrapped |= wrappers
        for label, node in wrapped.items():
            rows[label] = TensorRow(label, self._asked.dtype or "", tuple(node.head["size"]))
        if part is None:
            trees = [each.tree for each in self.document.structures]
            part = _model_of(rows, [each for tree in trees for each in walk(tree)])
        beginning = f"{part}." if part else ""
        found: dict[str, TensorRow] = {}
        for label, row in rows.items():
            if label.startswith(beginning):
                # A label that ends so is the second of its name, see unique_label.
                first = re.sub("~[2-9]$", "", label)
                name = key_of(first.removeprefix(beginning))
                if name in found or first != label:
                    raise UnsupportedState(
                        f"Two tensors would have the name {name!r}",
                        key=label,
                        hint="Rename one of them with the transform ckpipe.Rename",
                    )
                found[name] = row
        if not found and needs_tensors:
            raise _no_part(part)
        for row in found.values():
            if not row.dtype:
                raise UnsupportedState(
                    f"This is a wrapper tensor of {wrapped[row.label].head['class']}, which other "
                    "programs cannot read",
                    key=row.label,
                    hint="Set export.dtype, or --dtype of the command, to dequantise it",
                )
        return found

    def _cast(self, named: Mapping[str, TensorRow]) -> None:
        """Convert floating-point tensors to the dtype of the export, if there is one."""
        labels, dtype = {row.label for row in named.values()}, self._asked.dtype

        def cast(row: TensorRow) -> TensorRow:
            floating = row.kind != "numpy" and DTYPES[row.dtype].is_floating_point
            if dtype is None or not floating or row.label not in labels:
                return row
            refuse_codes(row, dtype, row.label)
            return replace(row, cast=dtype)

        if dtype is not None:
            self.document = with_scales(self.document)
            structures = [
                replace(each, tensors=tuple(map(cast, each.tensors)))
                for each in self.document.structures
            ]
            self.document = replace(self.document, structures=tuple(structures))

    def _check_size(self, sizes: Mapping[str, int]) -> None:
        if not self._expanded:
            hint = "Leave the tensor out, or pass expanded=True (--expanded in the command)"
            check_expansion("An export", [self.document], sum(sizes.values()), sizes, hint)


_FORMS: dict[Form, tuple[Callable[[_ExportPlan], list[File]], tuple[str, ...]]] = {
    "torch": (_ExportPlan.torch_file, (TORCH_FILE,)),
    "hf": (_ExportPlan.weights, (".safetensors", ".safetensors.index.json")),
    "dcp": (_ExportPlan.dcp_folder, (".distcp", DCP_METADATA)),
}
"""The plan of each form, and the ends of the names of its files."""

ENDS = tuple(end for _, ends in _FORMS.values() for end in ends)
"""The ends of the names of all files that an export plans."""


def _check_plain(
    tree: Node, tensors: Sequence[TensorRow], values: Sequence[Any], part: str | None
) -> None:
    """Check that ``torch.load`` opens a state as it is, and that its objects need no values.

    Raises:
        UnsupportedState: Names the first object that it does not open.
    """
    pending = list(walk(tree))
    while pending:
        node, label = pending.pop()
        if part and not f"{label}.".startswith(f"{part}."):
            continue
        kind, what = node.kind, node.kind.replace("_", " ")
        plain = kind in _PLAIN_NODES or (kind, node.head) == ("registered", "collections:Counter")
        if kind == "tensor":
            row = tensors[node.head]
            plain, what = row.kind in ("tensor", "parameter", "buffer"), f"{row.kind} tensor"
            pending += walk(row.attributes, label) if row.attributes else ()
        elif kind == "value":
            value = values[node.head]
            what = f"{value[0]} value" if isinstance(value, list) else ""
            plain = not isinstance(value, list) or value[0] in _PLAIN_VALUES
        elif node.attributes is not None:
            pending += walk(node.attributes, label)
        if not plain:
            raise UnsupportedState(
                f"This is a {what}, which torch.load refuses unless it may run code",
                key=label or None,
                hint="Leave it out with the transform ckpipe.Drop, or choose a part that is plain",
            )


def _as_torch_has_it(state: Any) -> Any:
    """Give states of ``training_state`` the form of torch's ``get_state_dict``, two levels deep."""
    made = in_torch_form(state)
    if type(made) is dict and made is state:
        return {key: in_torch_form(each) for key, each in state.items()}
    return made


def _without_wrappers(named: dict[str, TensorRow]) -> dict[str, TensorRow]:
    """Return tensors by names without those of DDP and torch.compile, as a load takes them off."""
    bare = bare_names(named)
    old = next((name for name, new in bare.items() if name != new), None)
    if old is None:
        return named
    logger.info("The export leaves out the names of wrappers: %r is %r in it", old, bare[old])
    if len({*bare.values()}) < len(bare):
        raise UnsupportedState(
            "Two tensors would have one name without the names of wrappers, such as _orig_mod",
            key=named[old].label,
            hint="Drop or rename one of them with a transform",
        )
    return {bare[name]: row for name, row in named.items()}


def _model_of(labels: Iterable[str], nodes: Iterable[tuple[Node, str]]) -> str:
    """Return the label of the one model of a state; empty if all of it is one."""
    mappings = [at for node, at in nodes if node.kind in MAPPINGS]
    models = dict.fromkeys(at for at in mappings if re.fullmatch(r"([^.]+\.)?model", at))
    held = [at for at in models if any(each.startswith(f"{at}.") for each in labels)]
    heads = grouped_heads(at for _, at in nodes if not at.startswith("model."))
    if not held and any(is_of_state(each, head) for each in labels for head in heads):
        flat = (found[1] for each in labels if (found := _FLAT_MODEL.match(each)))
        held = [*dict.fromkeys(flat)]
    if len(held) > 1 and "model" not in held:
        raise UsageError(
            f"The checkpoint has several models: {first_of(held, 4)}",
            hint="Set export.part, or --part of the command, to one of them; each takes an export",
        )
    return "model" if "model" in held else "".join(held)


def _no_part(part: str | None) -> UsageError:
    what = f"nothing to export under {part!r}" if part else "no tensors"
    hint = "Set export.part, or --part of the command, to a label of the state"
    return UsageError(f"The checkpoint has {what}", hint=hint)


def _shard(name: str, tensors: Sequence[tuple[str, torch.Tensor, TensorRow]]) -> File:
    """Plan one file of safetensors."""
    offset, entries, gaps = 0, [], []
    for label, tensor, row in tensors:
        kind, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        dtype = stored_dtype(kind) or FOREIGN_DTYPES.get(kind)
        if dtype is None or (dtype == "F4" and not shape):
            raise UnsupportedState(
                f"safetensors has no {'scalars of the ' if dtype else ''}dtype {kind}",
                key=row.label,
                hint='Export it as "torch" or "dcp", or cast it',
            )
        if dtype == "F4":
            shape = (*shape[:-1], 2 * shape[-1])
        entries.append((label, dtype, shape, offset, tensor.nbytes))
        offset += tensor.nbytes
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        gaps.append(Gap(tensor.nbytes, {row.label: plain}))
    return File(name, [encode_header(entries), *gaps])


def _keeps_lists(value: Any, label: str) -> bool:
    """Check that DCP, which keeps no empty dict, keeps all of a list; tell if it keeps anything.

    Raises:
        UnsupportedState: Names the first element that a list would lack.
    """
    if not isinstance(value, Mapping | list) or value == []:
        return True
    items = list(enumerate(value) if isinstance(value, list) else value.items())
    kept = [_keeps_lists(each, join(label, key)) for key, each in items]
    if isinstance(value, list) and any(kept) and not all(kept):
        raise UnsupportedState(
            "DCP keeps no empty dict, and without this one its list would be another",
            key=join(label, kept.index(False)),
            hint="Leave the list out with the transform ckpipe.Drop, or choose a part",
        )
    return any(kept)


# Files of torch.save


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, lazy_bits(tensor)


def _by_storage(made: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    found: dict[int, dict[str, torch.Tensor]] = {}
    for label, tensor in made.items():
        found.setdefault(tensor.untyped_storage().data_ptr(), {})[label] = tensor
    return found


class _Sink:
    """Take what ``torch.save`` writes; it seeks past the bytes of storages under ``skip_data``."""

    def __init__(self) -> None:
        self.parts: list[bytearray | tuple[int, int]] = [bytearray()]
        self._record = b""

    def write(self, data: Any) -> int:
        written = bytes(data)
        if b"/data/" in written:
            self._record = written
        if not isinstance(self.parts[-1], bytearray):
            self.parts.append(bytearray())
        self.parts[-1] += written  # type: ignore[operator]
        return len(written)

    def seek(self, nbytes: int, whence: int) -> None:
        """Note the key of a storage, which ends the name of its record, and its size."""
        self.parts.append((int(self._record.rpartition(b"/")[2]), nbytes))

    def flush(self) -> None:
        """Do nothing."""


def _saved(obj: Any, storages: Mapping[int, Mapping[str, torch.Tensor]]) -> list[Part]:
    """Return the file that ``torch.save`` makes of an object, with gaps for its storages.

    Its records of storages have the checksum 0, since the directory of the archive is made before
    their bytes are read. No reader of torch looks at it; torch leaves it out itself on
    ``torch.serialization.set_crc32_options(False)``.

    Args:
        obj: The object.
        storages: The tensors without values by the addresses of their memory, and by label.
    """
    keys: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def reducer_override(self, each: Any) -> Any:
            if isinstance(each, torch.Tensor):  # its storage gets the next key, if it is new
                storage = each.untyped_storage()
                keys.setdefault(storage._cdata, storage.data_ptr())
            return NotImplemented

    sink = _Sink()
    module: Any = SimpleNamespace(Pickler=Pickler, __name__="pickle")
    try:
        with torch.serialization.skip_data():
            torch.save(obj, sink, pickle_module=module)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise UnsupportedState(f"torch.save cannot write this state: {error}") from error
    addresses = list(keys.values())
    return [
        bytes(part) if isinstance(part, bytearray) else Gap(part[1], storages[addresses[part[0]]])
        for part in sink.parts
    ]
