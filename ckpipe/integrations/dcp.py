"""Store the checkpoints of ``torch.distributed.checkpoint`` (DCP) with ckpipe.

Theory. DCP plans a save, gathers the results of all ranks, and lets its coordinator finish. Each
rank saves the items of its plan as its own part of a checkpoint: a tensor under its path in the
state, with its box in the whole. The checkpoint has one part more than DCP has ranks. This last
part holds DCP's metadata, and the coordinator commits it in ``finish``. So a checkpoint becomes
complete by DCP's own last step, and not at all if a rank has failed before.

The coordinator names the launch, each rank's part and the number of the save, and they travel in
DCP's plan. So the parts of two saves at once never mix. A planner may cache the plan of an earlier
save; then the ranks count on, and the coordinator checks that they agree.

Source: ``storage.py``, ``planner.py``, ``state_dict_saver.py`` and ``filesystem.py`` of that
package in torch 2.6 and 2.13.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import secrets
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, NamedTuple, Unpack

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckpipe.errors import (
    CheckpointNotFound,
    InvalidManifest,
    ShapeMismatch,
    UnsupportedState,
    UsageError,
)
from ckpipe.format.dtypes import DTYPES
from ckpipe.format.labels import join
from ckpipe.handles import SyncSaveHandle
from ckpipe.integrations.shared import checked
from ckpipe.ranks.world import Topology
from ckpipe.running.pipeline import SyncPipeline
from ckpipe.running.validation import absolute, location
from ckpipe.settings import PipelineFields, Settings
from ckpipe.state.tensors import PLAIN_TYPES, box_tensor

_METADATA = ".metadata"
_STAGING_BYTES = 256 << 20
_COMPLETE_SECONDS = 60.0


class _RankOfLaunch(NamedTuple):
    """The part of each checkpoint of a launch that a rank writes.

    Args:
        attempt: The name of the launch.
        rank: The rank.
        ranks: The number of ranks.
    """

    attempt: str
    rank: int
    ranks: int


_Place = tuple[str, int, bool]
"""The place of an item: the label of its tensor; the size of bytes, if it is bytes; and whether the
tensor is the item alone, not all that the items of a name make together."""


class _DcpStorage:
    """The root, the settings and the present name of a writer or reader."""

    def __init__(self, root: str | os.PathLike[str], **settings: Unpack[PipelineFields]) -> None:
        self.root = absolute(location(root) or "")
        self.settings: dict[str, Any] = {**settings}
        self.checkpoint_id, self._thread = "", 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the name of the next checkpoint."""
        self.checkpoint_id = os.fspath(checkpoint_id or "")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any name."""
        return True

    def _check_alone(self) -> None:
        """Check that no other thread has begun a call of DCP with this object."""
        if self._thread != threading.get_ident():
            raise UsageError(
                f"Two calls of DCP use one {type(self).__name__} at once",
                hint="Give each its own, or wait for the first before the second",
            )


class _PartPipeline(SyncPipeline):
    """The pipeline of one part of the checkpoints of a launch."""

    def __init__(self, root: str, part: _RankOfLaunch, settings: Settings) -> None:
        if settings.staging_bytes is None:
            settings = settings.override(staging_bytes=_STAGING_BYTES)
        super().__init__(root, attempt_id=part.attempt, settings=settings)
        self._ranks = Topology(part.rank, part.ranks + 1)
        self.open()


_Key = tuple[str, str]
"""The root and the settings of a writer."""

_attempts: dict[tuple[_Key, int], str] = {}
"""On coordinators, the launches by the number of ranks."""
_given: Counter[tuple[_Key, str]] = Counter()
"""On coordinators, how many numbers they have given to saves of each launch."""
_written: defaultdict[tuple[_Key, str], set[int]] = defaultdict(set)
"""The numbers of the saves of each launch that this rank has begun to write."""
_pipelines: dict[tuple[_Key, _RankOfLaunch], _PartPipeline] = {}
_lock = threading.Lock()


class CkpipeStorageWriter(_DcpStorage, StorageWriter):
    """Stores the saves of ``dcp.save`` and ``dcp.async_save`` as checkpoints of ckpipe.

    The ``checkpoint_id`` of a save is a name, not a path. A second save under the same name makes
    another checkpoint, and the earlier one stays until retention removes it. A checkpoint counts
    once DCP's coordinator has finished it. If a rank fails before, DCP raises the error on all
    ranks, and no reader sees the checkpoint.

    The writers of a process share the pipelines of a root, which stay open until the process ends.
    Saves at the same time need a writer and a process group each.
    If ``staging_bytes`` is not set, a save takes at most 256 MiB of host memory on each rank,
    beside the copy that DCP's stager makes for ``async_save``.

    Args:
        root: The root of the checkpoints, as for :class:`ckpipe.Pipeline`.
        settings: Fields of :class:`~ckpipe.Settings`, the same on all ranks, such as
            ``keep_last=3``.

    Raises:
        UsageError: If a setting says when to save, what a run begins with, or what DCP decides:
            ``attempt_id``, ``solo``, ``read_only`` and ``plan``.
        SettingsError: If a setting is unknown or out of range.
    """

    def __init__(self, root: str | os.PathLike[str], **settings: Unpack[PipelineFields]) -> None:
        checked(
            "DCP", settings, "attempt_id", "solo", "read_only", "plan", "initial", "preemption",
            "save_every_seconds", "save_every_steps",
            hint="DCP plans the save, and your program calls it and gives it the state",
        )  # fmt: skip
        super().__init__(root, **settings)
        self._part, self._number = _RankOfLaunch("", 0, 0), 0
        self._meta, self.save_id = StorageMeta(), str(uuid.uuid4())

    @property
    def _key(self) -> _Key:
        return self.root, repr(sorted(self.settings.items()))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the name of the next checkpoint, and a new ``save_id``."""
        super().reset(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return what DCP tells its planner of the next save."""
        if self.save_id == self._meta.save_id:  # a save has it already
            self.save_id = str(uuid.uuid4())
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; the next one needs a name of its own.

        Raises:
            UsageError: If DCP saves without collectives: then no rank can complete a checkpoint.
        """
        self._meta, self.checkpoint_id = self.storage_meta(), ""
        self._thread = threading.get_ident()
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "ckpipe needs use_collectives=True: DCP's coordinator completes the checkpoint"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank's plan the name of its part; on the coordinator."""
        count = len(plans)
        with _lock:
            attempt = _attempts.setdefault((self._key, count), secrets.token_hex(8))
            number = _given[self._key, attempt]
            _given[self._key, attempt] += 1
        return [
            replace(plan, storage_data=(_RankOfLaunch(attempt, n, count), number))
            for n, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's items; return when they are durable.

        Raises:
            UsageError: If DCP has cached the plan of another storage, a planner has made it anew,
                or another thread saves with this writer meanwhile.
            UnsupportedState: If an item is not a plain tensor or bytes.
            CkpipeError: If the save failed.
        """
        if not (
            type(plan.storage_data) is tuple and isinstance(plan.storage_data[0], _RankOfLaunch)
        ):
            raise UsageError(
                "The plan lacks ckpipe's storage_data: finish_plan of a planner has made it anew, "
                "or DCP's planner has cached it for another storage",
                hint="Let finish_plan return replace(plan, items=…) of the plan that it is given; "
                "for cached plans, pass a planner of a class of its own, or "
                "enable_plan_caching=False",
            )
        self._check_alone()
        self._part, number = plan.storage_data
        launch = (self._key, self._part.attempt)
        with _lock:  # before anything can fail on this rank alone
            written = _written[launch]
            self._number = max(written) + 1 if number in written else number  # of a cached plan
            written.add(self._number)
        state: dict[Any, Any] = {}
        results = []
        counts = Counter(item.index.fqn for item in plan.items)
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        for item in plan.items:
            name = item.index.fqn
            data = planner.resolve_data(item)
            tensor = _tensor_of(item, data, alone=counts[name] > 1)
            path = tuple(paths.get(name, (name,)))
            if counts[name] > 1:
                path = (*path[:-1], f"{path[-1]}@{','.join(map(str, item.index.offset or ()))}")
            label = _put(state, path, tensor)
            nbytes = tensor.nbytes if item.type == WriteItemType.BYTE_IO else 0
            place: _Place = (label, nbytes, counts[name] > 1)
            results.append(WriteResult(item.index, tensor.nbytes, (self._number, place)))
        self._save(self._part, state)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint by DCP's metadata; on the coordinator.

        Raises:
            UnsupportedState: If a planner has put objects of other classes into the metadata.
            CkpipeError: If the save failed, or the part of a rank is missing.
        """
        self._check_alone()
        found = [(each.index, *each.storage_data) for rank in results for each in rank]
        if any(number != self._number for _, number, _ in found):
            raise UsageError(
                "Ranks have counted the saves with a cached plan differently",
                hint="Wait for each save before the next, or pass enable_plan_caching=False",
            )
        places = {index: place for index, _, place in found}
        # As DCP's file writer does; dcp.save returns these metadata.
        metadata.storage_data, metadata.storage_meta = places, self._meta
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        data = pickle.dumps(metadata)
        _unpickled(data)
        last = self._part._replace(rank=self._part.ranks)
        state = {_METADATA: torch.frombuffer(bytearray(data), dtype=torch.uint8)}
        self._save(last, state, worker="thread").wait_complete(_COMPLETE_SECONDS)

    def _save(self, part: _RankOfLaunch, state: dict[Any, Any], **changes: Any) -> SyncSaveHandle:
        """Save a part, and wait until it is durable."""
        with _lock:
            pipeline = _pipelines.get((self._key, part))
            if pipeline is None:
                settings = Settings(**{**self.settings, **changes})
                pipeline = _pipelines[self._key, part] = _PartPipeline(self.root, part, settings)
        about = {"name": self._meta.checkpoint_id, "dcp": True}
        handle = pipeline.save(state, self._number, metadata=about)
        handle.wait()
        return handle


def _tensor_of(item: WriteItem, data: Any, *, alone: bool) -> torch.Tensor:
    """Return the tensor that is saved for an item."""
    if isinstance(data, io.BytesIO):
        view = data.getbuffer()
        return torch.frombuffer(view, dtype=torch.uint8) if view else torch.empty(0).byte()
    tensor: torch.Tensor = data.detach()
    if type(tensor) not in PLAIN_TYPES or item.tensor_data is None:
        raise UnsupportedState(
            f"DCP would save an object of type {type(data).__name__}", key=item.index.fqn,
            hint="Save plain tensors and DTensors of plain tensors",
        )  # fmt: skip
    about = item.tensor_data
    if alone or about.size == about.chunk.sizes:
        return tensor
    return box_tensor(tensor, about.chunk.offsets, about.size)


def _put(state: dict[Any, Any], path: Sequence[Any], tensor: torch.Tensor) -> str:
    """Put a tensor at its path; return its label."""
    if path[0] == _METADATA:
        raise UnsupportedState("This name is DCP's own", key=path[0], hint="Choose another one")
    first = str(path[0])  # a label drops an empty one, and safetensors use the other name
    if first in ("", "__metadata__") or first.startswith("~"):
        path = (f"~{first}", *path[1:])
    label = ""
    for key in path:
        label = join(label, key)
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = tensor
    return label


_CLASSES = frozenset((
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
    "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
))  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Makes DCP's own records, and refuses all other objects."""

    def find_class(self, module: str, name: str) -> Any:
        if module == dcp_metadata.__name__ and name in _CLASSES:
            return getattr(dcp_metadata, name)
        if module == "torch" and (name == "Size" or name in DTYPES):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        raise UnsupportedState(
            f"DCP's metadata hold an object of {module}.{name}, which ckpipe does not make: it "
            "could run any code",
            hint="A planner of your own has put it into planner_data; put plain values there",
        )


def _unpickled(data: bytes) -> Metadata:
    found = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(found, Metadata):
        raise InvalidManifest("DCP's metadata are of another type", key=_METADATA)
    return found


@dataclass
class _ChosenPlan(LoadPlan):
    """A plan with the id of the checkpoint that is to be read."""

    ckpipe_id: str = ""


class CkpipeStorageReader(_DcpStorage, StorageReader):
    """Reads checkpoints of :class:`CkpipeStorageWriter` for ``dcp.load``.

    Under a ``checkpoint_id`` it takes the newest complete checkpoint of that name, and without one
    the newest of all. It loads into any number of ranks, and verifies every byte before it reaches
    a tensor; other values DCP unpickles itself. Errors are raised by DCP, on all ranks. Loads at
    the same time need a reader and a process group each.

    Args:
        root: The root of the checkpoints, as for :class:`ckpipe.Pipeline`.
        settings: Fields of :class:`~ckpipe.Settings`, such as options for the store.
    """

    def __init__(self, root: str | os.PathLike[str], **settings: Unpack[PipelineFields]) -> None:
        super().__init__(root, **settings)
        self._chosen, self._agreed, self.load_id = "", "", ""
        self._failure: Exception | None = None
        self._places: dict[MetadataIndex, _Place] = {}

    def read_metadata(self, *args: Any) -> Metadata:
        """Choose the checkpoint, and return DCP's metadata of it; empty ones after a failure.

        DCP takes an error here for a checkpoint of another form, and torch 2.10 drops it. So
        :meth:`set_up_storage_reader` raises it.
        """
        self._failure, self._thread = None, threading.get_ident()
        self.load_id = str(uuid.uuid4())
        try:
            return self._read_metadata()
        except Exception as error:
            self._failure, self.checkpoint_id = error, ""
            return Metadata({})

    def _read_metadata(self) -> Metadata:
        name = self.checkpoint_id
        named = f" named {name!r:.200}" if name else ""
        with self._opened() as pipeline:
            found = pipeline.choose(name=name or None)
            if found is None or "dcp" not in (found.metadata or {}):
                raise CheckpointNotFound(
                    f"There is no complete checkpoint of DCP{named} at {pipeline.url}"
                    if found is None
                    else f"{found.id} at {pipeline.url} was not saved by DCP",
                    hint="checkpoint_id is the name that dcp.save got; `ckpipe ls` lists the root",
                )
            self._chosen = found.id
            label = join("", _METADATA)
            loaded = pipeline.load(step=found.id, include=[label])
        assert loaded is not None, "a named checkpoint is loaded, or it is an error"
        metadata = _unpickled(loaded.state[_METADATA].numpy().tobytes())
        metadata.storage_meta = replace(
            metadata.storage_meta or StorageMeta(), load_id=self.load_id
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any) -> None:
        """Note where the items lie.

        Raises:
            CheckpointNotFound: If there is no complete checkpoint of this name.
            CkpipeError: If it cannot be read.
        """
        self.checkpoint_id = ""  # of this load only
        if self._failure is not None:
            raise self._failure
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which checkpoint this rank has chosen.

        Raises:
            UsageError: If another thread loads with this reader meanwhile.
        """
        self._check_alone()
        self._agreed = ""
        return self._with_chosen(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell all ranks which checkpoint the coordinator has chosen; on the coordinator.

        Raises:
            UsageError: If one was completed between the looks of two ranks.
        """
        for plan in plans:  # those of a planner that has made them anew do not tell
            self._check_chosen(getattr(plan, "ckpipe_id", self._chosen))
        self._agreed = self._chosen
        return [self._with_chosen(plan) for plan in plans]

    def _with_chosen(self, plan: LoadPlan) -> LoadPlan:
        chosen: LoadPlan = _ChosenPlan(plan.items, plan.storage_data, plan.planner_data)
        if type(plan) is not LoadPlan:  # of a planner of the user, with fields of its own
            chosen = copy.copy(plan)
        vars(chosen)["ckpipe_id"] = self._chosen
        return chosen

    def _check_chosen(self, chosen: str) -> None:
        if chosen != self._chosen:
            raise UsageError(
                f"Ranks have chosen different checkpoints: {sorted((chosen, self._chosen))}",
                hint="A save was completed meanwhile; call dcp.load again on all ranks",
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the tensors of its state.

        Raises:
            UsageError: If another rank has chosen another checkpoint, or finish_plan of a planner
                has made the plan anew, so that this cannot be told.
            CkpipeError: If the checkpoint is damaged, was deleted, or does not fit.
        """
        self._check_alone()
        agreed = getattr(plan, "ckpipe_id", self._agreed)
        if not agreed:
            raise UsageError(
                "finish_plan of a planner has made the plan anew, so ckpipe cannot tell whether "
                "all ranks read the same checkpoint",
                hint="Let it return replace(plan, items=…) of the plan that it is given",
            )
        self._check_chosen(agreed)
        boxes, taken = [], []
        for item in plan.items:
            label, nbytes, apart = self._places[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                lower: Sequence[int] = (0,)
                into = taker = torch.empty(nbytes, dtype=torch.uint8)
            else:
                taker = planner.resolve_tensor(item)
                into, lower = taker.detach(), item.storage_offsets
                if not apart and item.storage_index.offset is not None:
                    lower = tuple(map(add, item.storage_index.offset, lower))
                if into.size() != item.lengths:
                    raise ShapeMismatch(
                        f"{list(item.lengths)} elements are read for a target of the shape "
                        f"{list(into.size())}",
                        key=item.dest_index.fqn,
                    )
            taken.append((item, taker))
            boxes.append((label, lower, into))
        with self._opened() as pipeline:
            pipeline.read_boxes(agreed, boxes)
        for item, taker in taken:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(taker.numpy().tobytes()))
            else:
                planner.commit_tensor(item, taker)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self) -> SyncPipeline:
        fixed = {"read_only": True, "solo": True, "resume": "auto", "preemption": False}
        return SyncPipeline(self.root, **{**self.settings, **fixed})
