"""Find the credentials of requests, and look for them anew once the store refuses them.

The client's library looks for credentials once. It renews by itself only those that come with the
time of their end: those of roles and of single sign-on, and those of a program that names the time.
Keys from a file stay as they were read, also those that a role is assumed with, although another
program may renew the file. So an answer that refuses the credentials starts a new search.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import botocore.exceptions as client_errors
from aiobotocore.credentials import AioProcessProvider, create_credential_resolver
from aiobotocore.session import AioSession
from botocore.configloader import raw_config_parse
from botocore.loaders import create_loader

from ckpipe.backend import run_in_thread
from ckpipe.errors import PermissionDenied, StoreError, StoreUnavailable

KEYS = "Check the credentials that this process finds: environment, profile, or instance role"

_NAMED = {
    "AWS_SHARED_CREDENTIALS_FILE": "shared-credentials-file",
    "AWS_CONFIG_FILE": "config-file",
}
"""The variables that name files, each with the library's name for the source that reads it."""

_EXPIRED = frozenset({
    "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId",
    "InvalidIdentityToken", "InvalidToken", "RequestExpired", "TokenRefreshRequired",
    "400",  # an answer to a HEAD request has no code
})  # fmt: skip
"""The codes that say that the credentials are too old. Others with the status 401 or 403 may only
say that the rights are missing, so a search follows them only if a file has changed."""

signed: ContextVar[Any] = ContextVar("signed", default=None)
"""What the last request of a task was signed with."""


@dataclass(frozen=True)
class Found:
    """The result of one search.

    Args:
        session: The session that has searched, with the configuration that it has read.
        region: The region, if one is known.
        credentials: The credentials of the client's library; None if there are none.
        files: The state of each file that may have been read, from before the search.
    """

    session: Any
    region: str | None
    credentials: Any
    files: Mapping[str, Sequence[int] | None]

    def is_outdated(self) -> bool:
        """Tell whether one of the files has changed; block."""
        return _states(self.files) != self.files


def search(
    profile: str | None, region: str | None, other_region: str | None, process_seconds: float
) -> Found:
    """Search for credentials; block.

    The client's library can read them only on an event loop. So it gets a short-lived loop; only a
    later request binds the credentials to a loop.

    Args:
        profile: The profile in the AWS configuration files; None for the environment's.
        region: The region; None for that of the environment or the profile.
        other_region: The region if these have none.
        process_seconds: The time limit of a ``credential_process``.

    Raises:
        PermissionDenied: If a named profile or file cannot be used.
        StoreUnavailable: If a ``credential_process`` did not end in time.
        BotoCoreError: If the library raises another error.
    """
    session = AioSession(profile=profile)
    session.register_component("data_loader", _models())
    paths = [session.get_config_variable(name) for name in ("credentials_file", "config_file")]
    files = _states([_expanded(path) for path in paths])
    profile = session.get_config_variable("profile") or "default"
    try:
        region = region or session.get_config_variable("region") or other_region
        resolver = create_credential_resolver(session, region_name=region)
        _limit_processes(resolver, session, profile, process_seconds)
        credentials = asyncio.run(resolver.load_credentials())
    except client_errors.ProfileNotFound as error:
        message = f"The AWS configuration files have no profile {profile!r:.100}"
        unknown = PermissionDenied(message, hint="Check the option 'profile' and AWS_PROFILE")
        raise _passed_over(profile) or unknown from error
    except client_errors.ConfigParseError as error:
        message = f"The file {error.kwargs['path']!r:.300} is cut, or is no AWS configuration file"
        raise PermissionDenied(message, hint="Write the file anew") from None
    except client_errors.PartialCredentialsError as error:
        source, missing = error.kwargs["provider"], error.kwargs["cred_var"]
        where = dict(zip(_NAMED.values(), paths, strict=True)).get(source, source)
        message = f"The credentials of profile {profile!r:.100} in {where!r:.300} lack {missing}"
        raise PermissionDenied(message, hint=KEYS) from None
    sources = [provider.METHOD for provider in resolver.providers]
    machine = sources[sources.index("config-file") + 1 :]  # those that no profile or variable gives
    if credentials is None or credentials.method in machine:
        refused = _passed_over(profile)
        if refused is not None:
            raise refused
    return Found(session, region, credentials, files)


@functools.cache
def _models() -> Any:
    """Make the loader of service models, once for all clients."""
    return create_loader()


def _expanded(path: str) -> str:
    return os.path.expanduser(os.path.expandvars(path))


def _states(paths: Sequence[str] | Mapping[str, Any]) -> dict[str, Sequence[int] | None]:
    found: dict[str, Sequence[int] | None] = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            found[path] = None
        else:
            found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found


def _passed_over(profile: str) -> PermissionDenied | None:
    """Make the error for a named file that the library has skipped because it cannot be used.

    The library then goes on to the identity of the machine.
    """
    for variable, source in _NAMED.items():
        path = _expanded(os.environ.get(variable, ""))
        if path in ("", os.devnull):
            continue
        why = _fault(path, profile if source == "shared-credentials-file" else None)
        if why is not None:
            hint = f"Write the file, or unset {variable} to use other credentials"
            return PermissionDenied(f"{variable} names {path!r:.300}, which {why}", hint=hint)
    return None


def _fault(path: str, profile: str | None) -> str | None:
    """Find the reason why a file cannot be used; None if it can be.

    Args:
        path: The file.
        profile: The profile whose keys it should have; None if it need not have any.
    """
    try:
        with open(path, "rb"):  # the library's parser takes an unreadable file for an empty one
            pass
    except OSError as error:
        return f"cannot be read ({type(error).__name__})"
    if profile is None:
        return None
    sections = raw_config_parse(path)
    if not sections:
        return "is empty"
    return f"has nothing in its profile {profile!r:.100}" if sections.get(profile) == {} else None


def _limit_processes(resolver: Any, session: Any, profile: str, seconds: float) -> None:
    """Give every ``credential_process`` a time limit, also that of a role's source profile."""

    def provider(profile_name: str) -> Any:
        return AioProcessProvider(
            profile_name=profile_name,
            load_config=lambda: session.full_config,
            popen=partial(_run, profile_name, seconds),
        )

    resolver.insert_after(AioProcessProvider.METHOD, provider(profile))
    resolver.remove(AioProcessProvider.METHOD)  # the first of the two
    # The library offers no other way to those of source profiles.
    profiles = getattr(resolver.get_provider("assume-role"), "_profile_provider_builder", None)
    if profiles is not None:
        profiles._create_process_provider = provider


async def _run(profile: str, seconds: float, *command: str, **pipes: Any) -> Any:
    """Run a ``credential_process``, in place of the function that begins one for the library.

    Raises:
        StoreUnavailable: If it did not end in time; it is killed then.
    """

    def run() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, capture_output=True, timeout=seconds, check=False)

    try:
        return _EndedProcess(await run_in_thread(run))
    except subprocess.TimeoutExpired:
        # Its arguments may hold secrets.
        message = f"The credential_process {command[0]!r:.300} of profile {profile!r:.100} did not"
        message += f" end within {seconds:g} s"
        hint = "Run the command by hand; if it is only slow, raise the option 'request_timeout'"
        raise StoreUnavailable(message, hint=hint) from None


@dataclass(frozen=True)
class _EndedProcess:
    """A process that has ended, with the methods of a running one."""

    process: subprocess.CompletedProcess[bytes]

    @property
    def returncode(self) -> int:
        return self.process.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        return self.process.stdout, self.process.stderr


class Keys:
    """The credentials of requests, for the client's library; making them blocks.

    All attributes that are not here are those of the credentials that were found last.

    Args:
        asked: The arguments of :func:`search`.

    Raises:
        PermissionDenied: As there.
        StoreUnavailable: As there.
        BotoCoreError: As there.
    """

    def __init__(self, *asked: Any) -> None:
        self._search = partial(search, *asked)
        self._found = self._search()
        self._lock = anyio.Lock()
        self.session, self.region = self._found.session, self._found.region

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found.credentials, name)

    async def load_credentials(self) -> Keys | None:
        """Return what a client signs with; None if there are no credentials."""
        return None if self._found.credentials is None else self

    async def get_frozen_credentials(self) -> Any:
        """Return what the next request is signed with, renewed if it is about to end."""
        found = await self._found.credentials.get_frozen_credentials()
        signed.set(found)
        return found

    async def renewed(self, used: Any, code: str, status: int) -> bool:
        """Tell whether there are other credentials than those of a refused request.

        Args:
            used: What the request was signed with; None if it was the request for credentials, such
                as those of a role.
            code: The code of the answer.
            status: Its status.

        Raises:
            StoreUnavailable: If the credentials cannot be used at the moment, for example because
                another program is writing their file.
            BotoCoreError: If the library cannot renew them.
            ClientError: If the request for them is refused.
        """
        if code not in _EXPIRED and status not in (401, 403):
            return False
        async with self._lock:
            if used is None or used == await self.get_frozen_credentials():
                if code not in _EXPIRED and not await run_in_thread(self._found.is_outdated):
                    return False
                await self._search_again()
        return bool(used != await self.get_frozen_credentials())

    async def _search_again(self) -> None:
        what = "The credentials were refused, and new ones cannot be used yet"
        try:
            found = await run_in_thread(self._search)
        except StoreError as error:
            raise StoreUnavailable(f"{what}: {error.message}", hint=error.hint) from error
        except (client_errors.BotoCoreError, OSError, ValueError) as error:
            raise StoreUnavailable(f"{what} ({type(error).__name__})", hint=KEYS) from error
        before = getattr(self._found.credentials, "method", None)
        if getattr(found.credentials, "method", None) != before:
            raise StoreUnavailable(f"{what}: those of {before!r} are gone", hint=KEYS)
        self._found = found
