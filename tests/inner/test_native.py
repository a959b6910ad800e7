"""Copies and checksums of many pieces: right to the last byte, compiled or not, however cut."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpipe.format.checksum import (
    ChunkSums,
    SumTable,
    combine,
    crc32c,
    crc32c_of_each,
)
from ckpipe.memory import native
from tests.inner.raw_memory import Pieces, before_a_wall, behind_each_other, pieces
from tests.support.project_copy import (
    BUILD,
    LIBRARY,
    NO_COMPILER,
    ROOT,
    SOURCE,
    build,
    copy_project,
    needs_compiler,
)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The library as this compiler makes it; None where there is no compiler."""
    if NO_COMPILER:
        return None
    root = tmp_path_factory.mktemp("native")
    (root / SOURCE).parent.mkdir(parents=True)
    for name in (BUILD, SOURCE):
        shutil.copy(ROOT / name, root / name)
    done = build(root)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(root / "ckpipe/memory")) == ["_native.c", "_native.so"]
    return root / LIBRARY


@pytest.fixture(params=["compiled", "by libraries"])
def _way(
    request: pytest.FixtureRequest, compiled: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a test with the compiled library and without."""
    free = held = None
    if request.param == "compiled":
        if compiled is None:
            pytest.skip("there is no C compiler")
        monkeypatch.delenv("CKPIPE_NATIVE", raising=False)
        free, held = native.open_library(compiled)
    monkeypatch.setattr(native, "_free", free)
    monkeypatch.setattr(native, "_held", held)


both = pytest.mark.usefixtures("_way")
# The fixture is the same for all examples.
drawn = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.integers(0, 70) | st.integers(200, 600) | st.integers(0, 70_000)


@both
@drawn
@given(pieces(SIZES), st.sampled_from(["copy", "copy, holding the GIL", "copy and sum", "verify"]))
def test_every_byte_of_each_piece_is_copied_and_no_other(some: Pieces, how: str) -> None:
    before = [each.tobytes() for each in some.sources]
    expected = array("I", [crc32c(before[n]) for n in some.order])
    targets, sources, sizes = some.arrays()
    assert native.crc32c_each(sources, sizes) == expected
    match how:
        case "copy and sum":
            assert native.copy_crc32c_each(targets, sources, sizes) == expected
        case "verify":
            done = native.verify_copy_each(targets, sources, sizes, expected)
            assert done == len(sizes)
        case _:
            native.copy_each(targets, sources, sizes, release_gil=how == "copy")
    assert (some.target == some.expected).all()
    assert [each.tobytes() for each in some.sources] == before


@both
@drawn
@given(pieces(SIZES).filter(lambda some: len(some.order) > 0), st.data())
def test_pieces_are_copied_up_to_the_first_damaged_one(some: Pieces, data: st.DataObject) -> None:
    targets, sources, sizes = some.arrays()
    sums = native.crc32c_each(sources, sizes)
    damaged = data.draw(st.integers(0, len(sizes) - 1))
    sums[damaged] ^= 1 << data.draw(st.integers(0, 31))
    only_verified = data.draw(st.integers(0, len(sizes) - 1))
    targets[only_verified] = 0
    expected = np.full(len(some.expected), some.target[0], np.uint8)
    for place, number in enumerate(some.order[:damaged]):
        if place != only_verified:
            source, at = some.sources[number], some.places[number]
            expected[at : at + len(source)] = source
    assert native.verify_copy_each(targets, sources, sizes, sums) == damaged
    assert (some.target == expected).all()


@both
def test_all_small_sizes_at_all_places() -> None:
    source = np.random.default_rng(7).integers(0, 256, 4200, np.uint8)
    target = np.zeros(4200, np.uint8)
    for nbytes, shift in itertools.product((*range(300), 383, 384, 385, 512, 4096), range(32)):
        other = 7 * shift % 32
        to, of = array("q", [target.ctypes.data + shift]), array("q", [source.ctypes.data + other])
        sums = native.copy_crc32c_each(to, of, array("q", [nbytes]))
        image = source[other : other + nbytes].tobytes()
        assert target[shift : shift + nbytes].tobytes() == image
        assert sums.tolist() == [crc32c(image)]


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


@both
@drawn
@given(st.binary(max_size=3000), st.integers(0, 7), st.floats(0, 1), st.randoms())
def test_nan_are_those_that_torch_finds(
    data: bytes, shift: int, share: float, draw: random.Random
) -> None:
    for place, dtype in enumerate(DTYPES):
        size = len(data) // dtype.itemsize * dtype.itemsize
        bits = np.frombuffer(bytearray(data[:size]), f"u{dtype.itemsize}")
        # Random bits are seldom at the bounds, and of wide elements seldom NaN.
        largest = (1 << dtype.itemsize * 8 - 1) - 1
        most = native.NAN_BITS[list(native.NAN_BITS)[place]][1]
        for at in range(len(bits)):
            if draw.random() < share:
                sign = draw.choice([0, largest + 1])
                bits[at] = sign + draw.choice([0, most, most + 1, largest])
        expected = int(torch.from_numpy(bits.view(np.uint8)).view(dtype).isnan().sum())
        memory = np.zeros(size + 8, np.uint8)
        memory[shift : shift + size] = bits.view(np.uint8)
        memory[shift + size :], memory[:shift] = 0xFF, 0xFF
        source = array("q", [memory.ctypes.data + shift] * 2)
        dtypes = array("q", [place] * 2)
        found = native.count_nan_each(source, array("q", [size, 0]), dtypes)
        assert found.tolist() == [expected, 0], dtype


@both
def test_counts_of_nan_have_room_for_any_number() -> None:
    every = np.full(1 << 20, 0xFF, np.uint8)
    for place, dtype in enumerate(DTYPES):
        (found,) = native.count_nan_each(
            array("q", [every.ctypes.data]), array("q", [len(every)]), array("q", [place])
        )
        assert found == len(every) // dtype.itemsize


@both
def test_reads_and_writes_up_to_the_last_byte_of_memory_and_no_further() -> None:
    source, target = before_a_wall(b"\x11"), before_a_wall(b"\x22")
    for sizes in ([3], [1000, 0, 1, 63], [255, 256, mmap.PAGESIZE], [2 * mmap.PAGESIZE]):
        sources = array("q", [source - nbytes for nbytes in sizes])
        targets = behind_each_other(sizes, target)
        native.copy_each(targets, sources, array("q", sizes), release_gil=True)
        sums = native.copy_crc32c_each(targets, sources, array("q", sizes))
        done = native.verify_copy_each(targets, sources, array("q", sizes), sums)
        assert done == len(sizes)
        for dtype in range(len(DTYPES)):
            native.count_nan_each(sources, array("q", sizes), array("q", [dtype] * len(sizes)))
        assert ctypes.string_at(target - sum(sizes), sum(sizes)) == b"\x11" * sum(sizes)


@both
def test_the_sum_is_of_the_written_bytes_while_others_write_to_the_source() -> None:
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
        while not torn:  # else nothing wrote while it was copied
            to, of = (array("q", [each.ctypes.data]) for each in (target, source))
            (found,) = native.copy_crc32c_each(to, of, array("q", [len(target)])).tolist()
            assert found == crc32c(target.data)
            torn += len(np.unique(target)) > 1
    finally:
        over.set()
        writer.join()


@both
def test_columns_of_different_length_are_refused() -> None:
    one, two, sums = array("q", [1]), array("q", [1, 2]), array("I", [0])
    with pytest.raises(ValueError, match="length"):
        native.copy_each(one, one, two, release_gil=True)
    with pytest.raises(ValueError, match="length"):
        native.crc32c_each(two, one)
    with pytest.raises(ValueError, match="length"):
        native.copy_crc32c_each(one, two, one)
    with pytest.raises(ValueError, match="length"):
        native.verify_copy_each(two, two, two, sums)
    with pytest.raises(ValueError, match="length"):
        native.count_nan_each(one, one, two)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copy_project(tmp_path / "project")


def test_a_library_for_another_machine_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "_native.so").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(OSError, match="_native"):
        native.open_library(tmp_path / "_native.so")


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize("flags", [["-fsanitize=address,undefined"], ["-O3"]])
def test_every_kernel_under_sanitizers(flags: list[str], tmp_path: Path) -> None:
    program = tmp_path / "harness"
    command = ["cc", "-std=gnu11", "-g", "-fno-sanitize-recover=all", "-o", str(program)]
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }")
    if subprocess.run([*command, *flags, str(tmp_path / "empty.c")], check=False).returncode:
        pytest.skip("this compiler has no sanitizers")
    source = ROOT / "tests/inner/native_harness.c"
    subprocess.run([*command, "-Wall", "-Wextra", "-Werror", *flags, str(source)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sum_portable" in done.stdout.split()


def cross_compilers() -> Iterator[tuple[str, list[str]]]:
    """Compilers for other processors that this machine has, with the processor's name."""
    if importlib.util.find_spec("ziglang"):
        for machine in ("aarch64-linux-gnu", "aarch64-linux-musl", "riscv64-linux-musl"):
            yield machine, [sys.executable, "-m", "ziglang", "cc", "-target", machine]
    elif found := shutil.which("aarch64-linux-gnu-gcc"):
        yield "aarch64-linux-gnu", [found]


def test_it_compiles_for_other_processors(project: Path, tmp_path: Path) -> None:
    compilers = list(cross_compilers())
    if not compilers:
        pytest.skip("there is neither ziglang nor aarch64-linux-gnu-gcc")
    for machine, words in compilers:
        done = build(project, CC=" ".join(words))
        assert (done.returncode, done.stderr) == (0, ""), machine
        elf_machine = (project / LIBRARY).read_bytes()[18:20]
        assert elf_machine in (b"\xb7\x00", b"\xf3\x00"), machine
        with pytest.raises(OSError, match="_native"):
            native.open_library(project / LIBRARY)


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"\0" * 32, 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_values_of_the_standard(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@given(st.binary(max_size=300), st.integers(0, 300))
def test_pieces_make_the_whole(data: bytes, cut: int) -> None:
    first, second = data[:cut], data[cut:]
    assert crc32c(data) == slow_crc32c(data)
    assert crc32c(memoryview(second), crc32c(first)) == crc32c(data)
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(data)


EDGES = st.sampled_from([0, 1, 7, 8, 9, 255, 256, 257, 50_003, 400_007])


PARTS = st.lists(st.tuples(EDGES, st.integers(0, 9)), max_size=9)


@given(st.lists(PARTS, max_size=4), st.integers(0, 99))
def test_many_parts_in_one_call_have_the_sums_that_each_has(
    drawn: list[list[tuple[int, int]]], seed: int
) -> None:
    blocks, expected = [], []
    for parts in drawn:
        begins, ends, at = [], [], 0
        for nbytes, gap in parts:
            begins.append(at + gap)
            ends.append(at := at + gap + nbytes)
        image = memoryview(random.Random(seed).randbytes(at))  # not a byte behind the last part
        blocks.append((image, begins, ends))
        expected.append([crc32c(image[lo:hi]) for lo, hi in zip(begins, ends, strict=True)])
    assert crc32c_of_each(blocks) == expected
    backwards = [(image, begins[::-1], ends[::-1]) for image, begins, ends in blocks[::-1]]
    assert crc32c_of_each(backwards) == [sums[::-1] for sums in expected[::-1]]


@pytest.mark.parametrize(
    ("begins", "ends"), [([0], [101]), ([-1], [4]), ([9], [8]), ([0, 1], [1]), ([101], [101])]
)
def test_ranges_outside_the_data_are_refused(begins: list[int], ends: list[int]) -> None:
    with pytest.raises(ValueError, match="ranges"):
        crc32c_of_each([(memoryview(bytes(100)), begins, ends)])


def test_missing_piece_is_noticed() -> None:
    table = SumTable([(1 << 20) + 8])
    sums = ChunkSums(table)
    sums.add_block(table.cuts([(0, 0, (1 << 20) + 4, 0)]), [1, 2])
    with pytest.raises(AssertionError, match="never checksummed"):
        sums.finished()


def test_sums_of_another_block_are_noticed() -> None:
    table = SumTable([2 << 20])
    with pytest.raises(AssertionError, match="other ranges"):
        ChunkSums(table).add_block(table.cuts([(0, 0, 2 << 20, 0)]), [1])
