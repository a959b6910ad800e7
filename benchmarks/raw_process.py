"""A process that only writes as many bytes as a save has.

Theory. Every save in the background must at least write its bytes. That alone costs a loop time: a
virtual disk copies them with the host's processors, over the memory that the loop uses too. So the
bare write is the lower bound for any save on this machine, and only the cost above it is the save's
own. Before a turn the process is started, its memory touched and its file preallocated. It has the
niceness of ckpipe's worker, and idles between turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import raw
from contenders import Contender, Wait

from ckpipe.worker.server import step_back, step_back_together

LANES = (1, 2, 4)
BLOCK = 16 * raw.MIB
TRIES = 3
NICENESS = 10
"""The default niceness of ckpipe's worker."""

AS_FAST = 1.05
"""A write counts as equally fast up to this ratio to the fastest."""

WRITE, PREPARE, DONE = b"w", b"p", b"."


class RawWrite(Contender):
    """A bare write of some bytes, whatever the state.

    Args:
        root: Its folder.
        nbytes: The number of bytes.
    """

    name = "raw write, process"

    def __init__(self, root: Path, nbytes: int) -> None:
        super().__init__(root)
        self.path = root / "raw.bin"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.path), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._answer()

    def save(self, state: dict[str, Any]) -> Wait:
        self._ask(WRITE)
        return self._answer

    def _save(self, state: dict[str, Any]) -> Wait:
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Make the file anew, as a save does, outside of all measured times."""
        self._ask(PREPARE)
        self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, word: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word)

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.read(1) != DONE:
            self.close()
            raise RuntimeError(f"the raw write failed, exit code {self._process.returncode}")


def fewest_lanes(seconds: Mapping[int, float]) -> int:
    """Find the smallest number of lanes that is as fast as any.

    Args:
        seconds: The seconds of a write, by the number of lanes.
    """
    return min(lanes for lanes in seconds if seconds[lanes] <= AS_FAST * min(seconds.values()))


def main(path: Path, nbytes: int) -> None:
    """Write, and make the file anew, on command."""
    step_back(NICENESS)
    step_back_together(NICENESS)
    memory = raw.touched(nbytes)
    tried = {
        lanes: min(raw.write(path, memory, nbytes, lanes, BLOCK) for _ in range(TRIES))
        for lanes in LANES
    }
    lanes = fewest_lanes(tried)
    print(f"raw writes: {lanes} lanes, {tried[lanes]:.3f} s", file=sys.stderr)
    file = raw.preallocated(path, nbytes)
    os.write(1, DONE)
    while word := os.read(0, 1):
        if word == WRITE:
            raw.write_into(file, memory, nbytes, lanes, BLOCK)
        else:
            os.close(file)
            path.unlink()
            file = raw.preallocated(path, nbytes)
        os.write(1, DONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
