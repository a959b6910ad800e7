"""Opening the files of objects, and nothing that only has such a name."""

from __future__ import annotations

import os
import stat

from ckpipe.errors import ObjectNotFound


def open_object(path: str, key: str) -> int:
    """Opens the file of an object for reading.

    Raises:
        ObjectNotFound: If it is no regular file: to open a pipe would wait for who writes to it.
    """
    check_regular(os.stat(path), path, key)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def check_regular(found: os.stat_result, path: str, key: str) -> None:
    """Makes sure that what was found at a path is a regular file.

    Raises:
        ObjectNotFound: If it is not.
    """
    if not stat.S_ISREG(found.st_mode):
        raise ObjectNotFound(
            f"{path} is not a file but {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}",
            key=key,
            hint="Look who put it there, and remove it",
        )


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
