"""Ranks compare copies that one of them writes: one bit on one rank is told, and nothing else."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import ckpipe
from ckpipe import events
from ckpipe.distributed import training_state
from ckpipe.errors import InvalidManifest, ReplicasDiffer
from ckpipe.format.checksum import crc32c
from ckpipe.format.codec import decode_document, encode_document
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.merge import merge
from ckpipe.format.names import index_key
from ckpipe.format.summary import decode_summary, encode_summary, summary_of
from ckpipe.types import DifferingCopy
from tests.inner.made_up_ranks import ID, Borrowed, manifest_of
from tests.support.fork_server import Case
from tests.support.rank_pipelines import ranks
from tests.support.rank_processes import SETTINGS, Gang, told
from tests.support.rank_processes import tell as note
from tests.support.settling import settle
from tests.support.stored_files import document_of
from tests.support.wrapped_models import trained, wrapped

BLOCK = 65536
DOCS = Path(__file__).parents[2] / "docs"


class Model:
    """A guarded optimizer, and tensors of every kind that several ranks hold alike."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.owned = torch.nn.Parameter(torch.randn(1000, 1000, generator=made))
        self.optimizer = torch.optim.SGD([self.owned], lr=0.1)
        numbers = torch.randn(4000, generator=made)
        self.state: dict[str, Any] = {
            "owned": self.owned,
            "tied": self.owned,
            "strided": numbers[:2000].view(40, 50).t(),
            "lazy": torch.randn(100, dtype=torch.complex64, generator=made).conj(),
            "half": numbers[2000:2301].bfloat16(),
            "scalar": torch.tensor(3.0),
            "none": torch.empty(0, 3),
            "overlapping": [numbers[3000:3200], numbers[3100:3400]],
            "one": torch.ones(1).expand(1 << 20),
        }


TENSORS = ["owned", "strided", "lazy", "half", "scalar"]


def flip(tensor: torch.Tensor) -> None:
    """Change one bit of the last element."""
    with torch.no_grad():
        last = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        last = last[(-1,) * last.ndim]
        bits = torch.tensor([last.item()], dtype=last.dtype).view(torch.uint8)
        bits[0] ^= 1
        value = bits.view(last.dtype)[0]
        if tensor.is_complex():
            tensor[-1] = torch.complex(tensor[-1].real, -value if tensor.is_conj() else value)
        else:
            tensor[(-1,) * tensor.ndim] = value


@pytest.mark.sample(2)
@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("until", ["staged", "captured"])
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("what", TENSORS)
def test_one_bit_is_told(
    tmp_path: Path, what: str, until: Any, worker: str, incremental: bool
) -> None:
    models = [Model(), Model()]
    guards = iter([each.optimizer for each in models])
    globs = [f"{name}*" for name in models[0].state]
    with ranks(
        str(tmp_path), 2, plan={"replicated": globs}, worker=worker, replicas={"share": 1},
        incremental=incremental, staging={"block_bytes": BLOCK}, guard=lambda: next(guards),
    ) as world:  # fmt: skip
        for step, expected in enumerate([0, 0, 1, 1]):
            if step == 2:
                flip(models[1].state[what])
            handles = [
                pipeline.save(model.state, step=step, until=until)
                for pipeline, model in zip(world, models, strict=True)
            ]
            assert [each.wait_complete(300).differences for each in handles] == [expected] * 2
        id = world[0].steps()[-1].id
    (found,) = ckpipe.inspect(tmp_path, id).differing
    assert (found.tensor, {found.owner, *found.witnesses}) == (what, {0, 1})
    assert found.mebibytes == (int(what == "owned"),)
    if what == "owned":  # rows are divided, and the last ones differ
        assert found.box is not None
        assert found.box[1] == (1000, 1000)


@pytest.mark.parametrize(
    ("mode", "worker"),
    [("warn", "thread"), ("raise", "thread"), ("raise", "process"), ("off", "thread")],
)
def test_the_mode_decides_what_a_difference_does(
    mode: str, worker: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"plan": {"replicated": ["t"]}, "worker": worker}
    seen: list[events.Event] = []
    with ranks(str(tmp_path), 2, replicas={"mode": mode, "share": 1}, **settings) as world:
        world[1].events.add(seen.append)

        def save(step: int) -> None:
            for rank, pipeline in enumerate(world):  # the last one completes the checkpoint
                pipeline.save({"t": torch.full((9,), float(rank))}, step=step).wait(300)
                settle(pipeline)

        save(0)
        if mode == "raise":
            with pytest.raises(ReplicasDiffer, match="holds other bytes of t than rank") as raised:
                world[1].save({"t": torch.zeros(9)}, step=1)
            assert raised.value.key == "t"
        save(2)
        infos = [each for each in world[0].steps() if each.complete]
    assert [(each.step, each.differences) for each in infos] == [
        (step, int(mode != "off")) for step in (0, 2)
    ]
    told = [each for each in seen if isinstance(each, events.ReplicasDiffered)]
    texts = [text for each in caplog.records if "declared equal" in (text := each.getMessage())]
    assert len(told) == len(texts) == (mode != "off")


def test_all_copies_are_compared_in_the_saves_that_the_share_promises(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        small = [torch.full((9,), float(rank)) for _ in range(40)]
        return {"large": torch.full((3, 1 << 20), float(rank)), "small": small}

    found: list[DifferingCopy] = []
    replicas = {"share": 1 / 4}
    with ranks(str(tmp_path), 2, plan={"replicated": ["*"]}, replicas=replicas) as world:
        for step in range(4):
            handles = [each.save(state(rank), step=step) for rank, each in enumerate(world)]
            assert all(each.wait_complete(300).complete for each in handles)
            found += ckpipe.inspect(tmp_path, step).differing
    assert {each.tensor for each in found} == {"large", *(f"small.{n}" for n in range(40))}
    places = {(each.tensor, each.box, n) for each in found for n in each.mebibytes}
    assert len(places) == 12 + 40


@pytest.mark.parametrize(("blocks", "differences"), [(9, 0), (16, 0), (17, 2)])
def test_copies_are_compared_where_memory_is_left(
    tmp_path: Path, blocks: int, differences: int
) -> None:
    # Each rank writes 8 blocks and a header, and compares 8 blocks.
    staging = {"block_bytes": BLOCK, "bytes": blocks * BLOCK}
    with ranks(
        str(tmp_path), 2, plan={"replicated": ["t"]}, replicas={"share": 1}, staging=staging
    ) as world:
        for step in (1, 2):
            handles = [
                pipeline.save({"t": torch.full((1 << 18,), float(rank))}, step=step)
                for rank, pipeline in enumerate(world)
            ]
            assert [each.wait_complete(300).differences for each in handles] == [differences] * 2
            for pipeline in world:
                settle(pipeline)


def test_without_copies_nothing_is_written(tmp_path: Path) -> None:
    with ranks(str(tmp_path), 2) as world:
        for pipeline in world:
            pipeline.save({"t": torch.zeros(9)}, step=1).wait(300)
    texts = [path.read_bytes() for path in tmp_path.rglob("*.json")]
    assert texts
    assert not any(b"witness" in text or b"difference" in text for text in texts)


# Real ranks


def drift(case: Case) -> None:
    """Train and save without and with one other bit, in every wrapper; tell what is found."""
    mesh = init_device_mesh("cpu", (4,))
    rank, kinds = dist.get_rank(), ["ddp", "fsdp1", "hsdp", "3d", "globs"]
    for kind, plan in itertools.product(kinds, case["plans"]):
        root = Path(case["root"]) / f"{kind}-{plan}"
        globs = ["t.*"] if kind == "globs" else "auto"
        settings = SETTINGS | {"plan": {"planner": plan, "replicated": globs}}
        model = wrapped("plain" if kind == "globs" else kind)
        optimizer = torch.optim.Adam(model.parameters())
        trained(model, optimizer, range(1))
        copies = DTensor.from_local(torch.ones(300, 1000), mesh, [Replicate()], run_check=False)
        state = {
            "t": training_state(model, optimizer, replicated=kind == "fsdp1"),
            "copies": copies,
        }
        with ckpipe.SyncPipeline(root, replicas={"share": 1}, **settings) as pipeline:
            for step in range(case["saves"]):
                trained(model, optimizer, range(step, step + 1))
                found = pipeline.save(state, step=step).wait_complete(timeout=300).differences
                note(case, found=[kind, plan, found])
            weight = next(each for each in model.parameters() if each.ndim == 2)
            if rank == 3:
                for each in (weight.detach(), optimizer.state[weight]["exp_avg"], copies):
                    flip(each.to_local() if isinstance(each, DTensor) else each)
            names: set[str] = set()
            for step in range(100, 103):
                info = pipeline.save(state, step=step).wait_complete(timeout=300)
                names |= {each.tensor for each in ckpipe.inspect(root, info.id).differing}
            note(case, drift=[kind, plan, sorted(names)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", ["local", "global"])
def test_ranks_in_every_wrapper(world: Gang, root: Path, plan: str) -> None:
    root.mkdir(exist_ok=True)
    world.succeed("tests.ranks.test_witnesses:drift", root, 4, plans=[plan], saves=2)
    clean = told(root, "found")
    assert len(clean) == 4
    assert {each[2] for rank in clean.values() for each in rank} == {0}
    for kind, _, names in told(root, "drift")[0]:
        assert len(names) == 3, (kind, plan, names)
        assert any("exp_avg" in name for name in names)


# Merging


def parts_of(count: int, odd: int) -> list[ManifestDocument]:
    """Manifests of ranks that hold what rank 0 writes; one of them holds other bytes."""
    made = torch.arange(1 << 19, dtype=torch.float32)
    data = made.numpy().tobytes()
    sums = [crc32c(data[: 1 << 20]), crc32c(data[1 << 20 :])]
    found = []
    for rank in range(count):
        borrowed = {"t": Borrowed(0)} if rank else {}
        other = [sums[0], sums[1] ^ 1] if rank == odd else sums
        witnesses = ((0, 0, *other),) if rank else ()
        state = {"mine": torch.full((3,), float(rank)), "t": made}
        found.append(manifest_of(state, rank, count, borrowed=borrowed, witnesses=witnesses)[0])
    return found


@pytest.mark.parametrize("count", [2, 101])
def test_a_difference_is_found_by_whoever_merges(count: int) -> None:
    every = parts_of(count, 1)
    index = merge(every, "index")
    assert index.differences is not None
    assert index.differences.found == (DifferingCopy("t", None, 0, (1,), (1,)),)
    if count > 100:
        groups = [merge(every[:100], "group", (1, 0)), merge(every[100:], "group", (1, 1))]
        again = [
            decode_document(encode_document(each), key="k", id=ID, kind="group") for each in groups
        ]
        assert encode_document(merge(again, "index")) == encode_document(index)
    text = encode_document(index)
    read = decode_document(text, key=index_key(ID), id=ID, kind="index")
    assert read.differences == index.differences
    schema = json.loads((DOCS / "schema" / "document.json").read_text())
    for document in (index, every[1], every[-1]):
        members = {**document_of(encode_document(document)), "crc32c": "00000000"}
        jsonschema.Draft202012Validator(schema).validate(members)
    assert decode_summary(ID, encode_summary(ID, summary_of(index))).differences == 1


def test_an_index_without_differences_has_nothing_of_them() -> None:
    every = parts_of(3, -1)
    plain = [replace(each, parts=(replace(each.parts[0], witnesses=()),)) for each in every]
    assert encode_document(merge(every, "index")) == encode_document(merge(plain, "index"))


@pytest.mark.parametrize("row", [(1, 0, 5), (0, 2, 5), (0, 1, 5, 5), (0, 0), (0, 0, 1 << 32), ()])
def test_a_part_that_witnesses_what_is_not_there_is_refused(row: tuple[int, ...]) -> None:
    document = parts_of(2, -1)[1]
    part = replace(document.parts[0], witnesses=(row,))
    data = encode_document(replace(document, parts=(part,)))
    with pytest.raises(InvalidManifest, match="witnesses"):
        decode_document(data, key="k", id=ID, kind="manifest")
