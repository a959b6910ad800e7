"""What the ranks of the training-state matrix do: one world saves or loads many cells."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpipe import CkpipeError, SyncPipeline
from ckpipe.distributed import training_state
from tests.support.differences import difference
from tests.support.fork_server import Case
from tests.support.pipelines import load_existing
from tests.support.rank_processes import SETTINGS, tell
from tests.training.matrix_cells import RANKS, SCENARIOS, TRIPLED, Cell, Saved
from tests.training.matrix_models import Trained, make
from tests.training.matrix_optimizers import DROPPED, LR, SMALL, is_moment
from tests.training.matrix_references import (
    Reference,
    fingerprint,
    fsdp1,
    give,
    kept_by_loads,
    names_of,
    taken,
)

MORE = range(10, 12)
"""The steps that are taken after a save or a load, to see whether the training goes on."""


def together(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the value of some work and the error of the first rank that failed at it."""
    value, failure = None, None
    try:
        value = work()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, failure)
    return value, next((each for each in every if each), None)


def save(case: Case) -> None:
    """Save many trainings, keep what each consists of, and train each on."""
    warnings.simplefilter("ignore")  # torch's own
    root = Path(case["root"])
    with SyncPipeline(root / "store", attempt_id="matrix", **SETTINGS) as pipeline:
        for number, saved in torch.load(case["cells"], weights_only=False):
            found = _save_one(pipeline, number, saved)
            torch.save(found, root / f"{number}.{dist.get_rank()}.pt")
    dist.barrier()


def _save_one(pipeline: SyncPipeline, number: int, saved: Saved) -> dict[str, Any]:
    trained, failure = together(lambda: make(saved.wrapper, saved.optimizer, saved.variant))
    if failure is not None:
        return {"not applicable": failure}
    reference, failure = together(lambda: taken(trained) if saved.wrapper != "fsdp1" else None)
    if failure is not None:
        return {"not applicable": failure}
    before = fingerprint(trained)
    try:
        state = {"training": training_state(trained.model, *trained.optimizers)}
        pipeline.save(state, step=number).wait()
        refused = None
    except CkpipeError as error:
        refused = str(error)
    except Exception as error:
        return {"failed": f"the save raised {type(error).__name__}: {error}"[:300]}
    found = {"refused": refused, "reference": reference}
    changed = first_change(before, fingerprint(trained))
    if changed is not None:
        found["failed"] = f"the save changed {changed}"
    if refused is not None:
        return found
    end, failure = together(lambda: [trained.train(MORE), taken(trained)])
    if failure is not None:
        return {"not applicable": failure}
    return found | {"end": end}


def load(case: Case) -> None:
    """Load many cells, and tell of each whether it did what it must."""
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        pipelines = {}
        for ranks in RANKS:
            root = Path(case["saves"], f"by-{ranks}")
            pipeline = stack.enter_context(SyncPipeline(root / "store", **SETTINGS))
            pipelines[ranks] = root, pipeline
        for number, cell in torch.load(case["cells"], weights_only=False):
            root, pipeline = pipelines[cell.saved_by]
            rank = dist.get_rank() if cell.saved_by == dist.get_world_size() else 0
            was = torch.load(root / f"{number}.{rank}.pt", weights_only=False)
            tell(case, found=_load_one(pipeline, number, cell, was))


def _load_one(pipeline: SyncPipeline, step: int, cell: Cell, was: dict[str, Any]) -> str:
    scenario = SCENARIOS[cell.scenario]
    if "not applicable" in was:
        return f"not applicable: {was['not applicable']}"
    if "failed" in was:
        return f"failed: {was['failed']}"
    if (was["refused"] is not None) != (cell.outcome == "is refused at the save"):
        return f"failed: at the save: {was['refused']}"
    if was["refused"] is not None:
        return "is refused at the save"
    trained, failure = together(lambda: make(cell.wrapper, cell.optimizer, scenario.target))
    if failure is None and cell.wrapper == "fsdp1-mesh":  # torch cannot take all of them
        _, failure = together(lambda: taken(trained))
    if failure is not None:
        return f"not applicable: {failure}"
    before, kept = fingerprint(trained), kept_by_loads(trained)
    missing: tuple[str, ...] = ()
    try:
        state = {"training": training_state(trained.model, *trained.optimizers)}
        result = load_existing(pipeline, state, step=step, cast=scenario.cast)
        missing, found = result.missing, "loads"
    except CkpipeError as error:
        found = f"raises: {type(error).__name__}: {error}"[:400]
        changed = first_change(before, fingerprint(trained))
        if changed is not None:
            found = f"failed: {changed} was changed by a load that {found}"
    except Exception as error:
        found = f"failed: the load raised {type(error).__name__}: {error}"[:400]
    if found == "loads" and kept_by_loads(trained) != kept:
        found = f"failed: the load changed {difference(kept_by_loads(trained), kept)}"
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if set(every) != {"loads"} or cell.outcome != "loads":
        return found
    return _loaded(trained, cell, was, missing)


def _loaded(trained: Trained, cell: Cell, was: dict[str, Any], missing: tuple[str, ...]) -> str:
    expected = expected_of(was["reference"], cell)
    found, failure = together(lambda: taken(trained))
    # With FSDP1, torch takes the state of all parameters or fails: the next steps make it.
    wrong = difference(found, expected) if failure is None else fsdp1(trained) is None and failure
    if wrong:
        return f"failed: after the load {wrong}"
    unnamed = unnamed_of(trained, expected, missing)
    if cell.optimizer != "lbfgs" and unnamed:
        return f"failed: missing names {missing}, which differs in {unnamed}"
    return _goes_on(trained, cell, was, expected)


def _goes_on(trained: Trained, cell: Cell, was: dict[str, Any], expected: Reference) -> str:
    """Train on, beside the run that was saved or one that was given the same without ckpipe."""
    same = (cell.saved_in, cell.saved_by) == (cell.wrapper, cell.ranks)
    if same and cell.scenario in UNINTERRUPTED:
        control, which = was["end"], "the run that was saved"
    else:
        control, failure = together(lambda: _control(cell, expected))
        which = "the control"
        if failure is not None:
            return f"loads, and cannot go on without ckpipe: {failure}"
    found, failure = together(lambda: [trained.train(MORE), taken(trained)])
    wrong = failure or difference(found, control)
    return f"failed: unlike {which} {wrong}" if wrong else f"loads: goes on as {which}"


UNINTERRUPTED = (
    "same", "into a fresh one", "unused", "frozen at both", "frozen after steps",
    "before the first step", "before any step", "groups reordered", "equal groups 2 to 1",
    "parameters reordered", "tied", "extra state", "state of no parameter",
    "another class at both",
)  # fmt: skip
"""Scenarios whose target is the training that was saved, and goes on as that did."""


def _control(cell: Cell, expected: Reference) -> list[Any]:
    control = make(cell.wrapper, cell.optimizer, SCENARIOS[cell.scenario].target)
    give(expected, control)
    return [control.train(MORE), taken(control)]


def expected_of(reference: Reference, cell: Cell) -> Reference:
    """Compute what the target must hold after the load."""
    target = SCENARIOS[cell.scenario].target
    model = {
        name: each.to(target.dtype) if isinstance(each, torch.Tensor) else each
        for name, each in reference["model"].items()
    }
    state, options = dict(reference["state"]), dict(reference["options"])
    if SCENARIOS[cell.scenario].cast and cell.optimizer != "lbfgs":
        for name, kept in state.items():
            dtype = reference["model"][name].dtype
            state[name] = {
                key: value.to(target.dtype) if is_cast(key, value, dtype) else value
                for key, value in kept.items()
            }
    hooks = SCENARIOS[cell.scenario].saved.hooks
    for name, kept in state.items() if hooks != "none" else ():
        state[name] = {
            key: value.to(SMALL).to(value.dtype) if is_moment(key, value) else value
            for key, value in kept.items()
        }
        if hooks == "drop":
            state[name] = {**kept, DROPPED: torch.ones_like(kept[DROPPED])}
    if cell.scenario == "tied at the save":
        options["spare.weight"] = options["third.weight"]
        if "third.weight" in state:
            state["spare.weight"] = state["third.weight"]
    if cell.scenario == "left out at the save":
        options["spare.weight"] = options["third.weight"]
        if cell.optimizer == "single":  # there its optimizer was not saved
            options["spare.weight"] = options["spare.weight"] | {"lr": LR * TRIPLED}
    if target.options == "target":
        options = {
            name: each | {"mine": "kept", "lr": torch.as_tensor(each["lr"])}
            for name, each in options.items()
        }
    if cell.scenario == "one layer fewer":
        model, state, options = (
            {name: each for name, each in part.items() if "extra" not in name}
            for part in (model, state, options)
        )
    return {"model": model, "state": state, "options": options}


def is_cast(key: str, value: Any, dtype: torch.dtype) -> bool:
    """Tell whether state had the dtype of its parameter, and so is cast as that is."""
    return key != "step" and isinstance(value, torch.Tensor) and value.dtype == dtype


def unnamed_of(trained: Trained, expected: Reference, missing: tuple[str, ...]) -> set[str]:
    """Find parameters without state that ``missing`` does not name, and others that it does."""
    held = {id(each) for o in trained.optimizers for g in o.param_groups for each in g["params"]}
    names = {name for each, name in names_of(trained).items() if id(each) in held}
    if fsdp1(trained) is not None:
        names = set(expected["options"])
    without = {name for name in names if name not in expected["state"]}
    prefix = "training.optimizer.state."
    named = {each.removeprefix(prefix) for each in missing}
    return without ^ named


def first_change(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> str | None:
    """Name what differs between two fingerprints, if anything does."""
    if [name for name, _ in before] != [name for name, _ in after]:
        return "the set of tensors"
    pairs = zip(before, after, strict=True)
    return next((name for (name, old), (_, new) in pairs if old != new), None)
