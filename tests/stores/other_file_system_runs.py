"""Uses a store on a file system that ``other_file_system.c`` plays; the library is preloaded."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from typing import Any

import torch

import ckpipe
from ckpipe.errors import CkpipeError
from tests.support.pipelines import checked_whole, load_existing, same

SETTINGS: dict[str, Any] = {
    "worker": "thread",
    "keep_last": 2,
    "upload": {"backoff_seconds": 0, "retries": 2, "lanes": 2},
    "staging": {"bytes": 2 * 65536, "block_bytes": 65536},
}

_library = ctypes.CDLL(None)


def set_rules(rules: str) -> int:
    """Set the rules; return how many calls the first of the earlier ones has struck."""
    return int(_library.other_fs_rules(rules.encode()))


class Warnings(logging.Handler):
    """Collects what ckpipe warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def content(step: int) -> dict[str, Any]:
    """A state of three blocks."""
    return {"weight": torch.full((40_000,), float(step)), "step": step}


def use(root: str, committed: list[int], errors: list[str]) -> None:
    """Save three times, so that one is pruned; load; delete one."""

    def note(error: CkpipeError) -> None:
        errors.append(f"{type(error).__name__}: {error}")

    try:
        with ckpipe.SyncPipeline(root, **SETTINGS) as pipeline:
            for step in range(1, 4):
                try:
                    pipeline.save(content(step), step=step, until="committed")
                except CkpipeError as error:
                    note(error)
                else:
                    committed.append(step)
            try:
                if committed:
                    result = load_existing(pipeline, step=committed[-1])
                    assert same(result.state, content(committed[-1]))
                if len(committed) > 1:
                    pipeline.delete(committed[-2])
            except CkpipeError as error:
                note(error)
    except CkpipeError as error:
        note(error)


def check(root: str, committed: list[int]) -> list[str]:
    """Check that all checkpoints are whole, the newest is there, and the store goes on.

    Returns:
        The checkpoints that are listed as incomplete, and why.
    """
    with ckpipe.SyncPipeline(root, **SETTINGS) as pipeline:
        found = pipeline.steps()
        complete = checked_whole(pipeline, content)
        if committed:
            assert max(info.step for info in complete) >= committed[-1]
        pipeline.save(content(9), step=9, until="committed")
    with ckpipe.SyncPipeline(root, **SETTINGS) as pipeline:
        newest = pipeline.latest()
        assert newest is not None
        assert newest.step == 9
    return [f"{info.id}: {info.reason}" for info in found if not info.complete]


def descriptors() -> list[int]:
    """Return the open descriptors, without the one that lists them."""
    found = [int(each) for each in os.listdir("/proc/self/fd")]
    return [each for each in found if os.path.lexists(f"/proc/self/fd/{each}")]


def outcome(root: str, rules: str) -> dict[str, Any]:
    """Use a store while rules hold, and check it without."""
    committed: list[int] = []
    errors: list[str] = []
    warnings = Warnings()
    logging.getLogger("ckpipe").addHandler(warnings)
    set_rules(rules)
    use(root, committed, errors)
    struck = set_rules("")
    opened = [os.readlink(f"/proc/self/fd/{each}") for each in descriptors()]
    logging.getLogger("ckpipe").removeHandler(warnings)
    left = [name for _, _, names in os.walk(root) for name in names if name.startswith(".ckpipe-")]
    return {
        "struck": struck,
        "committed": committed,
        "errors": errors,
        "warnings": warnings.texts,
        "left": left,
        "opened": [each for each in opened if each.startswith(root)],
        "incomplete": check(root, committed),
    }


def main() -> None:
    """Answer a line of JSON, the root and the rules, by another with the outcome."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(outcome(**json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
