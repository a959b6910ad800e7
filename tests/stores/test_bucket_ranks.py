"""Real ranks that save to one bucket: one is killed, one is slow, all prune at once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpipe
from tests.support.gcs_servers import GcsServer
from tests.support.rank_processes import Gang, gang, told
from tests.support.s3_servers import S3Server
from tests.support.sampling import EVERY, SEED
from tests.support.stored_files import ATTEMPTS

BUCKET = "ranks"
RANKS = 4
SERVERS = ["moto_server", "gcs_server"]
SERVERS = [*SERVERS, "weed_server"] if EVERY else random.Random(SEED).sample(SERVERS, 1)
Server = S3Server | GcsServer

_numbers = itertools.count()


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    found.make_bucket(BUCKET)
    return found


@pytest.fixture(scope="module")
def world(server: Server) -> Iterator[Gang]:
    with gang() as made:
        yield made


@pytest.fixture
def case(server: Server) -> dict[str, Any]:
    run = f"{BUCKET}/run-{next(_numbers)}"
    if isinstance(server, GcsServer):
        return {"bucket": f"gs://{run}", "endpoint": server.url, "rows": 256}
    # Four ranks have two parts each of so many rows, and two have three.
    return {"bucket": f"s3://{run}", "endpoint": server.url, "rows": 3000}


def opened(case: dict[str, Any], **fields: Any) -> ckpipe.SyncPipeline:
    """A pipeline of one rank on the bucket of a case."""
    endpoint = case["endpoint"]
    backends = {"s3": {"endpoint_url": endpoint}, "gs": {"endpoint_url": endpoint}}
    backends["gs"]["anonymous"] = True
    return ckpipe.SyncPipeline(case["bucket"], backends=backends, worker="thread", **fields)


def blocks_of(case: dict[str, Any]) -> int:
    """How many blocks each of four ranks writes in a save."""
    block = 5 << 20 if case["bucket"].startswith("s3:") else 64 << 10
    rows: int = case["rows"]
    return -(-(rows // RANKS * 8192 + 4096) // block)


def below(case: dict[str, Any]) -> str:
    """The prefix of a case."""
    return str(case["bucket"]).partition(f"//{BUCKET}/")[2]


def whole(pipeline: ckpipe.SyncPipeline) -> list[ckpipe.CheckpointInfo]:
    """The complete checkpoints; SeaweedFS shows for a while what it held of others."""
    return [info for info in pipeline.steps() if info.complete]


KILLS: dict[str, dict[str, Any]] = {  # ``nth`` counts in the second save
    "between two parts": {"verb": "write", "key": "rank-00001", "landing": "after", "nth": 1},
    "before a part": {"verb": "write", "key": "rank-00001", "landing": "before", "nth": 2},
    "before its upload is complete": {"verb": "complete", "key": "", "landing": "before", "nth": 1},
    "before its manifest": {"verb": "put", "key": "/m/0/", "landing": "before", "nth": 1},
}


@pytest.mark.parametrize("when", KILLS if EVERY else ["between two parts"])
def test_one_of_four_is_killed_and_two_go_on(
    world: Gang,
    server: Server,
    case: dict[str, Any],
    tmp_path: Path,
    when: str,
) -> None:
    root = tmp_path / "run"
    kill = KILLS[when]
    once = blocks_of(case) if kill["verb"] == "write" else 1
    kill = kill | {"nth": once + kill["nth"]}
    codes = world.run("divide", root, RANKS, first=1, saves=2, victim=1, **case, **kill)
    assert codes == [0, None, 0, 0]
    assert told(root, "committed") == {0: [1, 2], 1: [1], 2: [1, 2], 3: [1, 2]}
    assert world.run("divide", root, 2, first=3, saves=1, **case) == [0, 0]
    assert {rank: steps[-1] for rank, steps in told(root, "loaded").items() if rank < 2} == {
        0: 1,
        1: 1,
    }
    killed = f"{below(case)}/step-000000000002."
    assert server.names(BUCKET, killed)
    # As if the launches had begun so long ago that their claims are no sign of life.
    server.delete(BUCKET, server.names(BUCKET, f"{below(case)}/{ATTEMPTS}"))
    with opened(case, retention={"sweep_after_seconds": 0}) as pipeline:
        pipeline.sweep()
        assert [info.step for info in whole(pipeline)] == [1, 3]
        for step in (1, 3):
            pipeline.verify(step)
    assert server.names(BUCKET, killed) == []
    assert [name for name in server.open_uploads(BUCKET) if name.startswith(below(case))] == []


SAVES = 20 if EVERY else 6
DEATHS = [
    {"verb": verb, "key": key, "landing": landing}
    for verb, key in (("put", "/m/0/"), ("complete", ""), ("list", "/m/0/"))
    for landing in ("before", "after")
]


def newest_whole(names: list[str]) -> int:
    """The newest step that all ranks have committed, whether or not somebody has noticed."""
    parts = [name.partition("/m/0/000/rank-") for name in names]
    counts = Counter(int(head.rpartition("step-")[2][:12]) for head, found, _ in parts if found)
    return max(step for step, count in counts.items() if count == RANKS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("death", DEATHS)
def test_ranks_that_die_lag_and_prune_at_once_lose_nothing(
    world: Gang, server: Server, case: dict[str, Any], tmp_path: Path, death: dict[str, str]
) -> None:
    root, below_it = tmp_path / "run", below(case)
    case |= {"slow": 2, "latency": 0.1 if EVERY else 0.02, "pruners": [0, 1], "until": SAVES}
    codes = world.run("retain", root, RANKS, victim=3, nth=SAVES // 2, **death, **case)
    assert codes == [0, 0, 0, None], "nothing is raised on those that live"
    whole = newest_whole(server.names(BUCKET, f"{below_it}/step-"))
    assert world.run("retain", root, RANKS, **case) == [0] * RANKS
    assert {steps[-1] for steps in told(root, "loaded").values()} == {whole}
    with opened(case, keep_last=2) as pipeline:
        stay = {SAVES - 1, SAVES - 2, whole}  # the last, and what they were resumed from
        assert {info.step for info in pipeline.steps() if info.complete} >= stay
        pipeline.prune()
        kept = [info for info in pipeline.steps() if info.complete]
        assert {info.step for info in kept} == stay
        for info in kept:
            assert pipeline.verify(info).files == RANKS
    inside = f"{below_it}/.ckpipe"
    deleted = {name.rpartition("/")[2] for name in server.names(BUCKET, f"{inside}/deleted/")}
    assert len(deleted) >= SAVES - 4
    names = server.names(BUCKET, f"{below_it}/step-")
    ours = [name.removeprefix(f"{below_it}/").partition("/")[0] for name in names]
    assert not {name.removesuffix(".json") for name in ours} & deleted, "no file of theirs is left"
    for info in kept:
        # Data, a manifest for each rank, and the index; a world of four has one level of groups.
        assert sum(name.removesuffix(".json") == info.id for name in ours) == 2 * RANKS + 1
    summaries = [name.rpartition("/")[2] for name in server.names(BUCKET, f"{inside}/digests/")]
    assert {name.removesuffix(".json") for name in summaries} <= {info.id for info in kept}
