"""The built pages name all that is public, and show no raw markup."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import site_hooks
from pydantic import BaseModel

import ckpipe
from ckpipe import errors
from ckpipe.settings import Settings

ROOT = Path(__file__).parents[2]
MODULES = [
    "backend",
    "distributed",
    "errors",
    "event_lines",
    "events",
    "live_line",
    "planning",
    "retention",
    "settings",
    "sources",
    "testing",
]

PICTURES = sorted([*(ROOT / "docs/plots").iterdir(), *(ROOT / "docs/pictures").iterdir()])
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip

pytest.importorskip("mkdocs", reason="the extra docs is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages: those that ``make`` has built, or built once."""
    if made := os.environ.get("CKPIPE_TEST_SITE"):
        return Path(made)
    built = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict")
    done = subprocess.run(
        (*command, "--site-dir", str(built)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def article(site: Path, page: str) -> str:
    """The content of a page, without navigation."""
    html = (site / page / "index.html").read_text(encoding="utf-8")
    return html[html.index("<article") : html.index("</article>")]


def prose(html: str) -> str:
    """The text of a page without its code blocks."""
    return re.sub(r"<[^>]+>", "", re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL))


def documented(site: Path) -> set[str]:
    """The names of all objects that have a place on a page."""
    inventory = (site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]
    return {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}


def public_names() -> Iterator[str]:
    yield from (f"ckpipe.{name}" for name in ckpipe.__all__ if name != "__version__")
    for each in MODULES:
        module = importlib.import_module(f"ckpipe.{each}")
        listed = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        yield from (f"ckpipe.{each}.{name}" for name in listed)


def test_every_public_name_is_documented(site: Path) -> None:
    shown = {name.rpartition(".")[2] for name in documented(site)}
    missing = {name for name in public_names() if name.rpartition(".")[2] not in shown}
    assert missing == set()


@pytest.mark.parametrize(
    "name", ["Pipeline.load", "Pipeline.save", "SyncPipeline.load", "SyncPipeline.save", "load"]
)
def test_each_option_of_a_call_is_shown(site: Path, name: str) -> None:
    _, _, rest = article(site, "reference/pipeline").partition(f'id="ckpipe.{name}"')
    own = unescape(rest.partition('class="doc doc-object ')[0]).replace("'", '"')
    signature = re.sub(r"<[^>]+>", "", own.partition("</pre>")[0])
    rows = [prose(each).split() for each in re.findall(r"<tr .*?</tr>", own, re.DOTALL)]
    for option in inspect.signature(attrgetter(name)(ckpipe)).parameters.values():
        if option.kind is option.KEYWORD_ONLY:
            default = repr(option.default).replace("'", '"')
            assert re.search(rf"\b{option.name}: [^=]+ = {re.escape(default)}", signature), option
            if not name.startswith("Sync"):  # it leads to Pipeline
                (told,) = [each for each in rows if each[:1] == [option.name]]
                assert len(told) > 6, option
                assert told[-1] == default, option


def test_errors_are_a_list_in_which_each_leads_to_its_description(site: Path) -> None:
    page = article(site, "reference/errors")
    assert "::" not in prose(page)
    assert "──" not in page
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    for kind in kinds:
        if issubclass(kind, errors.CkpipeError):
            assert f'<a href="#ckpipe.errors.{kind.__name__}">' in page
            assert f'id="ckpipe.errors.{kind.__name__}"' in page
    assert page.count("<ul>") == page.count("</ul>")


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("Hugging Face", "huggingface"),
        ("accelerate", "accelerate"),
        ("Lightning", "lightning"),
        ("torchtitan", "torchtitan"),
        ("DCP", "dcp"),
        ("Ray", "ray"),
        ("LoRA", "huggingface"),
        ("Slurm", "preemption"),
        ("Kubernetes", "preemption"),
        ("elastic", "many_ranks"),
        ("W&B", "trackers"),
    ],
)
def test_the_search_finds_what_people_look_for(site: Path, words: str, page: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    separator = index["config"]["separator"]
    [entry, *parts] = [
        each for each in index["docs"] if each["location"].startswith(f"tutorials/{page}/")
    ]
    text = " ".join(each["title"] + " " + each["text"] for each in (entry, *parts))
    plain = re.sub(r"<[^>]+>", " ", text)
    found = {each.strip(".,:;()") for each in re.split(separator, plain.lower())}
    assert set(re.split(separator, words.lower())) <= found


WORDS = {
    "disk full": "troubleshooting/",
    "out of memory": "troubleshooting/",
    "slow": "troubleshooting/",
    "azure": "faq/",
    "fsspec": "faq/",
    "minio": "faq/",
    "jupyter": "faq/",
    "export transformers": "faq/",
    "huggingface": "tutorials/huggingface/",
}


def test_pages_load_nothing_from_elsewhere_and_the_search_leads_to_a_remedy(site: Path) -> None:
    """A browser reads the pages on a phone and on a desk, and searches the words of users."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    browsing = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if program is None:
        pytest.skip("Chromium is missing: install the package chromium of your system")
    asked: list[str] = []
    with served(site) as address, browsing.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=QUIET)
        for width in (390, 1280):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("request", lambda request: asked.append(request.url))
            for name in ("", "benchmarks/", "reference/cli/", "tutorials/one_gpu/"):
                page.goto(address + name)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name
                small = "[...document.images].filter(each => each.naturalWidth < 300).length"
                assert page.evaluate(small) == 0, name
                lines = "each => each.map(code => code.getClientRects().length)"
                options = page.locator("td code", has_text=re.compile(r"^--.{1,20}$"))
                assert set(options.evaluate_all(lines)) == ({1} if "cli" in name else set()), name
        for words, wanted in WORDS.items():
            page.goto(f"{address}?q={words}")
            found = page.locator(".md-search-result__link").first
            assert f"{address}{wanted}" in str(found.get_attribute("href")), words
        browser.close()
    assert len(asked) > 50
    assert [each for each in asked if not each.startswith((address, "data:", "blob:"))] == []


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve files on this machine, at the address that is given."""

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_only_pages_are_published(site: Path) -> None:
    published = {path.suffix for path in site.rglob("*") if path.is_file()}
    assert {".html", ".svg"} <= published
    assert published.isdisjoint({".py", ".pyc"})


def test_the_address_of_the_site_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    assert load_config("mkdocs.yml").site_url == ""
    monkeypatch.setenv("DOCS_URL", "https://docs.example.org/ckpipe/")
    assert load_config("mkdocs.yml").site_url == "https://docs.example.org/ckpipe/"


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://user:secret@github.com/them/ckpipe.git", "https://github.com/them/ckpipe"),
        ("git@gitlab.com:them/ckpipe.git", "https://gitlab.com/them/ckpipe"),
        ("/srv/git/ckpipe", None),
    ],
)
def test_the_repository_is_the_one_of_the_remote(remote: str, address: str | None) -> None:
    assert site_hooks.web_address(remote) == address


def test_an_sdist_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    config = {"config_file_path": str(tmp_path / "mkdocs.yml")}
    assert site_hooks.on_config(dict(config)) == config


def test_the_link_to_the_repository_asks_nothing_of_its_host() -> None:
    material = pytest.importorskip("material")
    link = Path(material.__file__).parent / "templates" / "partials" / "source.html"
    text = link.read_text(encoding="utf-8")
    assert 'data-md-component="source"' in text
    assert 'data-md-component="source"' not in site_hooks.on_post_page(text)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_pictures_are_readable_in_both_schemes_and_load_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    dark_ground = "prefers-color-scheme" in text or "#1b1f27" in text  # a terminal is always dark
    assert dark_ground
    assert "url(http" not in text
    assert set(re.findall(r"href=\"([^#\"]{1,10})", text)) <= {"data:image"}
    assert path.stat().st_size < 300_000


def test_no_page_shows_markup(site: Path) -> None:
    for path in site.rglob("index.html"):
        text = prose(article(site, str(path.parent.relative_to(site))))
        for mark in ("\\|", " :: ", "&para;", ":class:", ":func:", ":meth:", "<!--"):
            assert mark not in text.replace("&para;", ""), (path, mark)
        assert not re.search(r"::\s*$", text, re.MULTILINE), path


def test_the_environment_page_has_every_variable(site: Path) -> None:
    page = article(site, "reference/environment")

    def names(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from names(kind, f"{prefix}{name.upper()}__")
            elif name != "backends":
                yield prefix + name.upper()

    expected = {*names(Settings, "CKPIPE_"), "CKPIPE_STAGING_BYTES", "CKPIPE_KEEP_LAST"}
    read = re.compile(r"environ(?:ment)?\.get\(\"(\w+)\"|NATIVE = \"(\w+)\"")
    for path in (ROOT / "ckpipe").rglob("*.py"):
        expected |= {a or b for a, b in read.findall(path.read_text(encoding="utf-8"))}
    missing = {name for name in expected if f">{name}</code>" not in page}
    assert missing == set()
    assert len(expected) > 40
