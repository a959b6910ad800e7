"""Peak host memory of saves, each contender in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import contenders
import states
import torch
from contenders import Contender

SAVES = 3
SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import peaks
if __name__ == "__main__":
    print("PEAK", peaks.peak_memory({name!r}, {state!r}, {root!r}))
"""


def peak_memory(name: str, state_name: str, root: str) -> int:
    """Peak host memory of this process above its state over a few saves, in bytes."""
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


def measure_peaks(found: Sequence[Contender], state_name: str, root: Path) -> dict[str, int]:
    """The peak of each contender that got through."""
    peaks: dict[str, int] = {}
    for each in found:
        folder = root / "memory"
        folder.mkdir()
        script = folder / "peak.py"
        here = str(Path(__file__).parent)
        script.write_text(
            SCRIPT.format(here=here, name=each.name, state=state_name, root=str(folder))
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        printed = [line for line in done.stdout.splitlines() if line.startswith("PEAK")]
        if printed:
            peaks[each.name] = int(printed[-1].split()[1])
        shutil.rmtree(folder)
    return peaks
