"""Pauses of the garbage collector: how long they last, and what is left after the last of them."""

from __future__ import annotations

import gc
import os

import anyio
import anyio.lowlevel
import pytest

from ckpipe.interpreter import gc_paused, gc_paused_at_first


async def test_pauses_for_all_of_a_short_block() -> None:
    with gc_paused_at_first(60):
        await anyio.lowlevel.checkpoint()
        assert not gc.isenabled()
    assert gc.isenabled()


async def test_a_long_block_is_paused_at_first_only() -> None:
    with anyio.fail_after(20), gc_paused_at_first(0.0):
        while not gc.isenabled():
            await anyio.lowlevel.checkpoint()
    assert gc.isenabled()


async def test_the_end_of_one_pause_leaves_the_others() -> None:
    with gc_paused():
        with anyio.fail_after(20), gc_paused_at_first(0.0):
            await anyio.lowlevel.checkpoint()
        assert not gc.isenabled()
        with pytest.raises(ValueError, match="within"), gc_paused_at_first(60):
            raise ValueError("within")
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.filterwarnings("default:.*use of fork:DeprecationWarning")
def test_a_forked_child_collects() -> None:
    with gc_paused(), gc_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()
