"""The timeline of a save: kept in manifests, shown as text, JSON and a page of its own."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ckpipe
from tests.cli.pages import Page
from tests.support.command_line import Commands
from tests.support.pipelines import loaded_state, stores
from tests.support.rank_pipelines import ranks
from tests.support.stored_files import Document, forge, manifest_key

SMALL_BLOCKS = {"block_bytes": 65536}
STAGE = {"began": 0.05, "seconds": 0.4, "waited": 0.0, "bytes": 10**6}


def save(url: object, **settings: Any) -> None:
    with ckpipe.SyncPipeline(str(url), staging=SMALL_BLOCKS, **settings) as pipeline:
        # What torch copies is summed afterwards.
        pipeline.save({"a": torch.ones(200_000)[::2]}, step=3)


def page_of(call: Commands, root: Path, report: Document | None = None) -> str:
    """The page about a small save, of whose report some members are others."""
    save(root)
    (index,) = root.glob("step-*.json")
    forge(index, lambda document: document["report"].update(report or {}))
    file = root.with_suffix(".html")
    assert call("timeline", root, "--html", file).code == 0
    return file.read_text()


def blocks(count: int) -> Document:
    """The blocks of a report, as the format has them."""
    spans = [[10_000 * n, 10_000 * n + 5000] for n in range(count)]
    numbers = {"file": [0] * count, "copier": [0] * count, "lane": [0] * count}
    places = {"offset": [4096 * n for n in range(count)], "bytes": [4096] * count}
    return {"of": count, **numbers, **places, "copied": spans, "summed": spans, "uploaded": spans}


def test_timeline_shows_stages_and_draws_blocks(call: Commands, tmp_path: Path) -> None:
    save(tmp_path / "root")
    data = call("timeline", tmp_path / "root", "--json").data
    assert (data["step"], data["world_size"], data["html"]) == (3, 1, None)
    (rank,) = data["ranks"]
    blocks = rank["report"]["blocks"]
    assert blocks["of"] == len(blocks["uploaded"]) == 7
    assert rank["report"]["bottleneck"]
    text = call("timeline", tmp_path / "root", 3).out
    assert rank["report"]["bottleneck"] in text
    assert re.search(r"^upload( +\d+\.\d{4}){3} +40\d kB +\S+ [kMG]?B/s", text, re.MULTILINE)
    file = tmp_path / "page.html"
    done = call("timeline", tmp_path / "root", "--html", file)
    assert done.out.splitlines()[-1] == f"wrote {file}"
    page = Page(file.read_text())
    for kind in ("copied", "summed", "uploaded"):
        assert len(page.of_class(kind)) == 7
    assert {path.name for path in tmp_path.iterdir()} == {"root", "page.html"}


def test_every_rank_keeps_its_own(call: Commands, tmp_path: Path) -> None:
    with ranks(str(tmp_path / "root"), 3) as world:
        for number, pipeline in enumerate(world):
            pipeline.save({"mine": torch.full((1000,), number)}, step=1).wait()
        world[0].latest()
    found = call("timeline", tmp_path / "root", "--json").data
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2]
    assert all(each["report"]["bytes"] > 4000 for each in found["ranks"])
    two = call("timeline", tmp_path / "root", "--rank", 2, "--json").data
    assert [each["rank"] for each in two["ranks"]] == [2]
    assert call("timeline", tmp_path / "root", "--rank", 3).code == 2
    file = tmp_path / "page.html"
    call("timeline", tmp_path / "root", "--html", file, "--rank", 0, "--rank", 1)
    text = file.read_text()
    assert "3 ranks, 2 of them shown" in text
    assert [f'id="rank-{n}"' in text for n in range(3)] == [True, True, False]


def test_a_report_costs_no_request_and_can_be_left_out(call: Commands) -> None:
    counts = []
    for keep in (True, False):
        with stores() as made:
            save(made.url, keep_reports=keep)
            counts.append(len(made.faulty.operations))
            (rank,) = call("timeline", made.url, "--json").data["ranks"]
            assert (rank["report"] is not None) == keep
            if not keep:
                assert call("timeline", made.url).out == "rank 0: it kept no report of its save\n"
    assert counts[0] == counts[1]


def test_a_report_that_is_not_one_spoils_only_the_timeline(call: Commands, tmp_path: Path) -> None:
    root = tmp_path / "root"
    save(root)
    (index,) = root.glob("step-*.json")
    for spoilt in ({"stages": 7}, {}, "text"):
        forge(index, partial(Document.update, report=spoilt))
        with ckpipe.SyncPipeline(root) as pipeline:
            assert torch.equal(loaded_state(pipeline)["a"], torch.ones(100_000))
        assert call("timeline", root).code == (1 if isinstance(spoilt, dict) else 0)


def test_a_device_and_a_pipe_stay_what_they_are(call: Commands, tmp_path: Path) -> None:
    save(tmp_path / "root")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(pipe.read_text)
        assert call("timeline", tmp_path / "root", "--html", pipe).code == 0
        assert Page(reading.result(300)).of_class("uploaded")
    assert pipe.is_fifo()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    done = call("timeline", tmp_path / "root", "--html", full)
    assert (done.code, "No space left" in done.err, full.is_symlink()) == (2, True, True)


def test_a_page_loads_and_runs_nothing_and_names_cannot_break_out(
    call: Commands, tmp_path: Path
) -> None:
    nasty = '</title><img src="https://example.org/x" onerror="alert(1)">'
    report: Document = {"stages": {nasty: STAGE}, "bottleneck": nasty}
    page = Page(page_of(call, tmp_path / "root", report))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "link", "iframe", "object", "script"}
    assert not any({"src", "href", "onerror"} & attrs.keys() for _, attrs in page.elements)
    policy = next(attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs)
    assert (policy or "").startswith("default-src 'none'")
    assert nasty in page.texts
    assert len(page.of_class("stage")) == 1
    assert any(text.startswith(f"{nasty}: 0.0500 to 0.4500 s") for text in page.texts)


def test_very_many_blocks_are_thinned_out(call: Commands, tmp_path: Path) -> None:
    root, file = tmp_path / "root", tmp_path / "page.html"
    with ranks(str(root), 4) as world:
        ids = [pipeline.save({"a": torch.ones(3)}, step=1).wait().id for pipeline in world]
        world[0].latest()
    for rank, id in enumerate(ids):
        forge(root / manifest_key(id, rank), lambda d: d["report"].update(blocks=blocks(2000)))
    assert call("timeline", root, "--html", file).code == 0
    page = Page(file.read_text())
    assert 3000 < len(page.of_class("uploaded")) <= 6000
    assert any("not all blocks are drawn" in text for text in page.texts)
