"""Formats that other packages teach ckpipe: the example of the page on sources, installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.foreign.places import assert_loaded, counted
from tests.support.command_line import Commands
from tests.support.one_checkpoint import save_one
from tests.support.pipelines import load_existing

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sources.md"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (entry,) = re.findall(
        r"^```toml\n\[project\.entry-points.*\n(.*\n)", PAGE.read_text(), re.MULTILINE
    )
    site = tmp_path / "site"
    facts = site / "rows-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / "my_package.py").write_text(module)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: rows\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[ckpipe.sources]\n" + entry.replace('"', ""))
    monkeypatch.syspath_prepend(str(site))


def test_a_package_adds_a_format_by_its_entry_point(theirs: Path) -> None:
    expected = {"a": torch.randn(3, 100_000), "b": torch.randn(2, 1)}
    for name, values in expected.items():
        rows = len(values).to_bytes(8, "little")
        (theirs / f"{name}.rows").write_bytes(rows + values.numpy().tobytes())
    assert_loaded(ckpipe.load(theirs), expected, theirs)
    with counted(theirs) as (url, _):
        assert_loaded(ckpipe.load(url), expected, url)


def test_a_package_opens_files_and_what_ckpipe_refuses(
    tmp_path: Path, call: Commands, theirs: Path
) -> None:
    expected = {"a": torch.ones(2, 3)}
    file = theirs / "a.rows"
    file.write_bytes((2).to_bytes(8, "little") + expected["a"].numpy().tobytes())
    for refused in ("_METADATA", "common.pt", "metadata.json", "model.gguf"):
        (theirs / refused).write_bytes(b"")
    for place in (theirs, file):
        assert_loaded(ckpipe.load(place), expected, place)
        with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
            assert_loaded(load_existing(pipeline, source=place), expected, place)
        assert call("ls", place, "--json").data["foreign"]["format"] == "rows"
    save_one(tmp_path / "run.rows", {"a": 1}, step=4)
    assert ckpipe.load(tmp_path / "run.rows").step == 4


def test_a_package_that_cannot_be_imported_leaves_other_formats_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    (tmp_path / "site" / "my_package.py").write_text("raise OSError('a library is absent')")
    with ckpipe.SyncPipeline(tmp_path / "run.5") as pipeline:
        pipeline.save({"a": torch.ones(2)})
    assert torch.equal(ckpipe.load(tmp_path / "run.5").state["a"], torch.ones(2))
    assert "my_package" in caplog.text
    assert "a library is absent" in caplog.text


@pytest.mark.parametrize("content", [b"short", bytes(12), b"\x03" + bytes(11)])
def test_a_file_that_lies_is_refused(content: bytes, theirs: Path) -> None:
    (theirs / "a.rows").write_bytes(content)
    target = {"a": torch.ones(1)}
    with pytest.raises(errors.CorruptCheckpoint, match=r"a\.rows"):
        ckpipe.load(theirs, target)
    assert target["a"].item() == 1
