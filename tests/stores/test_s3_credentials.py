"""Credentials that another program renews, that a program does not give, and that are cut short."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe_s3 import S3Backend
from tests.support import s3_servers
from tests.support.bucket_stores import BLOCK, Store, behind_proxy
from tests.support.fault_proxy import FaultProxy, Request, S3Dialect, fault_proxy
from tests.support.s3_servers import S3Server

BUCKET = "credentials"


@pytest.fixture
def surroundings(
    moto_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Mapping[str, str]], None]:
    """Set environment variables in place of all credentials."""
    s3_servers.set_up_process()
    usual = {
        "HOME": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_STS": moto_server.url,
    }

    def setenv(more: Mapping[str, str]) -> None:
        for name in [each for each in os.environ if each.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in (usual | dict(more)).items():
            monkeypatch.setenv(name, value)

    return setenv


@pytest.fixture
def proxy(moto_server: S3Server) -> Iterator[FaultProxy]:
    with behind_proxy(moto_server, BUCKET) as proxy:
        yield proxy


class Source:
    """A place where another program writes temporary keys.

    Args:
        folder: Where files are to lie.
    """

    environment: Mapping[str, str]
    profile: str | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, number: int | None) -> None:
        """Write the keys of a number whole; None for a file that is cut short."""
        text = "[default]\naws_access" if number is None else self.text(number)
        made = self._folder / "made"
        made.write_text(text)
        made.replace(self._folder / "file")

    def text(self, number: int) -> str:
        """The file."""
        raise NotImplementedError


def keys(number: int, section: str = "default") -> str:
    lines = (
        f"[{section}]",
        f"aws_access_key_id = KEY{number}",
        f"aws_secret_access_key = secret{number}",
        f"aws_session_token = token-{number}",
    )
    return "\n".join(lines) + "\n"


class CredentialsFile(Source):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment = {"AWS_SHARED_CREDENTIALS_FILE": str(folder / "file")}

    def text(self, number: int) -> str:
        return keys(number)


class Profile(CredentialsFile):
    profile = "other"

    def text(self, number: int) -> str:
        return keys(0) + keys(number, "other")


class ConfigurationFile(Source):
    profile = "other"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment = {"AWS_CONFIG_FILE": str(folder / "file")}

    def text(self, number: int) -> str:
        return keys(number, "profile other")


class Process(Source):
    """A program that gives keys without their end, so that the client never asks it again."""

    profile = "other"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        command = shlex.join([sys.executable, "-c", PRINT, str(folder / "file")])
        (folder / "config").write_text(f"[profile other]\ncredential_process = {command}\n")
        self.environment = {"AWS_CONFIG_FILE": str(folder / "config")}

    def text(self, number: int) -> str:
        told = {"AccessKeyId": f"KEY{number}", "SecretAccessKey": "s"}
        return json.dumps({"Version": 1, "SessionToken": f"token-{number}", **told})


PRINT = "import sys; print(open(sys.argv[1]).read())"

SOURCES = (CredentialsFile, Profile, ConfigurationFile, Process)


class Authority:
    """Lets only requests with the newest keys pass, and renews the keys before some request.

    Args:
        source: Where they are written.
        renewals: The numbers of the requests before which they are renewed, and operations before
            whose first request they are.
        refusal: The answer to requests with older keys.
        cut: How many of these find the file cut short.
    """

    def __init__(
        self,
        source: Source,
        renewals: tuple[int | str, ...],
        refusal: tuple[int, str],
        cut: int = 0,
    ) -> None:
        self._source, self._left, self._cut = source, set(renewals), cut
        self._refusal = S3Dialect().refusal(*refusal, "The keys are too old")
        self._number, self._count = 1, itertools.count()
        self.served: set[str] = set()
        source.write(1)

    def __call__(self, request: Request) -> bytes | None:
        for mark in {next(self._count), request.operation} & self._left:
            self._left.discard(mark)
            self._number += 1
            self._source.write(None if self._cut else self._number)
        token = request.headers["x-amz-security-token"]
        if token == f"token-{self._number}":
            self.served.add(token)
            return None
        if self._cut:
            self._cut -= 1
            if not self._cut:
                self._source.write(self._number)
        return self._refusal


def state() -> dict[str, Any]:
    return {"weight": torch.arange(2 * BLOCK, dtype=torch.uint8)}


REFUSALS = (
    (400, "ExpiredToken"),
    (400, "InvalidToken"),
    (403, "InvalidAccessKeyId"),
    (403, "AccessDenied"),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("source", "refusal"), list(itertools.product(SOURCES, REFUSALS)))
def test_a_save_goes_on_with_keys_that_another_program_renews(
    moto_server: S3Server,
    proxy: FaultProxy,
    surroundings: Callable[[Mapping[str, str]], None],
    tmp_path: Path,
    source: type[Source],
    refusal: tuple[int, str],
) -> None:
    if source is Process and refusal[0] == 403:
        pytest.skip("this may mean missing rights, and no file tells that there are other keys")
    written = source(tmp_path)
    surroundings(written.environment)
    operations = ("Put", "CreateUpload", "UploadPart", "Complete", "Head", "List", "Get")
    authority = Authority(written, (3, 4, 8, 14, 20, *operations), refusal)
    proxy.rule = authority
    store = Store(moto_server, proxy, BUCKET)
    with store.pipeline(profile=written.profile, retries=0) as pipeline:
        for step in (0, 1):
            pipeline.save(state(), step=step, until="committed")
        assert pipeline.load() is not None
    assert f"token-{6 + len(operations)}" in authority.served
    proxy.rule = lambda request: None
    surroundings({"AWS_ACCESS_KEY_ID": s3_servers.KEY, "AWS_SECRET_ACCESS_KEY": s3_servers.SECRET})
    store.check(state())


@pytest.mark.parametrize("source", [CredentialsFile, ConfigurationFile, Process])
async def test_a_file_that_is_being_written_is_read_again(
    proxy: FaultProxy,
    surroundings: Callable[[Mapping[str, str]], None],
    tmp_path: Path,
    source: type[Source],
) -> None:
    written = source(tmp_path)
    surroundings(written.environment)
    options: dict[str, Any] = {"endpoint_url": proxy.url, "profile": written.profile}
    proxy.rule = Authority(written, (4,), (400, "ExpiredToken"), cut=2)
    async with S3Backend(f"s3://{BUCKET}/cut-{source.__name__}", **options) as backend:
        await backend.put("a", b"x", PutMode.CREATE)
        with pytest.raises(errors.StoreUnavailable, match="new ones cannot be used yet"):
            await backend.put("b", b"x", PutMode.CREATE)
        await backend.put("b", b"x", PutMode.CREATE)


async def test_keys_that_are_not_renewed_are_told_at_once(
    proxy: FaultProxy, surroundings: Callable[[Mapping[str, str]], None], tmp_path: Path
) -> None:
    written = CredentialsFile(tmp_path)
    surroundings(written.environment)
    written.write(1)
    for refusal in REFUSALS:
        proxy.log.clear()
        answer = S3Dialect().refusal(*refusal, "The keys are too old")
        proxy.rule = lambda request, answer=answer: answer  # type: ignore[misc]
        async with S3Backend(f"s3://{BUCKET}/old", endpoint_url=proxy.url) as backend:
            with pytest.raises(errors.PermissionDenied, match="The keys are too old"):
                await backend.get("a", max_bytes=1)
        assert len(proxy.log) == 1


async def test_a_role_is_assumed_with_keys_that_another_program_renews(
    moto_server: S3Server,
    proxy: FaultProxy,
    surroundings: Callable[[Mapping[str, str]], None],
    tmp_path: Path,
) -> None:
    written, seen = Profile(tmp_path), list[str]()
    config = tmp_path / "config"
    role = "arn:aws:iam::123456789012:role/saver"
    config.write_text(f"[profile role]\nrole_arn = {role}\nsource_profile = other\n")

    def sts_rule(request: Request) -> bytes | None:
        seen.append(request.headers["x-amz-security-token"])
        return None

    def rule(request: Request) -> bytes | None:
        token = request.headers["x-amz-security-token"]
        first.add(token) if not first else None
        return S3Dialect().refusal(400, "ExpiredToken") if expired and token in first else None

    first, expired = set[str](), list[bool]()
    proxy.rule = rule
    with fault_proxy(moto_server.port) as sts:
        sts.rule = sts_rule
        surroundings(
            dict(written.environment)
            | {"AWS_CONFIG_FILE": str(config), "AWS_ENDPOINT_URL_STS": sts.url}
        )
        written.write(1)
        options: dict[str, Any] = {"endpoint_url": proxy.url, "profile": "role"}
        async with S3Backend(f"s3://{BUCKET}/role", **options) as backend:
            await backend.put("a", b"x", PutMode.CREATE)
            written.write(2)
            expired.append(True)
            await backend.put("b", b"x", PutMode.CREATE)
    assert seen == ["token-1", "token-2"]


async def test_the_token_file_of_a_web_identity_is_read_anew(
    moto_server: S3Server,
    proxy: FaultProxy,
    surroundings: Callable[[Mapping[str, str]], None],
    tmp_path: Path,
) -> None:
    file = tmp_path / "identity"
    file.write_text("first")
    surroundings(
        {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(file),
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/saver",
        }
    )
    tokens, expired = set[str](), list[bool]()

    def rule(request: Request) -> bytes | None:
        token = request.headers["x-amz-security-token"]
        if token in tokens and expired:
            return S3Dialect().refusal(400, "ExpiredToken")
        if not expired:
            tokens.add(token)
        return None

    proxy.rule = rule
    async with S3Backend(f"s3://{BUCKET}/web", endpoint_url=proxy.url) as backend:
        await backend.put("a", b"x", PutMode.CREATE)
        file.write_text("second")
        expired.append(True)
        await backend.put("b", b"x", PutMode.CREATE)


# A program that hangs

HANG = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
pathlib.Path(sys.argv[2]).open().read()  # a pipe that no process writes to
"""


@pytest.mark.parametrize("profile", ["hanging", "role"])
async def test_a_program_that_hangs_is_ended_and_named(
    surroundings: Callable[[Mapping[str, str]], None], tmp_path: Path, profile: str
) -> None:
    config, pid, pipe = tmp_path / "config", tmp_path / "pid", tmp_path / "pipe"
    os.mkfifo(pipe)
    program = tmp_path / "hang.py"
    program.write_text(HANG)
    command = shlex.join([sys.executable, str(program), str(pid), str(pipe), "--password=hunter2"])
    config.write_text(
        f"[profile hanging]\ncredential_process = {command}\n"
        "[profile role]\nrole_arn = arn:aws:iam::123456789012:role/x\nsource_profile = hanging\n"
    )
    surroundings({"AWS_CONFIG_FILE": str(config)})
    options: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:9", "request_timeout": 4.0}
    with pytest.raises(
        errors.StoreUnavailable,
        match=rf"credential_process '{sys.executable}' of profile 'hanging'.*within 2 s",
    ) as caught:
        async with S3Backend(f"s3://{BUCKET}/hangs", profile=profile, **options):
            pass
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_a_program_that_hangs_when_keys_are_renewed(
    proxy: FaultProxy, surroundings: Callable[[Mapping[str, str]], None], tmp_path: Path
) -> None:
    config, told = tmp_path / "config", tmp_path / "told"
    command = shlex.join([sys.executable, "-c", PRINT, str(told)])
    config.write_text(f"[profile later]\ncredential_process = {command}\n")
    surroundings({"AWS_CONFIG_FILE": str(config)})
    soon = datetime.now(UTC) + timedelta(minutes=2)  # so soon that each request wants new ones
    keys = {"Version": 1, "AccessKeyId": "KEY", "SecretAccessKey": "s", "SessionToken": "t"}
    text = json.dumps(keys | {"Expiration": soon.isoformat()})
    told.write_text(text)
    options: dict[str, Any] = {"endpoint_url": proxy.url, "request_timeout": 8.0}
    async with S3Backend(f"s3://{BUCKET}/later", profile="later", **options) as backend:
        await backend.put("a", b"x", PutMode.CREATE)
        told.unlink()
        os.mkfifo(told)
        with pytest.raises(errors.StoreUnavailable, match="of profile 'later' did not end"):
            await backend.get("a", max_bytes=1)
        told.unlink()
        told.write_text(text)
        assert await backend.get("a", max_bytes=1) == b"x"


# Files that are named and cannot be used


def make_link(path: Path) -> None:
    path.symlink_to(path)


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_text(""),
    "only a comment": lambda path: path.write_text("# keys\n"),
    "cut in a section": lambda path: path.write_text("[defa"),
    "cut after a section": lambda path: path.write_text("[default]\n"),
    "cut in a name": lambda path: path.write_text("[default]\naws_access_k"),
    "cut after the first key": lambda path: path.write_text("[default]\naws_access_key_id = A\n"),
    "no text": lambda path: path.write_bytes(b"[default]\n\xff\xfe\x00"),
    "a directory": lambda path: path.mkdir(),
    "a link to itself": make_link,
}


@pytest.mark.parametrize("what", UNUSABLE)
async def test_no_other_identity_is_taken_for_a_named_file_that_cannot_be_used(
    surroundings: Callable[[Mapping[str, str]], None], tmp_path: Path, what: str
) -> None:
    file = tmp_path / "the credentials"
    UNUSABLE[what](file)

    async def give(request: web.Request) -> web.Response:
        until = datetime.now(UTC) + timedelta(hours=1)
        keys = {"AccessKeyId": "MACHINE", "SecretAccessKey": "s", "Token": "t"}
        return web.json_response(keys | {"Expiration": until.isoformat()})

    app = web.Application()
    app.router.add_get("/keys", give)
    async with TestServer(app) as machine:
        named = {
            "AWS_SHARED_CREDENTIALS_FILE": str(file),
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": str(machine.make_url("/keys")),
        }
        surroundings(named)
        options: dict[str, Any] = {"endpoint_url": "http://127.0.0.1:9"}
        with pytest.raises(errors.PermissionDenied, match=str(file)) as caught:
            async with S3Backend(f"s3://{BUCKET}/none", **options):
                pass
        assert caught.value.hint


@pytest.mark.parametrize("what", ["keys in the environment", "keys in a profile", "none"])
async def test_a_named_file_that_is_not_wanted_may_be_anything(
    proxy: FaultProxy,
    surroundings: Callable[[Mapping[str, str]], None],
    tmp_path: Path,
    what: str,
) -> None:
    (tmp_path / "config").write_text(keys(1))
    named = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "absent")}
    more = {
        "keys in the environment": {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "s"},
        "keys in a profile": {"AWS_CONFIG_FILE": str(tmp_path / "config")},
        "none": {"AWS_SHARED_CREDENTIALS_FILE": os.devnull},
    }
    surroundings(named | more[what])
    async with S3Backend(f"s3://{BUCKET}/not-wanted", endpoint_url=proxy.url) as backend:
        if what != "none":
            await backend.put("a", b"x", PutMode.OVERWRITE)
        else:
            with pytest.raises(errors.PermissionDenied, match="no credentials"):
                await backend.put("a", b"x", PutMode.OVERWRITE)


FRESH = """
import json, secrets
token = secrets.token_hex(8)
print(json.dumps({"Version": 1, "AccessKeyId": "K", "SecretAccessKey": "s", "SessionToken": token}))
"""


@pytest.mark.parametrize("profile", ["program", "role"])
async def test_a_store_that_refuses_all_keys_is_not_asked_for_ever(
    moto_server: S3Server,
    proxy: FaultProxy,
    surroundings: Callable[[Mapping[str, str]], None],
    tmp_path: Path,
    profile: str,
) -> None:
    config, program = tmp_path / "config", tmp_path / "fresh.py"
    program.write_text(FRESH)
    command = shlex.join([sys.executable, str(program)])
    config.write_text(
        f"[profile program]\ncredential_process = {command}\n"
        "[profile role]\nrole_arn = arn:aws:iam::123456789012:role/x\nsource_profile = program\n"
    )
    surroundings({"AWS_CONFIG_FILE": str(config)})
    options: dict[str, Any] = {"endpoint_url": proxy.url, "request_timeout": 8.0}
    proxy.rule = lambda request: S3Dialect().refusal(400, "InvalidToken", "Not a token of ours")
    async with S3Backend(f"s3://{BUCKET}/refused", profile=profile, **options) as backend:
        with pytest.raises(errors.PermissionDenied, match="Not a token of ours"):
            await backend.get("a", max_bytes=1)
    assert len(proxy.log) == 4
