"""Gather the facts about a run: from its list, indexes and reports; write nothing.

Each index is read once, several at a time. Data are read for ``verify`` and ``weights`` only. No
lease is written, so a checkpoint may be deleted meanwhile; then it is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median

from ckpipe.calls import verified
from ckpipe.catalog.catalog import NOT_BY_RULE, OTHER_LINE, Catalog
from ckpipe.catalog.complete import read_members
from ckpipe.catalog.find import DELETING, read_index, recheck
from ckpipe.catalog.inspect import data_bytes
from ckpipe.catalog.summaries import Summaries, candidate_of
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    CorruptCheckpoint,
    LinkRefused,
    UnsupportedVersion,
)
from ckpipe.foreign.source import Place, open_place
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import prefix
from ckpipe.format.summary import summary_of
from ckpipe.pages.facts import PARTS, Checkpoint, RetentionOutcome, Run, part_of
from ckpipe.pages.weights import heat_map
from ckpipe.retention import Candidate, KeepBest, Rule, decide
from ckpipe.settings import Settings
from ckpipe.state.training_form import heads_in
from ckpipe.threads import run_lanes
from ckpipe.types import CheckpointInfo, save_report_from_data, size_text

MOST_CHECKPOINTS = 2000
"""The most checkpoints of a page: the newest."""

_AT_ONCE = 16


async def gather(
    url: str,
    settings: Settings,
    *,
    verify: bool = False,
    weights: bool = False,
    match: Sequence[str] | None = None,
) -> Run:
    """Gather the facts about the run at a root.

    Args:
        url: The root, or a checkpoint of another program.
        settings: The options of backends, the retry settings, lanes, and the retention rules.
        verify: Whether to read all bytes of all complete checkpoints.
        weights: Whether to read the weights of up to 24 of them.
        match: Globs of the labels of the weights; None for those of the model.

    Raises:
        UsageError: If the place has a format that is known and not opened.
        StoreError: If the store failed.
    """
    async with open_place(url, settings) as place:
        infos = await place.checkpoints()
        now = datetime.now(UTC)
        if not infos:
            return Run(place.name, now, (), foreign=await _foreign(place))
        deleting = sum(each.reason == DELETING for each in infos)
        infos = [each for each in infos if each.reason != DELETING]
        reading = _Reading(place, settings, verify)
        pending = iter(infos[:MOST_CHECKPOINTS])

        async def lane() -> None:
            for each in pending:
                await reading.read(each)

        await run_lanes(_AT_ONCE, lane)
        found = sorted(reading.found, key=lambda each: each.key)
        complete = [each for each in found if each.complete]
        known = [each for each in infos if each.id in reading.summaries]
        facts = [candidate_of(each, reading.summaries[each.id]) for each in known]
        retention = await _retention(reading, complete, facts)
        parts = _bytes_by_part(reading.newest) if reading.newest else {}
        best, best_by = _best(settings.retention.rule, facts)
        for each in complete:
            each.best = each.id == best
        heat = await heat_map(place, settings, known[::-1], match) if weights else None
        return Run(
            place.name, now, tuple(found), deleting, retention, best_by, parts, "",
            len(complete) if verify else None, heat, len(infos[MOST_CHECKPOINTS:]),
        )  # fmt: skip


@dataclass(slots=True)
class _Reading:
    """Read one checkpoint after the other, and remember what several facts need."""

    place: Place
    settings: Settings
    verify: bool
    found: list[Checkpoint] = field(default_factory=list)
    summaries: Summaries = field(default_factory=Summaries)
    newest: ManifestDocument | None = None

    async def read(self, info: CheckpointInfo) -> None:
        store = self.place.store
        known = (info.reason, info.saved_at, info.pinned)
        plain = Checkpoint(info.id, info.step, "incomplete", *known)
        if not info.complete:
            with suppress(LinkRefused):
                times = [each.modified async for each in store.list(prefix(info.key))]
                plain.time = max(times, default=None)
            self.found.append(plain)
            return
        try:
            index = await read_index(store, info.key)
            found = await self._read(plain, index)
            if self.verify:
                async with self.place.opened(info, lease=False) as opened:
                    await verified(opened, self.settings)
        except (CheckpointNotFound, CorruptCheckpoint, UnsupportedVersion) as error:
            if (await recheck(store, info)).complete:
                self.found.append(replace(plain, state="damaged", why=str(error)))
            return
        self.found.append(found)
        self.summaries.learn(info.id, summary_of(index))
        if self.newest is None or index.id > self.newest.id:
            self.newest = index

    async def _read(self, plain: Checkpoint, index: ManifestDocument) -> Checkpoint:
        summary, document, first = summary_of(index), index, index.parts[0]
        if index.world_size > 1:
            (document,) = await read_members(self.place.store, index.id, [(0, 0)], index.world_size)
        devices = {row.device for structure in index.structures for row in structure.tensors}
        found = replace(
            plain, state="complete", why="", final=summary.final, bytes=summary.bytes,
            copied_bytes=summary.copied_bytes, nan=summary.nan, world_size=summary.world_size,
            metrics=summary.metrics, resumed_from=first.resumed_from, writer=first.writer,
            devices=tuple(sorted(devices)),
        )  # fmt: skip
        with suppress(CkpipeError):  # a damaged report spoils no more than its own facts
            if document.report is not None:
                report = save_report_from_data(document.report)
                found.blocked = report.captured_seconds or report.staged_seconds
                found.durable = report.seconds
                found.slowest = report.bottleneck.partition(" took longest")[0]
        with suppress(ValueError, TypeError, OverflowError):  # an index that was copied is younger
            began = datetime.fromisoformat(first.started)
            found.time = min(plain.time or began, began + timedelta(seconds=found.durable or 0.0))
        return found


async def _foreign(place: Place) -> str:
    """Describe the checkpoint of another program; empty if there is none."""
    try:
        document = await place.described()
    except CheckpointNotFound:
        return ""
    tensors = len(document.structures[0].tensors)
    return f"{tensors} tensors, {size_text(data_bytes(document))}"


async def _retention(
    reading: _Reading, complete: list[Checkpoint], facts: list[Candidate]
) -> RetentionOutcome:
    """Decide as ``ckpipe prune --dry-run`` does, and for the next save; note the reasons."""
    retention, now = reading.settings.retention, datetime.now(UTC)
    rule = retention.rule
    outcome = RetentionOutcome("" if rule is None else repr(rule))
    if rule is None or not complete:
        return outcome
    every, store = retention.lines == "all", reading.place.store
    catalog = Catalog(store, rule, summaries=reading.summaries, all_lines=every)
    try:
        decision = await catalog.prune(now=now, dry_run=True)
    except CkpipeError as error:
        return replace(outcome, problem=str(error))
    for each in complete:
        reason, goes = decision.reasons.get(each.id, ""), each.id in decision.remove
        each.kept, each.goes = ("", reason) if goes else (reason, "")
    gaps = [b.step - a.step for a, b in pairwise(complete[-5:]) if b.step > a.step]
    if not gaps:
        return outcome
    kept = {each.id: each.kept for each in complete if each.kept and each.kept != OTHER_LINE}
    newest = replace(
        facts[0], id="next", step=facts[0].step + int(median(gaps)), created=now, final=False,
        metrics=dict.fromkeys(facts[0].metrics, math.nan),
    )  # fmt: skip
    fixed = {id: reason for id, reason in kept.items() if reason in NOT_BY_RULE}
    stays = (each for each in facts if each.id in kept)
    then = decide([newest, *stays], rule, now=now, protected=fixed)
    return replace(outcome, next_step=newest.step, next_goes=then.remove)


def _best(rule: Rule | None, facts: Sequence[Candidate]) -> tuple[str, str]:
    """Find the best checkpoint by a rule, or else by the lowest loss; also return the reason."""
    rules = [each for each in getattr(rule, "rules", (rule,)) if isinstance(each, KeepBest)]
    losses = {name for each in facts for name in each.metrics if "loss" in name.lower()}
    losses_first = sorted(losses, key=lambda name: ("val" not in name.lower(), name))
    for each in (*rules, *map(KeepBest, losses_first)):
        for winner in each.winners(facts):
            return winner, f"the {'lowest' if each.mode == 'min' else 'highest'} {each.metric}"
    return "", ""


def _bytes_by_part(index: ManifestDocument) -> dict[str, int]:
    """Count the bytes of each part of the state, by the entries of the data files."""
    found: Counter[str] = Counter()
    for part in index.parts:
        labels = [row.label for row in index.structures[part.structure].tensors]
        heads, layout = heads_in(labels), index.layouts[part.layout]
        owner = {
            c.entry: part_of(labels[c.tensor], heads) for c in layout.chunks if c.owner is None
        }
        for number, nbytes in enumerate(layout.entries.nbytes):
            found[owner.get(number, "other")] += nbytes
    return {name: found[name] for name in (*PARTS, "other") if found[name]}
