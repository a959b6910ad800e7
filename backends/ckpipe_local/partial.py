"""Files that have no name yet: written under a temporary one, then published in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Sequence

from ckpipe.backend import PutMode
from ckpipe.errors import StoreError
from ckpipe_local.direct_io import (
    aligned_part,
    open_direct,
    side_by_side,
    write_all,
    write_direct,
)
from ckpipe_local.directories import create_temporary, delete_files, sync_directory
from ckpipe_local.failures import unrepeatable
from ckpipe_local.system_calls import preallocate


class PartialFile:
    """A temporary file of fixed size that several threads write at once.

    It is open twice: one descriptor goes through the page cache, the other, where the file
    system has it, past it. Neither is closed while a thread writes through it, because its
    number may be given to another file at once.
    """

    def __init__(
        self, buffered: int, temporary: str, final: str, root: str, durable: set[str]
    ) -> None:
        self.temporary = temporary
        self.final = final
        self._root, self._durable = root, durable
        self._buffered = buffered
        self._direct: int | None = None
        self._refused = False
        self._synced: bool | None = None
        self._state = threading.Condition()
        self._writers = 0
        self._closed = False

    def prepare(self, size: int, *, direct: bool) -> None:
        """Reserves the space, and finds out whether the page cache can be passed by."""
        preallocate(self._buffered, size)
        if direct:
            self._direct = open_direct(self.temporary)

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

    def publish(self, mode: PutMode) -> None:
        """Makes the data durable, then the name, and closes the file."""
        self._sync()
        self.close()
        if mode is PutMode.CREATE:
            link_new(self.temporary, self.final)
            os.unlink(self.temporary)
        else:
            os.rename(self.temporary, self.final)
        self._sync_name(mode)

    def _sync(self) -> None:
        """Makes the data durable, once, for the kernel reports a loss only once.

        After a failed sync it counts the lost pages as written, and another sync would succeed.
        """
        if self._synced is None:
            self._synced = False
            with unrepeatable(f"make {self.final} durable"):
                os.fsync(self._buffered)
            self._synced = True
        elif not self._synced:
            raise StoreError(f"Parts of {self.final} were lost on their way to the disk")

    def _sync_name(self, mode: PutMode) -> None:
        """Makes the name durable, or takes a new one back: what is listed has to stay."""
        try:
            sync_directory(os.path.dirname(self.final))
        except OSError:
            if mode is PutMode.CREATE:
                with contextlib.suppress(OSError):
                    os.rename(self.final, self.temporary)
            raise

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
        delete_files([self.temporary], self._root, self._durable)


def link_new(temporary: str, final: str) -> None:
    """Gives a file a second name that nothing has yet; one of any number of racers wins."""
    try:
        os.link(temporary, final)
    except FileExistsError as error:
        if os.path.isdir(final):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        message = f"The file system of {final} has no hard links, which create-only writes need"
        raise StoreError(message, hint="Use another file system") from error


def put_object(path: str, root: str, durable: set[str], data: bytes, mode: PutMode) -> None:
    """Writes a small object at once."""
    descriptor, temporary = create_temporary(os.path.dirname(path), root, durable)
    file = PartialFile(descriptor, temporary, path, root, durable)
    try:
        file.write([(0, memoryview(data))])
        file.publish(mode)
    except BaseException:
        file.discard()
        raise


def put_volatile_object(path: str, root: str, durable: set[str], data: bytes) -> None:
    """Creates a small object at once that need not survive a loss of power.

    It takes as few system calls as it can, each of which may lose the interpreter for a while.
    """
    directory = os.path.dirname(path)
    descriptor, temporary = create_temporary(directory, root, durable, lasting=False)
    try:
        try:
            write_all(descriptor, memoryview(data), 0)
        finally:
            os.close(descriptor)
        link_new(temporary, path)
    except BaseException:
        delete_files([temporary], root, durable)
        raise
    os.unlink(temporary)


def begin_file(path: str, root: str, durable: set[str], size: int, direct: bool) -> PartialFile:
    """Creates a large object's temporary file, with its space reserved."""
    descriptor, temporary = create_temporary(os.path.dirname(path), root, durable)
    file = PartialFile(descriptor, temporary, path, root, durable)
    try:
        file.prepare(size, direct=direct)
    except BaseException:
        file.discard()
        raise
    return file
