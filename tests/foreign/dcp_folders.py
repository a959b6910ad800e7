"""Folders that ``torch.distributed.checkpoint`` writes, of one rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp


def save(state: Any, folder: Path, **options: Any) -> None:
    """Save a state, with options of the writer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they differ between versions of torch
        save_by_dcp(state, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
