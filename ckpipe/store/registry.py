"""Find the backend of a URL, registered in this process or installed, and open the store."""

from __future__ import annotations

import difflib
import enum
import inspect
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from ckpipe.backend import Backend, without_secrets
from ckpipe.errors import BackendNotFound, SettingsError, UsageError
from ckpipe.store.retry import OnRead, RetryingBackend, logging_policy
from ckpipe.types import CheckpointId
from ckpipe.version import install_line

if TYPE_CHECKING:
    from ckpipe.settings import Settings

BackendFactory = Callable[..., Backend]
"""A callable that makes a backend as ``factory(url, **options)``, most often a class."""

ENTRY_POINT_GROUP = "ckpipe.backends"
"""The group of entry points in which installed packages offer backends; names are schemes."""

_EXTRAS = {"s3": "s3", "gs": "gcs"}
_MOUNT = (
    "Mount it, with {} or `rclone mount`, and name the folder; or save to a disk and copy later"
)
_S3 = "Write s3:// and give the store's URL as the option endpoint_url of the backend s3"
_ELSEWHERE = {
    **dict.fromkeys(("az", "azure", "abfs", "abfss", "wasb", "wasbs"), _MOUNT.format("blobfuse2")),
    **dict.fromkeys(("hdfs", "dbfs", "sftp", "ssh", "webdav", "smb"), _MOUNT.format("FUSE")),
    **dict.fromkeys(("r2", "b2", "minio", "oss", "cos"), _S3),
    "hf": "To load, name the folder that huggingface_hub.snapshot_download returns; to publish, "
    "upload the folder of ckpipe.export with huggingface_hub.upload_folder",
    "http": "Download it, and name the folder",
    "https": "Download it, and name the folder",
    "gcs": "Write gs://",
}
"""The way round for schemes of stores that have no backend."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")

_registered: dict[str, BackendFactory] = {}
_lock = threading.Lock()


def register_backend(scheme: str, factory: BackendFactory) -> None:
    """Make URLs of a scheme use a backend, in this process and from now on.

    It takes precedence over an installed entry point of the same scheme.

    Args:
        scheme: The text before ``://``; letters, digits, ``+``, ``.`` and ``-``.
        factory: Called as ``factory(url, **options)`` with the whole URL; returns the backend.

    Raises:
        UsageError: If ``scheme`` is not valid, or is registered in this process already.
    """
    if not _SCHEME.fullmatch(scheme.lower()):
        message = f"{scheme!r} cannot be the scheme of a URL"
        raise UsageError(message, hint="Use letters, digits, '+', '.' and '-', a letter first")
    with _lock:
        if scheme.lower() in _registered:
            message = f"A backend for {scheme!r} is registered in this process already"
            raise UsageError(message, hint="Choose another scheme")
        _registered[scheme.lower()] = factory


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, in lower case; ``file`` for a plain path."""
    scheme, separator, _ = url.partition("://")
    lowered = scheme.lower()
    return lowered if separator and _SCHEME.fullmatch(lowered) else "file"


def is_registered_here(url: str) -> bool:
    """Tell whether the URL's backend is registered in this process, so that no other has it."""
    with _lock:
        return scheme_of(url) in _registered


def create_backend(
    url: str, options: Mapping[str, Any] | None = None, *, read_only: bool = False
) -> Backend:
    """Make the backend for a URL, without opening it.

    Blocks while it looks up installed packages and imports the backend: on an event loop, call it
    in a worker thread.

    Args:
        url: The URL, passed to the backend as it is; a plain path means ``file``.
        options: The backend's own options.
        read_only: Whether the caller only reads. Opening a backend may write: it makes its root, or
            probes the features of the store. A backend that can open without writes has the option
            ``access``, and gets ``access="read"`` then.

    Raises:
        BackendNotFound: If no backend is known for the scheme, or it cannot be imported.
        SettingsError: If the backend does not have a given option, or lacks a required one.
        UsageError: If the backend does not understand the URL, or it is the URL of a checkpoint.
    """
    _refuse_slip(url)
    _refuse_checkpoint(url)
    scheme = scheme_of(url)
    factory = _factory(scheme)
    given = dict(options or {})
    if read_only and "access" in inspect.signature(factory).parameters:
        given["access"] = "read"
    _check_options(scheme, factory, given)
    return factory(url, **given)


def _refuse_slip(url: str) -> None:
    """Refuse ``s3:/bucket``, which would be a folder named ``s3:`` here."""
    scheme, separator, rest = url.partition(":/")
    if separator and not rest.startswith("/") and _SCHEME.fullmatch(scheme.lower()):
        raise UsageError(
            f"{without_secrets(url)!r} is neither a path nor a URL",
            hint=f"Write {scheme}:// for a URL, or ./{scheme}:/ for a folder of this name",
        )


def _refuse_checkpoint(url: str) -> None:
    """Refuse the URL of a checkpoint in place of its root, where nothing would be found."""
    root, _, name = url.rstrip("/").rpartition("/")
    id = CheckpointId.parse(name.removesuffix(".json"))
    if id is not None:
        raise UsageError(
            f"{without_secrets(url)!r} is one checkpoint, and not the root of a run",
            step=id.step,
            hint=f"Give the folder that it lies in, {without_secrets(root) or '.'}, and name the "
            "step where you load",
        )


def _factory(scheme: str) -> BackendFactory:
    with _lock:
        registered = dict(_registered)
    if scheme in registered:
        return registered[scheme]
    return _installed(scheme, tuple((str(each), _last_change(each)) for each in sys.path))


def _last_change(folder: Any) -> int:
    with suppress(OSError, TypeError, ValueError):  # anything may have been put into sys.path
        return os.stat(folder or ".").st_mtime_ns
    return 0


@lru_cache(maxsize=8)  # the search reads a file of each installed package
def _installed(scheme: str, changes: tuple[tuple[str, int], ...]) -> BackendFactory:
    try:
        installed = metadata.entry_points(group=ENTRY_POINT_GROUP)
    except (TypeError, ValueError) as error:
        message = f"Python cannot list the installed packages, which offer backends: {error}"
        hint = "Remove from sys.path what is no path"
        raise BackendNotFound(message, hint=hint) from error
    found = set(installed.select(name=scheme))
    if not found:
        names = sorted({*_registered, *installed.names})
        known = ", ".join(map(repr, names)) or "none"
        message = f"There is no backend for {scheme!r}; known are {known}"
        raise BackendNotFound(message, hint=_install_hint(scheme))
    if len({point.value for point in found}) > 1:
        values = ", ".join(sorted(point.value for point in found))
        message = f"Several installed packages offer a backend for {scheme!r}: {values}"
        raise BackendNotFound(message, hint="Uninstall all but one, or register one by hand")
    try:
        factory: BackendFactory = found.pop().load()
    except (ImportError, AttributeError) as error:
        message = f"The backend for {scheme!r} cannot be imported: {error}"
        raise BackendNotFound(message, hint=_install_hint(scheme)) from error
    return factory


def _install_hint(scheme: str) -> str:
    if scheme in _EXTRAS:
        return f"Install it with: {install_line(_EXTRAS[scheme])}"
    if scheme in _ELSEWHERE:
        return f"{_ELSEWHERE[scheme]}, or call ckpipe.register_backend with one of your own"
    return "Install the package that offers it, or call ckpipe.register_backend"


def _check_options(scheme: str, factory: BackendFactory, options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    valid = [parameter.name for parameter in named]
    for name in options:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1)
            options_hint = f"Its options are: {', '.join(valid) or 'none'}"
            hint = f"Did you mean {near[0]!r}" if near else options_hint
            message = f"The backend for {scheme!r} has no option {name!r}"
            raise SettingsError(message, hint=hint)
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise SettingsError(f"The backend for {scheme!r} needs the option {parameter.name!r}")


class Access(enum.Enum):
    """The use that a caller is about to make of a store."""

    READ = "read"
    """Read only, so that a read-only root is enough; only leases are written, where they may be
    (see ``access`` in :class:`ckpipe.backend.Backend`)."""

    CHANGE = "change"
    """Change existing objects: a root that does not exist is an error, and is not made."""

    CREATE = "create"
    """Write, and make the root if it is missing and the store has roots to make."""


def backend_of(settings: Settings) -> Backend:
    """Make the backend of the settings' URL, as :func:`create_backend`; blocking."""
    assert settings.url is not None
    options = settings.backends.get(scheme_of(settings.url), {})
    return create_backend(settings.url, options, read_only=settings.read_only)


@asynccontextmanager
async def open_store(
    url: str, settings: Settings, access: Access, on_read: OnRead | None = None
) -> AsyncIterator[RetryingBackend]:
    """Open the store of a URL without a pipeline; its requests are retried.

    Args:
        url: A URL, or a plain path.
        settings: The options of backends, and the retry settings.
        access: The use that the caller is about to make of the store.
        on_read: Called as bytes are read.

    Raises:
        BackendNotFound: If no backend is known for the URL.
        UsageError: If the URL or the backend's options are wrong.
        StoreError: If the store cannot be used, or is missing and not to be made.
    """
    options = settings.backends.get(scheme_of(url), {})
    policy = logging_policy(settings.upload)
    if access is not Access.CREATE:
        # Opening for writing might make the root, so opening for reading checks first that it
        # exists.
        reader = await to_thread.run_sync(partial(create_backend, url, options, read_only=True))
        async with reader:
            if access is Access.READ:
                yield RetryingBackend(reader, policy, on_read=on_read)
                return
    backend = await to_thread.run_sync(create_backend, url, options)
    async with backend:
        yield RetryingBackend(backend, policy, on_read=on_read)
