"""What a user may write wrong for a bucket is told at once, and what only looks odd works."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from botocore.exceptions import ClientError

from ckpipe import errors
from ckpipe.backend import Backend, PutMode
from ckpipe_gcs import GcsBackend
from ckpipe_s3 import S3Backend
from tests.support import s3_servers
from tests.support.gcs_servers import GcsServer
from tests.support.s3_servers import S3Server
from tests.support.sampling import sample

BUCKET = "options"
BACKENDS: dict[str, type[S3Backend | GcsBackend]] = {"s3": S3Backend, "gs": GcsBackend}

_numbers = itertools.count()


def both(values: list[Any]) -> list[tuple[str, Any]]:
    """Each value with each scheme."""
    return list(itertools.product(BACKENDS, values))


def make(scheme: str, prefix: str = "run", **options: Any) -> Backend:
    """A backend that is not open."""
    return BACKENDS[scheme](f"{scheme}://{BUCKET}/{prefix}", **options)


NO_ADDRESSES = [
    "", "127.0.0.1:8333", "ftp://host", "http://", "http://:80", "http://host:99999", "http://host:0",
    "http://me:hunter2@host", "http://host?hunter2=1", "http://host#hunter2", " http://host",
    "http://ho st", "http://[::1",
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "url"), both(NO_ADDRESSES))
def test_addresses_that_are_none(scheme: str, url: str) -> None:
    with pytest.raises(errors.UsageError, match=r"Write http://host:port as endpoint_url") as found:
        make(scheme, endpoint_url=url)
    assert "hunter2" not in str(found.value)


ABSENT: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "a profile": ("s3", {}, {"profile": "absent"}),
    "a profile of the environment": ("s3", {"AWS_PROFILE": "absent"}, {}),
    "a file of credentials": ("s3", {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere/absent"}, {}),
    "a configuration file": ("s3", {"AWS_CONFIG_FILE": "/nowhere/absent"}, {}),
    "a token file": (
        "s3",
        {
            "AWS_WEB_IDENTITY_TOKEN_FILE": "/nowhere/absent",
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/x",
        },
        {},
    ),
    "a token file of a container": (
        "s3",
        {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/x",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/nowhere/absent",
        },
        {},
    ),
    "credentials_file": ("gs", {}, {"credentials_file": "/nowhere/absent"}),
    "GOOGLE_APPLICATION_CREDENTIALS": (
        "gs",
        {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/absent"},
        {},
    ),
}


@pytest.mark.parametrize("what", ABSENT)
async def test_a_file_or_profile_of_credentials_that_is_absent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    scheme, environment, options = ABSENT[what]
    for name in [each for each in os.environ if each.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    found = {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"} | environment
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    if scheme == "s3":
        options = {"endpoint_url": "http://127.0.0.1:1", "region": "us-east-1"} | options
    with pytest.raises(errors.StoreError, match="absent") as caught:
        async with make(scheme, **options) as backend:
            await backend.get("key", max_bytes=10)
    assert not caught.value.transient
    assert caught.value.hint


def test_the_arn_of_an_access_point_is_answered_with_its_alias() -> None:
    arn = "arn:aws:s3:us-east-1:123456789012:accesspoint/data"
    with pytest.raises(errors.UsageError, match=r"ARN of an access point.*-s3alias"):
        S3Backend(f"s3://{arn}/run")


@pytest.mark.parametrize(
    ("scheme", "url"), both(["127.0.0.1:3128", "socks5://h:1", "ftp://h", "http://me:hunter2@:1"])
)
def test_proxies_that_are_none(scheme: str, url: str) -> None:
    with pytest.raises(errors.UsageError, match="as proxy") as found:
        make(scheme, endpoint_url="http://host", proxy=url)
    assert "hunter2" not in str(found.value)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        *both([{"max_connections": "8"}, {"request_timeout": True}, {"request_timeout": 0}]),
        *both([{"require_create_only": "false"}, {"request_timeout": float("nan")}]),
        ("gs", {"anonymous": "false"}),
        ("gs", {"resumable_bytes": -1}),
    ],
)
def test_numbers_and_flags_that_are_none(scheme: str, options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(errors.UsageError, match=name):
        make(scheme, endpoint_url="http://host", **options)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        *[("{}://bucket", "{}://bucket/"), ("{}://bucket/", "{}://bucket/")],
        *[("{}://my.bucket-1/run 17", "{}://my.bucket-1/run 17/")],
        ("{}://bucket/a/b%20c/", "{}://bucket/a/b%20c/"),
    ],
)
@pytest.mark.parametrize("scheme", BACKENDS)
def test_urls(scheme: str, url: str, shown: str) -> None:
    for written in (scheme, scheme.upper()):
        assert f" {shown.format(scheme)}>" in repr(BACKENDS[scheme](url.format(written)))


BAD_URLS = [
    "{}://", "{}:///a", "other://bucket/a", "bucket/a", "{}://b/a//c", "{}://b/../c", "{}://b/a",
    "{}://AKIA:hunter2@bucket/run", "{}://bucket:80/run",
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "url"), both(BAD_URLS))
def test_bad_urls(scheme: str, url: str) -> None:
    with pytest.raises(errors.UsageError, match=f"{scheme}://bucket/prefix") as caught:
        BACKENDS[scheme](url.format(scheme))
    assert "hunter2" not in str(caught.value)


NO_KEYS = ["a/\ud800", ".ckpipe-probe", "x" * 1021, "ü" * 511]


@pytest.mark.parametrize(
    ("scheme", "key"),
    [
        *both(NO_KEYS),
        *[("gs", key) for key in ("a\nb", "a\rb", f"a/.ckpipe-upload-{'0' * 16}-1-3.ckpipe-part")],
    ],
    ids=ascii,
)
async def test_keys_that_the_store_cannot_hold(scheme: str, key: str) -> None:
    with pytest.raises(errors.InvalidKey):
        await make(scheme).put(key, b"", PutMode.CREATE)


@pytest.mark.parametrize(("scheme", "prefix"), both(["a\\b", "a\nb", "a\x01", "\x7f/b"]))
def test_prefixes_that_stores_disagree_about(scheme: str, prefix: str) -> None:
    with pytest.raises(errors.UsageError, match="backslash or a control character"):
        make(scheme, prefix, endpoint_url="http://host")


ODD = [
    "a b", " a ", "a%20b", "a+b", "ü-日本", "a#b?c=d&e", "q'uo\"te", "😀",
    "~!$*(@:;,=[{^`|<>", ".a.",
]  # fmt: skip
SOME = sample(ODD, 2)


@pytest.mark.parametrize("prefix", SOME)
async def test_odd_prefixes(
    prefix: str, moto_server: S3Server, weed_server: S3Server, gcs_server: GcsServer
) -> None:
    servers: list[S3Server | GcsServer] = [moto_server, weed_server, gcs_server]
    await anyio.to_thread.run_sync(_make_buckets, servers)
    for server in servers:
        scheme = "gs" if isinstance(server, GcsServer) else "s3"
        options: dict[str, Any] = {"anonymous": True} if scheme == "gs" else {}
        root = f"{prefix}/{next(_numbers)}"
        async with make(scheme, root, endpoint_url=server.url, **options) as backend:
            await backend.put("a/b", b"content", PutMode.CREATE)
            with pytest.raises(errors.ObjectExists):
                await backend.put("a/b", b"other", PutMode.CREATE)
            assert [info.key async for info in backend.list()] == ["a/b"]
            assert (await backend.children()).prefixes == ("a/",)
            buffer = bytearray(4)
            await backend.read_into("a/b", 3, memoryview(buffer))
            assert bytes(buffer) == b"tent"
            await backend.delete(["a/b"])
            assert [info.key async for info in backend.list()] == []


def _make_buckets(servers: list[S3Server | GcsServer]) -> None:
    for server in servers:
        with contextlib.suppress(ClientError, OSError):  # it is there
            server.make_bucket(BUCKET)


@pytest.mark.parametrize("scheme", BACKENDS)
async def test_tls_where_none_is_spoken(
    scheme: str, moto_server: S3Server, gcs_server: GcsServer
) -> None:
    server = gcs_server if scheme == "gs" else moto_server
    endpoint = server.url.replace("http:", "https:")
    options: dict[str, Any] = {"anonymous": True} if scheme == "gs" else {}
    async with make(scheme, endpoint_url=endpoint, **options) as backend:
        with pytest.raises(errors.StoreError, match=r"does not use TLS.*https or http") as found:
            await backend.stat("a")
    assert not found.value.transient


@pytest.mark.parametrize("scheme", BACKENDS)
@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_certificates_that_are_none(scheme: str, content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "document.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(errors.StoreError, match=rf"{file}.*option 'ca_bundle'") as found:
        async with make(scheme, endpoint_url="https://127.0.0.1:9", ca_bundle=str(file)):
            pass
    assert not found.value.transient


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "in a profile"])
async def test_a_file_of_certificates_that_the_surroundings_name_and_that_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    s3_servers.set_up_process()
    absent = str(tmp_path / "absent.pem")
    if variable == "in a profile":
        config = tmp_path / "config"
        config.write_text(f"[default]\nca_bundle = {absent}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    else:
        monkeypatch.setenv(variable, absent)
    with pytest.raises(errors.StoreError, match=rf"{absent}.*{variable}") as found:
        async with make("s3", endpoint_url="https://127.0.0.1:9"):
            pass
    assert not found.value.transient
