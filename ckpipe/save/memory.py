"""Reserve staging memory for saves."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath

import anyio
import torch

from ckpipe import threads
from ckpipe.errors import PipelineBusy, SaveError, UsageError
from ckpipe.interpreter import local_ranks
from ckpipe.lock.state_lock import LockHold
from ckpipe.memory.budget import BlockReservation
from ckpipe.ranks.agree import agree
from ckpipe.save.context import SaveContext
from ckpipe.save.program import CopyProgram
from ckpipe.save.save import Save, SkipSave
from ckpipe.types import size_text

UNKNOWN_BYTES = 1 << 40
"""Available memory in bytes if the system does not tell."""

AVAILABLE_SHARE = 0.4
"""The largest share of the available host memory that staging takes by itself."""


async def reserve(
    save: Save, context: SaveContext, program: CopyProgram, hold: LockHold | None = None
) -> None:
    """Give a save its reservation of staging memory, unless it has one for so many blocks.

    It also gets the bytes that it witnesses, and blocks for them.

    Args:
        save: The save.
        context: The context with the arena and the budget.
        program: Its blocks.
        hold: A hold of the lock, which is released before the save waits for others.

    Raises:
        SkipSave: If it would have to wait and ``on_busy`` is ``"skip"``.
        PipelineBusy: If it would have to wait and ``on_busy`` is ``"fail"``.
        UsageError: If it must be copied beside training and the budget is too small, or if the
            calling thread would wait for memory that is lent to itself.
        SaveError: If the system has no memory left; the save then holds none.
    """
    if save.reserved_for is not program:
        save.reserved_for, witnesses = program, program.witnesses
        save.witness = None if witnesses is None else witnesses.take()
    image = len(program.blocks)
    blocks = image + (len(save.witness.blocks) if save.witness else 0)
    if save.reservation is not None:
        if save.reservation.blocks == blocks:
            return
        save.reservation.close()
        save.reservation = None
    size, budget = context.arena.block_bytes, context.budget
    wanted = size * (blocks + sum(each.count for each in context.lent.values()))
    if context.settings.staging.bytes is None and wanted > budget.capacity:
        # Without a bound of the user's, the budget grows to the wanted size, up to a limit.
        available = await threads.run_sync(available_bytes)
        most = int(AVAILABLE_SHARE * (available + budget.capacity))
        budget.raise_capacity(min(wanted, most) // size * size)
    if image * size <= budget.capacity < budget.used + blocks * size:
        # No save waits, fails or streams for copies of others.
        if save.witness is not None and program.witnesses is not None:
            program.witnesses.put_back(save.witness)
        blocks, save.witness = image, None
    # A state without tensors takes none: it would have no block to give back before its end.
    reserved = min(blocks, max(1, budget.capacity // size))
    await _acquire(save, context, reserved * size, hold)
    try:
        save.reservation = BlockReservation(budget, context.arena, reserved=reserved, needed=blocks)
    except MemoryError as error:
        budget.release(reserved * size)
        too_large = getattr(error.__cause__, "errno", None) == errno.EFBIG
        raise SaveError(
            f"The system has no memory for {size_text(reserved * size)} of staging",
            hint="A limit on file sizes (ulimit -f) counts for memory that is shared with a "
            "worker process too: raise it, or set worker='thread'"
            if too_large
            else "Lower staging_bytes; larger states stream through it",
        ) from error
    context.recent_blocks = [*context.recent_blocks[-7:], reserved]
    if save.request.owners:
        await _draw_all(save, context, save.reservation)


async def _draw_all(save: Save, context: SaveContext, reservation: BlockReservation) -> None:
    """Draw all blocks before a copy beside training, so that no step waits for memory."""
    if not reservation.is_whole:
        reservation.close()
        raise UsageError(
            f"The state needs more than the {size_text(context.budget.capacity)} of staging "
            'memory, so it cannot be saved with until="captured"',
            hint='Raise staging_bytes, or save with until="staged"',
        )
    save.blocks = reservation.take_all()
    limiter = anyio.CapacityLimiter(max(1, torch.get_num_threads()))
    async with anyio.create_task_group() as tasks:
        for block in save.blocks:
            if not block.touched:
                tasks.start_soon(partial(threads.run_sync, block.touch, limiter=limiter))


async def _acquire(save: Save, context: SaveContext, amount: int, hold: LockHold | None) -> None:
    on_busy = "wait" if save.request.urgent else context.settings.on_busy
    busy = False
    try:
        context.budget.acquire_nowait(amount)
    except anyio.WouldBlock:
        busy = True
    try:
        if hold is not None and (busy or (on_busy == "skip" and context.world_size > 1)):
            hold.release()
        skipped = busy
        if on_busy == "skip" and context.world_size > 1:  # the first rank decides for all
            question = f"skip-{save.id.step}-{save.id.count}"
            skipped = bool(await agree(context.store.retrying, context.attempt, question, busy))
        if on_busy == "skip" and skipped:
            raise SkipSave("Earlier saves hold the staging memory")
    except BaseException:
        if not busy:
            context.budget.release(amount)
        raise
    if not busy:
        return
    if on_busy == "fail":
        raise PipelineBusy(
            "Earlier saves hold the staging memory",
            hint='Save less often, raise staging_bytes, or set on_busy to "wait" or "skip"',
        )
    _refuse_deadlock(save, context, amount)
    with save.clock.timing("wait"):
        await context.budget.acquire(amount)


def _refuse_deadlock(save: Save, context: SaveContext, amount: int) -> None:
    if save.interrupts_another:
        raise UsageError(
            "This save began inside another save of its thread, and would wait for its memory",
            hint="Save after that has returned; a signal handler should only set a flag, as "
            "preemption=True does",
        )
    loans = context.lent.values()
    own = sum(each.count for each in loans if each.thread == save.request.thread)
    if own and own * context.arena.block_bytes + amount > context.budget.capacity:
        raise UsageError(
            "The save would wait for staging memory that is lent to its own thread",
            hint="Leave staged_state() before saving, or raise staging_bytes",
        )


def available_bytes(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """Return the available host memory, divided by the number of ranks on the machine.

    It is the least of the kernel's estimate of memory that is available without swapping, and of
    the rest below the limit of each control group (version 2) of the process, as of a container.
    Page cache that the kernel would drop first counts as available.

    Args:
        root: The directory of ``/proc`` and ``/sys``.
        environment: The environment, in which a launcher sets ``LOCAL_WORLD_SIZE``.

    Returns:
        Bytes.
    """
    left: list[int] = []
    with suppress(OSError, LookupError):  # no such file outside Linux
        left.append(_fields(root / "proc/meminfo")["MemAvailable:"] * 1024)
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        names = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
        groups = root / "sys/fs/cgroup"
        own = [PurePath(name) for name in names]
        for group in (groups / each for name in own for each in (name, *name.parents)):
            with suppress(
                OSError, ValueError, LookupError
            ):  # the root group has no such files, and others may have no limit
                limit, used = (
                    int((group / f"memory.{it}").read_text()) for it in ("max", "current")
                )
                left.append(max(0, limit - used + _fields(group / "memory.stat")["inactive_file"]))
    return min(left, default=UNKNOWN_BYTES) // local_ranks(environment)


def _fields(file: Path) -> dict[str, int]:
    """Read a file whose lines are a name and a number."""
    return {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()}
