"""Files that have no name yet: written under a temporary one, then published in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Sequence

from ckpipe.backend import PutMode
from ckpipe.errors import LinkRefused, StoreError
from ckpipe_local.direct_io import (
    aligned_part,
    open_direct,
    side_by_side,
    write_all,
    write_direct,
)
from ckpipe_local.directories import delete_files, directories, new_file, sync_entries
from ckpipe_local.failures import needing, unrepeatable
from ckpipe_local.system_calls import preallocate


class PartialFile:
    """A temporary file of fixed size that several threads write at once.

    It is open twice: one descriptor goes through the page cache, the other, where the file
    system has it, past it. Neither is closed while a thread writes through it, because its
    number may be given to another file at once.
    """

    def __init__(
        self, buffered: int, directory: str, names: tuple[str, str], root: str, durable: set[str]
    ) -> None:
        self._temporary, self._name = names
        self._directory = directory
        self._root, self._durable = root, durable
        self._buffered = buffered
        self._direct: int | None = None
        self._refused = False
        self._synced: bool | None = None
        self._state = threading.Condition()
        self._writers = 0
        self._closed = False

    def prepare(self, size: int, directory: int, *, direct: bool) -> None:
        """Reserves the space, and finds out whether the page cache can be passed by."""
        preallocate(self._buffered, size)
        if direct:
            self._direct = open_direct(self._temporary, directory)

    def write(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Writes ranges; several threads may do so at once."""
        with self._state:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._writers += 1
        try:
            self._write(ranges)
        finally:
            with self._state:
                self._writers -= 1
                self._state.notify_all()

    def _write(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        direct = None if self._refused else self._direct
        middles: list[tuple[int, memoryview]] = []
        for offset, data in ranges:
            start, stop = (0, 0) if direct is None else aligned_part(data, offset)
            write_all(self._buffered, data[:start], offset)
            write_all(self._buffered, data[stop:], offset + stop)
            if start < stop:
                middles.append((offset + start, data[start:stop]))
        for offset, pieces in side_by_side(middles):
            assert direct is not None
            done = write_direct(direct, pieces, offset)
            for piece in pieces:
                if done < len(piece):
                    self._refused = True
                    write_all(self._buffered, piece[done:], offset + done)
                offset += len(piece)
                done = max(0, done - len(piece))

    def publish(self) -> None:
        """Makes the data durable, then the name, and closes the file."""
        self._sync()
        self.close()
        with directories(self._root, self._directory) as opened:
            give_name(opened[-1], self._temporary, self._name, PutMode.CREATE)

    @property
    def _path(self) -> str:
        return os.path.join(self._root, self._directory, self._name)

    def _sync(self) -> None:
        """Makes the data durable, once, for the kernel reports a loss only once.

        After a failed sync it counts the lost pages as written, and another sync would succeed.
        """
        if self._synced is None:
            self._synced = False
            with unrepeatable(f"make {self._path} durable"):
                os.fsync(self._buffered)
            self._synced = True
        elif not self._synced:
            raise StoreError(f"Parts of {self._path} were lost on their way to the disk")

    def close(self) -> None:
        """Closes both descriptors once no thread writes through them."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: not self._writers)
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def discard(self) -> None:
        """Closes and removes the file, and directories that are empty then.

        The published object, if there is one, stays.
        """
        self.close()
        remove_temporary(self._directory, self._temporary, self._root, self._durable)


def remove_temporary(directory: str, name: str, root: str, durable: set[str]) -> None:
    """Removes a temporary file, unless a link has taken the place of its directory since."""
    with contextlib.suppress(LinkRefused):
        delete_files([os.path.join(directory, name)], root, durable)


def give_name(
    directory: int, temporary: str, name: str, mode: PutMode, *, lasting: bool = True
) -> None:
    """Gives a temporary file its name; of any number that create one, exactly one wins.

    The name is durable then, or taken back if it was new: what is listed has to stay.

    Args:
        directory: A descriptor of the directory that it is in.
        temporary: Its name until now.
        name: Its name from now on.
        mode: Whether another file may have the name already, which goes then.
        lasting: Whether the name has to survive a loss of power.
    """
    if mode is PutMode.CREATE:
        _link_new(directory, temporary, name)
        os.unlink(temporary, dir_fd=directory)
    else:
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    if not lasting:
        return
    try:
        sync_entries(directory)
    except OSError:
        if mode is PutMode.CREATE:
            with contextlib.suppress(OSError):
                os.rename(name, temporary, src_dir_fd=directory, dst_dir_fd=directory)
        raise


def _link_new(directory: int, temporary: str, name: str) -> None:
    try:
        os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except FileExistsError as error:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        message = "The file system has no hard links, which create-only writes need"
        raise StoreError(message, hint="Use another file system") from error


def put_object(
    key: str, root: str, durable: set[str], data: bytes, mode: PutMode, lasting: bool = True
) -> None:
    """Writes a small object at once.

    It takes as few system calls as it can, each of which may lose the GIL for a while.

    Args:
        key: The object's key.
        root: The root.
        durable: The directories known to be durable in their parents; kept up to date here.
        data: The object.
        mode: Whether an object of this key may be there already.
        lasting: Whether it has to survive a loss of power.
    """
    below, name = os.path.split(key)
    with (
        needing(len(data), root),
        new_file(root, below, durable, lasting=lasting) as (directory, descriptor, temporary),
    ):
        try:
            try:
                write_all(descriptor, memoryview(data), 0)
                if lasting:
                    with unrepeatable(f"make {os.path.join(root, key)} durable"):
                        os.fsync(descriptor)
            finally:
                os.close(descriptor)
            give_name(directory, temporary, name, mode, lasting=lasting)
        except BaseException:
            remove_temporary(below, temporary, root, durable)
            raise


def begin_file(key: str, root: str, durable: set[str], size: int, direct: bool) -> PartialFile:
    """Creates a large object's temporary file, with its space reserved."""
    below, name = os.path.split(key)
    with (
        needing(size, root),
        new_file(root, below, durable) as (directory, descriptor, temporary),
    ):
        file = PartialFile(descriptor, below, (temporary, name), root, durable)
        try:
            file.prepare(size, directory, direct=direct)
        except BaseException:
            file.discard()
            raise
    return file
