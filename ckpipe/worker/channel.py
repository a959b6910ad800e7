"""Messages over a socket between two processes, in order, some of them with descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from collections import deque

import anyio

from ckpipe.memory.mapping import forget, keep_private
from ckpipe.worker.protocol import Message, decode, encode

_READ_BYTES = 1 << 18
_DESCRIPTORS_SPACE = socket.CMSG_SPACE(32 * array("i").itemsize)
_LENGTH_BYTES = 8


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Make two connected sockets. A child that other code forks from this process gets neither:
    otherwise it would keep the other end from noticing the end of this process."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return _private(left), _private(right)


def _private(sock: socket.socket) -> socket.socket:
    return socket.socket(fileno=keep_private(sock.detach()))


def close_socket(sock: socket.socket) -> None:
    """Close a socket of a pair; may be called twice."""
    forget(sock.fileno())
    sock.close()


class Channel:
    """One end of the socket, for one event loop of asyncio.

    The loop itself watches the socket. A task that waited for the socket anew for each message
    would release the GIL three more times, and beside a loop of plain Python each time costs
    milliseconds.

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
        self._sent, self._arrived = anyio.Event(), anyio.Event()
        self._descriptors: deque[int] = deque()
        self._broken = self._ended = False
        """True if no more messages are sent, and if no more are received."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._on_readable)

    @property
    def idle(self) -> bool:
        """True if the system has all posted messages, or they will never be received."""
        return not self._out

    def post(self, message: Message, *descriptors: int) -> None:
        """Send a message after all that were posted before.

        The loop sends the rest if the socket does not take all of it at once. If the other end is
        gone, the message is dropped: the reader of this end notices that.
        """
        if self._broken:
            return
        self._post_soon_now()
        self._enqueue(encode(message), descriptors)

    def post_soon(self, message: Message, within: float) -> None:
        """Send a message together with others, which costs both ends less than one by one.

        It is sent before all messages that are posted after it. The first message of a batch sets
        the time limit of the batch.

        Args:
            message: The message.
            within: Seconds that it may wait for others.
        """
        if self._broken:
            return
        self._soon += encode(message)
        if self._timer is None:
            self._timer = self._loop.call_later(within, self._post_soon_now)

    def _post_soon_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._soon:
            frames, self._soon = self._soon, bytearray()
            self._enqueue(frames, ())

    def _enqueue(self, data: bytes | bytearray, descriptors: tuple[int, ...]) -> None:
        self._out.append((memoryview(data), descriptors))
        if len(self._out) == 1:
            self._push()

    def _push(self) -> None:
        """Send as much as the socket takes, and let the loop send the rest."""
        try:
            while self._out:
                data, descriptors = self._out[0]
                if descriptors:
                    done = socket.send_fds(self._socket, [data], descriptors)
                else:
                    done = self._socket.send(data)
                self._out[0] = (data[done:], ())
                if done == len(data):
                    self._out.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._push)
            return
        except OSError:
            self._broken = True
            self._out.clear()
        self._loop.remove_writer(self._socket)
        self._sent.set()

    async def flush(self) -> None:
        """Wait until the system has all posted messages: it delivers them even if we die."""
        self._post_soon_now()
        while self._out:
            self._sent = anyio.Event()
            await self._sent.wait()

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            anyio.EndOfStream: If the other end is gone and all its messages were received.
        """
        while (message := self._take()) is None:
            if self._ended:
                raise anyio.EndOfStream
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return message

    def receive_nowait(self) -> Message | None:
        """Return the next message that has arrived already, or None.

        Raises:
            anyio.EndOfStream: If the other end is gone and all its messages were received.
        """
        while (message := self._take()) is None:
            if self._ended:
                raise anyio.EndOfStream
            if not self._read():
                break
        return message

    def _take(self) -> Message | None:
        end = _LENGTH_BYTES + int.from_bytes(self._in[:_LENGTH_BYTES], "little")
        if len(self._in) < max(end, _LENGTH_BYTES):
            return None
        body = bytes(self._in[_LENGTH_BYTES:end])
        del self._in[:end]
        return decode(body)

    def _on_readable(self) -> None:
        try:
            self._read()
        except MemoryError:
            self._end()  # otherwise the loop, which logs the error, would call this for ever
            raise
        finally:
            self._arrived.set()

    def _read(self) -> bool:
        """Read available bytes; False if there are none."""
        try:
            # Not socket.recv_fds(), which ignores its flags.
            data, ancillary, _, _ = self._socket.recvmsg(
                _READ_BYTES, _DESCRIPTORS_SPACE, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:  # after any error, no more messages can be received
            data, ancillary = b"", []
        for _, _, numbers in ancillary:
            self._descriptors.extend(array("i", numbers))
        self._in += data
        if not data:
            self._end()
        return True

    def _end(self) -> None:
        self._ended = True
        self._loop.remove_reader(self._socket)

    def take_descriptor(self) -> int:
        """Return the descriptor of the last received message; the caller closes it."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close the socket; no task may be receiving."""
        self._broken = True
        if self._timer is not None:
            self._timer.cancel()
        self._soon.clear()
        self._out.clear()
        self._sent.set()
        self._end()
        self._loop.remove_writer(self._socket)
        close_socket(self._socket)
        while self._descriptors:
            os.close(self._descriptors.popleft())
