"""A new setting of stages 4 to 7 touches two files: `settings.py`, and the stage that reads it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ckpipe
from tests.support.command_line import script

HEAD = '''class Upload(_Group):
    """Writes to the store, and the retries of all requests."""
'''
DECLARED = '''
    made_up: int = Field(1, ge=1)
    """A setting of stage 5."""
'''
BODY = "    assert save.files is not None\n"
READ = """    import os

    logger.warning("made_up %d in process %d", context.settings.upload.made_up, os.getpid())
"""
SAVES = """
import logging, os, sys, ckpipe
print(ckpipe.__file__, os.getpid())
logging.basicConfig(stream=sys.stdout, format="%(message)s")
for worker in ("thread", "process"):
    with ckpipe.SyncPipeline(worker, worker=worker, upload={"made_up": 7}) as pipeline:
        pipeline.save({"number": 1}).wait()
"""


def insert(path: Path, after: str, text: str) -> None:
    """Insert a text into a file, after the only place of another."""
    before = path.read_text()
    assert before.count(after) == 1
    path.write_text(before.replace(after, after + text))


def test_a_setting_of_stage_5_takes_two_files(tmp_path: Path) -> None:
    copy = shutil.copytree(Path(ckpipe.__file__).parent, tmp_path / "ckpipe")
    insert(copy / "settings.py", HEAD, DECLARED)
    insert(copy / "save" / "upload.py", BODY, READ)
    done = script(SAVES, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.code == 0, done.err
    where, here, there = done.out.splitlines()
    path, trainer = where.split()
    assert Path(path).parent == copy
    assert here == f"made_up 7 in process {trainer}"
    assert there.startswith("The worker says: made_up 7 in process ")
    assert not there.endswith(f" {trainer}")
