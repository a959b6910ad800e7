"""Record a match of a saved state with a target: its arguments, and the labels that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ckpipe.format.labels import LabelFilter
from ckpipe.format.tree import Node, leaf_labels
from ckpipe.loading.request import LoadRequest
from ckpipe.loading.stateful import InspectionMemo
from ckpipe.reading.saved_state import SavedState
from ckpipe.reading.select import any_selected
from ckpipe.reading.targets import Targets


class Use(Enum):
    """The use of the live counterpart of a node.

    ``IN_PLACE``: it belongs to the target; containers must be of the saved kind, and are refilled.
    ``NAMED``: it belongs to a module's state; tensors must fit and are filled, containers are made.
    ``FITTING``: the same, for an object whose state may have more names after the load.
    ``OFFERED``: the same, but a tensor that does not fit is made anew.
    """

    IN_PLACE = "in place"
    NAMED = "named"
    FITTING = "fitting"
    OFFERED = "offered"


NOTHING = object()
"""Marks a node without a live counterpart."""


@dataclass(slots=True)
class MatchRecord:
    """The arguments of a match, and its findings.

    Args:
        saved: The saved state.
        targets: Makes fresh tensors, and collects the tensors to fill.
        definitions: The containers that references in the tree point to, by number.
        request: The arguments of the load.
        select: Selects the labels to load: those of the request that this match is about.
        distributed: Whether other processes load other parts of the same tensors.
        above: The label below which the names of a foreign checkpoint were moved.
        memo: The memo of facts of the target's objects.
        missing: Labels that the target has and the checkpoint has not.
        unexpected: Labels that the checkpoint has and the target has not.
        kept: Labels that objects have and the checkpoint has not; the objects' own strictness
            applies.
        left: Labels that the checkpoint has and objects do without, which is no error.
        objects_have_more: Whether an object of the target has labels that were not saved of it.
        plan: Plans the object of a node, once the match has begun.
        loaded: Labels of the objects that have taken their state.
        skips_shapes: Whether tensors that have another shape in the checkpoint stay as they are.
    """

    saved: SavedState
    targets: Targets
    definitions: Mapping[int, Node]
    request: LoadRequest
    select: LabelFilter = field(default_factory=LabelFilter)
    distributed: bool = False
    above: str = ""
    memo: InspectionMemo = field(default_factory=InspectionMemo)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    objects_have_more: bool = False
    plan: Callable[[MatchRecord, Node, str], Callable[[], Any]] = field(init=False)
    loaded: list[str] = field(default_factory=list)
    skips_shapes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.skips_shapes = self.request.strict == "shapes"

    @property
    def by_label(self) -> bool:
        """True if labels count and not containers: dotted keys and mappings are the same."""
        return bool(self.request.transform)

    def is_selected(self, live: Any, label: str) -> bool:
        """Tell whether a leaf of a live object is to be loaded."""
        return any_selected(live, label, self.select)

    def note_missing(self, live: Any, label: str) -> None:
        """Note that the checkpoint lacks a live object, if it is to be loaded."""
        if self.is_selected(live, label):
            self.missing.append(label)

    def is_elsewhere(self, child: Node, label: str, where: str, live: Any, use: Use | None) -> bool:
        """Tell whether a key that a mapping lacks is left to other ranks, as only some had it.

        The program gives plain containers and modules their keys, and so decides which ranks have
        which keys. Other objects may be fresh and take their keys from the loaded state: they get
        the keys that their own rank had, and all keys of a container that it did not have.
        """
        saved = self.saved
        if saved.common is None or where in saved.common:
            return False
        fresh = not isinstance(live, dict)
        if not fresh and use in (Use.IN_PLACE, Use.NAMED):
            return True
        theirs = where in saved.from_others and label not in saved.from_others
        if saved.same_world:
            return theirs
        if fresh or not theirs:
            return False
        self.left += leaf_labels(child, where)  # It is unknown which rank is to have it.
        return True

    def value_of(self, node: Node, label: str) -> Any:
        """Return the inline value of a node."""
        return self.saved.value_of(node.head, label, pickling=self.request.pickle == "allow")
