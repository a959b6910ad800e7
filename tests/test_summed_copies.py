"""Copies that also sum: every byte and no other, the right sums, and where there can be none."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_pieces import Pieces, before_a_wall, behind_each_other, pieces

from ckpipe.format.checksum import crc32c
from ckpipe.memory.summed_copies import summed_copies

copies = summed_copies()

_flags = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""

pytestmark = pytest.mark.skipif(
    not {"avx2", "vpclmulqdq", "sse4_2"}.issubset(_flags.split()),
    reason="there is none on other processors",
)


def test_there_is_one_on_this_processor() -> None:
    assert copies is not None


@given(pieces(st.integers(0, 20) | st.integers(200, 600) | st.integers(0, 30_000)))
def test_every_byte_of_each_piece_is_moved_and_summed(some: Pieces) -> None:
    assert copies is not None
    before = [each.tobytes() for each in some.sources]
    sums = copies(*some.arrays())
    assert (some.target == some.expected).all()
    assert [each.tobytes() for each in some.sources] == before
    assert sums.tolist() == [crc32c(before[n]) for n in some.order]


def test_sums_of_all_small_sizes_at_all_places() -> None:
    assert copies is not None
    source = np.random.default_rng(7).integers(0, 256, 4200, np.uint8)
    target = np.zeros(4200, np.uint8)
    for nbytes, shift in itertools.product((*range(300), 383, 384, 385, 512, 4096), range(32)):
        other = 7 * shift % 32
        to, of = array("q", [target.ctypes.data + shift]), array("q", [source.ctypes.data + other])
        sums = copies(to, of, array("q", [nbytes]))
        image = source[other : other + nbytes].tobytes()
        assert target[shift : shift + nbytes].tobytes() == image
        assert sums.tolist() == [crc32c(image)]


def test_reads_and_writes_up_to_the_last_byte_of_memory_and_no_further() -> None:
    assert copies is not None
    source, target = before_a_wall(b"\x11"), before_a_wall(b"\x22")
    for sizes in ([3], [1000, 0, 1, 63], [255, 256, mmap.PAGESIZE], [2 * mmap.PAGESIZE]):
        sources = array("q", [source - nbytes for nbytes in sizes])
        copies(behind_each_other(sizes, target), sources, array("q", sizes))
        assert ctypes.string_at(target - sum(sizes), sum(sizes)) == b"\x11" * sum(sizes)


def test_the_sum_is_of_what_was_written_whoever_writes_to_the_source_meanwhile() -> None:
    assert copies is not None
    source, target = np.zeros(8 << 20, np.uint8), np.zeros(8 << 20, np.uint8)
    over = threading.Event()

    def change() -> None:
        value = 0
        while not over.is_set():
            value = (value + 1) % 256
            source.fill(value)

    writer = threading.Thread(target=change)
    writer.start()
    torn = 0
    try:
        for _ in range(200):
            to, of = (array("q", [each.ctypes.data]) for each in (target, source))
            (found,) = copies(to, of, array("q", [len(target)])).tolist()
            assert found == crc32c(target.data)
            torn += len(np.unique(target)) > 1
    finally:
        over.set()
        writer.join()
    assert torn  # else nobody wrote while it was copied


STRICT = """
import ctypes
refuse_new_code, option = 1, 65  # PR_MDWE_REFUSE_EXEC_GAIN of PR_SET_MDWE, <linux/prctl.h>
if ctypes.CDLL(None).prctl(option, refuse_new_code, 0, 0, 0):
    raise SystemExit("no such policy")
from ckpipe.memory.summed_copies import summed_copies
print(summed_copies())
"""


def test_there_is_none_where_the_system_allows_no_new_code() -> None:
    run = subprocess.run([sys.executable, "-c", STRICT], capture_output=True, text=True)
    if "no such policy" in run.stderr:
        pytest.skip("the kernel has no such policy, which came with Linux 6.3")
    assert run.stdout.splitlines() == ["None"], run.stderr
