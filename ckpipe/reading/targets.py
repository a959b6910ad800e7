"""The tensors that a load fills: live ones of the target and fresh ones, and their order.

Live tensors that overlap in the target in the same way as when they were saved agree by
construction, because the shared bytes were saved once. For other overlapping tensors the checkpoint
may hold different bytes. Their values are read into fresh tensors first, written to a canvas in the
shape of the target's memory, and read back. If a value has changed, another tensor wrote different
bytes to the same place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpipe.errors import InvalidExtent, SharingConflict, StructureMismatch
from ckpipe.format.boxes import contiguous_stride
from ckpipe.memory.cuda import events_behind
from ckpipe.reading.chunks import ChunkCopy, HeldElements, Regions, StoredTensor, StoredTensors
from ckpipe.reading.fill import (
    Destination,
    Elements,
    Pieces,
    RawBytes,
    allocate,
    copy_from_image,
    destination_of,
    is_image,
    memory_overlaps,
    normal_tensors,
    with_lazy_bits,
    write,
)
from ckpipe.reading.live_tensors import is_placed, regions_of, writable_view
from ckpipe.reading.read_plan import Need
from ckpipe.state.tensors import MAX_ITEM, NUMPY, Shardings, lazy_bits, overlapping, window_bytes

_MANY_PIECES = 8


class LiveTensor(NamedTuple):
    """A tensor of the target into which a stored one is loaded.

    Args:
        stored: The stored tensor.
        label: The label of the target in the state.
        tensor: Its memory, as a plain detached tensor.
        owner: The object in the state.
        regions: The parts of the stored tensor that the memory holds; None for the whole.
        copies: The chunks from which it is assembled.
    """

    stored: StoredTensor
    label: str
    tensor: torch.Tensor
    owner: torch.Tensor | np.ndarray[Any, Any]
    regions: Regions
    copies: tuple[ChunkCopy, ...]


@dataclass(slots=True)
class Round:
    """A round of reads: the needed bytes, and the destinations of each entry's bytes."""

    needs: list[Need] = field(default_factory=list)
    destinations: defaultdict[int, list[Destination]] = field(
        default_factory=partial(defaultdict, list)
    )


class Targets:
    """Collect the tensors to fill, live and fresh, and then the reads that they need.

    Args:
        stored: The tensors of the checkpoint.
        cast: Whether values may be converted to the dtype of a live tensor.
        device: The device of fresh tensors; None for the CPU. Nothing is read on ``meta``.

    Attributes:
        rounds: The rounds of reads: mostly one. There are two if overlapping live tensors may get
            different bytes. The first then fills only fresh tensors, which are compared; the
            second fills live ones.
        noted: The live tensors to fill.
        queued_before: Events behind the kernels that the caller has queued on devices. They may
            still read the target or write to it, and other threads are about to fill it.
    """

    def __init__(
        self, stored: StoredTensors, *, cast: bool, device: torch.device | None = None
    ) -> None:
        self.stored, self.cast, self._device = stored, cast, device or torch.device("cpu")
        self.rounds: list[Round] = []
        self.queued_before: list[Any] = []
        self._into_fresh, self._into_live = Round(), Round()
        self._shardings = Shardings()
        self.noted: list[LiveTensor] = []
        self._disputed: list[list[LiveTensor]] = []
        self._fresh: dict[tuple[StoredTensor, Regions], torch.Tensor] = {}
        self._sharing: dict[Hashable, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._finishers: list[Callable[[], object]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Destinations have only addresses; this keeps the tensors there alive.
        self._alive: list[torch.Tensor] = []

    # Live tensors

    def fill(
        self,
        stored: StoredTensor,
        live: torch.Tensor | np.ndarray[Any, Any],
        label: str,
        regions: Regions = None,
    ) -> bool:
        """Note that a live tensor is to be filled with a stored one that fits it.

        Args:
            stored: The stored tensor.
            live: The live one.
            label: Its label.
            regions: The parts of the stored tensor to take; None for those that it holds.

        Returns:
            False if its memory cannot be written, so that a fresh one is needed.

        Raises:
            ShapeMismatch: If it is distributed, and its local part contradicts its placements.
        """
        view = writable_view(live)
        if view is None:
            return False
        if regions is None and is_placed(live):
            regions = regions_of(live, self._shardings, label)
        copies = self.stored.copies(stored, regions)
        self.noted.append(LiveTensor(stored, label, view, live, regions, copies))
        return True

    def held(self, stored: StoredTensor, live: torch.Tensor) -> HeldElements:
        """Tell how much of a live tensor's elements the checkpoint has.

        Raises:
            As :meth:`fill` does.
        """
        regions = regions_of(live, self._shardings, stored.label) if is_placed(live) else None
        return self.stored.held(stored, regions)

    def settle(self) -> None:
        """Assign every live tensor to a round; call it once all are noted.

        Raises:
            StructureMismatch: If the memory of one is mapped read-only.
        """
        lives = _distinct(self.noted)
        devices = {str(live.tensor.device) for live in lives if not live.tensor.is_cpu}
        self.queued_before = events_behind(devices)
        _refuse_read_only(lives)
        self._disputed = [group for group in _overlapping(lives) if not _lay_likewise(group)]
        disputed = {id(live) for group in self._disputed for live in group}
        for live in lives:
            images = any(copied.shared and is_image(copied, live.stored) for copied in live.copies)
            if images or id(live) in disputed or memory_overlaps(live.tensor):
                self._copies.append((live.tensor, self._fresh_for(live)))
            else:
                self._add(live.stored, live.copies, live.tensor, self._into_live)
        if self._disputed:
            self.rounds = [self._into_fresh, self._into_live]
            return
        for entry, takers in self._into_fresh.destinations.items():
            self._into_live.destinations[entry] += takers
        self._into_live.needs += self._into_fresh.needs
        self.rounds = [self._into_live]

    def check_disputed(self) -> None:
        """Prove that overlapping live tensors get the same bytes.

        Raises:
            SharingConflict: If they do not.
        """
        self._resolve_fresh()
        for group in self._disputed:
            _check_agreement(group, [self._fresh_for(live) for live in group])

    def finish(self) -> None:
        """Complete the tensors once all bytes are read, and tell autograd of the change."""
        with torch.inference_mode():  # no gradients; also writes to tensors made in this mode
            self._resolve_fresh()
            copies, self._copies = self._copies, []
            for target, value in copies:
                write(target, value)
        owners = [each.owner for each in self.noted]
        changed = [each for each in owners if isinstance(each, torch.Tensor)]
        if any(map(torch.Tensor.is_inference, changed)):
            changed = [each for each in changed if not each.is_inference()]
        torch.autograd.graph.increment_version(changed)

    def _resolve_fresh(self) -> None:
        finishers, self._finishers = self._finishers, []
        for finish in finishers:
            finish()

    # Fresh tensors

    def fresh(self, stored: StoredTensor) -> torch.Tensor:
        """Return a new tensor on the device for a stored one; always the same one.

        Its elements are valid once the bytes are read and :meth:`finish` has run.

        Raises:
            InvalidManifest: If the checkpoint contradicts itself about it.
        """
        return self._make(stored, None, stored.shape)

    @property
    def made(self) -> dict[str, torch.Tensor]:
        """All new tensors, by label."""
        return {stored.label: tensor for (stored, _), tensor in self._fresh.items()}

    def _fresh_for(self, live: LiveTensor) -> torch.Tensor:
        shape = live.stored.shape if live.regions is None else tuple(live.tensor.shape)
        return self._make(live.stored, live.regions, shape)

    def _make(self, stored: StoredTensor, regions: Regions, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._fresh.get((stored, regions))
        if tensor is not None:
            return tensor
        copies = self.stored.copies(stored, regions)
        with normal_tensors():
            image = len(copies) == 1 and copies[0].shared and copies[0].target is None
            on_cpu = self._device.type == "cpu" or stored.row.kind == NUMPY
            if image and stored.row.cast is None and on_cpu:
                tensor = self._window(stored, copies[0])
            elif not any(copied.shared for copied in copies):
                tensor = self._alone(stored, copies, shape)
            else:
                # Tensors with the same copies from shared bytes share memory again.
                key = (copies, shape, stored.loaded_dtype, stored.row.lazy)
                if key not in self._sharing:
                    self._sharing[key] = self._alone(stored, copies, shape)
                tensor = self._sharing[key].detach()
        self._fresh[stored, regions] = tensor
        return tensor

    def _alone(
        self, stored: StoredTensor, copies: tuple[ChunkCopy, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        device = torch.device("cpu") if stored.row.kind == NUMPY else self._device
        tensor = allocate(stored, shape, device)
        if tensor.is_meta:
            return with_lazy_bits(tensor, stored.row.lazy)
        plain = []
        for copied in copies:
            if copied.shared and is_image(copied, stored):
                image = self._window(stored, copied)
                self._finishers.append(partial(copy_from_image, tensor, image, copied))
            else:
                plain.append(copied)
        self._add(stored, plain, tensor, self._into_fresh)
        if not stored.row.lazy:
            return tensor
        if "c" in stored.row.lazy:
            self._finishers.append(tensor.conj_physical_)
        if "n" in stored.row.lazy:
            self._finishers.append(tensor.neg_)
        return with_lazy_bits(tensor, stored.row.lazy)

    def _add(
        self,
        stored: StoredTensor,
        copies: Sequence[ChunkCopy],
        target: torch.Tensor,
        round: Round,
    ) -> None:
        """Plan to fill a tensor with chunks, none of which is an image."""
        self._alive.append(target)
        pieces: defaultdict[int, list[RawBytes | Elements]] = defaultdict(list)
        for copied in copies:
            if copied.start < copied.stop:
                pieces[copied.entry].append(destination_of(copied, stored.dtype, target))
                round.needs += copied.needs(stored.dtype.itemsize)
        for entry, found in pieces.items():
            round.destinations[entry] += found if len(found) < _MANY_PIECES else [Pieces(found)]

    def _window(self, stored: StoredTensor, copied: ChunkCopy) -> torch.Tensor:
        """Return a chunk as a view of its entry's memory."""
        offset, rest = divmod(copied.start, stored.dtype.itemsize)
        if rest:
            raise InvalidExtent(
                f"It begins at byte {copied.start} of its entry, which its dtype is not aligned to",
                key=stored.label,
            )
        tensor = torch.empty(0, dtype=stored.dtype, device="cpu")
        storage = self._buffer(copied.entry).untyped_storage()
        stride = copied.stride or contiguous_stride(copied.shape)
        tensor.set_(storage, offset, copied.shape, stride)
        if copied.start < copied.stop:
            self._into_fresh.needs.append(Need(copied.entry, copied.start, copied.stop))
        return with_lazy_bits(tensor, stored.row.lazy)

    def _buffer(self, entry: int) -> torch.Tensor:
        buffer = self._buffers.get(entry)
        if buffer is None:
            nbytes = self.stored.data.sizes[entry]
            buffer = self._buffers[entry] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            raw = RawBytes(0, nbytes, buffer.data_ptr())
            self._into_fresh.destinations[entry].append(raw)
        return buffer


def _distinct(lives: Sequence[LiveTensor]) -> list[LiveTensor]:
    """Drop duplicates: live tensors that fill the same memory with the same stored elements."""
    if len({live.tensor.data_ptr() for live in lives}) == len(lives):
        return list(lives)
    found: dict[Hashable, LiveTensor] = {}
    for live in lives:
        each = live.tensor
        memory = each.data_ptr(), each.shape, each.stride(), each.dtype, each.device
        found.setdefault((id(live.stored), live.regions, memory, lazy_bits(each)), live)
    return list(found.values())


def _refuse_read_only(lives: Sequence[LiveTensor]) -> None:
    """Refuse tensors in pages that cannot be written: a write there would end the process.

    torch does not know the protection of memory that it has not allocated, as of an array over a
    file; such a storage cannot be resized. Only for these is the kernel's table of mappings read,
    which takes about a millisecond.

    Raises:
        StructureMismatch: Names the first of them.
    """
    not_of_torch = [
        live
        for live in lives
        if live.tensor.is_cpu
        and not live.tensor.untyped_storage().resizable()
        and live.tensor.numel()
        and isinstance(live.owner, torch.Tensor)  # numpy knows which arrays are read-only
    ]
    if not not_of_torch:
        return
    try:
        mappings = _read_only_mappings()
    except OSError:  # there is no /proc
        return
    starts = [start for start, _, _ in mappings]
    for live in not_of_torch:
        address = live.tensor.data_ptr()
        _, stop, name = mappings[bisect_right(starts, address) - 1]
        if address < stop:
            raise StructureMismatch(
                f"The target cannot be written: its memory is mapped read-only ({name})",
                key=live.label,
                hint="Load into a clone of it, map the file with mode 'r+' or 'c', or leave the "
                "tensor out with exclude",
            )


def _read_only_mappings() -> list[tuple[int, int, str]]:
    """Return the ranges of this process's addresses that cannot be written, with their names.

    Source: ``proc_pid_maps(5)``.
    """
    found = [(0, 0, "")]
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            bounds, access, _, _, _, *name = line.rstrip("\n").split(maxsplit=5)
            if access[1] != "w":
                start, stop = (int(bound, 16) for bound in bounds.split("-"))
                found.append((start, stop, name[0] if name else "without a file"))
    return found


def _overlapping(lives: Sequence[LiveTensor]) -> list[list[LiveTensor]]:
    """Return the connected components of overlapping windows, and self-overlapping tensors."""
    tensors = [live.tensor for live in lives]
    windows = (
        ("cpu" if each.is_cpu else str(each.device), each.data_ptr(), window_bytes(each))
        for each in tensors
    )
    return [
        [lives[number] for number in group]
        for group in overlapping(windows)
        if len(group) > 1 or memory_overlaps(tensors[group[0]])
    ]


def _lay_likewise(group: Sequence[LiveTensor]) -> bool:
    places = {_place(live) for live in group}
    return len(places) == 1 and None not in places


def _place(live: LiveTensor) -> Hashable:
    """Return a key that is equal for tensors that get the same bytes at the same addresses.

    If the tensor has the same layout in its entry as in memory, the key is the address of the
    entry's first byte. If it is assembled from several chunks, the key is these chunks with its
    address and strides, unless its own elements overlap. None if neither is the case.
    """
    stored, tensor = live.stored, live.tensor
    if tensor.dtype != stored.dtype or not live.copies:
        return None
    first = live.copies[0]
    if lazy_bits(tensor) != (stored.row.lazy if first.shared else ""):
        return None
    if len(live.copies) > 1 or first.target is not None:
        alone = not memory_overlaps(tensor)
        return (live.copies, tensor.data_ptr(), tensor.stride()) if alone else None
    stride = first.stride or contiguous_stride(stored.shape)
    same = all(
        n == 1 or ours == theirs
        for n, ours, theirs in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )
    return (first.entry, tensor.data_ptr() - first.start) if same else None


def _check_agreement(group: Sequence[LiveTensor], values: Sequence[torch.Tensor]) -> None:
    """Prove that overlapping tensors get the same bytes where they overlap.

    Args:
        group: The live tensors; they are not changed.
        values: The value of each of them.

    Raises:
        SharingConflict: If they do not.
    """
    low = min(live.tensor.data_ptr() for live in group)
    low -= low % MAX_ITEM
    high = max(live.tensor.data_ptr() + window_bytes(live.tensor) for live in group)
    canvas = torch.zeros(high - low, dtype=torch.uint8, device="cpu")
    views = [_on_canvas(live, canvas, low) for live in group]
    converted = [value.to(view.dtype) for value, view in zip(values, views, strict=True)]
    for view, value in zip(views, converted, strict=True):
        write(view, value)
    for live, view, value in zip(group, views, converted, strict=True):
        if not torch.equal(_row_major_bytes(view), _row_major_bytes(value)):
            labels = sorted({repr(other.label) for other in group})
            among = f"between {', '.join(labels)}" if len(labels) > 1 else f"within {labels[0]}"
            raise SharingConflict(
                f"The target shares bytes {among}, but the checkpoint holds different values there",
                key=live.label,
                hint="Load into tensors that do not share memory, such as clones, or leave one "
                "out with exclude",
            )


def _on_canvas(live: LiveTensor, canvas: torch.Tensor, low: int) -> torch.Tensor:
    tensor = live.tensor
    offset, rest = divmod(tensor.data_ptr() - low, tensor.itemsize)
    if rest:
        raise SharingConflict(
            "The target shares bytes at an address that its dtype is not aligned to", key=live.label
        )
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    view.set_(canvas.untyped_storage(), offset, tensor.shape, tensor.stride())
    return with_lazy_bits(view, lazy_bits(tensor))


def _row_major_bytes(tensor: torch.Tensor) -> torch.Tensor:
    resolved = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return resolved.view(-1).view(torch.uint8)
