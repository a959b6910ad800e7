"""A sweep removes what dead runs have left, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.support.command_line import Commands, save_steps
from tests.support.dead_runs import age, crash


def test_sweep_removes_leftovers_of_dead_runs(call: Commands, tmp_path: Path) -> None:
    (whole,) = save_steps(tmp_path, 1)
    age(tmp_path, 9)
    dead, slow = crash(tmp_path, 2, days=2), crash(tmp_path, 3, days=0.5)
    foreign = [tmp_path / "step-5", tmp_path / "notes" / "a.json", tmp_path / "step-1.x.0.json"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    stale = tmp_path / slow / ".ckpipe-tmp-0123456789abcdef"
    stale.write_text("half")
    age(tmp_path, 2, "notes", "step-5", "step-1.x", stale.name)
    dry = call("sweep", tmp_path, "--dry-run", "--json").data
    assert [each["id"] for each in dry["remove"]] == [dead]
    assert [each["id"] for each in dry["keep"]] == [slow]
    assert (tmp_path / dead).exists()
    done = call("sweep", tmp_path, "--json").data
    assert [each["id"] for each in done["remove"]] == [dead]
    assert done["uploads"] == 1
    assert not (tmp_path / dead).exists()
    assert not stale.exists()
    assert (tmp_path / slow).exists()
    assert all(path.read_text() == "mine" for path in foreign)
    assert call("verify", tmp_path, whole).code == 0
    again = call("sweep", tmp_path, "--json").data
    assert (again["remove"], again["uploads"]) == ([], 0)
