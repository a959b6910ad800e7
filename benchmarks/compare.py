"""Compare ckpipe with its peers, interleaved in one run; ``make bench`` runs it.

    python benchmarks/compare.py [--quick | --trial] [--continue] [--json FILE] [--plots DIR]

Every round saves and loads once with each contender, so that a drift of the machine's speed affects
all of them. *Blocked* is the time until the trainer may change the state again, and *durable* the
time until every file is fsynced. *Cold* and *warm* are loads in place, past the page cache and from
it. *Lost* is the training time that one save costs: the time until durable, minus the undisturbed
time of the steps of this period. A blocking save costs all of its time, and is not measured beside
a loop again. *Held up* is the call and the time after it in which the training thread could not
run. Unlike *lost*, it does not change with the machine's speed. All forms of DCP's save are loaded
by the same call, which is measured once.

Each part runs in its own process. A contender that fails, crashes or takes too long is left out of
the rest of that part, with the reason; the others continue. Times are medians of all rounds. The
rounds beside loops share the remaining time, and each row shows its number of rounds. All results
are written at once to a journal beside the JSON. ``--continue`` continues an interrupted run from
it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import comparison_parts
import comparison_report
from comparison_parts import Entry, Extent, Journal, Part

PACKAGES = ("ckpipe", "torch", "safetensors", "torch_checkpointing", "torchsnapshot")
POLL_SECONDS, CLOSING_SECONDS, START_SECONDS, WRITE_SECONDS = 0.3, 10.0, 120.0, 15.0
TURNS = Path(__file__).with_name("comparison_turns.py")


class Place(NamedTuple):
    """The place of a run.

    Args:
        extent: The name of the extent.
        journal: The journal, written as results come.
        folder: A folder on the disk that is measured.
        json: The file of results; None for none.
        only: Text in the names of the parts to measure.
    """

    extent: str
    journal: Journal
    folder: Path
    json: Path | None
    only: str

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the extent, in their order."""
        return comparison_parts.EXTENTS[self.extent].parts


def run(place: Place) -> None:
    """Measure every part that is not in the journal."""
    extent = comparison_parts.EXTENTS[place.extent]
    ends = time.monotonic() + extent.minutes * 60
    over = {each["part"] for each in place.journal.read() if each["kind"] == "done"}
    waiting = [part for part in extent.parts if part.name not in over and place.only in part.name]
    while waiting:
        part, *waiting = waiting
        print(f"{part.name}", file=sys.stderr, flush=True)
        left = ends - time.monotonic()
        share = left * part.nominal / sum(each.nominal for each in (part, *waiting))
        _measure(place, part, extent, share if part.loop else left)
        _write(place)


def _measure(place: Place, part: Part, extent: Extent, seconds: float) -> None:
    """Measure a part; start again without a contender that fails, hangs or crashes."""
    later = sum(each.nominal for each in place.parts[place.parts.index(part) + 1 :])
    ends = time.monotonic() + seconds
    for number in range(len(place.parts) * 20):
        root = place.folder / f"{place.parts.index(part)}.{number}"
        root.mkdir()
        command = [
            *(sys.executable, "-X", "faulthandler", str(TURNS), place.extent),
            *(str(place.parts.index(part)), "--journal", str(place.journal.path)),
            *("--root", str(root), "--seconds", str(ends - time.monotonic())),
            *("--later", str(later)),
        ]
        with place.journal.path.with_suffix(".log").open("a") as log:
            process = subprocess.Popen(
                command, stdout=sys.stderr, stderr=log, start_new_session=True
            )
        try:
            why = _watch(process, place, part, extent.turn_seconds)
        finally:
            _end(process)
            shutil.rmtree(root, ignore_errors=True)
        if why is None or not _blame(place.journal, part, why):
            return


def _watch(
    process: subprocess.Popen[bytes], place: Place, part: Part, turn_seconds: float
) -> str | None:
    """Wait until a part ends; return the reason if it did not finish."""
    journal, size, wrote = place.journal, -1, 0.0
    changed = time.monotonic()
    entries: list[Entry] = []
    while True:
        code = process.poll()
        now = time.monotonic()
        if (found := _size(journal.path)) != size:
            size, changed, entries = found, now, journal.read()
            if now - wrote > WRITE_SECONDS:
                _write(place)
                wrote = now
        done = any(each["kind"] == "done" and each["part"] == part.name for each in entries)
        limit = turn_seconds if comparison_parts.unfinished(entries) else START_SECONDS
        if done and (code is not None or now - changed > CLOSING_SECONDS):
            return None
        if not done and code is not None:
            return _ending(code)
        if not done and now - changed > limit:
            return f"it took longer than {limit:.0f} s and was stopped"
        time.sleep(POLL_SECONDS)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _ending(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was ended by {signal.Signals(-code).name}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _blame(journal: Journal, part: Part, why: str) -> bool:
    """Write which contender's turn broke off; return whether the others can continue."""
    turn = comparison_parts.unfinished(journal.read())
    if turn is None:
        print(f"  {part.name} is given up: {why}", file=sys.stderr, flush=True)
        journal.write(kind="failed", part=part.name, contender="everybody", why=why)
        return False
    print(f"  {turn['contender']} is left out: {why}", file=sys.stderr, flush=True)
    if turn["round"] == "start":
        journal.write(kind="left out", contender=turn["contender"], why=why)
    else:
        journal.write(kind="failed", part=part.name, contender=turn["contender"], why=why)
    return bool(turn["contender"] != comparison_parts.LIMIT)


def _write(place: Place) -> dict[str, Any]:
    """Write the results so far to their file, whole or not at all; return them."""
    extent = comparison_parts.EXTENTS[place.extent]
    found = comparison_parts.results(place.journal.read(), extent)
    if place.json is not None:
        draft = place.json.with_suffix(".draft")
        draft.write_text(json.dumps(found, indent=1) + "\n")
        draft.replace(place.json)
    return found


def about() -> dict[str, Any]:
    """Describe the day, the machine and the versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model n")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": model,
        "memory": memory,
        "platform": platform.platform(),
        "load at start": os.getloadavg()[0],
    }
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    extents = parser.add_mutually_exclusive_group()
    extents.add_argument("--quick", dest="extent", action="store_const", const="quick",
                         help="a quarter of a state, one loop, one round: two minutes")  # fmt: skip
    extents.add_argument("--trial", dest="extent", action="store_const", const="trial",
                         help="a tiny state: does the benchmark itself work?")  # fmt: skip
    parser.add_argument("--continue", dest="go_on", action="store_true",
                        help="take up the run whose journal lies beside the JSON")  # fmt: skip
    parser.add_argument("--only", default="", help="parts that have this in their name")
    parser.add_argument("--root", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plots", type=Path, default=None, help="a folder for pictures")
    parser.set_defaults(extent="full")
    return parser.parse_args()


def main(given: argparse.Namespace) -> int:
    """Measure, print the tables, and write JSON and plots."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupted)
    folder = Path(tempfile.mkdtemp(prefix="ckpipe-bench-", dir=given.root or Path.cwd()))
    journal = Journal(
        given.json.with_suffix(".jsonl") if given.json is not None else folder / "journal.jsonl"
    )
    if not given.go_on:
        for old in (journal.path, journal.path.with_suffix(".log")):
            old.unlink(missing_ok=True)
    place = Place(given.extent, journal, folder, given.json, given.only)
    code = 0
    try:
        if not journal.read():
            journal.write(kind="about", values=about())
        run(place)
    except KeyboardInterrupt:
        code = 130
    finally:
        spent = sum(each["values"]["seconds"] for each in journal.read() if each["kind"] == "took")
        took = spent + time.monotonic() - began
        journal.write(kind="took", values={"seconds": round(took, 1)})
        results = _write(place)
        journal.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(comparison_report.text(results), flush=True)
    if given.plots and code == 0:
        given.plots.mkdir(parents=True, exist_ok=True)
        comparison_report.draw(results, given.plots)
    print(_last_word(code, time.monotonic() - began, given), flush=True)
    return code


def _last_word(code: int, seconds: float, given: argparse.Namespace) -> str:
    took = f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    if not code:
        return f"\ntook {took}"
    again = "; the same with --continue takes it up" if given.json is not None else ""
    return f"\nbroken off after {took}{again}"


if __name__ == "__main__":
    sys.exit(main(_arguments()))
