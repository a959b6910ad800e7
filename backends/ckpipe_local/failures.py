"""Translate errors of the operating system to errors of ckpipe, in one place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ckpipe.errors import (
    InvalidKey,
    LinkUnavailable,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

_ACCESS = "Give this user access to the directory, or name another directory"

_ENOTSUPP = 524  # internal to the kernel, but NFS and others leak it; Python has no name for it

NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, _ENOTSUPP})
"""The errors of a call that the file system does not have."""

NO_LINKS = NOT_SUPPORTED | {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK}
"""The errors of ``link`` if the file system lacks hard links, or has a rule against them."""

Table = Mapping[int, tuple[type[StoreError], str | None]]

WRITING: Table = {
    errno.ENOSPC: (StoreFull, "Free space on that file system, then try again"),
    errno.EDQUOT: (StoreFull, "Free space within the quota of this user, then try again"),
    errno.EFBIG: (
        StoreFull,
        "Raise the limit on file sizes (ulimit -f), or use another file system",
    ),
    errno.EACCES: (PermissionDenied, _ACCESS),
    errno.EPERM: (PermissionDenied, _ACCESS),
    errno.EROFS: (
        PermissionDenied,
        "Mount the file system for writing, name another directory, or open the "
        "pipeline with read_only=True to load only",
    ),
    errno.EEXIST: (ObjectExists, None),
    errno.ENAMETOOLONG: (InvalidKey, None),
    errno.EILSEQ: (InvalidKey, None),
    errno.ELOOP: (InvalidKey, None),
    errno.EINVAL: (InvalidKey, None),
    errno.ENOTDIR: (InvalidKey, "A component of the path is a file, not a directory"),
    errno.EISDIR: (InvalidKey, "The key names a directory that has objects below it"),
    errno.ESTALE: (StoreUnavailable, None),
    errno.ETIMEDOUT: (StoreUnavailable, None),
    errno.EAGAIN: (StoreUnavailable, None),
    errno.EBUSY: (StoreUnavailable, None),
    errno.ETXTBSY: (StoreUnavailable, None),
    errno.ENOTCONN: (StoreUnavailable, None),
    errno.EHOSTDOWN: (StoreUnavailable, None),
    errno.EMFILE: (StoreError, "Raise the limit on open files (ulimit -n)"),
    errno.ENOMEM: (StoreError, "Free memory, or raise its limit (ulimit -v, memory.max)"),
    errno.EIO: (StoreError, "The device fails: check the kernel's log"),
    **dict.fromkeys(
        NOT_SUPPORTED,
        (
            StoreError,
            "Name a directory of another file system. If this is a mounted bucket, give its URL "
            "instead (s3://… or gs://…)",
        ),
    ),
}
"""The class and hint of each error of a write or deletion. A missing directory during a write is a
fault of the store."""

_BAD_SECTOR = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN)
"""The errors of a read of damaged blocks. ENODATA is a bad sector in direct I/O, EILSEQ a wrong
block of dm-integrity; EBADMSG and EUCLEAN are wrong checksums in file systems."""

# A key below a file names no object when it is read, and is an invalid key when it is written.
READING: Table = {
    **WRITING,
    **dict.fromkeys(_BAD_SECTOR, WRITING[errno.EIO]),
    errno.EINVAL: (StoreError, None),
    errno.ENOENT: (ObjectNotFound, None),
    errno.ENOTDIR: (ObjectNotFound, WRITING[errno.ENOTDIR][1]),
    errno.EISDIR: (ObjectNotFound, WRITING[errno.EISDIR][1]),
}


LINKING: Table = {
    **WRITING,
    **dict.fromkeys(NO_LINKS, (LinkUnavailable, None)),
}
"""As above, of a link. A right that a write needs too is told by the write."""


@contextmanager
def translating(
    action: str,
    key: str | None = None,
    table: Table = WRITING,
) -> Iterator[None]:
    """Translate errors of the operating system by a table."""
    try:
        yield
    except OSError as error:
        kind, hint = table.get(error.errno or 0, (StoreError, None))
        found = kind(f"Could not {action}: {error_text(error)}", key=key, hint=hint)
        if table is READING and error.errno in _BAD_SECTOR:
            found.unreadable = found.transient = True
        raise found from error


def error_text(error: OSError) -> str:
    """Describe an error of the operating system, without the path that it may name."""
    code = error.errno or 0
    if code in (errno.ENOSPC, errno.EOPNOTSUPP) and error.strerror:  # ckpipe may have written it
        return error.strerror
    return os.strerror(errno.EOPNOTSUPP if code == _ENOTSUPP else code) if code else str(error)


@contextmanager
def needing(nbytes: int, root: str) -> Iterator[None]:
    """Add the needed and the free bytes to an error for a full file system; block."""
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
def unrepeatable(action: str, key: str) -> Iterator[None]:
    """Translate errors of an operation that must not be retried."""
    try:
        with translating(action, key):
            yield
    except StoreUnavailable as error:
        hint = "Written data may be lost: check the file system or its server, and save again"
        raise StoreError(error.message, key=key, hint=hint) from error


@contextmanager
def opening(root: str, *, create: bool) -> Iterator[None]:
    """Translate errors of finding, creating or probing the root directory."""
    try:
        yield
    except OSError as error:
        code, said = error.errno or 0, error_text(error)
        if code == errno.ENOTDIR and not create:
            message = f"{root} is no directory: it or a component of the path is a file"
            hint = "Look for a mistake in the path; files of torch.save and safetensors are opened"
            raise StoreError(message, hint=f"{hint} by ckpipe.load and source=") from error
        if code in (errno.EEXIST, errno.ENOTDIR):
            message = f"The directory {root} cannot be created: a component of its path is a file"
            raise StoreError(message, hint="Remove the file, or name another directory") from error
        if code == errno.ENAMETOOLONG:
            message = f"The directory {root:.100}… cannot be used: {said}"
            raise StoreError(message, hint="Name a directory with a shorter path") from error
        if code == errno.ENOENT:
            message, hint = f"There is no directory {root}", "Look for a mistake in the path"
            raise StoreError(message, hint=hint) from error
        kind, found = WRITING.get(code, (StoreError, None))
        kind = StoreError if kind is InvalidKey else kind
        hint = found or "Name a directory that can be created and written"
        if kind is StoreUnavailable:
            hint = "Try again once its file system answers"
        if kind is StoreFull:
            hint += ", or open the pipeline with read_only=True to load only"
        raise kind(f"The directory {root} cannot be used: {said}", hint=hint) from error
