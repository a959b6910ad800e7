"""The timeline of a save: kept in manifests, shown as text, JSON and a page of its own."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from bundles import ID, document_of, manifest_of, sealed
from commands import Commands
from pipelines import stores
from ranks import ranks

import ckpipe
from ckpipe.cli.timeline import MOST_BLOCKS, timeline_page
from ckpipe.format.codec import encode_bundle
from ckpipe.format.names import index_key
from ckpipe.types import BlockReport, RankReport, SaveReport, StageReport

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SMALL_BLOCKS = {"block_bytes": 65536}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


class Page(html.parser.HTMLParser):
    """A page taken apart: elements, and what is written in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.elements if attrs.get("class") == name]


def save(url: object, **settings: Any) -> None:
    with ckpipe.SyncPipeline(str(url), staging=SMALL_BLOCKS, **settings) as pipeline:
        # What torch copies is summed afterwards.
        pipeline.save({"a": torch.ones(200_000)[::2]}, step=3)


def made_up(blocks: int = 3, stage: str = "upload") -> RankReport:
    spans = [(0.01 * number, 0.01 * number + 0.005) for number in range(blocks)]
    rows = tuple(BlockReport(0, 4096 * n, 4096, s, s, s) for n, s in enumerate(spans))
    report = SaveReport(
        {stage: StageReport(0.4, 10**6, 0.05)}, 0.2, None, 10**6, 5, planned=True, blocks=rows
    )
    return RankReport(0, "2026-11-21T03:42:05.123+00:00", report)


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
    assert re.search(r"^upload( +\d+\.\d{4}){3} +39\d\.\d KiB +\S+ [kMG]?B/s", text, re.MULTILINE)
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
    bundle, files = manifest_of({"a": torch.ones(3)})
    document = document_of(encode_bundle(bundle)) | {"kind": "index", "per_rank": []}
    root = tmp_path / "root"
    (root / str(ID)).mkdir(parents=True)
    for name, image in files.items():
        (root / str(ID) / name).write_bytes(image)
    for spoilt in ({"stages": 7}, {}, "text"):
        (root / index_key(ID)).write_bytes(sealed(document | {"report": spoilt}))
        with ckpipe.SyncPipeline(root) as pipeline:
            result = pipeline.load()
            assert result is not None
            assert torch.equal(result.state["a"], torch.ones(3))
        assert call("timeline", root).code == (1 if isinstance(spoilt, dict) else 0)


def test_a_page_that_cannot_be_written_is_a_clear_error(call: Commands, tmp_path: Path) -> None:
    save(tmp_path / "root")
    for target in (tmp_path / "no" / "page.html", tmp_path / "root"):
        done = call("timeline", tmp_path / "root", "--html", target)
        assert (done.code, done.out) == (2, "")
        assert "cannot be written" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


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


def test_a_page_loads_nothing_and_names_cannot_break_out() -> None:
    nasty = '</script><img src="https://example.org/x" onerror="alert(1)">'
    text = timeline_page(nasty, [made_up(stage=nasty)], 1)
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "link", "iframe", "object"}
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 1
    assert not any({"src", "href", "onerror"} & attrs.keys() for _, attrs in page.elements)
    policy = next(attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs)
    assert (policy or "").startswith("default-src 'none'")
    assert nasty in page.texts
    assert (page.of_class("stage")[0]["data-tip"] or "").startswith(f"{nasty}: 0.0500 to 0.4500 s")


def test_very_many_blocks_are_thinned_out() -> None:
    page = Page(timeline_page("id", [made_up(MOST_BLOCKS)] * 3, 3))
    assert MOST_BLOCKS / 2 < len(page.of_class("uploaded")) <= MOST_BLOCKS
    assert any("not all blocks are drawn" in text for text in page.texts)


def test_a_page_of_a_rank_without_a_report() -> None:
    text = timeline_page("id", [RankReport(0, "2026-11-21T03:42:05+00:00", None)], 1)
    assert "kept no report" in text


PROBE = """
<script>
addEventListener("load", () => {
  const bar = document.querySelector("rect.uploaded"), box = bar.getBoundingClientRect();
  const where = {bubbles: true, clientX: box.x, clientY: box.y};
  bar.dispatchEvent(new PointerEvent("pointermove", where));
  const tip = document.getElementById("tip");
  const wide = [...document.querySelectorAll("rect")].every(
    each => each.getBoundingClientRect().right <= document.documentElement.clientWidth);
  const found = {tip: tip.textContent, hidden: tip.hidden, wide, height: box.height,
    fill: getComputedStyle(bar).fill, ground: getComputedStyle(document.body).backgroundColor};
  document.title = JSON.stringify(found);
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to draw the page")
def test_a_browser_draws_the_page_and_shows_details(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(timeline_page("id", [made_up()], 1) + PROBE)
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,700",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stderr
    found = json.loads(title[1])
    assert found["tip"].startswith("uploaded: 0.0000 to 0.0050 s")
    assert (found["hidden"], found["wide"], found["fill"]) == (False, True, "rgb(31, 157, 97)")
    assert found["height"] > 5
