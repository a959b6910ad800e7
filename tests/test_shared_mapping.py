"""Files that are mapped, where their huge pages can be huge in the mapping too."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpipe.memory.mapping import HUGE_PAGE_BYTES, map_to_read, map_to_write

PAGE = 4096
SIZE = 3 * HUGE_PAGE_BYTES


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A file in memory in which every page is another."""
    made = os.memfd_create("ckpipe-test-mapping")
    pages = np.arange(SIZE // PAGE, dtype=np.uint32).repeat(PAGE // 4)
    os.write(made, pages.tobytes())
    yield made
    os.close(made)


def mappings() -> list[tuple[int, int]]:
    """Where this process has mapped such files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [re.match(r"(\w+)-(\w+) ", line) for line in lines if "ckpipe-test-mapping" in line]
    return [(int(each[1], 16), int(each[2], 16)) for each in found if each]


@pytest.mark.parametrize("offset", [0, PAGE, 77 * PAGE, HUGE_PAGE_BYTES - PAGE, HUGE_PAGE_BYTES])
def test_address_and_offset_are_alike_modulo_a_huge_page(descriptor: int, offset: int) -> None:
    view = map_to_read(descriptor, SIZE - offset, offset)
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    assert (address - offset) % HUGE_PAGE_BYTES == 0
    assert view == os.pread(descriptor, SIZE, offset)
    assert view.readonly


def test_what_is_written_to_a_mapping_is_in_the_file_at_a_like_offset(descriptor: int) -> None:
    memory, offset = map_to_write(descriptor, HUGE_PAGE_BYTES)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    assert (address - offset) % HUGE_PAGE_BYTES == 0
    memory[:3] = b"new"
    assert os.pread(descriptor, HUGE_PAGE_BYTES, offset) == memory[:]


def test_what_is_written_later_is_seen_too(descriptor: int) -> None:
    view = map_to_read(descriptor, SIZE, 0)
    os.pwrite(descriptor, b"new", SIZE - 3)
    assert bytes(view[-3:]) == b"new"


def test_it_is_unmapped_with_the_last_view_of_it(descriptor: int) -> None:
    view = map_to_read(descriptor, SIZE, 0)
    part = view[PAGE : 2 * PAGE]
    del view
    gc.collect()
    assert [end - begin for begin, end in mappings()] == [SIZE]
    assert part == os.pread(descriptor, PAGE, PAGE)
    del part
    gc.collect()
    assert mappings() == []


def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="No such device"):
            map_to_read(folder, PAGE, 0)
        with pytest.raises(OSError, match="Permission denied"):
            map_to_write(folder, PAGE)
    finally:
        os.close(folder)
