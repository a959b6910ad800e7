"""Translate errors of the operating system to errors of ckpipe, in one place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ckpipe.errors import (
    InvalidKey,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TruncatedObject,
)

_Errors = Mapping[int, type[StoreError]]

_COMMON: _Errors = {
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EFBIG: StoreFull,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.EEXIST: ObjectExists,
    errno.ENAMETOOLONG: InvalidKey,
    errno.EILSEQ: InvalidKey,
    errno.ELOOP: InvalidKey,
    errno.ESTALE: StoreUnavailable,
    errno.ETIMEDOUT: StoreUnavailable,
    errno.EAGAIN: StoreUnavailable,
    errno.EBUSY: StoreUnavailable,
    errno.ENOTCONN: StoreUnavailable,
    errno.EHOSTDOWN: StoreUnavailable,
}
# A key that runs through a file names nothing when it is read, and nothing possible when it is
# written. A directory that is gone while a file is written in it is a fault of the store.
_READING: _Errors = {
    **_COMMON,
    errno.ENOENT: ObjectNotFound,
    errno.ENOTDIR: ObjectNotFound,
    errno.EISDIR: ObjectNotFound,
}
_WRITING: _Errors = {
    **_COMMON,
    errno.EINVAL: InvalidKey,
    errno.ENOTDIR: InvalidKey,
    errno.EISDIR: InvalidKey,
}

_HINTS: Mapping[int, str] = {
    errno.ENOSPC: "Free space on that file system, then try again",
    errno.EDQUOT: "Free space within the quota of this user, then try again",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or use another file system",
    errno.EACCES: "Give this user access to the directory, or name another one",
    errno.EPERM: "Give this user access to the directory, or name another one",
    errno.EROFS: "Mount the file system for writing, name another directory, or open the "
    "pipeline with read_only=True to load only",
    errno.ENOTDIR: "A part of the path is a file, so that nothing can lie below it",
    errno.EISDIR: "The key names a directory that has objects below it",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.EIO: "The device fails: look at the kernel's log",
}


@contextmanager
def reading(action: str, key: str | None = None) -> Iterator[None]:
    """Translate errors of reading objects."""
    try:
        yield
    except OSError as error:
        raise _store_error(error, action, key, _READING) from error


@contextmanager
def writing(action: str, key: str | None = None) -> Iterator[None]:
    """Translate errors of writing or deleting objects."""
    try:
        yield
    except OSError as error:
        raise _store_error(error, action, key, _WRITING) from error


@contextmanager
def needing(nbytes: int, root: str) -> Iterator[None]:
    """Add the needed and the free bytes to an error for a full file system; blocks."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            with suppress(OSError):
                found = os.statvfs(root)
                free = f"{found.f_bavail * found.f_frsize} are free"
                if found.f_files and not found.f_favail:
                    free = "no inode is free"
                error.strerror = f"{error.strerror}: {nbytes} bytes are needed, and {free}"
        raise


@contextmanager
def unrepeatable(action: str) -> Iterator[None]:
    """Translate errors of an operation whose success at a second try proves nothing."""
    try:
        yield
    except OSError as error:
        found = _store_error(error, action, None, _WRITING)
        raise (StoreError(found.message) if found.transient else found) from error


@contextmanager
def opening(root: str, *, create: bool) -> Iterator[None]:
    """Translate errors of finding the root directory, or creating and probing it."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOTDIR and not create:
            message = f"{root} is no directory: it or a part of the path is a file"
            raise StoreError(message, hint="Look for a mistake in the path") from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            message = f"The directory {root} cannot be created: a part of the path is a file"
            raise StoreError(message, hint="Remove the file, or name another directory") from error
        raise _root_error(error, root) from error


def _store_error(error: OSError, action: str, key: str | None, errors: _Errors) -> StoreError:
    code = error.errno or 0
    text = os.strerror(code) if code else str(error)
    if code == errno.ENOSPC:  # which may say what is needed and what is free
        text = error.strerror or text
    kind = errors.get(code, StoreError)
    return kind(f"Could not {action}: {text}", key=key, hint=_HINTS.get(code))


def _root_error(error: OSError, root: str) -> StoreError:
    code = error.errno or 0
    if code == errno.ENAMETOOLONG:
        message = f"The directory {root:.100}… cannot be used: {os.strerror(code)}"
        return StoreError(message, hint="Name a directory with a shorter path")
    if code == errno.ENOENT:
        return StoreError(f"There is no directory {root}", hint="Look for a mistake in the path")
    kind = _WRITING.get(code, StoreError)
    kind = StoreError if kind is InvalidKey else kind
    hint = _HINTS.get(code, "Name a directory that can be created and written")
    if kind is StoreFull:
        hint += ", or open the pipeline with read_only=True to load only"
    return kind(f"The directory {root} cannot be used: {os.strerror(code)}", hint=hint)


def truncated(key: str, offset: int, wanted: int, size: int) -> TruncatedObject:
    """Make the error for a range that reaches beyond the end of an object."""
    message = f"The object has {size} bytes, and {wanted} from byte {offset} on were wanted"
    return TruncatedObject(message, key=key)
