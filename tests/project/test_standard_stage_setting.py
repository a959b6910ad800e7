"""A new setting of stages 4 to 7 touches two files: `settings.py`, and the stage that reads it."""

from __future__ import annotations

from pathlib import Path

from tests.support.changed_tree import ChangedTree

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


def test_a_setting_of_stage_5_takes_two_files(tmp_path: Path) -> None:
    tree = ChangedTree(tmp_path)
    tree.insert("settings.py", HEAD, DECLARED)
    tree.insert("save/upload.py", BODY, READ)
    where, here, there = tree.run(SAVES).out.splitlines()
    path, trainer = where.split()
    assert Path(path).parent == tree.package
    assert here == f"made_up 7 in process {trainer}"
    assert there.startswith("The worker says: made_up 7 in process ")
    assert not there.endswith(f" {trainer}")
