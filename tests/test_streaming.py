"""Copies past the processor's cache: every byte, no other byte, and where there can be none."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_pieces import GUARD, Pieces, before_a_wall, behind_each_other, pieces

from ckpipe.memory.streaming import LEAST_BYTES, streaming_copy, streaming_moves

copy = streaming_copy()
move_each = streaming_moves()

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="there is none elsewhere"
)


def test_there_is_a_copy_on_this_processor() -> None:
    assert copy is not None


@given(
    nbytes=st.integers(LEAST_BYTES, 3 * LEAST_BYTES) | st.integers(LEAST_BYTES, 100_000),
    source_shift=st.integers(0, 70),
    target_shift=st.integers(0, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_copies_every_byte_and_no_other(
    nbytes: int, source_shift: int, target_shift: int, seed: int
) -> None:
    assert copy is not None
    source = np.random.default_rng(seed).integers(0, 256, nbytes + 160, np.uint8)
    target = np.full(nbytes + 160, GUARD, np.uint8)
    before = source.copy()
    copy(target.ctypes.data + target_shift, source.ctypes.data + source_shift, nbytes)
    end = target_shift + nbytes
    assert (target[target_shift:end] == source[source_shift : source_shift + nbytes]).all()
    assert (target[:target_shift] == GUARD).all()
    assert (target[end:] == GUARD).all()
    assert (source == before).all()


def test_reads_and_writes_up_to_the_last_byte_of_memory_and_no_further() -> None:
    assert copy is not None
    source, target = before_a_wall(b"\x11"), before_a_wall(b"\x22")
    for nbytes in (LEAST_BYTES, 1000, mmap.PAGESIZE - 1, 2 * mmap.PAGESIZE):
        copy(target - nbytes, source - nbytes, nbytes)
        assert ctypes.string_at(target - nbytes, nbytes) == b"\x11" * nbytes


@given(pieces(st.integers(0, 3 * LEAST_BYTES) | st.integers(0, 20_000)))
def test_moves_every_byte_of_each_piece_and_no_other(some: Pieces) -> None:
    assert move_each is not None
    move_each(*some.arrays())
    assert (some.target == some.expected).all()


def test_moves_pieces_up_to_the_last_byte_of_memory_and_no_further() -> None:
    assert move_each is not None
    source, target = before_a_wall(b"\x11"), before_a_wall(b"\x22")
    for sizes in ([3], [1000, 0, 1, 63], [64, 65, mmap.PAGESIZE]):
        sources = array("q", [source - nbytes for nbytes in sizes])
        move_each(behind_each_other(sizes, target), sources, array("q", sizes))
        assert ctypes.string_at(target - sum(sizes), sum(sizes)) == b"\x11" * sum(sizes)


STRICT = """
import ctypes
refuse_new_code, option = 1, 65  # PR_MDWE_REFUSE_EXEC_GAIN of PR_SET_MDWE, <linux/prctl.h>
if ctypes.CDLL(None).prctl(option, refuse_new_code, 0, 0, 0):
    raise SystemExit("no such policy")
from array import array
from ckpipe.memory.raw_memory import copy_bytes, copy_each
from ckpipe.memory.streaming import streaming_copy, streaming_moves
assert streaming_copy() is None
assert streaming_moves() is None
source, target = (ctypes.c_char * 300_000)(*b"abc" * 100_000), (ctypes.c_char * 300_000)()
copy_bytes(ctypes.addressof(target), ctypes.addressof(source), 300_000)
assert target.raw == source.raw
addresses = [array("q", [ctypes.addressof(each)]) for each in (target, source)]
source[0] = b"z"
copy_each(*addresses, array("q", [300_000]), lets_go=True)
assert target.raw == source.raw
"""


def test_the_c_library_copies_where_the_system_allows_no_new_code() -> None:
    run = subprocess.run([sys.executable, "-c", STRICT], capture_output=True, text=True)
    if "no such policy" in run.stderr:
        pytest.skip("the kernel has no such policy, which came with Linux 6.3")
    assert run.returncode == 0, run.stderr
