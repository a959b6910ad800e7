"""Damage a checkpoint of each library, and tell what a load makes of it.

Each library saves a small state. Then, in turn, one bit of its largest file is flipped, its largest
file is cut in half, or a process is killed (SIGKILL) as soon as the next save has written a
mebibyte. A load afterwards returns the saved values, returns others, or raises.

    python benchmarks/damage.py --folder /tmp/damage --json damage.json

Orbax, which needs JAX, is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
SIZE = 16 * MIB  # of each of four tensors, in bytes
FLIPS = 16
Arrays = dict[str, Any]
Save = Callable[[Path, int], None]
Load = Callable[[Path], Arrays]


def arrays(step: int) -> Arrays:
    """Make the state of a step."""
    random = np.random.default_rng(step)
    return {f"w{number}": random.random(SIZE // 4, np.float32) for number in range(4)}


def step_of(loaded: Arrays) -> int | None:
    """Return the step whose state this is, to the bit."""
    found = {name: np.asarray(each) for name, each in loaded.items()}
    for step in (1, 2):
        if all(np.array_equal(found[name], each) for name, each in arrays(step).items()):
            return step
    return None


def tensors(step: int) -> Arrays:
    import torch

    return {name: torch.from_numpy(each) for name, each in arrays(step).items()}


def torch_save(place: Path, step: int) -> None:
    import torch

    place.mkdir(parents=True, exist_ok=True)
    torch.save(tensors(step), place / "last.pt")


def torch_load(place: Path) -> Arrays:
    import torch

    return dict(torch.load(place / "last.pt"))


def dcp_save(place: Path, step: int, name: str = "last") -> None:
    from torch.distributed.checkpoint import state_dict_saver

    state_dict_saver.save(tensors(step), checkpoint_id=place / name, no_dist=True)


def dcp_load(place: Path, name: str = "last") -> Arrays:
    from torch.distributed.checkpoint import state_dict_loader

    target = tensors(0)
    state_dict_loader.load(target, checkpoint_id=place / name, no_dist=True)
    return target


def dcp_steps_save(place: Path, step: int) -> None:
    dcp_save(place, step, f"step-{step}")


def dcp_steps_load(place: Path) -> Arrays:
    return dcp_load(place, max(each.name for each in place.iterdir()))


def orbax_save(place: Path, step: int) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(place) as manager:
        manager.save(step, args=ocp.args.StandardSave(arrays(step)))


def orbax_load(place: Path) -> Arrays:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(place) as manager:
        step = manager.latest_step()
        return dict(manager.restore(step, args=ocp.args.StandardRestore(arrays(0))))


def ckpipe_save(place: Path, step: int) -> None:
    import ckpipe

    with ckpipe.SyncPipeline(place) as pipeline:
        pipeline.save(tensors(step), step=step)


def ckpipe_load(place: Path) -> Arrays:
    import ckpipe

    return dict(ckpipe.load(place).state)


LIBRARIES: dict[str, tuple[str, Save, Load]] = {
    "torch.save": ("torch", torch_save, torch_load),
    "DCP, one folder": ("torch", dcp_save, dcp_load),
    "DCP, a folder each": ("torch", dcp_steps_save, dcp_steps_load),
    "Orbax": ("orbax-checkpoint", orbax_save, orbax_load),
    "ckpipe": ("ckpipe", ckpipe_save, ckpipe_load),
}


def largest(place: Path) -> Path:
    return max(
        (each for each in place.rglob("*") if each.is_file()), key=lambda e: e.stat().st_size
    )


def flipped(save: Save, load: Load, place: Path, library: str) -> list[str]:
    """Flip one bit, at each of several places of the largest file, and back."""
    save(place, 1)
    size = largest(place).stat().st_size
    told = []
    for number in range(FLIPS):
        with largest(place).open("r+b") as file:
            file.seek(at := size * (2 * number + 1) // (2 * FLIPS))
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        told.append(outcome(load, place))
        with largest(place).open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    return told


def torn(save: Save, load: Load, place: Path, library: str) -> list[str]:
    """Cut the largest file in half."""
    save(place, 1)
    with largest(place).open("r+b") as file:
        file.truncate(largest(place).stat().st_size // 2)
    return [outcome(load, place)]


def killed(save: Save, load: Load, place: Path, library: str) -> list[str]:
    """Kill the save of step 2 while its files grow."""
    save(place, 1)
    command = [sys.executable, __file__, "--save", library, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        process.stdout.readline()  # it is about to save
        begin = time.time_ns()
        while process.poll() is None and not grows(place, begin):
            pass
        process.kill()
    assert process.returncode == -signal.SIGKILL, f"{library} was quicker"
    return [outcome(load, place)]


def grows(place: Path, begin: int) -> bool:
    """Tell whether a file was written since, with a mebibyte or more."""
    with suppress(FileNotFoundError):
        for file in place.rglob("*"):
            stat = file.stat()
            if file.is_file() and stat.st_mtime_ns > begin and stat.st_size >= MIB:
                return True
    return False


def outcome(load: Load, place: Path) -> str:
    """Load, and tell what came."""
    try:
        step = step_of(load(place))
    except BaseException as error:  # that of DCP is no Exception
        [(cause, *_)] = getattr(error, "failures", {0: (error, None)}).values()
        return f"raises {type(cause).__name__}"
    return f"loads step {step}" if step else "loads other values"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("damage"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    if options.save:
        library, place = options.save
        print(flush=True)
        LIBRARIES[library][1](Path(place), 2)
        return
    found: dict[str, Any] = {"date": str(date.today()), "versions": {}, "outcomes": {}}
    for library, (package, save, load) in LIBRARIES.items():
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        for harm in (flipped, torn, killed):
            place = options.folder.absolute() / f"{library}-{harm.__name__}"
            shutil.rmtree(place, ignore_errors=True)
            told = Counter(harm(save, load, place, library))
            found["outcomes"].setdefault(library, {})[harm.__name__] = told
            print(f"{library:20s} {harm.__name__:8s} {dict(told)}")
            shutil.rmtree(place)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
