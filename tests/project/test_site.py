"""The built pages name all that is public, and show no raw markup."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
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

pytest.importorskip("mkdocs", reason="the extra docs is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages: those that ``make`` has built, or built once."""
    if made := os.environ.get("CKPIPE_TEST_SITE"):
        return Path(made)
    built = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet")
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
    missing = {name for name in expected if f"<code>{name}</code>" not in page}
    assert missing == set()
    assert len(expected) > 40
