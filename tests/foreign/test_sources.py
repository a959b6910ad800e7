"""Formats that other packages teach ckpipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpipe
from tests.foreign.places import assert_loaded, counted

MODULE = """
from ckpipe.foreign.virtual import Extent, ForeignTensor, virtual_manifest


class RawSource:
    name = "raw"

    def recognizes(self, listing):
        return any(each.key.endswith(".f32") for each in listing)

    async def describe(self, store, listing, place):
        files = [await store.stat(each.key) for each in listing if each.key.endswith(".f32")]
        state = {
            each.key[:-4]: ForeignTensor(
                "float32", (each.size // 4,), (Extent(each.key, 0, each.size),)
            )
            for each in files
        }
        return virtual_manifest({"raw": state, "count": len(files)}, files, place)
"""


def test_a_package_adds_a_format_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, folder = tmp_path / "site", tmp_path / "theirs"
    facts = site / "raw_floats-1.0.dist-info"
    facts.mkdir(parents=True)
    folder.mkdir()
    (site / "raw_floats.py").write_text(MODULE)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: raw-floats\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[ckpipe.sources]\nraw = raw_floats:RawSource\n")
    monkeypatch.syspath_prepend(str(site))
    values = torch.randn(300_000)
    (folder / "a.f32").write_bytes(values.numpy().tobytes())
    expected = {"raw": {"a": values}, "count": 1}
    assert_loaded(ckpipe.load(folder), expected, folder)
    with counted(folder) as (url, _):
        assert_loaded(ckpipe.load(url), expected, url)
