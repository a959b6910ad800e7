"""Measuring a store: figures that make sense, advice that follows, and nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import ckpipe
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


@given(rates, st.floats(1, 1e9), st.floats(1, 1e9), st.floats(1, 1e9))
def test_advice_is_nearly_the_best_and_no_larger_than_that(
    found: list[Rate], copy: float, checksum: float, beside: float
) -> None:
    advice = advise(Measurements(copy, checksum, 0.01, tuple(found), beside))
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
    sizes = ("--size", "32MiB", "--lanes", "1,2", "--blocks", "256KiB,1 MiB")
    data = call("bench", tmp_path / "new", *sizes, "--json").data
    assert list((tmp_path / "new").iterdir()) == []  # the first write has made the root
    tried = [(each["lanes"], each["block_bytes"]) for each in data["rates"]]
    assert tried == [(1, 1 << 18), (2, 1 << 18), (1, 1 << 20), (2, 1 << 20)]
    assert all(each["write"] > 0 and each["read"] > 0 for each in data["rates"])
    assert min(data["copy"], data["checksum"], data["put_seconds"]) > 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    small = ("--size", "32MiB", "--lanes", "1", "--blocks", "256KiB")
    text = call("bench", tmp_path, *small).out
    assert "A save will wait for" in text
    keywords, table = re.findall(r"\n\n((?:upload|worker).+?)(?=\n\nOr|\Z)", text, re.DOTALL)
    (tmp_path / "settings.toml").write_text(table)
    proposed = ckpipe.Settings.from_file(tmp_path / "settings.toml")
    assert ckpipe.Settings(**eval(f"dict({keywords})")) == proposed
    assert proposed.worker.mode in ("thread", "process")
    assert proposed.staging.block_bytes == 1 << 18
    (tmp_path / "settings.toml").unlink()
    assert data["write_beside"] > 0
    assert data["advice"]["worker"] in ("thread", "process")
    with stores() as made:
        assert call("bench", made.url, *small).code == 0
        assert made.memory._store.objects == {}


def test_bench_measures_nothing_twice_and_keeps_no_small_object(call: Commands) -> None:
    with stores() as made:
        seen: list[str] = []
        made.faulty.call(
            lambda _: seen.extend(made.memory._store.objects),
            lambda operation: operation.verb == "open_upload",
        )
        sizes = ("--size", "32MiB", "--lanes", "1,1", "--blocks", "1MiB,1048576")
        data = call("bench", made.url, *sizes, "--json").data
        assert [(each["lanes"], each["block_bytes"]) for each in data["rates"]] == [(1, 1 << 20)]
        assert seen == []


def test_bench_refuses_sizes_that_measure_nothing(call: Commands, tmp_path: Path) -> None:
    for options, hint in (
        (("--lanes", "0"), "at least 1"),
        (("--lanes", "a"), "1,4,8"),
        (("--blocks", "x"), "16MiB"),
        (("--size", "-1"), "--size is a size such as 16MiB"),
        (("--size", "127MiB"), "Write --size 128MiB or more"),
        (("--size", "1MiB", "--lanes", "1", "--blocks", "64KiB"), "Write --size 32MiB or more"),
        (("--size", "9000000TB"), "does not fit on the disk"),
        (("--lanes", "9000000", "--blocks", "1GiB"), "Try fewer lanes with --lanes"),
    ):
        done = call("bench", tmp_path / "new" / "root", *options)
        assert (done.code, done.out) == (2, "")
        assert hint in done.err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    arguments = ("bench", f"stuck://{tmp_path}", "--size", "32MiB", "--lanes", "1")
    assert interrupted("read_into", *arguments).code == 130
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
