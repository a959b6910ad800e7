"""What is S3's own: addresses, options, errors, and uploads that nobody ended."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ckpipe import errors
from ckpipe.backend import Backend, PutMode
from ckpipe_s3 import S3Backend
from tests.support.bucket_stores import BLOCK, Seen, behind_proxy
from tests.support.fault_proxy import Fault, fault_proxy
from tests.support.s3_servers import KEY, S3Server

BUCKET = "backend"


@pytest.fixture
def seen(moto_server: S3Server) -> Iterator[Seen]:
    with behind_proxy(moto_server, BUCKET) as proxy:
        yield Seen(moto_server, proxy, BUCKET)


@pytest.fixture
async def backend(seen: Seen) -> AsyncIterator[Backend]:
    async with seen.backend() as backend:
        yield backend


async def upload_two_blocks(backend: Backend, key: str = "data") -> bytes:
    """Upload an object of two parts."""
    data = bytes(range(256)) * (BLOCK // 128)
    upload = await backend.open_upload(key, size=len(data), block_bytes=BLOCK)
    for offset in (0, BLOCK):
        await upload.write(offset, memoryview(data)[offset : offset + BLOCK])
    await upload.complete()
    return data


async def test_options_reach_the_requests_that_they_are_for(seen: Seen) -> None:
    options: dict[str, Any] = {
        "sse": "aws:kms",
        "sse_kms_key_id": "a-key",
        "storage_class": "STANDARD_IA",
        "request_payer": "requester",
        "region": "eu-central-1",
    }
    async with seen.backend(**options) as backend:
        await upload_two_blocks(backend)
        await backend.put("small", b"x", PutMode.OVERWRITE)
        await backend.delete(["small"])
    [begun] = seen.headers("CreateUpload")
    puts, parts = seen.headers("Put"), seen.headers("UploadPart")
    assert begun["x-amz-storage-class"] == "STANDARD_IA"
    for headers in (begun, *puts):
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "a-key"
    assert all("x-amz-storage-class" not in headers for headers in puts)
    for headers in (*puts, *parts):
        assert len(headers["x-amz-checksum-crc32c"]) == 8
        assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    for request in seen.requests:
        assert request.headers["x-amz-request-payer"] == "requester"
        assert "/eu-central-1/s3/" in request.headers["authorization"]


async def test_a_profile_gives_credentials(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[other]\naws_access_key_id = OTHERKEY\naws_secret_access_key = hidden\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    async with seen.backend(profile="other") as backend:
        await backend.put("a", b"x", PutMode.CREATE)
    assert all("Credential=OTHERKEY/" in each.headers["authorization"] for each in seen.requests)
    assert KEY not in str(seen.requests)


async def test_buckets_stand_in_the_path_or_in_the_host_and_a_proxy_is_asked(seen: Seen) -> None:
    # Nobody listens there, so that only the proxy can have been asked.
    options: dict[str, Any] = {"endpoint_url": "http://localhost:9", "proxy": seen.proxy.url}
    async with S3Backend(seen.url, **options) as backend:
        await backend.put("a", b"x", PutMode.CREATE)
        assert await backend.get("a", max_bytes=1) == b"x"
    assert all(each.target.startswith(f"http://localhost:9/{BUCKET}") for each in seen.requests)
    assert {each.headers["host"] for each in seen.requests} == {"localhost:9"}
    seen.fault["Get"] = Fault.EXPIRED
    async with S3Backend(seen.url, **options, addressing_style="virtual") as backend:
        with pytest.raises(errors.PermissionDenied):
            await backend.get("a", max_bytes=1)
    root = seen.url.removeprefix(f"s3://{BUCKET}/")
    assert seen.requests[-1].target == f"http://{BUCKET}.localhost:9/{root}/a"
    async with S3Backend(
        seen.url, proxy=seen.proxy.url, region="eu-south-2", addressing_style="path"
    ) as backend:
        seen.fault["Connect"] = Fault.RESET_BEFORE
        with pytest.raises(errors.StoreUnavailable):
            await backend.get("a", max_bytes=1)
    # Without an endpoint it is AWS's own, for the region, and through a tunnel.
    assert seen.requests[-1].method == "CONNECT"
    assert seen.requests[-1].target == "s3.eu-south-2.amazonaws.com:443"


async def test_the_proxy_of_the_environment_is_asked(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", seen.proxy.url)
    async with S3Backend(seen.url, endpoint_url="http://localhost:9") as backend:
        await backend.put("a", b"x", PutMode.CREATE)
    assert all(each.target.startswith(f"http://localhost:9/{BUCKET}") for each in seen.requests)


async def test_a_proxy_that_is_not_there(seen: Seen) -> None:
    with fault_proxy(1) as gone:
        pass
    url = f"http://me:hunter2@127.0.0.1:{gone.port}"
    async with seen.backend(proxy=url) as backend:
        with pytest.raises(errors.StoreUnavailable) as caught:
            await backend.get("a", max_bytes=1)
    assert "hunter2" not in str(caught.value)


async def test_a_bundle_of_certificates_is_trusted(seen: Seen, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(certificate, key)
    with fault_proxy(seen.server.port, tls=shown) as proxy:
        url, endpoint = f"s3://{BUCKET}/tls", proxy.url.replace("http:", "https:")
        async with S3Backend(url, endpoint_url=endpoint, ca_bundle=str(certificate)) as backend:
            await backend.put("a", b"x", PutMode.OVERWRITE)
            assert await backend.get("a", max_bytes=1) == b"x"
        async with S3Backend(url, endpoint_url=endpoint) as backend:
            with pytest.raises(errors.StoreError, match=r"not trusted.*ca_bundle") as caught:
                await backend.get("a", max_bytes=1)
    assert not caught.value.transient


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine's loopback address, and its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ckpipe tests")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(*encoding, serialization.NoEncryption()))
    return certificate, key


async def test_no_credentials(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    async with seen.backend() as backend:
        with pytest.raises(errors.PermissionDenied, match="credentials"):
            await backend.get("a", max_bytes=1)
    with pytest.raises(errors.StoreError, match="no profile"):
        async with seen.backend(profile="nobody"):
            pass
    (tmp_path / "config").write_text("[profile broken]\ncredential_process = false\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(errors.PermissionDenied, match="no credentials"):
        async with seen.backend(profile="broken"):
            pass


async def test_an_upload_whose_begin_was_lost_is_ended(seen: Seen) -> None:
    async with seen.backend() as backend:
        seen.fault["CreateUpload"] = Fault.LOST
        with pytest.raises(errors.StoreUnavailable):
            await backend.open_upload("data", size=2 * BLOCK, block_bytes=BLOCK)
        assert len(await seen.left()) == 1
        await upload_two_blocks(backend)
        assert await seen.left() == []


async def test_leaving_asks_a_silent_store_once_for_each_upload(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    async with seen.backend() as backend:
        await backend.open_upload("data", size=2 * BLOCK, block_bytes=BLOCK)
        begun = len(seen.requests)
        backend.timeout = 0.5  # type: ignore[attr-defined]
        seen.fault |= {"Abort": Fault.HANG, "ListUploads": Fault.HANG}
    assert [each.operation for each in seen.requests[begun:]] == ["Abort"]
    assert "Unfinished uploads may be left behind" in caplog.text


async def test_uploads_that_a_crash_left_are_removed(weed_server: S3Server) -> None:
    # This server, since moto says of every upload that it was begun in 2010.
    soon = datetime.now(UTC) + timedelta(minutes=5)
    here, there = (f"step-{step:012d}.20261121T034205123Z-a.0" for step in (1, 2))
    own = [
        f"{here}/rank-00000.safetensors",
        f"{there}/rank-00000.1.safetensors",
        f"{there}.hf/model.safetensors",
        f"{there}.torch/state.pt",
        ".ckpipe/bench/1/2",
    ]
    foreign = ["datasets/train.parquet", "step-1/notes", f"{here}.json", f"{here}.zip/a", "mine"]
    foreign.append(f"old/{here}/rank-00000.safetensors")
    async with weed_server.client() as client:
        await client.create_bucket(Bucket="crashed")
        for key in ("other/data", *(f"root/{each}" for each in own + foreign)):
            await client.create_multipart_upload(Bucket="crashed", Key=key)
    async with S3Backend("s3://crashed/root", endpoint_url=weed_server.url) as backend:
        earlier = soon - timedelta(minutes=10)
        assert await backend.remove_stale_uploads(f"{here}/", before=earlier) == 0
        assert await backend.remove_stale_uploads(f"{here}/", before=soon) == 1
        assert await backend.remove_stale_uploads("", before=soon) == len(own) - 1
    left = await anyio.to_thread.run_sync(weed_server.open_uploads, "crashed")
    assert sorted(left) == sorted(["other/data", *(f"root/{each}" for each in foreign)])


async def test_an_upload_that_a_sweep_removed_says_so(seen: Seen, backend: Backend) -> None:
    key = "step-000000000001.20261121T034205123Z-a.0/rank-00000.safetensors"
    upload = await backend.open_upload(key, size=2 * BLOCK, block_bytes=BLOCK)
    await backend.remove_stale_uploads("", before=datetime.now(UTC) + timedelta(minutes=5))
    with pytest.raises(errors.StoreError):
        await upload.write(0, memoryview(bytes(BLOCK)))
    await upload.abort()


async def test_many_objects_are_deleted_by_few_requests(seen: Seen, backend: Backend) -> None:
    await backend.put("0001", b"x", PutMode.CREATE)
    await backend.delete([f"{number:04}" for number in range(1001)])
    assert len(seen.headers("Delete")) == 2
    assert [info async for info in backend.list()] == []


def test_the_tests_hide_the_credentials_of_the_user(moto_server: S3Server) -> None:
    assert os.environ["AWS_ACCESS_KEY_ID"] == KEY
