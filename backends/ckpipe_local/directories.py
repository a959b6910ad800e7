"""Directories of the store: made durably, listed, and removed once they are empty.

A directory may be removed at any moment by whoever deletes the last object in it. A writer
therefore makes the directory and creates its temporary file as one step that is tried again when
the directory vanished in between; from then on the temporary file keeps the directory alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from ckpipe.backend import Children, ObjectInfo
from ckpipe.errors import StoreError

TEMPORARY_PREFIX = ".ckpipe-tmp-"
"""How the names of files begin that are not objects yet."""

_ABANDONED_SECONDS = 3600.0
_CREATE_TRIES = 100


def is_temporary(name: str) -> bool:
    """Whether a file name is one of an object that is still being written."""
    return name.startswith(TEMPORARY_PREFIX)


def sync_directory(directory: str) -> None:
    """Makes the entries of a directory durable, where its file system has a way to."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def open_root(root: str) -> list[str]:
    """Makes the root directory with its parents, durably, and proves that it can be written.

    Returns:
        The directories that were made, the outermost first.
    """
    made: list[str] = []
    _check_path(root)
    _make_root(root, made)
    path = temporary_path(root)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    os.unlink(path)
    return made


def remove_unused(made: list[str]) -> None:
    """Removes directories that were made in vain: the innermost ones that are empty."""
    while made:
        try:
            os.rmdir(made.pop())
        except OSError:
            made.clear()


def find_root(root: str) -> list[str]:
    """Proves that the root directory is there and can be listed; makes nothing."""
    _check_path(root)
    with os.scandir(root):
        return []


def _check_path(path: str) -> None:
    """Refuses what no directory can be made at, before any of its parents is.

    Raises:
        StoreError: If a part of the path is a link to nothing.
        OSError: If it is too long, say.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)
        return
    while path != os.path.dirname(path):
        if os.path.islink(path) and not os.path.exists(path):
            raise StoreError(
                f"{path} is a link to {os.readlink(path)}, which is not there",
                hint="Make that directory, or remove the link",
            )
        path = os.path.dirname(path)


def _make_root(directory: str, made: list[str]) -> None:
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    _make_root(parent, made)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
        made.append(directory)
    sync_directory(parent)


def temporary_path(directory: str) -> str:
    """A path in a directory that nobody else uses."""
    return os.path.join(directory, TEMPORARY_PREFIX + secrets.token_hex(8))


def create_temporary(
    directory: str, root: str, durable: set[str], *, lasting: bool = True
) -> tuple[int, str]:
    """Creates a temporary file in a directory below the root, which is made if it is missing.

    Args:
        directory: Where to create it.
        root: Is never made itself: when it is gone, writing on would go to another file system.
        durable: The directories known to be durable in their parents; kept up to date here.
        lasting: Whether the directory has to survive a loss of power.

    Returns:
        A descriptor open for writing, and the path.
    """
    for remaining in reversed(range(_CREATE_TRIES)):
        path = temporary_path(directory)
        try:
            (_make_below if lasting else _make_for_now)(directory, root, durable)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return os.open(path, flags, 0o666), path
        except FileNotFoundError:
            durable.clear()
            if not remaining:
                raise
    raise AssertionError("The last try returned or raised")


def _make_for_now(directory: str, root: str, durable: set[str]) -> None:
    """Makes a directory, durably only right below the root, where others take it for durable."""
    if os.path.dirname(directory) in ("", root) or directory == root:
        return _make_below(directory, root, durable)
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(directory)
        except FileNotFoundError:
            _make_for_now(os.path.dirname(directory), root, durable)
            os.mkdir(directory)
    return None


def _make_below(directory: str, root: str, durable: set[str]) -> None:
    if directory == root or directory in durable:
        return
    parent = os.path.dirname(directory)
    _make_below(parent, root, durable)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
    # One that exists may have been made by a process that has not made it durable yet.
    sync_directory(parent)
    durable.add(directory)


def list_objects(root: str, prefix: str) -> list[ObjectInfo]:
    """All objects below a prefix."""
    found: list[ObjectInfo] = []
    pending = [prefix]
    while pending:
        below = pending.pop()
        for entry in _entries(os.path.join(root, below)):
            if entry.is_dir(follow_symlinks=False):
                pending.append(f"{below}{entry.name}/")
            elif info := _object_info(entry, below):
                found.append(info)
    return found


def list_children(root: str, prefix: str) -> Children:
    """The objects and the prefixes directly below a prefix."""
    objects: list[ObjectInfo] = []
    prefixes: list[str] = []
    for entry in _entries(os.path.join(root, prefix)):
        if entry.is_dir(follow_symlinks=False):
            if _has_objects(entry.path):
                prefixes.append(f"{prefix}{entry.name}/")
        elif info := _object_info(entry, prefix):
            objects.append(info)
    return Children(tuple(objects), tuple(prefixes))


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return [entry for entry in found if not is_temporary(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _has_objects(directory: str) -> bool:
    """Whether there is an object; one that may not be looked into counts as if there were.

    So a directory of somebody else's beside the checkpoints, such as ``lost+found``, is in nobody's
    way.
    """
    try:
        entries = _entries(directory)
    except PermissionError:
        return True
    if any(not entry.is_dir(follow_symlinks=False) for entry in entries):
        return True
    return any(_has_objects(entry.path) for entry in entries)


def _object_info(entry: os.DirEntry[str], prefix: str) -> ObjectInfo | None:
    try:
        found = entry.stat()
    except FileNotFoundError:
        return None
    return object_info(prefix + entry.name, found) if stat.S_ISREG(found.st_mode) else None


def object_info(key: str, found: os.stat_result) -> ObjectInfo:
    """What is known of a file."""
    return ObjectInfo(key, found.st_size, datetime.fromtimestamp(found.st_mtime, UTC))


def delete_files(paths: list[str], root: str, durable: set[str]) -> None:
    """Deletes files below the root, and the directories that are empty then."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(path)
    for directory in {os.path.dirname(path) for path in paths}:
        _prune(directory, root, durable)


def _prune(directory: str, root: str, durable: set[str]) -> None:
    while directory != root and _remove_if_empty(directory):
        durable.discard(directory)
        directory = os.path.dirname(directory)


def _remove_if_empty(directory: str) -> bool:
    """Whether a directory is gone; one that is in use, or must not be removed, stays."""
    try:
        _remove_abandoned(directory)
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove_abandoned(directory: str) -> None:
    """Removes the temporary files of a directory if there is nothing else and all are old.

    A young one may belong to an upload that goes on, in this process or on another machine.
    """
    before = time.time() - _ABANDONED_SECONDS
    with os.scandir(directory) as entries:
        found = list(entries)
    if all(_is_abandoned(entry, before) for entry in found):
        for entry in found:
            os.unlink(entry.path)


def _is_abandoned(entry: os.DirEntry[str], before: float) -> bool:
    return is_temporary(entry.name) and entry.stat(follow_symlinks=False).st_mtime < before


def remove_stale(root: str, prefix: str, before: datetime, durable: set[str]) -> int:
    """Removes the temporary files below a prefix that were last written before a time."""
    removed = 0
    for path in _stale_files(os.path.join(root, prefix), before.timestamp()):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            removed += 1
        _prune(os.path.dirname(path), root, durable)
    return removed


def _stale_files(top: str, before: float) -> Iterator[str]:
    for directory, _, names in os.walk(top):
        for name in filter(is_temporary, names):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path, follow_symlinks=False).st_mtime < before:
                    yield path
