"""Do once for all adaptors: open a pipeline, check names and settings, find what a path names."""

from __future__ import annotations

import inspect
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ckpipe.errors import CheckpointNotFound, CkpipeError, CorruptCheckpoint, UsageError
from ckpipe.events import Completed, Pruned
from ckpipe.handles import SyncSaveHandle
from ckpipe.integrations.pointers import Pointer, read_pointer
from ckpipe.loading.request import LoadOptions
from ckpipe.running.pipeline import SyncPipeline
from ckpipe.settings import Settings
from ckpipe.types import CheckpointId, CheckpointInfo, LoadResult

T = TypeVar("T")

logger = logging.getLogger("ckpipe")

# Hints on devices mean no option.
_ARGUMENTS = re.compile(rf"\b({'|'.join(LoadOptions.__annotations__.keys() - {'device'})})\b")


class TrainerPipeline(SyncPipeline):
    """A pipeline of an adaptor: its errors name remedies that the trainer's user has.

    A deep copy of what holds it, such as callbacks, shares it.

    Args:
        url: The root of the checkpoints.
        place: The place where the trainer takes settings of ckpipe, for hints.
        other: The call by which the trainer takes another checkpoint, for hints.
        fields: As for :class:`~ckpipe.SyncPipeline`.
    """

    def __init__(self, url: str | os.PathLike[str], place: str, other: str, **fields: Any) -> None:
        super().__init__(url, **fields)
        self._place, self._other = place, other
        self.unnamed: dict[str, SyncSaveHandle] = {}
        """Saves whose name is not written yet, by its path."""

    def __deepcopy__(self, memo: object) -> TrainerPipeline:
        return self

    @contextmanager
    def _hinting(self) -> Iterator[None]:
        """Replace hints that name arguments which the trainer does not have."""
        try:
            yield
        except CkpipeError as error:
            words = _ARGUMENTS.findall(error.hint or "")
            if "pickle" in words:
                error.hint = (
                    f'pickle="allow" in {self._place} saves and loads it, and runs code from the '
                    "checkpoint; with state_dict and load_state_dict it needs no pickle"
                )
            elif "per_rank" in words:
                error.hint = (
                    f'Set per_rank in {self._place}: "drop", "rank0", or for generators "derive"; '
                    "or resume with as many ranks as saved"
                )
            elif words and isinstance(error, CorruptCheckpoint):
                error.hint = f"Resume from another checkpoint: {self._other}"
            elif words:
                error.hint = (
                    "Resume with the objects that were saved, or from another checkpoint: "
                    f"{self._other}"
                )
            raise

    def save(self, *args: Any, **options: Any) -> SyncSaveHandle:
        with self._hinting():
            handle = super().save(*args, **options)
        path = (options.get("metadata") or {}).get("path")
        if path is not None and handle.status != "skipped":
            self.unnamed[path] = handle
        return handle

    def load(self, *args: Any, **options: Any) -> LoadResult | None:
        with self._hinting():
            return super().load(*args, **options)

    def choose(self, *args: Any, **options: Any) -> CheckpointInfo | None:
        with self._hinting():
            return super().choose(*args, **options)

    def pointer(self, path: str) -> Pointer | None:
        """Read the pointer at a path; of a save under way, wait until it is complete.

        Raises:
            CkpipeError: If that save failed.
            TimeoutError: If other ranks did not commit it within
                ``load.agreement_timeout_seconds``.
            OSError: If the pointer cannot be read.
        """
        handle = self.unnamed.get(os.path.abspath(path))
        if handle is None:
            return read_pointer(path)
        info = handle.wait_complete(self.settings.load.agreement_timeout_seconds)
        return Pointer(self.url, info.id, info.step)


@contextmanager
def naming(path: str | os.PathLike[str], saved: str) -> Iterator[None]:
    """Raise a refusal of the system to write a name as an error of ckpipe.

    Args:
        path: The name.
        saved: The place and state of its checkpoint, for the error.

    Raises:
        CkpipeError: In place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise CkpipeError(
            f"The name {os.fspath(path)} cannot be written: {error.strerror or error}. {saved}",
            hint="Make room and give rights there, move away a file that is in its place, or give "
            "the trainer another folder: the run resumes from its checkpoints all the same",
        ) from error


def check_names(package: str, tried: str, names: Mapping[Any, str]) -> None:
    """Check that a package has the names that its adaptor uses, some of which are private.

    Args:
        package: The name of the package.
        tried: Its version that the adaptor was written for.
        names: Names by their owner, with spaces between: attributes of a class; or variables of a
            function, and attributes that it sets.

    Raises:
        UsageError: If a name is missing.
    """
    absent = []
    for owner, wanted in names.items():
        there = dir(owner)
        if inspect.isfunction(owner):
            code = inspect.unwrap(owner).__code__
            there = [*code.co_names, *code.co_varnames]
        absent += [f"{owner.__qualname__}: {each}" for each in wanted.split() if each not in there]
    if absent:
        raise UsageError(
            f"{package} {version(package)} is here and lacks names that {tried} has: "
            + ", ".join(absent),
            hint=f"Install {package}=={tried}, with which this adaptor was tried",
        )


def checked(trainer: str, given: Mapping[str, Any], *refused: str, hint: str) -> Settings:
    """Make settings of the user's keywords and environment.

    ``settings.retention.rule`` is None if the user has set no rule, so that the trainer's own
    limit may decide.

    Args:
        trainer: The name of the trainer, for the error.
        given: The keywords.
        refused: Names of settings that have no effect with this trainer.
        hint: The remedy, for the error.

    Raises:
        UsageError: If one of ``refused`` is not as by default.
        SettingsError: If a setting is unknown or out of range.
    """
    settings = Settings(**given)
    for name in refused:
        if getattr(settings, name) != Settings.model_fields[name].get_default():
            source = "" if name in given else f" (from CKPIPE_{name.upper()})"
            raise UsageError(f"The setting {name}{source} has no effect with {trainer}", hint=hint)
    return settings


def choose_path(
    pipeline: SyncPipeline,
    path: str | os.PathLike[str],
    read: Callable[[str], Pointer | None] = read_pointer,
) -> CheckpointInfo:
    """Choose the checkpoint that a path of the trainer leads to.

    That is the one of the pointer there; or, without one, the one whose id it is; or else the
    newest that was saved under this name: with the metadata ``name``, the last part of the path,
    and ``path``, all of it. So a name is found without its pointer, as on another machine. A path
    of another folder is refused, since it means another checkpoint; a name alone is not.

    Args:
        pipeline: The pipeline; all its ranks call alike.
        path: The path, a name alone, or an id.
        read: Reads the pointer; called on rank 0.

    Raises:
        CheckpointNotFound: If there is none at this root.
        CkpipeError: Any error of :meth:`ckpipe.SyncPipeline.choose`.
    """
    given, pointer = os.fspath(path), by_first(lambda: read(os.fspath(path)))
    name = os.path.basename(os.path.normpath(given))
    which = pointer.id if pointer else given if CheckpointId.parse(given) else None
    try:
        chosen = pipeline.choose(which, name=None if which else name)
    except CheckpointNotFound as error:
        if pointer is not None:
            error.hint = f"{given} leads to a checkpoint at {pointer.root}"
        raise
    saved = chosen and (chosen.metadata or {}).get("path")
    if chosen is None or not (which or given == name or saved == os.path.abspath(given)):
        raise CheckpointNotFound(
            f"There is no complete checkpoint {given!r} at {pipeline.url}"
            + (f": the newest of this name was saved as {saved}" if saved else ""),
            hint=f"Without a folder, {name!r} names the newest that was saved under this name",
        )
    return chosen


def by_first(function: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result or raise its error on all ranks.

    Such as for a file that only one of several machines may have. Without a process group each
    process calls it for itself.

    Args:
        function: The function; its result can be pickled.

    Raises:
        Exception: The error of the function.
    """
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    found: T = outcome[0]
    return found


def tell_resumed(step: int, place: str, rank: int, data: str = "") -> None:
    """Log where a run resumes; on rank 0 only.

    Args:
        step: The step of the checkpoint.
        place: The address of the checkpoint, ``f"{pipeline.url}/{info.id}"``.
        rank: The rank of this process.
        data: Where the data go on, if that is certain: ``"the data go on …"``.
    """
    if rank == 0:
        logger.info("resumed step %d from %s%s", step, place, data and f": {data}")


def pointer_folders(
    folder: str | os.PathLike[str], root: str, line: str | None = None
) -> list[Path]:
    """List the folders in a folder that have a pointer to a root, the oldest checkpoint first.

    Args:
        folder: The folder.
        root: The root, ``pipeline.url``.
        line: The line of their checkpoints; None for any.
    """
    ids: dict[Path, CheckpointId] = {}
    for each in Path(folder).iterdir() if os.path.isdir(folder) else ():
        pointer = read_pointer(each) if each.is_dir() else None
        id = CheckpointId.parse(pointer.id) if pointer and pointer.root == root else None
        if pointer is not None and id is not None and line in (None, pointer.line):
            ids[each] = id
    return sorted(ids, key=ids.__getitem__)


def is_newest(path: str | os.PathLike[str], root: str, info: CheckpointInfo) -> bool:
    """Tell whether a name leads to no later checkpoint: saves may complete in another order."""
    old = read_pointer(path)
    id = CheckpointId.parse(old.id) if old and old.root == root else None
    return id is None or id < info.key


def keep_names(
    pipeline: TrainerPipeline,
    write: Callable[[Completed], None],
    names: Callable[[], Iterable[Path]],
) -> None:
    """Keep the names of a trainer: each is there as long as the checkpoint that it leads to.

    Args:
        pipeline: The pipeline.
        write: Writes the name of a checkpoint that is complete.
        names: Lists the names: files and folders with a pointer among others.
    """

    def follow(event: Completed | Pruned) -> None:
        if isinstance(event, Completed):
            path = (event.info.metadata or {}).get("path", "")
            with naming(path, f"{event.id} is complete at {pipeline.url}"):
                write(event)
            saved = pipeline.unnamed.get(path)
            if saved is not None and saved.id == event.id:
                del pipeline.unnamed[path]
            return
        for each in names():
            pointer = read_pointer(each)
            if pointer is None or (pointer.root, pointer.id) != (pipeline.url, event.removed):
                continue
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)

    pipeline._hooks.add(follow, Completed, Pruned)
