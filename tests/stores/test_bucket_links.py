"""Links in buckets: copies on the server, written as uploads are, and lost answers to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe.store.retry import RetryingBackend, RetryPolicy
from ckpipe_gcs import GcsBackend
from ckpipe_s3 import S3Backend
from tests.support.bucket_stores import BLOCK, Seen, behind_proxy, written
from tests.support.fault_proxy import Fault, Request, answer
from tests.support.gcs_servers import GcsServer
from tests.support.pipelines import loaded_state, same

POLICY = RetryPolicy(3, 0.0, 0.0, 30.0)
KMS = "projects/p/locations/l/keyRings/r/cryptoKeys/k"


@pytest.fixture(params=["moto_server", "gcs_server"])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    server = request.getfixturevalue(request.param)
    with behind_proxy(server, "links") as proxy:
        yield Seen(server, proxy, "links")


def refusal(seen: Seen, status: int, code: str, text: str = "no") -> bytes:
    return seen.proxy.dialect.refusal(status, code, text)


def answer_copies(seen: Seen, answer: bytes) -> None:
    def rule(request: Request) -> bytes | None:
        return answer if request.operation == "Copy" else None

    seen.proxy.rule = rule


async def test_a_copy_is_stored_as_an_upload_is(seen: Seen) -> None:
    options: dict[str, Any] = {"storage_class": "STANDARD_IA", "sse": "aws:kms"}
    options |= {"sse_kms_key_id": "some-key"}
    if seen.scheme == "gs":
        options = {"kms_key_name": KMS}
    async with seen.backend(**options) as backend:
        await (await written(backend)).complete()
        await backend.link("data", "copy")
    copies = [each for each in seen.requests if each.operation == "Copy"]
    if isinstance(seen.server, GcsServer):
        resources = await anyio.to_thread.run_sync(seen.server.ask, "GET", "/emulator")
        data, copy = (
            resources["objects"][f"links/{seen.root}/{name}"] for name in ("data", "copy")
        )
        for field in ("storageClass", "kmsKeyName", "contentType", "crc32c", "size"):
            assert copy[field] == data[field]
        queries = [parse_qs(urlsplit(each.target).query) for each in copies]
        assert [query["ifGenerationMatch"] for query in queries] == [["0"], ["0"]]
        assert "rewriteToken" in queries[1]  # it is large
        return
    [copied], [uploaded] = [each.headers for each in copies], seen.headers("CreateUpload")
    asked = {name: value for name, value in uploaded.items() if name.startswith("x-amz-")}
    changing = {"x-amz-date", "x-amz-content-sha256", "x-amz-meta-ckpipe-upload"}
    assert len(asked.keys() - changing) == 4
    for name in asked.keys() - changing:
        assert copied[name] == asked[name]
    assert copied["x-amz-metadata-directive"] == "REPLACE"
    assert copied["if-none-match"] == "*"


async def test_a_lost_answer_to_a_copy_is_settled(seen: Seen) -> None:
    async with seen.backend() as plain, seen.backend() as other:
        backend = RetryingBackend(plain, POLICY)
        assert backend.can_link
        await backend.put("data", b"bytes", PutMode.CREATE)
        seen.fault["Copy"] = Fault.LOST
        await backend.link("data", "copy")
        assert await backend.get("copy", max_bytes=5) == b"bytes"
        await other.link("data", "copy")  # another process asks again
        assert len(await anyio.to_thread.run_sync(seen.names)) == 3  # and the probe
        await backend.put("other", b"bytes", PutMode.CREATE)
        for source, target in (("other", "copy"), ("data", "other")):
            with pytest.raises(errors.ObjectExists):
                await backend.link(source, target)


REFUSALS = {403: "AccessDenied", 501: "NotImplemented", 400: "InvalidRequest", 405: "NotAllowed"}


async def test_a_copy_that_the_store_refuses_is_left_to_a_write(seen: Seen) -> None:
    async with seen.backend() as backend:
        await backend.put("data", b"bytes", PutMode.CREATE)
        for status, code in REFUSALS.items():
            answer_copies(seen, refusal(seen, status, code))
            with pytest.raises(errors.LinkUnavailable, match=f"{code}.*Write the obj") as caught:
                await backend.link("data", "copy")
            assert caught.value.key == "copy"
            assert not caught.value.transient
        with pytest.raises(errors.ObjectNotFound):
            await backend.stat("copy")


async def test_a_store_that_fails_is_no_store_without_links(seen: Seen) -> None:
    answers = [refusal(seen, 503, "SlowDown"), refusal(seen, 500, "InternalError")]
    if seen.scheme == "s3":  # it begins to answer before it has copied
        body = b"<Error><Code>InternalError</Code><Message>no</Message></Error>"
        answers.append(answer(200, body, "application/xml"))
    else:
        answers.append(answer(200, b'{"done": false}', "application/json"))
    async with seen.backend() as backend:
        await backend.put("data", b"bytes", PutMode.CREATE)
        for each in answers:
            answer_copies(seen, each)
            with pytest.raises(errors.StoreUnavailable):
                await backend.link("data", "copy")


def test_the_largest_copies() -> None:
    assert S3Backend.limits.max_link_bytes == 5 * 2**30
    assert GcsBackend.limits.max_link_bytes is None


def test_a_save_sends_only_the_files_that_changed(seen: Seen) -> None:
    options: dict[str, Any] = {"endpoint_url": seen.proxy.url}
    if seen.scheme == "gs":
        options |= {"anonymous": True, "resumable_bytes": BLOCK}
    state = {f"base.{n}": torch.randn(1 << 20) for n in range(5)} | {"lora": torch.randn(1000)}
    sent = []
    with ckpipe.SyncPipeline(
        seen.url, incremental=True, staging={"block_bytes": BLOCK}, worker="thread",
        backends={seen.scheme: options},
    ) as pipeline:  # fmt: skip
        for step in (1, 2, 3):
            state["lora"].add_(1)
            seen.requests.clear()
            handle = pipeline.save(state, step=step)
            handle.wait()
            sent.append(sum(each.size for each in seen.requests))
        assert sent[0] > handle.report.bytes
        assert sent[2] < 0.02 * handle.report.bytes
        assert "Copy" in [each.operation for each in seen.requests]
        pipeline.delete(2, force=True)
        assert same(loaded_state(pipeline, 3), state)
