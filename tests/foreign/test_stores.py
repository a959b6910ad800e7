"""Each format is loaded from buckets, by ranged reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.backend import PutMode
from ckpipe.errors import CorruptCheckpoint, StoreError
from tests.foreign.dcp_folders import save
from tests.foreign.places import Tensors, assert_loaded, weights
from tests.foreign.test_weights import FORMS
from tests.support.bucket_stores import Seen, behind_proxy
from tests.support.pipelines import load_existing


@pytest.fixture(params=["moto_server", "gcs_server"])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    server = request.getfixturevalue(request.param)
    with behind_proxy(server, "foreign") as proxy:
        yield Seen(server, proxy, "foreign")


async def _put(seen: Seen, files: dict[str, bytes], *, anew: bool = False) -> None:
    async with seen.backend() as backend:
        if anew:
            await backend.delete(list(files))
        for name, data in files.items():
            await backend.put(name, data, PutMode.CREATE)


def put(seen: Seen, folder: Path, below: str) -> str:
    """Copy a folder into the bucket; return its URL."""
    files = {f"{below}/{each.name}": each.read_bytes() for each in folder.iterdir()}
    asyncio.run(_put(seen, files))
    seen.requests.clear()
    return f"{seen.url}/{below}"


def options(seen: Seen) -> dict[str, Any]:
    given: dict[str, Any] = {"endpoint_url": seen.proxy.url}
    return {"backends": {seen.scheme: given | ({"anonymous": True} if seen.scheme == "gs" else {})}}


def written(form: str, folder: Path, tensors: Tensors) -> str:
    """Write tensors in a form; return the name of the file, if it is one."""
    folder.mkdir()
    if form in FORMS:
        FORMS[form](folder, tensors)
        return "/model.safetensors" if form == "one_file" else ""
    if form == "torch":
        torch.save(dict(tensors), folder / "state.pt")
        return "/state.pt"
    save(dict(tensors), folder)
    return ""


@pytest.mark.sample(1)
def test_all_formats_are_read_from_a_bucket(seen: Seen, tmp_path: Path) -> None:
    tensors = {"large": torch.randn(1 << 18), **weights()}
    del tensors["empty"]  # DCP does not keep it on one rank
    with ckpipe.SyncPipeline(tmp_path / "run", **options(seen)) as pipeline:
        for form in ("one_file", "in_shards", "torch", "dcp"):
            file = written(form, tmp_path / form, tensors)
            url = put(seen, tmp_path / form, form) + file
            assert_loaded(load_existing(pipeline, source=url), tensors, url)
            reads = [each for each in seen.requests if each.operation == "Get"]
            assert reads
            assert all("range" in map(str.lower, each.headers) for each in reads), form
    part = ckpipe.load(url, include=["scale"], **options(seen))
    assert part.state.keys() == {"scale"}
    assert part.report is not None
    assert part.report.bytes < 1 << 18


class Replaces:
    """Puts another object of the same size in the place of a file while it is loaded."""

    def __init__(self, seen: Seen, name: str, data: bytes) -> None:
        self.seen, self.name, self.data = seen, name, data

    def state_dict(self) -> dict[str, Any]:
        asyncio.run(_put(self.seen, {self.name: self.data}, anew=True))
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a load that fails has given it state")


def test_an_object_that_is_replaced_meanwhile_is_an_error(seen: Seen, theirs: Path) -> None:
    torch.save({"w": torch.ones(9), "object": {"a": 1}}, theirs / "state.pt")
    url = put(seen, theirs, "replaced") + "/state.pt"
    torch.save({"w": torch.zeros(9), "object": {"a": 1}}, theirs / "state.pt")
    other = Replaces(seen, "replaced/state.pt", (theirs / "state.pt").read_bytes())
    # Google Cloud Storage reads the version that it began with, or none.
    what = "replaced or changed|overwritten while it was read"
    with pytest.raises((CorruptCheckpoint, StoreError), match=what) as raised:
        ckpipe.load(url, {"w": torch.zeros(9), "object": other}, **options(seen))
    assert raised.value.key == "state.pt"
