"""Kill training runs at the file events of their checkpoints, and count what came back.

The judge is ckpt-chaos, which is no part of ckpipe: ``pip install ckpt-chaos==0.1.8``. It kills a
run before an event, in the middle of a write that it can tear, or by SIGTERM; it starts the run
again and compares the final state with that of an undisturbed run, byte for byte. The runs are
those of ``chaos_run.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

MODES = {"before": "killed before an event", "torn": "killed in a write", "term": "told to end"}
ENDS = {
    "other": "other result",
    "lost": "work lost",
    "failed": "no resume",
    "not reached": "not reached",
}
RUN = Path(__file__).with_name("chaos_run.py")


class Moment(NamedTuple):
    """A moment at which a run was killed.

    Args:
        mode: How, a key of ``MODES``.
        label: The event, as the judge names it.
        end: ``"same"`` if the resumed run ended as the undisturbed one, or a key of ``ENDS``.
        said: The last line of the run that resumed.
    """

    mode: str
    label: str
    end: str
    said: str


class Judged(NamedTuple):
    """The moments that were tried of a run, and the number of all that it has."""

    moments: list[Moment]
    of: int


def judge(run: str, work: Path, points: int, jobs: int) -> Judged:
    """Let ckpt-chaos try one run.

    Args:
        run: The name of the run.
        work: A folder that does not exist.
        points: The most moments to try, drawn evenly.
        jobs: The number of runs at a time.

    Raises:
        SystemExit: If undisturbed runs differ, or one fails.
    """
    command = [
        *(sys.executable, "-m", "ckpt_chaos", "run", "--modes", ",".join(MODES)),
        *("--max-points", str(points), "--jobs", str(jobs), "--work", str(work)),
        *("--step-regex", r"begins at step (\d+)", "--result-file", "{out}/../final.pt"),
        *("--", sys.executable, str(RUN), run, "{out}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    folders = [file.parent for file in sorted(work.glob("pt_*/result.json"))]
    tried = [json.loads((folder / "result.json").read_text()) for folder in folders]
    controls = [each for each in tried if "point" not in each]
    if not controls or controls[0]["rc"] or controls[0]["outcome"]["weights_diff"]:
        said = done.stdout + done.stderr
        raise SystemExit(f"{run}: the undisturbed runs differ or failed\n{said}")
    events = events_of(work / "reference")
    tornable = sum(event.endswith("\t1") for event in events)
    moments = [
        Moment(
            each["point"][1], each["label"], _end(each, events_of(folder)),
            (each["resume_tail"].strip().splitlines() or [""])[-1],
        )
        for each, folder in zip(tried, folders, strict=True) if "point" in each
    ]  # fmt: skip
    return Judged(moments, 2 * len(events) + tornable)


def events_of(folder: Path) -> list[str]:
    """Return the lines in which the judge has noted the file events of a run."""
    file = folder / "events.log.rank0"
    return file.read_text().splitlines() if file.exists() else []


def _end(tried: dict[str, Any], events: list[str]) -> str:
    outcome, (number, mode) = tried["outcome"], tried["point"]
    # A run that is told to end may end well, so that only its events tell whether it was told.
    if len(events) < number or (mode != "term" and not tried["crashed"]):
        return "not reached"
    if outcome["raised"]:
        return "lost" if "lost work: " in str(tried["resume_tail"]) else "failed"
    return "other" if outcome["weights_diff"] else "same"


def table(results: dict[str, Judged]) -> str:
    """Return the matrix as Markdown: for each run and mode, how many of the moments it survived."""
    heads = ["run", "tried", *MODES.values(), *ENDS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for run, (moments, of) in results.items():
        ends = Counter(each.end for each in moments)
        cells = [run, f"{len(moments)} of {of}"]
        for mode in MODES:
            tried = [each.end for each in moments if each.mode == mode]
            reached = len(tried) - tried.count("not reached")
            cells.append(f"{tried.count('same')} of {reached}")
        lines.append("| " + " | ".join([*cells, *(str(ends[end]) for end in ENDS)]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Judge runs, and print the matrix and each moment that a run did not survive.

    Exits with 1 if a run with ckpipe did not survive one.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("runs", nargs="+", help="runs of chaos_run.py")
    parser.add_argument("--points", type=int, default=1000, help="the most moments of a run to try")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--json", type=Path, help="a file for all moments")
    chosen = parser.parse_args()
    results = {}
    for run in chosen.runs:
        with tempfile.TemporaryDirectory() as work:
            results[run] = judge(run, Path(work) / "work", chosen.points, chosen.jobs)
        for each in results[run].moments:
            if each.end != "same":
                print(f"{run}: {each.label}: {each.end}: {each.said}", flush=True)
    print(table(results))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))
    ours = [each for run in results if run.endswith("-ckpipe") for each in results[run].moments]
    sys.exit(any(each.end not in ("same", "not reached") for each in ours))


if __name__ == "__main__":
    main()
