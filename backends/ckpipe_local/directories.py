"""Directories of the store: made durably, listed, and removed once they are empty.

A process that deletes the last object in a directory may remove the directory at any moment. So a
writer makes the directory and creates its temporary file in one step, and repeats the step if the
directory vanished in between. From then on the temporary file keeps the directory alive.

Writes and deletions open one directory after the other, from the root down, each relative to the
one before and without following a link. So a link below the root, created at any moment, diverts
neither of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TypeVar

from ckpipe.backend import Children, ObjectInfo
from ckpipe.errors import LinkRefused, LinkUnavailable, ObjectNotFound, StoreError
from ckpipe_local.naming import add_name, create_name, sync_entries

T = TypeVar("T")

TEMPORARY_PREFIX = ".ckpipe-tmp-"
"""The beginning of the names of files that are not objects yet."""

# NFS, FUSE and SMB give such a name to a file that is deleted while it is open, until it is closed.
_DELETED = re.compile(
    r"\.(?:nfs|smb)[0-9a-f]{24}|\.fuse_hidden[0-9a-f]{16,24}|\.__smb[0-9A-F]{4}", re.ASCII
)

_ABANDONED_SECONDS = 3600.0
_CREATE_TRIES = 100
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def is_temporary(name: str) -> bool:
    """Tell whether a file name belongs to an object that is still being written."""
    return name.startswith(TEMPORARY_PREFIX)


def is_hidden(name: str) -> bool:
    """Tell whether a file name belongs to no object: it is being written, or was deleted."""
    return is_temporary(name) or _DELETED.fullmatch(name) is not None


def _refuse_foreign_file(path: str) -> None:
    """Refuse a file of another program, and name the function that reads it.

    Raises:
        StoreError: If it is such a file.
    """
    head = b""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):  # opening a pipe would wait for its writer
            with open(path, "rb") as file:
                head = file.read(1024)
    reader = None
    if head.startswith(b"PK\x03\x04") and b"/data.pkl" in head:
        reader = "torch.load"
    elif head and path.endswith(".safetensors"):
        reader = "safetensors.torch.load_file"
    if reader is not None:
        raise StoreError(
            f"{path} is no directory of checkpoints but a file that {reader} reads",
            hint="Name the directory of a pipeline; ckpipe.load opens such a file, and source= of "
            "a pipeline's load",
        )


def _check_path(path: str) -> None:
    """Refuse a path that cannot become a directory, before any of its parents is made.

    Raises:
        StoreError: If a component of the path is a dangling link.
        OSError: For example, if it is too long.
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


def _make_durably(path: str) -> None:
    """Make a directory with its parents, durably."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_durably(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    descriptor = os.open(parent, _DIRECTORY)
    try:
        sync_entries(descriptor)
    finally:
        _close(descriptor)


def _close(directory: int) -> None:
    """Close a directory: an error leaves nothing open, and tells of nothing that was written."""
    with contextlib.suppress(OSError):
        os.close(directory)


def temporary_name() -> str:
    """Make a name of a temporary file that no other writer uses."""
    return TEMPORARY_PREFIX + secrets.token_hex(8)


class Root:
    """The root directory of a store, with the set of directories known to be durable.

    Its methods block.

    Args:
        path: Its absolute path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._durable: set[str] = set()
        self._missing = False

    def prove(self, create: bool) -> None:
        """Prove that it can be listed, or written, or made if it is missing; make nothing.

        Raises:
            OSError: If it cannot; EOPNOTSUPP if its file system creates no file without replacing
                one of that name.
            StoreError: If its path names a link to nothing, or a file of another program.
        """
        _check_path(self.path)
        if not create:
            _refuse_foreign_file(self.path)
            os.scandir(self.path).close()
            return
        there = self.path
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        names = temporary_name(), temporary_name()
        directory = os.open(there, _DIRECTORY)
        with contextlib.ExitStack() as stack:
            stack.callback(_close, directory)
            for name in names:
                stack.callback(_unlink, directory, name)
            os.close(os.open(names[0], _NEW_FILE, 0o666, dir_fd=directory))
            create_name(directory, *names)
        self._missing = there != self.path

    @contextlib.contextmanager
    def directories(
        self, below: str, *, make: bool = False, lasting: bool = True
    ) -> Iterator[list[int]]:
        """Open the root and each directory on the way to one below it, and close them at the end.

        The root itself may be a link. It is never made here: if it is gone, further writes would go
        to another file system.

        Args:
            below: The directory, relative to the root; empty for the root itself.
            make: Whether to make missing directories.
            lasting: Whether new directories have to survive a power loss. One directly below the
                root always does, since other calls take it for durable.

        Yields:
            Their descriptors, the root's first.

        Raises:
            LinkRefused: If one of them is a link.
            FileNotFoundError: If one is missing and must not be made, or vanished again.
        """
        opened = [os.open(self.path, _DIRECTORY)]
        path = ""
        try:
            for part in below.split("/") if below else ():
                path = f"{path}/{part}" if path else part
                try:
                    opened.append(self._enter(opened[-1], part, path))
                except FileNotFoundError:
                    if not make:
                        raise
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=opened[-1])
                    opened.append(self._enter(opened[-1], part, path))
                if make and path not in self._durable and (lasting or path == part):
                    # Another process may have made it and not synced it yet.
                    sync_entries(opened[-2])
                    self._durable.add(path)
            yield opened
        finally:
            for descriptor in opened:
                _close(descriptor)

    def _enter(self, parent: int, name: str, path: str) -> int:
        try:
            return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise self._refused(path) from None
            raise

    def _refused(self, path: str) -> LinkRefused:
        full = os.path.join(self.path, path)
        try:
            target = os.readlink(full)
        except OSError:
            target = "another place"
        return LinkRefused(
            f"{full} is a link to {target}; ckpipe writes and deletes nothing through a link",
            hint="Put the directory itself there, or make the whole root a link",
        )

    @contextlib.contextmanager
    def new_file(self, below: str, *, lasting: bool = True) -> Iterator[tuple[int, int, str]]:
        """Create a temporary file in a directory below the root; make a missing directory.

        A root that was missing at open is made too; a root that vanished later is not.

        Args:
            below: The directory, relative to the root.
            lasting: As for :meth:`directories`.

        Yields:
            A descriptor of the directory, which is closed at the end; one of the file, open for
            writing, which the caller closes; and the name of the file.
        """
        name = temporary_name()
        if self._missing:
            _make_durably(self.path)
            self._missing = False

        def create(directory: int) -> int:
            return os.open(name, _NEW_FILE, 0o666, dir_fd=directory)

        with self._made(below, create, lasting=lasting) as (directory, descriptor):
            yield directory, descriptor, name

    @contextlib.contextmanager
    def _made(
        self, below: str, make: Callable[[int], T], *, lasting: bool
    ) -> Iterator[tuple[int, T]]:
        """Open a directory, which is made if it is missing, and make a name in it, in one step."""
        with contextlib.ExitStack() as stack:
            for remaining in reversed(range(_CREATE_TRIES)):
                try:
                    opened = stack.enter_context(
                        self.directories(below, make=True, lasting=lasting)
                    )
                    made = make(opened[-1])
                    break
                except FileNotFoundError:
                    stack.close()
                    self._durable.clear()
                    if not remaining:
                        raise
            yield opened[-1], made

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, durably, in a directory that is made if it is missing.

        Raises:
            ObjectNotFound: If there is no such file.
            LinkUnavailable: If it is a link, or behind one.
            FileExistsError: If another file has the name.
            OSError: If the system refuses it; a new name is gone then.
        """
        (above, old), (below, name) = os.path.split(source), os.path.split(target)
        path = os.path.join(self.path, source)
        missing = ObjectNotFound(f"There is no file {path}", key=source)

        def make(directory: int) -> None:
            try:
                found = os.stat(old, dir_fd=opened[-1], follow_symlinks=False)
            except FileNotFoundError as error:
                raise missing from error
            if stat.S_ISLNK(found.st_mode):
                raise LinkUnavailable(f"{path} is a symbolic link", key=target)
            if not stat.S_ISREG(found.st_mode):
                raise missing
            add_name(opened[-1], old, directory, name)

        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(self.directories(above))
            except LinkRefused as error:
                raise LinkUnavailable(error.message, key=target) from error
            except (FileNotFoundError, NotADirectoryError) as error:
                raise missing from error
            try:
                stack.enter_context(self._made(below, make, lasting=True))
            except BaseException:
                with contextlib.suppress(OSError, LinkRefused):
                    self.delete([os.path.join(below, temporary_name())])  # an empty directory goes
                raise

    def objects(self, prefix: str) -> list[ObjectInfo]:
        """List all objects below a prefix, and dangling links, which keep a directory in use.

        A file of a checkpoint that has several names counts as written when the last name was given
        in its directory, at the latest: a sweep takes what is old for the remains of a launch.

        Raises:
            LinkRefused: If a directory on the way to the prefix is a link: a caller that lists all
                objects may delete them next.
        """
        self._refuse_links(prefix)
        found: list[ObjectInfo] = []
        pending = [prefix]
        while pending:
            below, named = pending.pop(), 0.0
            if below.startswith("step-"):
                with contextlib.suppress(FileNotFoundError):
                    named = os.stat(os.path.join(self.path, below)).st_mtime
            for entry in _entries(os.path.join(self.path, below)):
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{below}{entry.name}/")
                elif info := _object_info(entry, below, links=True, named=named):
                    found.append(info)
        return found

    def _refuse_links(self, prefix: str) -> None:
        for below in accumulate(prefix.split("/")[:-1], "{}/{}".format):
            if os.path.islink(os.path.join(self.path, below)):
                raise self._refused(below)

    def children(self, prefix: str) -> Children:
        """List the objects and the prefixes directly below a prefix."""
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        for entry in _entries(os.path.join(self.path, prefix)):
            if entry.is_dir(follow_symlinks=False):
                if _has_objects(entry.path):
                    prefixes.append(f"{prefix}{entry.name}/")
            elif info := _object_info(entry, prefix):
                objects.append(info)
        return Children(tuple(objects), tuple(prefixes))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files below the root, and the directories that are empty then.

        Raises:
            LinkRefused: If a directory on the way to one is a link; other files may already be
                deleted.
        """
        for below, names in groupby(sorted(map(os.path.split, keys)), itemgetter(0)):
            missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
            with missing, self.directories(below) as opened:
                for _, name in names:
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(name, dir_fd=opened[-1])
                self._prune(opened, below)

    def _prune(self, opened: list[int], below: str) -> None:
        """Remove a directory and its parents, up to the first that is not empty."""
        for parent, directory in zip(opened[-2::-1], opened[:0:-1], strict=True):
            try:
                _remove_abandoned(directory)
                os.rmdir(os.path.basename(below), dir_fd=parent)
            except FileNotFoundError:
                pass
            except OSError:  # it is in use, or may not be removed
                break
            self._durable.discard(below)
            below = os.path.dirname(below)

    def remove_stale(self, prefix: str, before: datetime) -> int:
        """Remove the temporary files below a prefix that were last written before a time.

        Raises:
            LinkRefused: If a directory on the way to one is a link.
        """
        self._refuse_links(prefix)
        stale: list[str] = []
        for directory, _, names in os.walk(os.path.join(self.path, prefix)):
            for name in filter(is_temporary, names):
                path = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(path, follow_symlinks=False).st_mtime < before.timestamp():
                        stale.append(os.path.relpath(path, self.path))
        self.delete(stale)
        return len(stale)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return [entry for entry in found if not is_hidden(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _has_objects(directory: str) -> bool:
    """Tell whether there is an object; assume one in a directory that may not be read.

    So another user's directory beside the checkpoints, such as ``lost+found``, does no harm.
    """
    try:
        entries = _entries(directory)
    except PermissionError:
        return True
    if any(not entry.is_dir(follow_symlinks=False) for entry in entries):
        return True
    return any(_has_objects(entry.path) for entry in entries)


def _object_info(
    entry: os.DirEntry[str], prefix: str, *, links: bool = False, named: float = 0.0
) -> ObjectInfo | None:
    """Describe an entry; None if it is no object.

    Args:
        entry: The entry.
        prefix: The prefix of its key.
        links: True if any symbolic link counts as an object.
        named: The least time of a file with several names.
    """
    with contextlib.suppress(FileNotFoundError):
        found = entry.stat()
        if stat.S_ISREG(found.st_mode):
            return object_info(prefix + entry.name, found, named if found.st_nlink > 1 else 0.0)
    with contextlib.suppress(FileNotFoundError):
        if links and entry.is_symlink():
            return object_info(prefix + entry.name, entry.stat(follow_symlinks=False))
    return None


def object_info(key: str, found: os.stat_result, least: float = 0.0) -> ObjectInfo:
    """Describe a file as an object that was written at a time or later."""
    time = max(found.st_mtime, least)
    return ObjectInfo(key, found.st_size, datetime.fromtimestamp(time, UTC))


def _remove_abandoned(directory: int) -> None:
    """Remove the temporary files of a directory if it has no other entries and all are old.

    A young file may belong to a running upload, in this process or on another machine.
    """
    before = time.time() - _ABANDONED_SECONDS
    with os.scandir(directory) as entries:
        found = [entry for entry in entries if not _DELETED.fullmatch(entry.name)]
    if all(
        is_temporary(entry.name) and entry.stat(follow_symlinks=False).st_mtime < before
        for entry in found
    ):
        for entry in found:
            _unlink(directory, entry.name)


def _unlink(directory: int, name: str) -> None:
    """Remove a file, unless it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
