"""The contract of a store. Every backend implements it, ckpipe's own and third-party ones."""

from __future__ import annotations

import abc
import enum
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar, TypeVarTuple

from ckpipe.errors import InvalidKey, LinkUnavailable, StoreError, TruncatedObject, naming_refusals
from ckpipe.threads import all_of, in_thread

Item = TypeVar("Item")
Result = TypeVar("Result")
Args = TypeVarTuple("Args")

_CREDENTIALS = re.compile(
    r"(?<=:/)(/?)(?:"
    r"[^/\s?#]*@"  # user:password@host
    r"|[^/\s:@]+:(?!\d+(?:/|$))[^\s@]*@"  # the same with a slash in the password, as AWS has them
    r")"
)
_SECRET_PARAMETER = re.compile(
    r"(?i)([?&][^\s=&#]*(?:auth|cred|key|pass|secret|sig|token)[^\s=&#]*=)[^\s&#'\"]+"
)


class PutMode(enum.Enum):
    """The precondition of :meth:`Backend.put`."""

    CREATE = "create"
    """Succeed only if no object has the key; exactly one of any number of racing writers wins."""

    OVERWRITE = "overwrite"
    """Write the object atomically, and replace one that has the key."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object on a store.

    Args:
        key: The object's key, relative to the backend's root, parts joined by ``/``.
        size: Its size in bytes.
        modified: Time of the last write, by the store's own clock, in UTC.
        etag: A text that differs for every version of the object, if the store has one.
    """

    key: str
    size: int
    modified: datetime
    etag: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Children:
    """The level directly below a prefix.

    Args:
        objects: The objects whose key is the prefix and one more part.
        prefixes: The distinct next parts that have objects below them, each a whole prefix
            that ends in ``/``.
    """

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """The limits on the blocks of an upload, and on links.

    Args:
        min_block_bytes: The smallest size of a block that is not the last.
        max_blocks: The largest number of blocks in one upload.
        alignment: Reads are the fastest if offset and length are multiples of this many bytes.
        max_link_bytes: The size of the largest object that :meth:`Backend.link` takes.
    """

    min_block_bytes: int = 1
    max_blocks: int | None = None
    alignment: int = 1
    max_link_bytes: int | None = None


class Upload(abc.ABC):
    """One large object on its way to a store, written in blocks in any order.

    **Atomicity.** Until :meth:`complete` has returned, the object is invisible under its key:
    ``get``, ``stat`` and ``list`` behave as if it did not exist. Once it has returned, the
    object is whole and durable: it survives a crash of this process and, as far as the store
    can promise it, a loss of power. An upload that is aborted, or abandoned by a crash, never
    becomes visible; its remains cost space only, and :meth:`Backend.remove_stale_uploads` removes
    them.

    An upload is used by several tasks of one event loop at once. After :meth:`complete` has
    returned, or after :meth:`abort`, no other method may be called.
    """

    takes_checksums: ClassVar[bool] = False
    """True to have :meth:`write_summed` called instead of :meth:`write`."""

    most_blocks: ClassVar[int] = 1
    """The most blocks that :meth:`write_all` takes; with one, or checksums, it is not called."""

    @abc.abstractmethod
    async def write(self, offset: int, data: memoryview) -> None:
        """Write one block.

        Calls for different blocks may run at the same time. A retry of a failed write writes the
        same block again with the same bytes. ``data`` is read until the call returns and never
        kept.

        Args:
            offset: Offset of the block in the object, in bytes; a multiple of the ``block_bytes``
                that the upload was opened with.
            data: The block, flat bytes; ``block_bytes`` long, the last one 1 to ``block_bytes``.

        Raises:
            StoreFull: If the store has no room left.
            StoreError: If the store failed; see ``transient``.
        """

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        """Write one block whose checksum is known already.

        An optional speed-up of :meth:`write` for stores that take the checksum of a block: it is
        computed once for them and for the manifest. The default calls :meth:`write`.

        Args:
            offset: As in :meth:`write`.
            data: As in :meth:`write`.
            checksum: The CRC-32C of ``data``.

        Raises:
            StoreError: As in :meth:`write`.
        """
        await self.write(offset, data)

    async def write_all(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        """Write several blocks in one call.

        An optional speed-up of :meth:`write` for stores where a call costs the program more than
        the store: while blocks wait, a lane takes up to :attr:`most_blocks` of them together. If it
        fails, all of them are written again. The default writes one after the other.

        Args:
            blocks: The offset and the bytes of each, as in :meth:`write`.

        Raises:
            StoreFull: As in :meth:`write`.
            StoreError: As in :meth:`write`.
        """
        for offset, data in blocks:
            await self.write(offset, data)

    @abc.abstractmethod
    async def complete(self) -> None:
        """Make the object visible under its key, and durable.

        May be called once every block has been written. If an object of the same key exists,
        it is not replaced.

        Raises:
            ObjectExists: If the key is taken.
            StoreFull: If the store has no room left.
            StoreError: If the store failed. The object is then absent or whole, never partial.
        """

    async def landed(self) -> bool | None:
        """Tell whether this upload has made the object, after :meth:`complete` failed.

        The answer to a request that makes an object may be lost after the store has done it: the
        connection breaks, the try is cancelled because it took too long, or an HTTP client sends
        the request once more by itself, and the store refuses the repetition. An upload that leaves
        a mark of its own on the object tells its own object from one of another writer, and frees
        its resources if the object is its own.

        Returns:
            True if the object is there and this upload has made it, else False. None, the default,
            if it cannot tell: then an object of the right size counts as its own, unless the first
            call of :meth:`complete` has already found the key taken.

        Raises:
            StoreError: If the store failed.
        """
        return None

    @abc.abstractmethod
    async def abort(self) -> None:
        """Give the upload up and free its resources. Do nothing after a failed complete
        that did land. Never raise for an upload that is already gone."""


class ObjectReader(Protocol):
    """An open object that one thread reads, and which blocks that thread.

    It reads the same object to the end, also if that is deleted or replaced meanwhile. It frees its
    resources when it is no longer referenced.
    """

    @property
    def size(self) -> int:
        """Its size in bytes when it was opened."""

    def read_into(self, offset: int, buffer: memoryview, *, cached: bool) -> None:
        """Fill ``buffer`` as :meth:`Backend.read_into` does, which is used after a transient error.

        Args:
            offset: Offset of the first byte.
            buffer: Writable flat bytes; all of it is filled.
            cached: The answer of :meth:`is_cached` for a range that has these bytes.
        """

    def is_cached(self, offset: int, size: int) -> bool:
        """Tell whether a range is in memory already, as in the page cache; never raise.

        A load reads such a range in small steps, each into memory that stays in the processor's
        cache.
        """


class Backend(abc.ABC):
    """A store of objects under one root.

    **Atomicity.** :meth:`put` is all or nothing: a reader sees the old object, the new one or
    none, never a part; when it returns, the object is durable. With :attr:`PutMode.CREATE`
    exactly one of any number of racing writers succeeds, in any process on any machine, and
    every other gets :class:`~ckpipe.errors.ObjectExists`. **Consistency.** A :meth:`list` that
    begins after a write returned sees that write; lists come in no particular order.
    **Errors.** Errors of the store's own client are translated to a
    :class:`~ckpipe.errors.StoreError`. A call whose answer was lost may have succeeded; callers
    read back to find out. **Cancellation.** Every method may be cancelled; its effect has then
    happened as a whole or not at all.

    Keys are non-empty parts joined by ``/``, relative to the root; a part is never ``.`` or
    ``..``. A backend is an async context manager, is created and used on one event loop only,
    and must not block that loop: blocking work belongs in worker threads.

    Implementers register a subclass under the URL's scheme, through the entry-point group
    ``ckpipe.backends`` or :func:`ckpipe.register_backend`; it is called as
    ``cls(url, **options)``. If opening writes anything, such as the root or a probe, it should
    have an option ``access``. It is ``"read"`` for a caller that only reads: opening then creates
    and changes nothing, and finds a root that is missing or cannot be one. :meth:`put` and
    :meth:`delete` still work, since a reader holds a lease, and raise
    :class:`~ckpipe.errors.PermissionDenied` if the caller may not write.
    :class:`ckpipe.testing.BackendConformance` tests this contract.
    """

    limits: UploadLimits = UploadLimits()

    can_link: bool = False
    """True if the store has :meth:`link`."""

    prefers_worker: ClassVar[bool] = False
    """True if a transfer takes many steps of an event loop, as over a network, each of which waits
    for the GIL of a trainer that runs Python. Saves then go through a worker process unless the
    settings say otherwise."""

    def __init_subclass__(cls, **options: object) -> None:
        """Reset an inherited ``open_object`` or ``put_volatile`` that would bypass an override.

        A class that overrides :meth:`read_into` or :meth:`put` gets the default of the fast path
        beside it, unless it overrides that one too.
        """
        super().__init_subclass__(**options)
        for usual, short in (("read_into", "open_object"), ("put", "put_volatile")):
            having = next(each for each in cls.__mro__ if {usual, short} & vars(each).keys())
            if short not in vars(having):
                setattr(cls, short, getattr(Backend, short))

    async def __aenter__(self) -> Self:
        """Open the store; create the root if the store has one.

        Raises:
            StoreError: If the root cannot be created or used.
        """
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Free the resources of the backend."""
        return

    @abc.abstractmethod
    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        """Write one small object at once, durably.

        Raises:
            ObjectExists: If ``mode`` is CREATE and the key is taken.
            InvalidKey: If the store cannot hold the key.
            StoreError: If the store failed; the object is then absent, old or new, never partial.
        """

    async def put_volatile(self, key: str, data: bytes) -> None:
        """Create one small object that need not survive a crash of this machine.

        An optional speed-up of :meth:`put` with :attr:`PutMode.CREATE`, for leases and the like:
        a loss of power may leave the object absent or empty. Nothing else is different. The default
        makes it durable. A class that overrides only :meth:`put` has the default.

        Raises:
            ObjectExists: If the key is taken.
            StoreError: As :meth:`put` does.
        """
        await self.put(key, data, PutMode.CREATE)

    async def link(self, source: str, target: str) -> None:
        """Make the object ``target`` with the bytes of ``source``, without sending them.

        An optional verb of stores with hard links or copies on the server; the default refuses
        every link. The target is create-only and invisible until it is whole. When the call returns
        it is durable, and as new as if it had been written. A deletion of one leaves the other.

        A call whose answer was lost may have made the target. So a call also succeeds if it finds a
        target that an earlier call has made of the same source, in any process.

        Args:
            source: The key of the object, at most :attr:`UploadLimits.max_link_bytes` large.
            target: The key of the new object.

        Raises:
            ObjectExists: If the target is taken; it is not replaced.
            ObjectNotFound: If no object has the key ``source``; ``key`` is this key.
            LinkUnavailable: If the store refuses the link, for a reason that a write does not have:
                too many links, another owner or file system, a missing right to copy, or the size.
            InvalidKey: If the store cannot hold the target's key.
            StoreError: If the store failed; the target is then absent or whole, never partial.
        """
        raise LinkUnavailable("The store has no links", key=target)

    @abc.abstractmethod
    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        """Begin a large object of exactly ``size`` bytes, written in blocks.

        Args:
            key: The object's key.
            size: Its size in bytes, at least 1.
            block_bytes: The size of all its blocks but the last, within :attr:`limits`.

        Raises:
            StoreFull: If the store can tell already that it has no room.
            InvalidKey: If the store cannot hold the key.
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read one small object whole.

        Raises:
            ObjectNotFound: If no object has the key.
            StoreError: If the object is larger than ``max_bytes``, or the store failed.
        """

    @abc.abstractmethod
    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of an object from ``offset`` on.

        Calls may run at the same time. On failure the content of ``buffer`` is undefined.

        Args:
            key: The object's key.
            offset: Offset of the first byte.
            buffer: Writable flat bytes; all of it is filled.

        Raises:
            ObjectNotFound: If no object has the key.
            TruncatedObject: If the object ends before the buffer is full.
            StoreError: If the store failed; with ``unreadable`` and ``transient`` set to True if
                the device cannot read this object, as at a bad sector.
        """

    def open_object(self, key: str) -> ObjectReader | None:
        """Open an object for reads in the calling thread, and block that thread.

        An optional speed-up of :meth:`read_into` for stores that threads can read without the event
        loop: a disk that gets the next request as soon as the last one is answered is a tenth
        faster. The default returns None. A class that overrides only :meth:`read_into` has the
        default.

        Returns:
            The open object, or None if the caller must use :meth:`read_into`.

        Raises:
            ObjectNotFound: If no object has the key.
            StoreError: If the store failed.
        """
        return None

    @abc.abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """List all objects whose key begins with ``prefix``, in no particular order.

        Args:
            prefix: Empty, or whole parts with a ``/`` at the end.

        Raises:
            LinkRefused: If the store has links, and one is in the path of the prefix: callers may
                delete the objects that are listed.
            StoreError: If the store failed.
        """

    async def children(self, prefix: str = "") -> Children:
        """List the level directly below a prefix, as a delimited list does.

        The default filters :meth:`list`, which is right and slow; a store that can delimit
        by itself overrides it.

        Args:
            prefix: Empty, or whole parts with a ``/`` at the end.

        Raises:
            StoreError: If the store failed.
        """
        objects: list[ObjectInfo] = []
        prefixes: set[str] = set()
        async for info in self.list(prefix):
            head, slash, _ = info.key[len(prefix) :].partition("/")
            if slash:
                prefixes.add(f"{prefix}{head}/")
            else:
                objects.append(info)
        return Children(tuple(objects), tuple(sorted(prefixes)))

    @abc.abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Look up the size and time of an object.

        Raises:
            ObjectNotFound: If no object has the key.
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    async def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A key that no object has is no error; deletions are not atomic together.

        Raises:
            LinkRefused: If the store has links, and one is in the path of an object.
            StoreError: If the store failed; some of the objects may be gone.
        """

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        """Remove the remains of abandoned uploads below ``prefix`` that began before a time.

        Remains of other programs stay. A store that can tell them apart by the key alone counts
        objects below ``step-…/``, where checkpoints and their exports lie, and below ``.ckpipe/``
        as its own.

        Args:
            prefix: Empty, or whole parts with a ``/`` at the end.
            before: The time, by the store's own clock, in UTC.

        Returns:
            The number of removed uploads. The default has none to remove.

        Raises:
            StoreError: If the store failed.
        """
        return 0


def check_key(key: str) -> str:
    """Return the key if the contract allows its form.

    Raises:
        InvalidKey: If a part is empty, ``.`` or ``..``, or holds a NUL.
    """
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidKey("The key has an empty part, '.', '..' or a NUL", key=key)
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix if it is empty, or whole parts with a ``/`` at the end.

    Raises:
        InvalidKey: If it has another form.
    """
    if prefix:
        check_key(prefix.removesuffix("/"))
        if not prefix.endswith("/"):
            raise InvalidKey("A prefix ends in '/'", key=prefix)
    return prefix


def truncated(key: str, offset: int, wanted: int, size: int) -> TruncatedObject:
    """Make the error for a range that reaches beyond the end of an object.

    Args:
        key: The object's key.
        offset: Offset of the range, in bytes.
        wanted: Size of the range, in bytes.
        size: Size of the object, in bytes.
    """
    message = f"The object has {size} bytes; {wanted} from byte {offset} on were requested"
    return TruncatedObject(message, key=key)


async def run_in_thread(function: Callable[[*Args], Result], *args: *Args) -> Result:
    """Run blocking work in a worker thread, and return or raise only once it has ended.

    A caller that is cancelled, by anyio or by asyncio, goes on only then too: the thread may still
    read the caller's memory, and its work is never left behind half done. A pipeline that is open
    when the program ends is closed while the interpreter exits. Python may then refuse to start
    threads; calls run in threads that the pipeline has kept in reserve.

    Args:
        function: The work.
        args: Its arguments.
    """
    with naming_refusals(StoreError):
        return await in_thread(function, *args)


async def for_each(
    items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], *, at_once: int
) -> list[Result]:
    """Run a call for each item, with at most ``at_once`` calls under way.

    Args:
        items: The items.
        work: Called with each.
        at_once: The largest number of calls at the same time.

    Returns:
        The results of the calls, in the order of the items.

    Raises:
        Exception: The first failure of a call, as it is; the other calls are cancelled.
    """
    return await all_of([partial(work, item) for item in items], at_once)


def without_secrets(text: str) -> str:
    """Replace credentials in the URLs of a text by ``***``, for errors and ``repr``.

    Credentials are the text before an ``@`` of the host, and query parameters whose name contains
    a word such as key, pass, secret, sig or token.
    """
    return _SECRET_PARAMETER.sub(r"\1***", _CREDENTIALS.sub(r"\1***@", text))


__all__ = [
    "Backend",
    "Children",
    "ObjectInfo",
    "ObjectReader",
    "PutMode",
    "Upload",
    "UploadLimits",
    "check_key",
    "check_prefix",
    "for_each",
    "run_in_thread",
    "truncated",
    "without_secrets",
]
