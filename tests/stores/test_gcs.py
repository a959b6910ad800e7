"""What is Google Cloud Storage's own: addresses, options, tokens, errors, sessions, composing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from gcloud.aio.auth import token

from ckpipe import errors
from ckpipe.backend import Backend, PutMode
from ckpipe_gcs import GcsBackend
from tests.support import gcs_servers
from tests.support.bucket_stores import Seen, behind_proxy, written
from tests.support.fault_proxy import Fault
from tests.support.gcs_emulator import Api
from tests.support.gcs_servers import GcsServer
from tests.support.gcs_store import Store, Stored

BLOCK = 1 << 19

_numbers = itertools.count()


@pytest.fixture
def seen(gcs_server: GcsServer) -> Iterator[Seen]:
    with behind_proxy(gcs_server, "backend") as proxy:
        yield Seen(gcs_server, proxy, "backend")


@pytest.fixture
async def backend(seen: Seen) -> AsyncIterator[Backend]:
    async with seen.backend() as backend:
        yield backend


async def upload(
    backend: Backend, blocks: int = 2, key: str = "folder/data", block: int = BLOCK
) -> bytes:
    """Upload an object of some blocks, the last a bit shorter."""
    data = random.Random(blocks).randbytes(blocks * block - 7)
    opened = await backend.open_upload(key, size=len(data), block_bytes=block)
    async with anyio.create_task_group() as tasks:
        for offset in range(0, len(data), block):
            tasks.start_soon(opened.write, offset, memoryview(data)[offset : offset + block])
    await opened.complete()
    return data


async def read(backend: Backend, key: str = "folder/data") -> bytes:
    buffer = bytearray((await backend.stat(key)).size)
    await backend.read_into(key, 0, memoryview(buffer))
    return bytes(buffer)


async def test_options_reach_the_requests_that_they_are_for(seen: Seen) -> None:
    await anyio.to_thread.run_sync(seen.server.make_bucket, "payer")
    key = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    seen.url = "gs://payer/root"
    async with seen.backend(user_project="a-project", kms_key_name=key) as backend:
        assert await upload(backend) == await read(backend)
        await backend.delete(["folder/data"])
    assert len(seen.headers("Begin")) == 1
    for request in seen.requests:
        if request.operation not in ("Send", "Cancel"):
            assert "userProject=a-project" in request.target
        writes = request.operation in ("Put", "Begin", "Compose")
        assert ("kmsKeyName=projects%2Fp" in request.target) is writes


@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_the_proxy_of_the_environment_is_asked(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("http_proxy", seen.proxy.url.replace("http://", scheme))
    monkeypatch.setenv("no_proxy", "example.org")
    # Nobody listens there, so that only the proxy can have been asked.
    async with seen.backend(endpoint_url="http://localhost:9") as backend:
        await backend.put("a", b"x", PutMode.CREATE)
        assert await backend.get("a", max_bytes=1) == b"x"
    assert all(each.target.startswith("http://localhost:9/") for each in seen.requests)
    asked = len(seen.requests)
    monkeypatch.setenv("no_proxy", "example.org,localhost")
    async with seen.backend(endpoint_url="http://localhost:9") as backend:
        with pytest.raises(errors.StoreUnavailable):
            await backend.stat("a")
    monkeypatch.delenv("no_proxy")
    async with seen.backend(endpoint_url="https://store.invalid") as backend:
        with pytest.raises(errors.StoreUnavailable):
            await backend.stat("a")
    assert len(seen.requests) == asked
    monkeypatch.setenv("https_proxy", seen.proxy.url)
    seen.fault["Connect"] = Fault.RESET_BEFORE
    async with seen.backend(endpoint_url="https://store.invalid") as backend:
        with pytest.raises(errors.StoreUnavailable):
            await backend.stat("a")
    assert seen.requests[-1].method == "CONNECT"
    assert seen.requests[-1].target == "store.invalid:443"


async def test_a_proxy_of_the_environment_that_is_none(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "socks5://me:hunter2@localhost:1")
    with pytest.raises(errors.UsageError, match="in the environment") as caught:
        async with seen.backend():
            pass
    assert "hunter2" not in str(caught.value)


async def test_a_bucket_that_lets_the_requester_pay_says_so(seen: Seen) -> None:
    await anyio.to_thread.run_sync(seen.server.make_bucket, "payer")
    seen.url = "gs://payer/root"
    async with seen.backend() as backend:
        with pytest.raises(errors.PermissionDenied, match=r"userProjectMissing.*user_project"):
            await backend.put("a", b"x", PutMode.CREATE)


async def test_an_emulator_is_found_in_the_environment(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{seen.proxy.port}")
    async with GcsBackend(seen.url) as backend:
        await backend.put("a", b"x", PutMode.CREATE)
    assert all("authorization" not in each.headers for each in seen.requests)


async def test_many_blocks_are_composed_in_a_tree(seen: Seen, backend: Backend) -> None:
    data = await upload(backend, 34, block=5000)  # one request composes 32
    assert len(seen.headers("Compose")) == 3
    assert await read(backend) == data
    assert await seen.left() == []


async def test_a_composed_object_is_known_as_ones_own(seen: Seen, backend: Backend) -> None:
    opened = await written(backend, "folder/data", BLOCK)
    assert not await opened.landed()
    seen.fault["Compose"] = Fault.LOST
    with pytest.raises(errors.StoreUnavailable):
        await opened.complete()
    assert await opened.landed()
    assert await read(backend) == bytes(2 * BLOCK)
    assert await seen.left() == []


async def test_what_a_crash_left_is_swept(seen: Seen) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=5)
    crashed = seen.backend()
    async with crashed, seen.backend() as backend:
        for key in ("here/data", "there/data"):
            await written(crashed, key, BLOCK)
        earlier = soon - timedelta(minutes=10)
        assert await backend.remove_stale_uploads("here/", before=earlier) == 0
        assert len(await seen.left()) == 4
        assert await backend.remove_stale_uploads("here/", before=soon) == 1
        assert await backend.remove_stale_uploads("", before=soon) == 1
        assert await seen.left() == []


async def test_a_session_that_somebody_ended_is_begun_again(seen: Seen, backend: Backend) -> None:
    data = memoryview(bytes(2 * BLOCK))
    upload = await backend.open_upload("data", size=2 * BLOCK, block_bytes=BLOCK)
    seen.fault["Send"] = Fault.HALF
    with pytest.raises(errors.StoreUnavailable):
        await upload.write(0, data[:BLOCK])
    assert isinstance(seen.server, GcsServer)
    await anyio.to_thread.run_sync(seen.server.ask, "DELETE", "/emulator/sessions")
    with pytest.raises(errors.StoreUnavailable):
        await upload.write(0, data[:BLOCK])
    await upload.write(0, data[:BLOCK])
    await upload.write(BLOCK, data[BLOCK:])
    await upload.complete()
    assert await read(backend, "data") == data


async def test_a_part_that_lands_during_an_abort_is_removed_on_leaving(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, aborted = anyio.Event(), anyio.Event()
    block = BLOCK // 2  # so small that it takes no session
    async with seen.backend() as backend:
        opened = await backend.open_upload("data", size=2 * block, block_bytes=block)
        write = backend.write  # type: ignore[attr-defined]

        async def write_late(*args: Any, **options: Any) -> Any:
            begun.set()
            await aborted.wait()
            return await write(*args, **options)

        monkeypatch.setattr(backend, "write", write_late)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened.write, 0, memoryview(bytes(block)))
            await begun.wait()
            await opened.abort()
            aborted.set()
        assert len(await seen.left()) == 1
    assert await seen.left() == []


async def test_an_object_that_is_overwritten_or_deleted_while_it_is_read(
    seen: Seen, backend: Backend
) -> None:
    await backend.put("data", bytes(100), PutMode.CREATE)
    buffer = memoryview(bytearray(50))
    await backend.read_into("data", 0, buffer)
    async with seen.backend() as other:
        await other.put("data", bytes(100), PutMode.OVERWRITE)
    with pytest.raises(errors.StoreError, match="overwritten"):
        await backend.read_into("data", 50, buffer)
    await backend.read_into("data", 50, buffer)  # whoever begins again reads the new one
    async with seen.backend() as other:
        await other.delete(["data"])
        seen.fault["Look"] = Fault.UNAVAILABLE
        with pytest.raises(errors.StoreUnavailable):
            await backend.read_into("data", 50, buffer)
        with pytest.raises(errors.ObjectNotFound):
            await backend.read_into("data", 50, buffer)
        await other.put("data", bytes(100), PutMode.CREATE)
    await backend.read_into("data", 50, buffer)  # whoever begins again reads the new one


class ForgetfulStore(Store):
    """Keeps, once, other bytes of an object than it was sent."""

    wrong = True

    def put(
        self,
        bucket: str,
        content: bytes,
        told: Mapping[str, Any],
        query: Mapping[str, str],
        components: int | None = None,
    ) -> Stored:
        if self.wrong and told["name"].endswith("data"):
            self.wrong = False
            told = {name: value for name, value in told.items() if name != "crc32c"}
            content = bytes(len(content))
        return super().put(bucket, content, told, query, components)


async def test_a_small_object_that_the_store_has_otherwise_is_removed() -> None:
    store = ForgetfulStore()
    store.make_bucket("forgetful")
    async with (
        TestServer(Api(store, authorize=False).application()) as server,
        with_tokens(GcsServer(server.port or 0), "forgetful", anonymous=True) as backend,
    ):
        with pytest.raises(errors.StoreUnavailable, match="other bytes than were sent"):
            await backend.put("data", b"right", PutMode.CREATE)
        await backend.put("data", b"right", PutMode.CREATE)
        assert await backend.get("data", max_bytes=5) == b"right"


async def test_lists_come_in_pages(seen: Seen, backend: Backend) -> None:
    async with (
        seen.backend(endpoint_url=seen.server.url) as direct,
        anyio.create_task_group() as tasks,
    ):
        for number in range(205):
            tasks.start_soon(direct.put, f"{number:03}/x", b"x", PutMode.CREATE)
    seen.requests.clear()
    assert len((await backend.children()).prefixes) == 205
    assert len([info async for info in backend.list()]) == 205
    assert len(seen.headers("List")) == 6


# Tokens


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """An emulator that wants tokens, and gives them."""
    gcs_servers.set_up_process()
    with gcs_servers.emulator(tmp_path_factory.mktemp("guarded"), authorize=True) as server:
        yield server


@pytest.fixture
def credentials(guarded: GcsServer, tmp_path: Path) -> Callable[..., str]:
    """Write a file of credentials for the emulator's tokens."""

    def write(refresh_token: str = "good", path: str = "/token") -> str:
        file = tmp_path / f"{refresh_token}.json"
        told = {"type": "authorized_user", "client_id": "me", "client_secret": "hush-hush"}
        told |= {"refresh_token": refresh_token, "token_uri": guarded.url + path}
        file.write_text(json.dumps(told))
        return str(file)

    return write


def with_tokens(server: GcsServer, bucket: str, **options: Any) -> GcsBackend:
    return GcsBackend(f"gs://{bucket}/root", endpoint_url=server.url, **options)


async def granted(server: GcsServer) -> int:
    state = await anyio.to_thread.run_sync(server.ask, "GET", "/emulator")
    return int(state["tokens"])


async def make_bucket(server: GcsServer) -> str:
    name = f"guarded-{next(_numbers)}"
    await anyio.to_thread.run_sync(server.ask, "POST", f"/emulator/buckets/{name}")
    return name


async def test_one_token_is_asked_for_and_kept(
    guarded: GcsServer, credentials: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, before = await make_bucket(guarded), await granted(guarded)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", credentials())
    async with with_tokens(guarded, bucket) as backend:
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(backend.put, f"{number}", b"x", PutMode.OVERWRITE)
        assert len((await backend.children()).objects) == 8
    assert await granted(guarded) == before + 1


async def test_a_token_that_expired_is_renewed(
    guarded: GcsServer, credentials: Callable[..., str]
) -> None:
    bucket = await make_bucket(guarded)
    async with with_tokens(guarded, bucket, credentials_file=credentials()) as backend:
        await backend.put("a", b"first", PutMode.CREATE)
        before = await granted(guarded)
        await anyio.to_thread.run_sync(guarded.ask, "DELETE", "/emulator/tokens")
        data = await upload(backend)
        assert await granted(guarded) >= before + 1
        assert await read(backend) == data


@pytest.mark.parametrize(("secret", "path"), [("bad", "/token"), ("good", "/nowhere")])
async def test_refused_credentials(
    guarded: GcsServer, credentials: Callable[..., str], secret: str, path: str
) -> None:
    file = credentials(secret, path)
    async with with_tokens(guarded, "any-bucket", credentials_file=file) as backend:
        with pytest.raises(errors.PermissionDenied) as caught:
            await backend.get("a", max_bytes=1)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(caught.value)
    assert "hush-hush" not in repr(caught.getrepr(showlocals=False))


async def test_no_credentials(
    guarded: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    # Where a machine's own credentials would be, nobody answers, and no test leaves this machine.
    monkeypatch.setattr(token, "GCE_ENDPOINT_TOKEN", "http://127.0.0.1:9/token")
    async with with_tokens(guarded, "any-bucket", request_timeout=20.0) as backend:
        with pytest.raises(errors.PermissionDenied, match="no credentials"):
            await backend.get("a", max_bytes=1)
    with pytest.raises(errors.StoreError, match="credentials_file"):
        async with with_tokens(guarded, "any-bucket", credentials_file=str(tmp_path / "none")):
            pass


@pytest.mark.parametrize("over", ["its time is over", "the store refuses it"])
async def test_a_token_is_used_while_the_metadata_server_does_not_answer(
    guarded: GcsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    over: str,
) -> None:
    async def grant(_: web.Request) -> web.Response:
        form = {"refresh_token": "good"}
        async with aiohttp.request("POST", f"{guarded.url}/token", data=form) as answer:
            return web.json_response(await answer.json() | {"expires_in": 3600})

    app = web.Application()
    app.router.add_get("/token", grant)
    server = TestServer(app)
    await server.start_server()
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setattr(token, "GCE_ENDPOINT_TOKEN", str(server.make_url("/token")))
    now = 100.0
    monkeypatch.setattr("ckpipe_gcs.access.time", SimpleNamespace(monotonic=lambda: now))
    async with with_tokens(guarded, await make_bucket(guarded)) as backend:
        await backend.put("a", b"1", PutMode.CREATE)
        await server.close()
        now += 3500  # so it is to be renewed, and good for some time yet
        for tries in (1, 1, 2):
            assert await backend.get("a", max_bytes=1) == b"1"
            assert caplog.text.count("could not be renewed yet") == tries
            now += 6
        if over == "its time is over":
            now += 200
        else:
            await anyio.to_thread.run_sync(guarded.ask, "DELETE", "/emulator/tokens")
        with pytest.raises(errors.StoreUnavailable, match="access token"):
            await backend.get("a", max_bytes=1)


async def test_anonymous_requests_are_refused_where_a_token_is_wanted(guarded: GcsServer) -> None:
    async with with_tokens(guarded, "any-bucket", anonymous=True) as backend:
        with pytest.raises(errors.PermissionDenied, match="authError"):
            await backend.get("a", max_bytes=1)


# Files of credentials that cannot be used


async def test_credentials_that_another_program_renews_are_read_for_the_next_token(
    guarded: GcsServer, credentials: Callable[..., str]
) -> None:
    bucket, file = await make_bucket(guarded), credentials()
    read, write = Path(file).read_text, Path(file).write_text
    good, bad = read(), read().replace('"good"', '"bad"')
    async with with_tokens(guarded, bucket, credentials_file=file) as backend:
        await backend.put("a", b"1", PutMode.CREATE)
        # While another program writes the file, the credentials stay as they were.
        for text, works in ((bad, 0), (good, 1), ("", 1), (good[:40], 1), (bad, 0)):
            write(text)
            await anyio.to_thread.run_sync(guarded.ask, "DELETE", "/emulator/tokens")
            if works:
                assert await backend.get("a", max_bytes=1) == b"1"
            else:
                with pytest.raises(errors.PermissionDenied, match=file):
                    await backend.get("a", max_bytes=1)


@contextlib.asynccontextmanager
async def tokens_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """A server that gives tokens of the machine's own identity; the requests that it had."""
    asked: list[str] = []

    async def give(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"access_token": "the machine's", "expires_in": 3600})

    app = web.Application()
    app.router.add_get("/token", give)
    async with TestServer(app) as machine:
        monkeypatch.setattr(token, "GCE_ENDPOINT_TOKEN", str(machine.make_url("/token")))
        yield asked


@pytest.mark.parametrize("begun", ["with a file", "with the machine's own"])
async def test_the_identity_stays_when_a_stored_file_comes_or_goes(
    guarded: GcsServer,
    credentials: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: str,
) -> None:
    bucket, file = await make_bucket(guarded), credentials()
    stored = tmp_path / "application_default_credentials.json"
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    async with tokens_of_the_machine(monkeypatch) as asked:
        if begun == "with a file":
            os.replace(file, stored)
            async with with_tokens(guarded, bucket) as backend:
                await backend.put("a", b"1", PutMode.CREATE)
                os.unlink(stored)
                await anyio.to_thread.run_sync(guarded.ask, "DELETE", "/emulator/tokens")
                assert await backend.get("a", max_bytes=1) == b"1"
            assert not asked
            return
        async with with_tokens(guarded, bucket) as backend:
            for number in range(2):
                with pytest.raises(errors.PermissionDenied):
                    await backend.get("a", max_bytes=1)
                if number == 0:
                    os.replace(file, stored)
        assert len(asked) == 3  # each after the first replaces a refused token


WHOLE = {
    "type": "service_account",
    "client_email": "a@b",
    "private_key": "hush-hush",
    "token_uri": "http://127.0.0.1:9",
}
UNUSABLE: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_text(""),
    "blank": lambda path: path.write_text("\n"),
    "cut": lambda path: path.write_text(json.dumps(WHOLE)[:60]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "{}": lambda path: path.write_text("{}"),
    "null": lambda path: path.write_text("null"),
    "a list": lambda path: path.write_text("[]"),
    "an unknown type": lambda path: path.write_text(json.dumps(WHOLE | {"type": "new"})),
    "a type that is no text": lambda path: path.write_text(json.dumps(WHOLE | {"type": ["a"]})),
    "without a key": lambda path: path.write_text(json.dumps({"type": "service_account"})),
    "a directory": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("what", "named"), list(itertools.product(UNUSABLE, ["option", "variable", "gcloud"]))
)
async def test_no_other_identity_is_taken_for_a_file_that_cannot_be_used(
    guarded: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, what: str
) -> None:
    file = tmp_path / "application_default_credentials.json"
    UNUSABLE[what](file)
    if named == "gcloud" and what == "absent":
        pytest.skip("then gcloud has stored none, which is no mistake")
    options: dict[str, Any] = {"credentials_file": str(file)} if named == "option" else {}
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path if named == "gcloud" else other))
    if named == "variable":
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    said = {"option": "the option 'credentials_file'", "gcloud": "gcloud auth application-default"}
    by = said.get(named, "GOOGLE_APPLICATION_CREDENTIALS")
    async with tokens_of_the_machine(monkeypatch):
        with pytest.raises(errors.PermissionDenied, match=f"{file}.*{by}") as caught:
            async with with_tokens(guarded, "any-bucket", **options) as backend:
                await backend.get("a", max_bytes=1)
    assert caught.value.hint
    assert "hush-hush" not in repr(caught.getrepr(showlocals=False))


async def test_a_key_that_is_none_is_told_with_its_file(guarded: GcsServer, tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(WHOLE))
    async with with_tokens(guarded, "any-bucket", credentials_file=str(file)) as backend:
        with pytest.raises(errors.PermissionDenied, match=f"{file}.*cannot be used") as caught:
            await backend.get("a", max_bytes=1)
    assert "hush-hush" not in repr(caught.getrepr(showlocals=False))


async def test_the_absent_token_of_an_external_account_is_named(
    guarded: GcsServer, tmp_path: Path
) -> None:
    file, subject = tmp_path / "account.json", tmp_path / "subject"
    fields = {"audience": "a", "subject_token_type": "t", "token_url": f"{guarded.url}/token"}
    source = {"credential_source": {"file": str(subject)}}
    file.write_text(json.dumps({"type": "external_account"} | fields | source))
    async with with_tokens(guarded, "any-bucket", credentials_file=str(file)) as backend:
        with pytest.raises(errors.PermissionDenied, match=str(subject)):
            await backend.get("a", max_bytes=1)
