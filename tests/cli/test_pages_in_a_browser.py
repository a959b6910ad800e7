"""The pages of ``report`` and ``timeline`` in a real browser: widths, contrast and requests."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from tests.cli.pages import HOSTILE, killed_run, state_of
from tests.support.command_line import Commands
from tests.support.s3_servers import S3Server
from tests.support.sampling import EVERY
from tests.support.stored_files import flip, forge

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
WIDTHS = (360, 800, 1600)

TOO_WIDE = """() => [...document.querySelectorAll("body *")]
  .filter(each => !each.closest("defs, title, desc, details:not([open]) > :not(summary)"))
  .filter(each => {
    const box = each.getBoundingClientRect(), width = document.documentElement.clientWidth;
    return box.width > 0 && (box.right > width + 0.5 || box.left < -0.5);
  })
  .map(each => each.outerHTML.slice(0, 200))"""

PALE = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = each => {
    for (let at = each; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return rgba(getComputedStyle(document.documentElement).backgroundColor);
  };
  const pale = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  for (let text; text = texts.nextNode();) {
    const each = text.parentElement, style = getComputedStyle(each);
    if (!text.data.trim() || each.closest("title, desc, style") || !each.getClientRects().length)
      continue;
    const inside = each instanceof SVGElement;
    const pair = [light(rgba(inside ? style.fill : style.color)), light(ground(each))];
    const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    seen += 1;
    if (contrast < 4.5) pale.push(`${contrast.toFixed(2)}: ${text.data.trim().slice(0, 80)}`);
  }
  return {seen, pale};
}"""


@dataclass
class Looked:
    """What a browser found on a page."""

    wide: list[str] = field(default_factory=list)
    pale: list[str] = field(default_factory=list)
    seen: int = 0
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def look() -> Iterator[Callable[[Path], Looked]]:
    """Looks at a file at all widths, in light and dark."""
    sync_api: Any = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: install the package chromium of your system")
    # In a thread of its own: it runs an event loop as long as it is open.
    with ThreadPoolExecutor(1) as thread:
        playwright = thread.submit(sync_api.sync_playwright().start).result(300)
        launch = partial(playwright.chromium.launch, executable_path=CHROMIUM, args=[*ARGUMENTS])
        browser = thread.submit(launch).result(300)
        yield lambda file: thread.submit(_looked, browser, file).result(300)
        thread.submit(browser.close).result(300)
        thread.submit(playwright.stop).result(300)


def _looked(browser: Any, file: Path) -> Looked:
    found = Looked()
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.on("request", lambda request: found.requests.append(request.url))
        page.on("console", lambda message: found.messages.append(message.text))
        page.on("pageerror", lambda error: found.messages.append(str(error)))
        page.goto(file.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            found.wide += [f"{width}: {each}" for each in page.evaluate(TOO_WIDE)]
        contrasts = page.evaluate(PALE)
        found.pale += [f"{scheme}: {each}" for each in contrasts["pale"]]
        found.seen += contrasts["seen"]
        page.close()
    found.requests = [each for each in found.requests if each != file.as_uri()]
    return found


def check(found: Looked) -> None:
    """Assert that a page fits, can be read and asks for nothing."""
    assert found.wide == []
    assert found.pale == []
    assert found.requests == []
    assert found.messages == []
    assert found.seen > 10


def test_a_browser_shows_the_report_of_a_run(
    call: Commands, look: Callable[[Path], Looked], tmp_path: Path
) -> None:
    root = killed_run(tmp_path / "root")
    with ckpipe.SyncPipeline(root) as pipeline:
        pipeline.load(step=40)
        info = pipeline.save(state_of(50), step=50, metrics={"loss": float("nan")}).wait()
        pipeline.pin(30)
    flip(root / f"{info.id}.json", 100)
    rules = ckpipe.KeepLast(2) | ckpipe.KeepBest("loss")
    found = ckpipe.report(root, weights=True, retention=rules)
    check(look(found.write(tmp_path / "page.html")))
    assert call("timeline", root, 40, "--html", tmp_path / "timeline.html").code == 0
    check(look(tmp_path / "timeline.html"))


@pytest.mark.slow
@pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it")
def test_hostile_names_fit_on_the_pages(
    call: Commands, look: Callable[[Path], Looked], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with ckpipe.SyncPipeline(root) as pipeline:
        for step in range(2):
            state = {"model": {name: torch.ones(2) for name in HOSTILE}}
            pipeline.save(state, step=step, metrics=dict.fromkeys(HOSTILE, 1.0 + step)).wait()
    check(look(ckpipe.report(root, weights=True).write(tmp_path / "page.html")))
    stage = {"began": 0.05, "seconds": 0.4, "waited": 0.0, "bytes": 10**6}
    for index in root.glob("step-*.json"):
        forge(index, lambda d: d["report"].update(stages=dict.fromkeys(HOSTILE, stage)))
    assert call("timeline", root, "--html", tmp_path / "timeline.html").code == 0
    check(look(tmp_path / "timeline.html"))


@pytest.mark.slow
@pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it")
def test_an_empty_root_gets_a_page(look: Callable[[Path], Looked], tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    found = look(ckpipe.report(tmp_path / "root").write(tmp_path / "page.html"))
    found.seen += 10
    check(found)


def saved_often(url: str, launches: int, saves: int, **options: Any) -> None:
    """Write a run of several launches, with more metrics than a page shows."""
    numbers = itertools.count()
    for _ in range(launches):
        with ckpipe.SyncPipeline(url, **options) as pipeline:
            pipeline.load()
            for step in itertools.islice(numbers, saves):
                metrics = {f"metric {n}": step**n for n in range(14)}
                pipeline.save(state_of(step), step=step, metrics=metrics).wait()


@pytest.mark.slow
@pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it")
def test_a_browser_shows_300_checkpoints(look: Callable[[Path], Looked], tmp_path: Path) -> None:
    saved_often(str(tmp_path / "root"), 10, 30)
    found = ckpipe.report(tmp_path / "root")
    assert "300 complete checkpoints" in found.verdict
    check(look(found.write(tmp_path / "page.html")))


@pytest.mark.slow
@pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it")
def test_a_browser_shows_the_run_of_a_bucket(
    look: Callable[[Path], Looked], moto_server: S3Server, tmp_path: Path
) -> None:
    moto_server.make_bucket("pages")
    options: dict[str, Any] = {"backends": {"s3": {"endpoint_url": moto_server.url}}}
    saved_often("s3://pages/run", 2, 3, **options)
    names = moto_server.names("pages", "")
    found = ckpipe.report("s3://pages/run", **options)
    assert len(found.run.complete) == 6
    check(look(found.write(tmp_path / "page.html")))
    assert moto_server.names("pages", "") == names
