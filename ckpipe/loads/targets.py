"""The tensors that a load fills: live ones of the target and fresh ones, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpipe.loads.destinations import Destination
from ckpipe.loads.entry_tables import Need
from ckpipe.loads.filling import Filling, takes_bytes
from ckpipe.loads.live_tensors import (
    LiveTensor,
    PlainFill,
    new_live_tensor,
    new_plain_fill,
    plain_view,
    writable_view,
)
from ckpipe.loads.placed_tensors import is_placed, regions_of
from ckpipe.loads.sharing import apart, check_agreement, disputed_groups, distinct, distinct_fills
from ckpipe.loads.stored_tensors import StoredTensor, StoredTensors
from ckpipe.state.tensors import Shardings


class Targets:
    """Collects the tensors to fill, then says what to read, first and second.

    The first round brings, into fresh tensors, what decides whether live tensors that overlap
    agree; only the second fills live tensors. No entry is in both.

    Args:
        stored: The tensors of the checkpoint.
        cast: Whether values may be converted to the dtype of a live tensor.
    """

    def __init__(self, stored: StoredTensors, *, cast: bool) -> None:
        self.stored, self.cast = stored, cast
        self.filling = Filling(stored)
        self._shardings = Shardings()
        self._noted: list[LiveTensor | PlainFill] = []
        self._disputed: list[list[LiveTensor]] = []
        self._first: set[int] = set()

    def fill(
        self, stored: StoredTensor, live: torch.Tensor | np.ndarray[Any, Any], label: str
    ) -> bool:
        """Notes that a live tensor is to be filled with a stored one that fits it.

        Returns:
            False if its memory cannot be written, so that a fresh one has to serve.

        Raises:
            ShapeMismatch: If it is distributed, and its local part is not what its placements say.
        """
        found = self._live(stored, live, label)
        if found is None:
            return False
        self._noted.append(found)
        return True

    def fill_plain(self, number: int, live: torch.Tensor, label: str) -> bool:
        """The same for a plain stored tensor and a live one that takes its bytes: a short way.

        Args:
            number: The number of the stored tensor.
            live: The tensor of the target, of a type in ``PLAIN``.
            label: Where it stands in the state.

        Returns:
            False if they are anything else; then nothing was done.
        """
        plain = self.stored.plain(number) if live.is_cpu else None
        if plain is None:
            return False
        dtype, shape, entry, nbytes = plain
        view = plain_view(live, dtype, shape)
        if view is None:
            return False
        address = view.data_ptr()
        if not address and nbytes:
            return False
        self._noted.append(new_plain_fill((number, label, view, live, address, nbytes, entry)))
        return True

    def _live(
        self, stored: StoredTensor, live: torch.Tensor | np.ndarray[Any, Any], label: str
    ) -> LiveTensor | None:
        view = writable_view(live)
        if view is None:
            return None
        regions, pieces = None, stored.whole
        if is_placed(live):
            regions = regions_of(live, self._shardings, label)
        if pieces is None or regions is not None:
            pieces = self.stored.pieces(stored, regions)
        contiguous = view.is_contiguous()
        as_bytes = contiguous and takes_bytes(view, stored.dtype)
        place = (view.data_ptr(), view.device, view.nbytes, contiguous, as_bytes)
        return new_live_tensor((stored, label, view, live, *place, regions, pieces))

    def settle(self) -> None:
        """Gives every live tensor its place in a round; call it once all are known."""
        plain = distinct_fills([each for each in self._noted if type(each) is PlainFill])
        lives = distinct([each for each in self._noted if type(each) is LiveTensor])
        if apart(lives, plain):
            for live in lives:
                self._fill_live(live)
            self.filling.plain_all(plain)
            return
        self._settle_overlapping(distinct([self._looked_up(each) for each in self._noted]))

    def _looked_up(self, noted: LiveTensor | PlainFill) -> LiveTensor:
        """All that is to be known of a live tensor."""
        if isinstance(noted, LiveTensor):
            return noted
        found = self._live(self.stored[noted.number], noted.owner, noted.label)
        assert found is not None, "what takes bytes can be written"
        return found

    def _settle_overlapping(self, lives: Sequence[LiveTensor]) -> None:
        self._disputed = disputed_groups(lives)
        self._first = self._entries_to_compare(lives)
        for live in lives:
            if self._first and self._first.intersection(c.entry for c in live.pieces):
                self.filling.copy_later(live.stored, live.regions, live.tensor)
            else:
                self._fill_live(live)

    def _fill_live(self, live: LiveTensor) -> None:
        plain = self.filling.plain
        if not (live.takes_bytes and plain(live.stored, live.pieces, live.tensor, live.address)):
            self.filling.live(live.stored, live.pieces, live.regions, live.tensor)

    def _entries_to_compare(self, lives: Sequence[LiveTensor]) -> set[int]:
        """The entries of disputed tensors, and all that tensors reach which they touch."""
        entries = {c.entry for group in self._disputed for live in group for c in live.pieces}
        grown = bool(entries)
        while grown:
            before = len(entries)
            for live in lives:
                own = [piece.entry for piece in live.pieces]
                if not entries.isdisjoint(own):
                    entries.update(own)
            grown = len(entries) > before
        return entries

    @property
    def first_needs(self) -> list[Need]:
        """What to read before a live tensor is touched; usually nothing."""
        if not self._first:
            return []
        return [need for need in self.filling.needs if need.entry in self._first]

    @property
    def needs(self) -> list[Need]:
        """What to read then."""
        if not self._first:
            return self.filling.needs
        return [need for need in self.filling.needs if need.entry not in self._first]

    @property
    def destinations(self) -> Mapping[int, Sequence[Destination]]:
        """For each entry that is needed, who takes its bytes."""
        return self.filling.destinations

    def check_disputed(self) -> None:
        """Proves that live tensors which overlap are given the same bytes.

        Raises:
            SharingConflict: If they are not.
        """
        self.filling.resolve_fresh()
        for group in self._disputed:
            values = [
                self.filling.fresh_part(live.stored, live.regions, tuple(live.tensor.shape))
                for live in group
            ]
            check_agreement(group, values)

    def finish(self) -> None:
        """Completes the tensors once all bytes are there, and tells autograd of the change."""
        with torch.no_grad():
            self.filling.finish()
        owners = [each.owner for each in self._noted]
        changed = [each for each in owners if isinstance(each, torch.Tensor)]
        if any(map(torch.Tensor.is_inference, changed)):
            changed = [each for each in changed if not each.is_inference()]
        torch.autograd.graph.increment_version(changed)
