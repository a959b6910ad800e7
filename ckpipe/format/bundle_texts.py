"""Structures and layouts as JSON texts, as bundles hold them.

They are nearly all of a manifest, and from one save of a structure to the next they say the same.
Such saves have the same objects, so the texts of the last ones are kept with them, compressed: an
object that is another has another text, whatever it is equal to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckpipe.format.canonical_json import canonical
from ckpipe.format.manifest import Bundle, Layout, Structure
from ckpipe.format.manifest_tables import structure_form
from ckpipe.format.sealed_json import Pressed, pressed
from ckpipe.format.stored_layouts import layout_text, with_structure


class Texts:
    """Makes the texts of a bundle, one by one, so that they are never in memory together."""

    def structures(self, bundle: Bundle) -> Iterator[str | Pressed]:
        """The texts of its structures, in order.

        Raises:
            RecursionError: If a tree is nested too deeply.
        """
        return (pressed(canonical(structure_form(each))) for each in bundle.structures)

    def layouts(self, bundle: Bundle) -> Iterator[str | Pressed]:
        """The texts of its layouts, in order, each with the number of its structure."""
        structure_of: dict[int, int] = {}
        for part in bundle.parts:
            structure_of.setdefault(part.layout, part.structure)
        labels_of = [tuple(row.label for row in each.tensors) for each in bundle.structures]
        numbers_of = [{label: n for n, label in enumerate(labels)} for labels in labels_of]
        for number, layout in enumerate(bundle.layouts):
            structure = structure_of.get(number, 0)
            labels = labels_of[structure] if labels_of else ()
            numbers = numbers_of[structure] if numbers_of else {}
            yield pressed(with_structure(layout_text(layout, numbers, labels), structure))


class _Known(NamedTuple):
    """A structure, a layout and their texts; as they are kept, no other object takes their ids."""

    structure: Structure
    layout: Layout
    structure_text: str | Pressed
    layout_text: str | Pressed


class SteadyTexts(Texts):
    """Keeps the texts of the last bundle of one structure and one layout; for any thread.

    The trees and rows of structures and layouts must not be changed once they were in a bundle.
    """

    def __init__(self) -> None:
        self._last: _Known | None = None

    def structures(self, bundle: Bundle) -> Iterator[str | Pressed]:
        """See :meth:`Texts.structures`."""
        if self._is_single(bundle):
            yield self._known(bundle).structure_text
        else:
            yield from super().structures(bundle)

    def layouts(self, bundle: Bundle) -> Iterator[str | Pressed]:
        """See :meth:`Texts.layouts`."""
        if self._is_single(bundle):
            yield self._known(bundle).layout_text
        else:
            yield from super().layouts(bundle)

    def _is_single(self, bundle: Bundle) -> bool:
        return len(bundle.structures) == len(bundle.layouts) == 1

    def _known(self, bundle: Bundle) -> _Known:
        (structure,), (layout,) = bundle.structures, bundle.layouts
        last = self._last
        if last is None or last.structure is not structure or last.layout is not layout:
            (structure_text,), (layout_text,) = super().structures(bundle), super().layouts(bundle)
            last = self._last = _Known(structure, layout, structure_text, layout_text)
        return last


__all__ = ["SteadyTexts", "Texts"]
