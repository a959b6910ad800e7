"""Measuring a store: figures that make sense, advice that follows, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckpipe.cli.bench import Measurements, Rate, advise
from tests.support.command_line import Commands, interrupted
from tests.support.pipelines import stores

rates = st.lists(
    st.builds(
        Rate, st.integers(1, 8), st.sampled_from([1 << 20, 1 << 24]), *[st.floats(1, 1e9)] * 2
    ),
    min_size=1,
    unique_by=lambda rate: (rate.lanes, rate.block_bytes),
)


@given(rates, st.floats(1, 1e9), st.floats(1, 1e9))
def test_advice_is_nearly_the_best_and_no_larger_than_that(
    found: list[Rate], copy: float, checksum: float
) -> None:
    advice = advise(Measurements(copy, checksum, 0.01, tuple(found)))
    best = max(rate.write for rate in found)
    chosen = [
        rate
        for rate in found
        if (rate.lanes, rate.block_bytes) == (advice.upload_lanes, advice.block_bytes)
    ]
    assert max(rate.write for rate in chosen) >= 0.95 * best
    cost = advice.upload_lanes * advice.block_bytes
    assert all(r.lanes * r.block_bytes >= cost for r in found if r.write >= 0.95 * best)
    slowest = min(copy, checksum, max(rate.write for rate in chosen))
    assert f"{slowest / 1e9:.2f} GB/s" in advice.bottleneck


def test_bench_measures_and_leaves_no_object(call: Commands, tmp_path: Path) -> None:
    sizes = ("--size", "1MiB", "--lanes", "1,2", "--blocks", "256KiB,1 MiB")
    data = call("bench", tmp_path / "new", *sizes, "--json").data
    assert list((tmp_path / "new").iterdir()) == []  # the first write has made the root
    tried = [(each["lanes"], each["block_bytes"]) for each in data["rates"]]
    assert tried == [(1, 1 << 18), (2, 1 << 18), (1, 1 << 20), (2, 1 << 20)]
    assert all(each["write"] > 0 and each["read"] > 0 for each in data["rates"])
    assert min(data["copy"], data["checksum"], data["put_seconds"]) > 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    text = call("bench", tmp_path, *sizes).out
    assert "A save will wait for" in text
    assert "Set upload.lanes to" in text
    assert data["write_beside"] > 0
    assert data["advice"]["worker"] in ("thread", "process")
    with stores() as made:
        assert call("bench", made.url, *sizes).code == 0
        assert made.memory._store.objects == {}


def test_bench_measures_nothing_twice_and_keeps_no_small_object(call: Commands) -> None:
    with stores() as made:
        seen: list[str] = []
        made.faulty.call(
            lambda _: seen.extend(made.memory._store.objects),
            lambda operation: operation.verb == "open_upload",
        )
        sizes = ("--size", "64KiB", "--lanes", "1,1", "--blocks", "64KiB,65536")
        data = call("bench", made.url, *sizes, "--json").data
        assert [(each["lanes"], each["block_bytes"]) for each in data["rates"]] == [(1, 1 << 16)]
        assert seen == []


def test_bench_refuses_what_cannot_be(call: Commands, tmp_path: Path) -> None:
    for options in (("--lanes", "0"), ("--lanes", "a"), ("--blocks", "x"), ("--size", "-1")):
        assert call("bench", tmp_path, *options).code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    arguments = ("bench", f"stuck://{tmp_path}", "--size", "1MiB")
    assert interrupted("read_into", *arguments).code == 130
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
