"""Give a whole file its name, so that exactly one of several racing creators wins.

``link`` does this: it fails if the name is taken. File systems without hard links (SMB, exFAT, FAT,
many FUSE file systems) have it in another form, ``renameat2`` with ``RENAME_NOREPLACE``. Both give
a name only to a file that is whole. Others have neither, and cannot be a store.

A network file system may lose the answer to a call. It then sends the call again, and the server
answers that the name exists (``link``) or that the file is gone (``unlink``, ``rename``), although
the first call took effect. The inode tells: the temporary name is random, so no other process
names its file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat

from ckpipe.backend import PutMode
from ckpipe_local.failures import NO_LINKS, NOT_SUPPORTED, error_text

_libc = ctypes.CDLL(None, use_errno=True)
_RENAME_NOREPLACE = 1


def sync_entries(directory: int) -> None:
    """Make the entries of an open directory durable, if its file system can."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED | {errno.EINVAL}:
            raise


def sync_file(descriptor: int) -> None:
    """Make the bytes of an open file durable.

    Raises:
        OSError: If they may be lost; EOPNOTSUPP if the file system makes no file durable.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED | {errno.EINVAL}:
            raise
        message = f"the file system makes no file durable (fsync: {error_text(error)})"
        raise OSError(errno.EOPNOTSUPP, message) from error


def give_name(
    directory: int, temporary: str, name: str, mode: PutMode, *, lasting: bool = True
) -> None:
    """Give a temporary file its name; exactly one of several racing creators wins.

    Afterwards the name is durable; if that fails and the name is new, it is taken back, because a
    listed object has to stay. If another file has the name, that name is made durable too.

    Args:
        directory: A descriptor of its directory.
        temporary: Its temporary name.
        name: Its final name.
        mode: Whether to replace another file of that name.
        lasting: Whether the name has to survive a power loss.
    """
    if mode is PutMode.CREATE:
        try:
            create_name(directory, temporary, name)
        except FileExistsError:
            # Its creator may not have synced it yet, and the caller may rely on it.
            if lasting:
                sync_entries(directory)
            raise
    else:
        _rename(directory, temporary, name, 0)
    if not lasting:
        return
    try:
        sync_entries(directory)
    except OSError:
        if mode is PutMode.CREATE:
            with contextlib.suppress(OSError):
                os.rename(name, temporary, src_dir_fd=directory, dst_dir_fd=directory)
        raise


def create_name(directory: int, temporary: str, name: str) -> None:
    """Replace the temporary name of a file by a name that no file has.

    Raises:
        FileExistsError: If another file has the name.
        IsADirectoryError: If a directory has it.
        OSError: EOPNOTSUPP if the file system gives a name only by replacing the file that has it.
    """
    try:
        try:
            _link(directory, temporary, directory, name)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            _rename_without_links(directory, temporary, name, error)
            return
    except FileExistsError as error:
        taken = _look(directory, name)
        if taken is not None and stat.S_ISDIR(taken.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
        raise
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)


def add_name(source: int, old: str, directory: int, name: str) -> None:
    """Give a file a second name, durably; if that fails and the name is new, it is taken back.

    Args:
        source: A descriptor of its directory.
        old: Its name.
        directory: A descriptor of the directory of the new name.
        name: The new name.

    Raises:
        FileExistsError: If another file has the name, which is durable then.
    """
    try:
        made = _link(source, old, directory, name)
    except FileExistsError:
        sync_entries(directory)
        raise
    try:
        sync_entries(directory)
    except OSError:
        if made:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
        raise


def _link(source: int, old: str, directory: int, name: str) -> bool:
    """Link a file; return whether this call is known to have done it."""
    try:
        os.link(old, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
    except OSError:
        found = _look(directory, name)
        if found is None or found.st_nlink < 2 or not _is_same(found, _look(source, old)):
            raise
        return False
    return True


def _rename_without_links(directory: int, temporary: str, name: str, no_link: OSError) -> None:
    try:
        _rename(directory, temporary, name, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in NO_LINKS | {errno.EINVAL}:
            raise
        message = (
            f"the file system has neither hard links (link: {error_text(no_link)}) nor "
            f"RENAME_NOREPLACE (renameat2: {error_text(error)}), so two writers could replace each "
            "other's files"
        )
        raise OSError(errno.EOPNOTSUPP, message) from error


def _rename(directory: int, temporary: str, name: str, flags: int) -> None:
    ours = _look(directory, temporary)
    try:
        if flags:
            _renameat2(directory, os.fsencode(temporary), os.fsencode(name), flags)
        else:
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        # Some file systems number all their files alike: the old name has to be gone too.
        gone = _look(directory, temporary) is None
        if not (gone and _is_same(ours, _look(directory, name))):
            raise


def _renameat2(directory: int, source: bytes, target: bytes, flags: int) -> None:
    if not hasattr(_libc, "renameat2"):  # since glibc 2.28
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.renameat2(directory, source, directory, target, flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _is_same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    return one is not None and other is not None and os.path.samestat(one, other)


def _look(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
