"""Live tensors that overlap: whether the checkpoint holds the same bytes for all of them.

What overlaps in the target and lay likewise when it was saved agrees by construction, because
the shared bytes were saved once. Anything else has to be looked at: the values are read into
fresh tensors first, written to a canvas in the shape of the target's memory, and read back; if
one has changed then, another wrote different bytes to the same place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from ckpipe.errors import SharingConflict
from ckpipe.loads.filling import contiguous_stride, memory_overlaps, with_lazy_bits, write
from ckpipe.loads.live_tensors import LiveTensor, PlainFill

_MAX_ITEM = 16
_CPU = torch.device("cpu")


def disputed_groups(lives: Sequence[LiveTensor]) -> list[list[LiveTensor]]:
    """The groups of overlapping live tensors that may be given different bytes."""
    return [group for group in _overlapping(lives) if not _lay_likewise(group)]


def distinct(lives: Sequence[LiveTensor]) -> list[LiveTensor]:
    """The same without those that fill the same memory with the same tensor once more."""
    if len({live.address for live in lives}) == len(lives):
        return list(lives)
    found = {
        (id(live.stored), live.tensor.data_ptr(), live.tensor.stride(), live.tensor.device): live
        for live in reversed(lives)
    }
    return list(reversed(found.values()))


def distinct_fills(fills: Sequence[PlainFill]) -> Sequence[PlainFill]:
    """The same of fills that are plain: these lie alike if they begin alike."""
    if len({fill.address for fill in fills}) == len(fills):
        return fills
    return list({(fill.number, fill.address): fill for fill in fills}.values())


def apart(lives: Sequence[LiveTensor], fills: Sequence[PlainFill]) -> bool:
    """Whether all lie row by row, and apart, in one memory: quickly said, and nearly always so."""
    if not all(live.contiguous for live in lives):
        return False
    devices = {live.device for live in lives}
    if len(devices) > 1 or (fills and not devices <= {_CPU}):
        return False
    places = [(each.address, each.nbytes) for each in lives]
    places += [(each.address, each.nbytes) for each in fills]
    begins, sizes = np.array(places, np.uint64).reshape(-1, 2).T
    order = np.argsort(begins)
    ends = begins[order] + sizes[order]
    return bool(np.all(ends[:-1] <= begins[order][1:]))


def _overlapping(lives: Sequence[LiveTensor]) -> list[list[LiveTensor]]:
    """The connected components of overlapping windows, and tensors that overlap themselves."""
    spans = []
    for number, live in enumerate(lives):
        if live.tensor.numel():
            address = live.tensor.data_ptr()
            spans.append((str(live.tensor.device), address, number, address + _reach(live.tensor)))
    found: list[list[LiveTensor]] = []
    group: list[LiveTensor] = []
    last_device, end = "", -1
    for device, address, number, stop in sorted(spans):
        if device == last_device and address < end:
            group.append(lives[number])
            end = max(end, stop)
        else:
            group = [lives[number]]
            found.append(group)
            last_device, end = device, stop
    return [each for each in found if len(each) > 1 or memory_overlaps(each[0].tensor)]


def _reach(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel() * tensor.itemsize
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize


def _lay_likewise(group: Sequence[LiveTensor]) -> bool:
    places = {_place(live) for live in group}
    return len(places) == 1 and None not in places


def _place(live: LiveTensor) -> Hashable:
    """Equal for tensors that get the same bytes at the same addresses by construction.

    That is where the entry's first byte would lie, if the tensor lies in the entry as in memory;
    or, if it is put together from pieces, these and where it lies. None if neither can be said.
    """
    stored, tensor = live.stored, live.tensor
    if tensor.dtype != stored.dtype or not live.pieces:
        return None
    first = live.pieces[0]
    if lazy_bits(tensor) != (stored.row.lazy if first.shared else ""):
        return None
    if len(live.pieces) > 1 or first.target is not None:
        return (live.pieces, tensor.data_ptr(), tensor.stride())
    stride = first.stride or contiguous_stride(stored.shape)
    same = all(
        n == 1 or ours == theirs
        for n, ours, theirs in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )
    return (first.entry, tensor.data_ptr() - first.start) if same else None


def lazy_bits(tensor: torch.Tensor) -> str:
    """The lazy bits of a tensor: any of ``c`` and ``n``."""
    return ("c" if tensor.is_conj() else "") + ("n" if tensor.is_neg() else "")


def check_agreement(group: Sequence[LiveTensor], values: Sequence[torch.Tensor]) -> None:
    """Proves that overlapping tensors are given the same bytes where they overlap.

    Args:
        group: The live tensors; they are not touched.
        values: What each of them is to be filled with.

    Raises:
        SharingConflict: If they are not.
    """
    low = min(live.tensor.data_ptr() for live in group)
    low -= low % _MAX_ITEM
    high = max(live.tensor.data_ptr() + _reach(live.tensor) for live in group)
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
                f"The target shares bytes {among}, for which the checkpoint holds different values",
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
