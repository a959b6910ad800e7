"""Pointers: small files and folders under a trainer's own names for checkpoints.

Trainers and their tools look for ``checkpoint-500`` or ``last.ckpt``. A pointer has such a name and
holds the id of a checkpoint, not its data. It is written by a rename, so a tool never sees half of
it, and once the checkpoint is complete, or before that with a mark. A resume does not look for the
newest pointer but calls :meth:`ckpipe.Pipeline.choose`: a pointer may be missing, or be there
without its checkpoint.

A pointer is a JSON object: ``format`` is ``"ckpipe-pointer"``, ``version`` 1, ``id``, ``step`` and
``line`` are those of the checkpoint, and ``root`` is the root of the checkpoints, as a URL or as a
path relative to the folder of the pointer, so that both may move together. The mark of a save under
way are ``before``, the ids that the name had before, and ``writer``, the host and process.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpipe.types import CheckpointInfo

logger = logging.getLogger("ckpipe")

_WEIGHTS = ("*model*.safetensors", "*model*.bin", "optimizer.*", "*/*.distcp")
_STATES = ("trainer_state.json", "random_states_*.pkl")
_PARTS = ("*/*.safetensors", "*/*.bin", "*/*.pt", "*/*.pth")  # weights if there is a state too

_MOST_BYTES = 64 << 10

POINTER_FILE = "ckpipe.json"
"""The name of the pointer in a folder that :func:`write_pointer_folder` makes."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """The content of a pointer.

    Args:
        root: The root of the checkpoints: a URL, or an absolute path.
        id: The id of the checkpoint; accepted wherever a step is.
        step: Its step.
        line: Its line of launches; empty if it is unknown.
        before: The ids that the name had before, the newest first, while its save is under way or
            if that was killed; None once it is complete.
        writer: The process that saves, as :func:`this_process` returns it.
    """

    root: str
    id: str
    step: int
    line: str = field(default="", compare=False)
    before: tuple[str, ...] | None = None
    writer: str = ""


def this_process() -> str:
    """Return the host and number of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def may_run(process: str) -> bool | None:
    """Tell whether another process seems to run; None if it is of another host."""
    host, _, number = process.rpartition(":")
    if host != socket.gethostname() or not number.isdecimal():
        return None
    with suppress(PermissionError):
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return False
    return int(number) != os.getpid()  # which knows its own saves


def write_pointer(file: str | os.PathLike[str], root: str, info: CheckpointInfo | Pointer) -> None:
    """Write a pointer file, in place of an earlier one; a reader sees the old or the new one.

    Args:
        file: Its path. The folder is made.
        root: The root of the checkpoints, without credentials, such as ``pipeline.url``.
        info: The checkpoint, such as that of the event ``Completed``; or a pointer whose save is
            under way.

    Raises:
        OSError: If the file cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(file))
    if "://" not in root:
        root = os.path.relpath(os.path.abspath(os.path.expanduser(root)), folder)
    content: dict[str, object] = {"format": "ckpipe-pointer", "version": 1, "root": root}
    os.makedirs(folder, exist_ok=True)
    made = os.path.join(folder, f".{uuid.uuid4().hex}")
    try:
        content |= {"id": info.id, "step": info.step, "line": info.line or ""}
        if isinstance(info, Pointer) and info.before is not None:
            content |= {"before": info.before, "writer": info.writer}
        Path(made).write_text(json.dumps(content) + "\n")
        os.replace(made, file)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(made)


def write_pointer_folder(
    folder: str | os.PathLike[str], root: str, info: CheckpointInfo, files: Mapping[str, str]
) -> None:
    """Make a folder with a pointer and other small files, which appears with all of them.

    In a folder that exists, each file is replaced by itself, the pointer last; see also
    :func:`set_aside`.

    Args:
        folder: Its path.
        root: As for :func:`write_pointer`.
        info: The checkpoint.
        files: The texts of other files, by name.

    Raises:
        OSError: If a file cannot be written.
    """
    folder = Path(folder)
    made = folder.with_name(f".{uuid.uuid4().hex}")
    made.mkdir(parents=True)
    try:
        for name, text in files.items():
            (made / name).write_text(text, encoding="utf-8")
        write_pointer(made / POINTER_FILE, root, info)
        try:
            made.rename(folder)
        except OSError:  # it is there, and not empty
            for name in (*files, POINTER_FILE):
                os.replace(made / name, folder / name)
            made.rmdir()
    except BaseException:
        for each in (made / name for name in (*files, POINTER_FILE)):
            each.unlink(missing_ok=True)
        with suppress(OSError):
            made.rmdir()
        raise


def set_aside(folder: str | os.PathLike[str]) -> Path | None:
    """Rename a trainer's checkpoint without a pointer, and warn; otherwise do nothing.

    Call it before a save whose pointer will take this name, on one process: beside the pointer,
    other tools would load the weights of another run. ``checkpoint-4`` becomes
    ``before-ckpipe.checkpoint-4``, or ``before-ckpipe.checkpoint-4.2`` if that is there. A folder
    that the process works in, or that holds a root of checkpoints, is never renamed, only warned
    of.

    Args:
        folder: The path that the pointer will have.

    Returns:
        The new path; None if nothing was renamed.

    Raises:
        OSError: If the folder cannot be read or renamed.
    """
    folder = Path(os.path.abspath(folder))
    found = [any(any(folder.glob(each)) for each in kind) for kind in (_WEIGHTS, _STATES, _PARTS)]
    if not (found[0] or (found[1] and found[2])) or read_pointer(folder) is not None:
        return None
    if Path.cwd().is_relative_to(folder) or any(folder.rglob(".ckpipe")):
        logger.warning("%s has weights that ckpipe did not save, beside its pointer", folder)
        return None
    number, other = 1, folder.with_name(f"before-ckpipe.{folder.name}")
    while other.exists():
        number += 1
        other = folder.with_name(f"before-ckpipe.{folder.name}.{number}")
    folder.rename(other)
    logger.warning("%s has weights that ckpipe did not save: it is now called %s", folder, other)
    return other


def read_pointer(path: str | os.PathLike[str]) -> Pointer | None:
    """Read a pointer file, or the pointer in a folder; None if there is none.

    Raises:
        OSError: If it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = file / POINTER_FILE
    try:
        if file.stat().st_size > _MOST_BYTES:  # a trainer's own checkpoint
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != "ckpipe-pointer" or found["version"] != 1:
            return None
        root, id, step = str(found["root"]), str(found["id"]), int(found["step"])
        line, writer = str(found.get("line", "")), str(found.get("writer", ""))
        before = tuple(map(str, found["before"])) if "before" in found else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if "://" not in root:
        root = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(file)), root))
    return Pointer(root, id, step, line, before, writer)
