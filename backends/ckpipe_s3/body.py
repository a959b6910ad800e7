"""Request bodies: the caller's own memory."""

from __future__ import annotations

import io

PIECE_BYTES = 1 << 20
"""How much of a body is handed to the socket at a time. Each piece costs a turn of a worker
thread, so it is larger than what the HTTP client asks for."""


class MemoryBody(io.RawIOBase):
    """Reads a memoryview as a file, without copying it.

    The client insists on a file for a body that is not ``bytes``. What it reads are slices of
    the caller's memory. Once closed, the body reads as ended, so that a request that was
    cancelled while it still sends never touches memory that has another use by then.

    Args:
        data: Flat bytes.
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at, self._ended = data, 0, False

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = min(max(base + offset, 0), len(self._data))
        return self._at

    def read(self, size: int | None = -1) -> memoryview:
        """A slice of the memory, which may be longer than ``size``; empty at the end."""
        if self._ended:
            return memoryview(b"")
        piece = self._data[self._at : self._at + PIECE_BYTES]
        self._at += len(piece)
        return piece

    def end(self) -> None:
        """Forgets the memory."""
        self._ended, self._data = True, memoryview(b"")
