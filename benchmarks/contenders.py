"""ckpipe and its peers behind one interface, so that a benchmark treats all of them alike."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckpipe
from ckpipe.errors import UsageError

ENOUGH_FILES = 50_000
"""Twice the number of open files that the largest number of tensors needs."""

Wait = Callable[[], object]
"""A function that blocks until a save is durable."""


class Contender(ABC):
    """One way to save and load a state; saves go to numbered folders below its root.

    Args:
        root: Its folder.
    """

    name: str
    blocks: bool = False
    """True if a save returns only once it is durable."""
    loads_like: str | None = None
    """The contender that loads by the same call, so that loads are not measured twice."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.number = 0
        self.took = 0.0
        """The seconds of the last save beside a loop until it was durable."""
        root.mkdir(parents=True, exist_ok=True)

    @property
    def folder(self) -> Path:
        """The folder of the last save."""
        return self.root / str(self.number)

    def save(self, state: dict[str, Any]) -> Wait:
        """Save, and return as soon as the trainer may change the state again."""
        self.number += 1
        wait = self._save(plain(state))

        def durable() -> None:
            wait()
            sync(self.folder)

        return durable

    @abstractmethod
    def _save(self, state: dict[str, Any]) -> Wait: ...

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Load the last save into the state, in place."""

    def forget(self) -> None:
        """Remove the save, outside of all measured times."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def files(self) -> list[Path]:
        """List the files of the last save."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def close(self) -> None:
        """End all background work."""
        return


class Ours(Contender):
    """ckpipe, with its defaults."""

    name = "ckpipe"
    worker: Literal["auto", "process"] = "auto"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._pipeline = ckpipe.SyncPipeline(root, worker=self.worker)
        self._pipeline.__enter__()

    def save(self, state: dict[str, Any]) -> Wait:
        self.number += 1
        self.handle = self._pipeline.save(state, step=self.number)
        return self.handle.wait

    def _save(self, state: dict[str, Any]) -> Wait:
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        self._pipeline.load(state)

    def forget(self) -> None:
        for info in self._pipeline.steps()[:-1]:
            with contextlib.suppress(UsageError):  # the last loaded checkpoint is protected
                self._pipeline.delete(info.id)

    def files(self) -> list[Path]:
        return [self.root / f"{self.handle.id}.json", *(self.root / self.handle.id).iterdir()]

    def close(self) -> None:
        self._pipeline.__exit__(None, None, None)


class Captured(Ours):
    """ckpipe with guarded optimizers, whose tensors are copied while the trainer continues.

    If a state has no optimizer, one is made that owns its tensors.
    """

    name = "ckpipe, captured"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._guarded: dict[str, Any] = {}

    def save(self, state: dict[str, Any]) -> Wait:
        self.number += 1
        if state is not self._guarded:
            found = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
            owned = [tensor for _, tensor in flat(state)]
            self._pipeline.guard(*(found or [torch.optim.SGD(owned)]))
            self._guarded = state
        self.handle = self._pipeline.save(state, step=self.number, until="captured")
        return self.handle.wait


class OursInProcess(Ours):
    """ckpipe with a worker process, which writes the copies."""

    name, worker = "ckpipe, process", "process"


class CapturedInProcess(Captured):
    """ckpipe with guarded optimizers and a worker process."""

    name, worker = "ckpipe, process, captured", "process"


OTHER_WAYS: tuple[type[Ours], ...] = (Captured, OursInProcess, CapturedInProcess)
"""The other ways to save with ckpipe, which are measured beside loops."""


class TorchSave(Contender):
    """``torch.save``, and ``torch.load`` by mmap."""

    name, blocks = "torch.save", True

    def _save(self, state: dict[str, Any]) -> Wait:
        self.folder.mkdir()
        torch.save(state, self.folder / "state.pt")
        return _at_once

    def load(self, state: dict[str, Any]) -> None:
        copy_into(state, torch.load(self.folder / "state.pt", mmap=True))


class Safetensors(Contender):
    """``safetensors.torch.save_file`` of the flat tensors, without other values."""

    name, blocks = "safetensors", True

    def _save(self, state: dict[str, Any]) -> Wait:
        self.folder.mkdir()
        safetensors.torch.save_file(dict(flat(state)), self.folder / "state.safetensors")
        return _at_once

    def load(self, state: dict[str, Any]) -> None:
        loaded = safetensors.torch.load_file(self.folder / "state.safetensors")
        with torch.no_grad():
            for name, tensor in flat(plain(state)):
                tensor.copy_(loaded[name])


class DcpSync(Contender):
    """``torch.distributed.checkpoint.save``."""

    name, blocks = "DCP", True

    def _save(self, state: dict[str, Any]) -> Wait:
        dcp_save(state, checkpoint_id=self.folder)
        return _at_once

    def load(self, state: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(plain(state), checkpoint_id=self.folder)


class DcpThread(DcpSync):
    """``async_save`` in a thread, with one persistent stager."""

    name, blocks, loads_like = "DCP async, thread", False, "DCP"
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        shared = self.kind is AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(StagingOptions(False, shared, False, False))

    def _save(self, state: dict[str, Any]) -> Wait:
        response: Any = dcp_async_save(
            state,
            checkpoint_id=self.folder,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        return getattr(response, "upload_completion", response).result  # type: ignore[no-any-return]

    def close(self) -> None:
        self._stager.close()


class DcpProcess(DcpThread):
    """``async_save`` in a process; needs a process group, even for one rank."""

    name = "DCP async, process"
    kind = AsyncCheckpointerType.PROCESS


class TorchCheckpointing(Contender):
    """``torch_checkpointing``, its asynchronous default; O_DIRECT off, since it fails on ext4."""

    name = "torch_checkpointing"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        package = importlib.import_module("torch_checkpointing")
        files = importlib.import_module("torch_checkpointing.storage.filesystem")
        staging = package.CheckpointStagerConfig(use_async_staging=False)
        config = package.CheckpointManager.Config(
            save=package.AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=files.LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager = config.build()

    def _save(self, state: dict[str, Any]) -> Wait:
        return self._manager.save(str(self.folder), state).result  # type: ignore[no-any-return]

    def load(self, state: dict[str, Any]) -> None:
        self._manager.load(str(self.folder), into=plain(state))

    def close(self) -> None:
        self._manager.close()


class TorchSnapshot(Contender):
    """``torchsnapshot``'s ``Snapshot.async_take``."""

    name = "torchsnapshot"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._package = importlib.import_module("torchsnapshot")

    def _save(self, state: dict[str, Any]) -> Wait:
        app = {"state": self._package.StateDict(**state)}
        pending = self._package.Snapshot.async_take(str(self.folder), app)
        return pending.wait  # type: ignore[no-any-return]

    def load(self, state: dict[str, Any]) -> None:
        app = {"state": self._package.StateDict(**plain(state))}
        self._package.Snapshot(str(self.folder)).restore(app)


EVERYBODY: tuple[type[Contender], ...] = (
    Ours, TorchSave, Safetensors, DcpSync, DcpThread, DcpProcess, TorchCheckpointing, TorchSnapshot,
)  # fmt: skip


def start_process_group(root: Path) -> None:
    """Make a process group of one rank, which DCP's asynchronous process needs."""
    if not dist.is_initialized():
        store = dist.FileStore(str(root / "store"), 1)  # type: ignore[attr-defined]
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def allow_many_files() -> str | None:
    """Allow one open file for each tensor, which peers need to share tensors with a process.

    Returns:
        A note: if the system does not allow so many, torch shares them by name.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most >= ENOUGH_FILES:
        return None
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    return f"only {most} files may be open here: torch shares tensors by name (file_system)"


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Call ``state_dict()`` on the objects of a state; the tensors are the live ones."""
    return {
        name: each.state_dict() if hasattr(each, "state_dict") else each
        for name, each in state.items()
    }


def flat(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Collect the tensors of a plain state, by path."""
    if isinstance(state, torch.Tensor):
        yield prefix, state
    elif isinstance(state, dict):
        for key, each in state.items():
            yield from flat(each, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(state, list | tuple):
        for index, each in enumerate(state):
            yield from flat(each, f"{prefix}.{index}")


def copy_into(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Copy loaded tensors over the live ones."""
    found = dict(flat(loaded))
    with torch.no_grad():
        for name, tensor in flat(plain(state)):
            tensor.copy_(found[name])


def sync(folder: Path) -> None:
    """Make the files of a folder durable; quick if they already are."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _at_once() -> None:
    return
