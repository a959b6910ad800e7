"""The notebook runs from its first cell to its last, and holds no outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.command_line import forked

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for source in json.loads(sys.argv[1]):
    shell.run_cell(source).raise_error()
"""


def test_the_notebook_runs_and_holds_no_outputs(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [each for each in cells if each["cell_type"] == "code"]
    assert [each["outputs"] for each in code] == [[]] * len(code)
    assert {each["execution_count"] for each in code} == {None}
    sources = json.dumps(["".join(each["source"]) for each in code])
    environment = os.environ | {"IPYTHONDIR": str(tmp_path / "ipython"), "OMP_NUM_THREADS": "1"}
    done = forked(RUN, sources, cwd=tmp_path, env=environment)
    assert done.code == 0, done.out + done.err
    assert "resumed after step 0" in done.out or "resumed after step 1" in done.out
