"""What a notebook shows of pipelines, handles, checkpoints and results, and their plain form."""

from __future__ import annotations

import json
import pickle
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from tests.support.command_line import save_steps

HOSTILE = '<script>alert(1)</script>"&\x1b[2J\u202e'


class Table(HTMLParser):
    """The cells of a table by rows, its tags, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags, self.headings, self.caption, self._open = set[str](), 0, "", list[str]()
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.headings += "scope" in dict(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] == "caption":
            self.caption += data
        else:
            self.rows[-1][-1] += data


def shown(value: object) -> Table:
    """What the formatter of IPython makes of a value."""
    formatters = pytest.importorskip("IPython.core.formatters")
    text = formatters.HTMLFormatter()(value)
    assert text is not None
    assert text.isprintable()
    assert len(text) < 20_000
    table = Table(text)
    assert table.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert table.headings >= len(table.rows) or "thead" in table.tags
    return table


def plain(value: object) -> str:
    formatters = pytest.importorskip("IPython.core.formatters")
    text = formatters.PlainTextFormatter()(value)
    assert text.isprintable()
    assert len(text) < 2000
    return str(text)


def facts(value: object) -> dict[str, str]:
    return {row[0]: row[1] for row in shown(value).rows}


def test_a_notebook_shows_tables_of_what_is_known(tmp_path: Path) -> None:
    pipeline = ckpipe.SyncPipeline(tmp_path / "run")
    assert facts(pipeline) == {"root": str(tmp_path / "run"), "state": "closed", "saves": "none"}
    with pipeline:
        handle = pipeline.save({"a": torch.ones(1000)}, 7, metrics={"loss": 0.125})
        info = handle.wait()
        listed, result = pipeline.steps(), pipeline.load()
        about = facts(handle)
        assert (about["step"], about["status"], about["id"]) == ("7", "committed", info.id)
        assert about["size"] == "8.1 kB in 1 tensors"
        shutil.rmtree(tmp_path / "run")  # nothing is read to show them
        for value in (pipeline, handle, info, listed, result, pipeline.statistics()):
            assert shown(value).caption
            assert plain(value)
        assert facts(pipeline)["saves"] == facts(pipeline.statistics())["saves"] == "1 committed"
    assert facts(pipeline)["state"] == "closed"
    assert facts(info)["metrics"] == "loss=0.125"
    table = shown(listed)
    assert table.caption == "1 checkpoint"
    assert table.rows[0] == ["step", "saved at", "size", "ranks", "state", "metrics", "id"]
    assert (table.rows[1][0], table.rows[1][4], table.rows[1][6]) == ("7", "complete", info.id)
    assert plain(result).startswith(f"<LoadResult {info.id}: step 7, metrics loss=0.125, <LoadRep")
    text = plain(pipeline.statistics())
    assert text.startswith("<Statistics saves ")
    assert "1 committed" in text


def test_texts_of_a_store_are_escaped_and_cut(tmp_path: Path) -> None:
    names = [f"{number}{HOSTILE}{'x' * 9000}" for number in range(300)]
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        state = {"a": torch.ones(1), **dict.fromkeys(names, 1)}
        keys: dict[str, Any] = dict.fromkeys(names[:5], 0.5)
        info = pipeline.save(state, 1, metrics=keys, metadata=keys).wait()
        result = pipeline.load({"a": torch.ones(1), "b": 1}, strict=False)
        listed = pipeline.steps()
        for value in (info, listed, result):
            shown(value)
        text = plain(result)
        assert "missing 1 (b)" in text
        assert "unexpected 300 (0<script>" in text
        assert "and 297 more" in text
        assert facts(info)["metrics"].endswith("…")
        broken = [ckpipe.CheckpointInfo(info.id, 1, HOSTILE, 0, False, reason=HOSTILE * 999)]
        assert shown(type(listed)(broken)).rows[1][4].startswith("incomplete, <script>")


def test_listed_checkpoints_are_a_list_in_every_respect(tmp_path: Path) -> None:
    ids = save_steps(tmp_path, 1, 2, 3)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        found = pipeline.steps()
    assert isinstance(found, list)
    assert found == [*found]
    assert [*found] == found
    assert [each.id for each in found[:2] + found[2:]] == ids
    assert found[0].id == ids[0]
    assert json.loads(json.dumps(type(found)(ids))) == ids  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(found)) == found
    assert repr(found[:1]) == repr([*found][:1])
    assert [row[0] for row in shown(found[-2:]).rows[1:]] == ["2", "3"]
    table = shown(type(found)(found * 20))
    assert table.caption == "60 checkpoints: the last 50, without the 10 before them"
    assert [row[0] for row in table.rows[1:]] == ["2", "3", *["1", "2", "3"] * 16]
