"""Kill a training run in the middle of a save, resume it, and show that nothing was lost.

    python examples/demo.py          (or: make demo; about two minutes on two cores)

1. `train_gpt.py` runs undisturbed.
2. It runs again in a fresh folder and gets SIGKILL while it writes a checkpoint.
3. The same command starts again and resumes from the newest complete checkpoint.
4. Every loss and the final parameters of both runs are compared bit for bit.

Unknown options are passed to `train_gpt.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

TRAIN_GPT = Path(__file__).with_name("train_gpt.py")
SAVING = re.compile(r"saving step (\d+)")


class DemoFailed(Exception):
    """The demo could not be completed; the message gives the reason."""


@dataclass
class Run:
    """One training run: its command, its folder, its kills and its resumes."""

    folder: Path
    options: list[str]
    kills: list[int] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def command(self) -> list[str]:
        places = ["--checkpoints", str(self.checkpoints), "--log", str(self.folder / "log.jsonl")]
        return [sys.executable, str(TRAIN_GPT), *places, *self.options]

    def records(self) -> list[dict[str, object]]:
        """Read the log of the training: one record for each step, and a last one for the run."""
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def losses(self) -> list[tuple[int, str]]:
        """Return every step with its loss as exact hexadecimal, including repeated steps."""
        return [(int(str(r["step"])), str(r["loss"])) for r in self.records() if "step" in r]

    def seconds(self, name: str) -> list[float]:
        return [float(str(record[name])) for record in self.records() if name in record]

    def complete_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints: those that have an index."""
        return sorted(int(index.name[5:17]) for index in self.checkpoints.glob("step-*.json"))

    def bytes_of(self, step: int) -> int:
        """Count the bytes on the disk for one step, complete or not."""
        size = 0
        for file in self.checkpoints.glob(f"step-{step:012d}.*/**/*"):
            with suppress(FileNotFoundError):  # it may have got its final name meanwhile
                size += file.stat().st_blocks * 512 if file.is_file() else 0
        return size


@contextmanager
def running(run: Run) -> Iterator[subprocess.Popen[str]]:
    """Start the training, and kill it at the end of the block in any case."""
    with subprocess.Popen(run.command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def output_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines that the training prints, and print each of them at once."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        print(f"    {line}", end="", flush=True)


def train_to_the_end(run: Run) -> None:
    with running(run) as process:
        for _ in output_of(process):
            pass
        if process.wait() != 0:
            raise DemoFailed(f"training ended with exit status {process.returncode}")


def train_and_kill(run: Run, from_step: int) -> int:
    """Kill the training at the first save from a step on, and return the step being saved."""
    with running(run) as process:
        for line in output_of(process):
            saving = SAVING.match(line)
            if saving and int(saving[1]) >= from_step:
                step = int(saving[1])
                wait_for_bytes(run, step)
                process.send_signal(signal.SIGKILL)
                process.wait()
                print(f"    {line}", end="")
                run.kills.append(step)
                return step
    raise DemoFailed(f"there was no save to be killed in from step {from_step} on")


def wait_for_bytes(run: Run, step: int) -> None:
    """Wait until the files of a step begin to take space, so that a kill finds them half done.

    It polls without a pause: the whole save takes a few hundredths of a second.
    """
    give_up = time.monotonic() + 1
    while not run.bytes_of(step) and time.monotonic() < give_up:
        pass


def kill_in_the_middle_of_a_save(run: Run, from_step: int) -> int:
    """Kill until a kill has hit an incomplete save; return that save's step."""
    while True:
        step = train_and_kill(run, from_step)
        if step not in run.complete_steps():
            return step
        print(f"Too late: the checkpoint of step {step} was complete already. Once more.\n")
        run.resumes.append(step)
        from_step = step + 1


def resume(run: Run) -> int:
    """Start the same command again and return the step from which it resumed."""
    before = len(run.losses())
    newest = run.complete_steps()[-1] if run.complete_steps() else 0
    train_to_the_end(run)
    resumed = run.losses()[before][0] - 1
    if resumed != newest:
        raise DemoFailed(f"it resumed from step {resumed}; the newest checkpoint is {newest}")
    run.resumes.append(resumed)
    return resumed


def differences(undisturbed: Run, killed: Run) -> list[str]:
    """List the differences of the two runs; empty if they agree.

    Steps that were taken twice, before the kill and after the resume, must agree both times.
    """
    expected = dict(undisturbed.losses())
    found = [
        f"step {step}: loss {float.fromhex(loss)!r}, undisturbed {float.fromhex(expected[step])!r}"
        for step, loss in killed.losses()
        if loss != expected[step]
    ]
    if missing := expected.keys() - dict(killed.losses()).keys():
        found.append(f"steps never taken: {sorted(missing)}")
    for name in ("sha256", "bytes_seen"):
        ours, theirs = killed.records()[-1][name], undisturbed.records()[-1][name]
        if ours != theirs:
            found.append(f"final {name}: {ours}, undisturbed {theirs}")
    return found


def draw(undisturbed: Run, killed: Run, picture: Path) -> None:
    """Draw both loss curves, the kill, the resume and the saves."""
    import matplotlib

    matplotlib.use("agg")  # draws into a file and needs no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    steps, losses = curve(undisturbed.losses())
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=5, label="undisturbed")

    taken = killed.losses()
    starts = [i for i, (step, _) in enumerate(taken) if i and step <= taken[i - 1][0]]
    for begin, end in zip([0, *starts], [*starts, len(taken)], strict=True):
        axes.plot(*curve(taken[begin:end]), color="black", linewidth=1)
    axes.plot([], [], color="black", linewidth=1, label="killed and resumed")

    known = dict(zip(steps, losses, strict=True))
    saves = killed.complete_steps()
    axes.plot(saves, [known[s] for s in saves], "o", color="tab:green", label="complete checkpoint")
    for step in killed.kills:
        axes.axvline(step, color="tab:red", label=f"SIGKILL while step {step} was being saved")
    for step in killed.resumes:
        axes.axvline(step, color="tab:green", linestyle="--", label=f"resumed from step {step}")
    axes.set(xlabel="step", ylabel="loss", title="Two runs, one of them killed in a save")
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def curve(losses: list[tuple[int, str]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in losses], [float.fromhex(loss) for _, loss in losses]


def demonstrate(folder: Path, options: list[str], kill_from: int, picture: Path) -> bool:
    """Run the demo of the module docstring; return whether the runs are identical."""
    undisturbed, killed = Run(folder / "undisturbed", options), Run(folder / "killed", options)
    for run in (undisturbed, killed):
        run.checkpoints.mkdir(parents=True)

    print("1. Training undisturbed.", flush=True)
    train_to_the_end(undisturbed)

    print("\n2. The same training in a fresh folder, to be killed in a save.", flush=True)
    kill = kill_in_the_middle_of_a_save(killed, kill_from)
    size = killed.bytes_of(kill) / 1e6
    print(f"SIGKILL. Step {kill} takes {size:.1f} MB on the disk but has no index: not complete.")
    print(f"Complete checkpoints: {killed.complete_steps() or 'none yet'}.")

    print("\n3. The same command again.", flush=True)
    resumed = resume(killed)

    draw(undisturbed, killed, picture)
    found = differences(undisturbed, killed)
    report(undisturbed, killed, found)
    print(f"Killed while saving step {kill}, resumed from step {resumed}. Picture: {picture}")
    return not found


def report(undisturbed: Run, killed: Run, found: list[str]) -> None:
    """Print the verdict."""
    steps = len(undisturbed.losses())
    twice = len(killed.losses()) - steps
    blocked = [1e3 * s for run in (undisturbed, killed) for s in run.seconds("blocked_seconds")]
    step_time = 1e3 * statistics.median(undisturbed.seconds("step_seconds"))

    print("\n4. The verdict.")
    print(f"Compared: {steps} losses, {twice} of them taken twice, and the final parameters.")
    print("IDENTICAL to the last bit." if not found else "DIFFERENT:")
    for line in found[:10]:
        print(f"    {line}")
    print(
        f"A save paused training for {statistics.median(blocked):.1f} ms (median of "
        f"{len(blocked)}; longest {max(blocked):.1f} ms). A step takes {step_time:.0f} ms."
    )


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kill-from", type=int, default=200, help="kill at a save from here on")
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    parser.add_argument("--folder", type=Path, help="keep both runs here (default: keep neither)")
    return parser.parse_known_args()


def main() -> int:
    options, for_training = parse_arguments()
    beside = options.picture.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    try:
        if options.folder:
            same = demonstrate(options.folder, for_training, options.kill_from, options.picture)
        else:
            with tempfile.TemporaryDirectory(prefix="demo-", dir=beside) as folder:
                same = demonstrate(Path(folder), for_training, options.kill_from, options.picture)
    except DemoFailed as reason:
        print(f"\nThe demo failed: {reason}.")
        return 1
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
