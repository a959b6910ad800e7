"""Messages over a socket between two processes, in order, with descriptors where one needs one."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque

import anyio

from ckpipe.memory.mapping import forget, keep_private
from ckpipe.worker.protocol import Message, decode, encode

_READ_BYTES = 1 << 18
_MOST_DESCRIPTORS = 32
_LENGTH_BYTES = 8


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets. A child that is forked from this process, and not started by us, has
    neither: it would otherwise keep the other end from seeing that this process is gone."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return _private(left), _private(right)


def _private(sock: socket.socket) -> socket.socket:
    return socket.socket(fileno=keep_private(sock.detach()))


def close_socket(sock: socket.socket) -> None:
    """Close a socket of a pair; may be called twice."""
    forget(sock.fileno())
    sock.close()


class Channel:
    """One end of the socket; all of it is used on one event loop.

    Args:
        sock: The socket, which the channel owns from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._in = bytearray()
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._soon = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._spoken = False
        self._more = anyio.Event()
        self._sent = anyio.Event()
        self._broken = False
        self._descriptors: deque[int] = deque()
        self._arrived = anyio.Event()
        self._ended = False
        self._reader: asyncio.AbstractEventLoop | None = None

    @property
    def idle(self) -> bool:
        """Tell whether all that was posted is with the system, or will never be received."""
        return not self._out

    def has_spoken(self) -> bool:
        """Tell whether anything was sent since this was asked last."""
        spoken, self._spoken = self._spoken, False
        return spoken

    def post(self, message: Message | bytes, *descriptors: int) -> None:
        """Send a message, or one that is encoded already, after all that were posted before.

        What the socket does not take at once is sent by :meth:`serve`. If the other end is gone,
        nothing happens: who reads from it finds out.
        """
        if self._broken:
            return
        frame = message if isinstance(message, bytes) else encode(message)
        self._post_soon_now()
        self._enqueue(memoryview(frame), descriptors)

    def post_soon(self, message: Message, within: float) -> None:
        """Send a message together with others, which costs either end less than one by one.

        It goes before all that is posted after it, and not later than asked for the first of those
        that go together.

        Args:
            message: The message.
            within: How long it may wait for others, in seconds.
        """
        if self._broken:
            return
        self._soon += encode(message)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(within, self._post_soon_now)

    def _post_soon_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._soon:
            frames, self._soon = self._soon, bytearray()
            self._enqueue(memoryview(frames), ())

    def _enqueue(self, data: memoryview, descriptors: tuple[int, ...]) -> None:
        self._spoken = True
        self._out.append((data, descriptors))
        if len(self._out) == 1 and not self._push():
            self._more.set()

    def _push(self) -> bool:
        """Send what the socket takes; False if there is more."""
        while self._out:
            data, descriptors = self._out[0]
            try:
                done = self._send(data, descriptors)
            except BlockingIOError:
                return False
            except OSError:
                self._broken = True
                self._out.clear()
                break
            if done == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[done:], ())
        self._sent.set()
        return True

    def _send(self, data: memoryview, descriptors: tuple[int, ...]) -> int:
        if not descriptors:
            return self._socket.send(data)
        rights = array.array("i", descriptors)
        return self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    async def serve(self) -> None:
        """Send what could not be sent at once, until it is cancelled."""
        while True:
            await self._more.wait()
            self._more = anyio.Event()
            while not self._push():
                await anyio.wait_writable(self._socket)

    async def flush(self) -> None:
        """Wait until all that was posted is with the system, which delivers it in any case."""
        self._post_soon_now()
        while self._out:
            self._sent = anyio.Event()
            await self._sent.wait()

    async def receive(self) -> Message:
        """The next message.

        Raises:
            anyio.EndOfStream: If the other end is gone and all it sent was received.
        """
        while (message := self._take()) is None:
            if self._ended:
                raise anyio.EndOfStream
            self._arrived = anyio.Event()
            self._listen()
            await self._arrived.wait()
        return message

    def _listen(self) -> None:
        """Has the loop look at the socket from now on.

        Waiting for it anew for each message would let the interpreter go three more times, and
        beside a loop of plain Python each time costs milliseconds.
        """
        if self._reader is None:
            self._reader = asyncio.get_running_loop()
            self._reader.add_reader(self._socket, self._on_readable)

    def _on_readable(self) -> None:
        try:
            self._read()
        except (BlockingIOError, anyio.EndOfStream):
            pass
        except MemoryError:
            self._ended = True  # else the loop, which tells of it, would call this again for ever
            raise
        finally:
            if self._ended:
                self._stop_listening()
            self._arrived.set()

    def _stop_listening(self) -> None:
        if self._reader is not None:
            self._reader.remove_reader(self._socket)
            self._reader = None

    def receive_nowait(self) -> Message | None:
        """The next message that is there already; None if there is none yet.

        Raises:
            anyio.EndOfStream: If the other end is gone and all it sent was received.
        """
        while True:
            message = self._take()
            if message is not None:
                return message
            try:
                self._read()
            except BlockingIOError:
                return None

    def _take(self) -> Message | None:
        if len(self._in) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + int.from_bytes(self._in[:_LENGTH_BYTES], "little")
        if len(self._in) < end:
            return None
        body = bytes(self._in[_LENGTH_BYTES:end])
        del self._in[:end]
        return decode(body)

    def _read(self) -> None:
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                _READ_BYTES, space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except OSError:  # whatever it is, nothing more can be heard
            self._ended = True
            raise anyio.EndOfStream from None
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(rights[: len(rights) - len(rights) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if not data:
            self._ended = True
            raise anyio.EndOfStream
        self._in += data

    def take_descriptor(self) -> int:
        """The descriptor that came with the message received last; the caller closes it."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close the socket; no task may be receiving."""
        self._broken = True
        if self._timer is not None:
            self._timer.cancel()
        self._soon.clear()
        self._out.clear()
        self._sent.set()
        self._stop_listening()
        close_socket(self._socket)
        while self._descriptors:
            os.close(self._descriptors.popleft())
