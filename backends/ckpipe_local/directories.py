"""Directories of the store: made durably, listed, and removed once they are empty.

A directory may be removed at any moment by a process that deletes the last object in it. A writer
therefore makes the directory and creates its temporary file as one step that is tried again when
the directory vanished in between; from then on the temporary file keeps the directory alive.

Writes and deletions open one directory after the other, from the root down, each relative to the
one before and without following a link: a link below the root, put there at whatever moment, leads
neither of them elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import accumulate, groupby
from operator import itemgetter

from ckpipe.backend import Children, ObjectInfo
from ckpipe.errors import LinkRefused, StoreError

TEMPORARY_PREFIX = ".ckpipe-tmp-"
"""The beginning of the names of files that are not objects yet."""

_ABANDONED_SECONDS = 3600.0
_CREATE_TRIES = 100
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def is_temporary(name: str) -> bool:
    """Tell whether a file name is one of an object that is still being written."""
    return name.startswith(TEMPORARY_PREFIX)


def sync_directory(directory: str) -> None:
    """Make the entries of a directory durable, where its file system has a way to."""
    descriptor = os.open(directory, _DIRECTORY)
    try:
        sync_entries(descriptor)
    finally:
        os.close(descriptor)


def sync_entries(descriptor: int) -> None:
    """Make the entries of an open directory durable, where its file system has a way to."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def prove_root(root: str) -> bool:
    """Prove that the root directory can be written, or made where it is missing; make nothing.

    Returns:
        Whether it is missing.
    """
    _check_path(root)
    there = root
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    path = os.path.join(there, temporary_name())
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    os.unlink(path)
    return there != root


def find_root(root: str) -> bool:
    """Prove that the root directory is there and can be listed; return that it is not missing."""
    _check_path(root)
    with os.scandir(root):
        return False


def _check_path(path: str) -> None:
    """Refuse a path that no directory can be made at, before any of its parents is made.

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


def make_root(root: str) -> None:
    """Make the root directory with its parents, durably."""
    if os.path.isdir(root):
        return
    parent = os.path.dirname(root)
    make_root(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(root)
    sync_directory(parent)


def temporary_name() -> str:
    """Make a name of a temporary file that no other writer uses."""
    return TEMPORARY_PREFIX + secrets.token_hex(8)


@contextlib.contextmanager
def directories(
    root: str, below: str, durable: set[str] | None = None, *, lasting: bool = True
) -> Iterator[list[int]]:
    """Open the root and each directory on the way to one below it, and close them at the end.

    Args:
        root: The root, which may be a link, and is never made here: when it is gone, writing on
            would go to another file system.
        below: The directory, relative to the root; empty for the root itself.
        durable: The directories known to be durable in their parents, kept up to date here. Those
            that are missing are made if it is given.
        lasting: Whether directories that are made have to survive a loss of power. One right below
            the root always does, since others take it for durable.

    Yields:
        Their descriptors, the root's first.

    Raises:
        LinkRefused: If one of them is a link.
        FileNotFoundError: If one is missing and not to be made, or vanished again.
    """
    opened = [os.open(root, _DIRECTORY)]
    path = ""
    try:
        for part in below.split("/") if below else ():
            path = f"{path}/{part}" if path else part
            try:
                opened.append(_enter(opened[-1], part, root, path))
            except FileNotFoundError:
                if durable is None:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=opened[-1])
                opened.append(_enter(opened[-1], part, root, path))
            if durable is not None and path not in durable and (lasting or path == part):
                # One that exists may have been made by a process that has not made it durable yet.
                sync_entries(opened[-2])
                durable.add(path)
        yield opened
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _enter(parent: int, name: str, root: str, path: str) -> int:
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise _refused(root, path) from None
        raise


def _refused(root: str, path: str) -> LinkRefused:
    full = os.path.join(root, path)
    try:
        target = os.readlink(full)
    except OSError:
        target = "another place"
    return LinkRefused(
        f"{full} is a link to {target}, and nothing is written or deleted through a link",
        hint="Put the directory itself there, or make a link of the whole root",
    )


@contextlib.contextmanager
def new_file(
    root: str, below: str, durable: set[str], *, lasting: bool = True
) -> Iterator[tuple[int, int, str]]:
    """Create a temporary file in a directory below the root, which is made if it is missing.

    Args:
        root: The root.
        below: The directory, relative to the root.
        durable: As for :func:`directories`.
        lasting: As for :func:`directories`.

    Yields:
        A descriptor of the directory, which is closed at the end; one of the file, open for
        writing, which is the caller's to close; and the name of the file.
    """
    name = temporary_name()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        for remaining in reversed(range(_CREATE_TRIES)):
            try:
                opened = stack.enter_context(directories(root, below, durable, lasting=lasting))
                descriptor = os.open(name, flags, 0o666, dir_fd=opened[-1])
                break
            except FileNotFoundError:
                stack.close()
                durable.clear()
                if not remaining:
                    raise
        yield opened[-1], descriptor, name


def list_objects(root: str, prefix: str) -> list[ObjectInfo]:
    """List all objects below a prefix, and links that lead to none, which keep a directory in use.

    Raises:
        LinkRefused: If a directory on the way to the prefix is a link: a caller that lists all
            objects may be about to delete them.
    """
    _refuse_links(root, prefix)
    found: list[ObjectInfo] = []
    pending = [prefix]
    while pending:
        below = pending.pop()
        for entry in _entries(os.path.join(root, below)):
            if entry.is_dir(follow_symlinks=False):
                pending.append(f"{below}{entry.name}/")
            elif info := _object_info(entry, below) or _link_info(entry, below):
                found.append(info)
    return found


def _refuse_links(root: str, prefix: str) -> None:
    for below in accumulate(prefix.split("/")[:-1], "{}/{}".format):
        if os.path.islink(os.path.join(root, below)):
            raise _refused(root, below)


def _link_info(entry: os.DirEntry[str], prefix: str) -> ObjectInfo | None:
    if not entry.is_symlink():
        return None
    try:
        return object_info(prefix + entry.name, entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return None


def list_children(root: str, prefix: str) -> Children:
    """List the objects and the prefixes directly below a prefix."""
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
    """Tell whether there is an object; a directory that may not be read counts as if there were.

    So another user's directory beside the checkpoints, such as ``lost+found``, does no harm.
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
    """Describe a file as an object."""
    return ObjectInfo(key, found.st_size, datetime.fromtimestamp(found.st_mtime, UTC))


def delete_files(keys: Iterable[str], root: str, durable: set[str]) -> None:
    """Delete files below the root, and the directories that are empty then.

    Raises:
        LinkRefused: If a directory on the way to one is a link; some of the others may be gone.
    """
    for below, names in groupby(sorted(map(os.path.split, keys)), itemgetter(0)):
        missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with missing, directories(root, below) as opened:
            for _, name in names:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=opened[-1])
            _prune(opened, below, durable)


def _prune(opened: list[int], below: str, durable: set[str]) -> None:
    """Remove a directory and those that it is in, as long as there is nothing else in them."""
    for parent, directory in zip(opened[-2::-1], opened[:0:-1], strict=True):
        if not _remove_if_empty(parent, directory, os.path.basename(below)):
            break
        durable.discard(below)
        below = os.path.dirname(below)


def _remove_if_empty(parent: int, directory: int, name: str) -> bool:
    """Try to remove a directory; False for one that is in use, or must not be removed."""
    try:
        _remove_abandoned(directory)
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove_abandoned(directory: int) -> None:
    """Remove the temporary files of a directory if there is nothing else and all are old.

    A young one may belong to an upload that goes on, in this process or on another machine.
    """
    before = time.time() - _ABANDONED_SECONDS
    with os.scandir(directory) as entries:
        found = list(entries)
    if all(_is_abandoned(entry, before) for entry in found):
        for entry in found:
            os.unlink(entry.name, dir_fd=directory)


def _is_abandoned(entry: os.DirEntry[str], before: float) -> bool:
    return is_temporary(entry.name) and entry.stat(follow_symlinks=False).st_mtime < before


def remove_stale(root: str, prefix: str, before: datetime, durable: set[str]) -> int:
    """Remove the temporary files below a prefix that were last written before a time.

    Raises:
        LinkRefused: If a directory on the way to one is a link.
    """
    _refuse_links(root, prefix)
    stale = list(_stale_files(root, prefix, before.timestamp()))
    delete_files(stale, root, durable)
    return len(stale)


def _stale_files(root: str, prefix: str, before: float) -> Iterator[str]:
    for directory, _, names in os.walk(os.path.join(root, prefix)):
        for name in filter(is_temporary, names):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path, follow_symlinks=False).st_mtime < before:
                    yield os.path.relpath(path, root)
