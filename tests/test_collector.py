"""Pauses of the garbage collector: how long they last, and what is left after the last of them."""

from __future__ import annotations

import gc

import anyio
import anyio.lowlevel
import pytest

from ckpipe.tasks.collector import collector_paused, collector_paused_at_first


async def test_pauses_for_all_of_a_short_block() -> None:
    with collector_paused_at_first(60):
        await anyio.lowlevel.checkpoint()
        assert not gc.isenabled()
    assert gc.isenabled()


async def test_a_long_block_is_paused_at_first_only() -> None:
    with anyio.fail_after(20), collector_paused_at_first(0.0):
        while not gc.isenabled():
            await anyio.lowlevel.checkpoint()
    assert gc.isenabled()


async def test_the_end_of_one_pause_leaves_the_others() -> None:
    with collector_paused():
        with anyio.fail_after(20), collector_paused_at_first(0.0):
            await anyio.lowlevel.checkpoint()
        assert not gc.isenabled()
        with pytest.raises(ValueError, match="within"), collector_paused_at_first(60):
            raise ValueError("within")
        assert not gc.isenabled()
    assert gc.isenabled()
