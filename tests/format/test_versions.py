"""The version of the format that a checkpoint has: the oldest that its reader needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.one_checkpoint import index_of, save_one
from tests.support.stored_files import document_of
from tests.support.wrapper_tensors import scaled


def test_only_objects_with_a_wrapper_have_the_newer_version(tmp_path: Path) -> None:
    for name, state, version in (
        ("plain", {"wrapper_tensor": [torch.ones(1), "wrapper_tensor"]}, 1),
        ("wrapped", {"a": [scaled()]}, 2),
        ("left out", {"a": [scaled()], "b": 1}, 1),
    ):
        kwargs: dict[str, Any] = {"exclude": ["a"]} if name == "left out" else {}
        save_one(tmp_path / name, state, **kwargs)
        index = index_of(tmp_path / name).read_bytes()
        assert document_of(index)["version"] == version, name
