"""Measure the peak host memory of saves, each contender in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import contenders
import states
import torch
from contenders import Contender

SAVES = 2
SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import peaks
if __name__ == "__main__":
    print("PEAK", peaks.peak_memory({name!r}, {state!r}, {root!r}))
"""


class InProcess(Contender):
    """A contender that saves in its own process, which reports its peak.

    Args:
        root: Its folder.
        name: The name of the contender.
        state_name: The name of the state that it saves.
    """

    def __init__(self, root: Path, name: str, state_name: str) -> None:
        super().__init__(root)
        self.name, self.state_name = name, state_name

    def _save(self, state: dict[str, Any]) -> contenders.Wait:
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def measure(each: Contender) -> dict[str, float]:
    """Measure the peak of a contender.

    Raises:
        RuntimeError: If its process failed, with its last output.
    """
    assert isinstance(each, InProcess)
    each.number += 1
    each.folder.mkdir()
    script = each.folder / "peak.py"
    here = str(Path(__file__).parent)
    script.write_text(
        SCRIPT.format(here=here, name=each.name, state=each.state_name, root=str(each.folder))
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith("PEAK")]
    if not printed:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(said[-1])
    return {"peak memory": float(printed[-1].split()[1])}


def peak_memory(name: str, state_name: str, root: str) -> int:
    """Measure the peak host memory of this process above its state over a few saves, in bytes."""
    contenders.allow_many_files()
    contenders.start_process_group(Path(root))
    cls = next(each for each in contenders.EVERYBODY if each.name == name)
    state = states.STATES[state_name]()
    each = cls(Path(root) / "peak")
    each.save({"probe": {"weight": torch.zeros(1000)}})()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _memory("VmRSS")
    for _ in range(SAVES):
        each.save(state)()
        each.forget()
    peak = _memory("VmHWM") - before
    each.close()
    return peak


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
