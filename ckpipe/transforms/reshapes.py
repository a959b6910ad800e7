"""Transforms of shapes: cut tensors, join them, stack them and rearrange their elements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

from ckpipe.errors import ShapeMismatch, StructureMismatch, UsageError
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import Node
from ckpipe.transforms.box_steps import Lift, Regroup, Shift, Step, Take
from ckpipe.transforms.edit import ManifestEdit, two_with_one_name
from ckpipe.transforms.transform import Pattern, Transform, check_numbered, texts, whole_numbers
from ckpipe.types import first_of


class Split(Transform):
    """Cut a tensor along a dimension into several, such as a fused projection of attention.

    Args:
        name: A glob of the tensors to cut, such as ``"*.qkv.weight"``.
        into: The names of the parts, in their order, such as ``["*.q.weight", "*.k.weight",
            "*.v.weight"]``; each ``*`` is replaced by the match of the ``*`` in the same place.
        dim: The dimension.
        sizes: The size of each part in that dimension; None for equal ones.

    Raises:
        UsageError: If the arguments do not fit each other.
    """

    def __init__(
        self, name: str, into: Sequence[str], dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> None:
        self._into = texts(self, into)
        (self._dim,) = whole_numbers(self, "dim", [dim])
        self._pattern = Pattern(self, name, self._into)
        self._sizes = None if sizes is None else whole_numbers(self, "sizes", sizes)
        if self._sizes is not None and len(self._sizes) != len(self._into):
            raise UsageError(f"Split: {len(self._into)} names and {len(self._sizes)} sizes")
        if self._sizes is not None and min(self._sizes) < 0:
            raise UsageError("Split: a size is negative")

    def _apply(self, edit: ManifestEdit) -> None:
        made: list[_Made] = []
        for old, found, row in _matched(self, self._pattern, edit):
            dim, bounds = self._parts(old, row)
            for new, (low, high) in zip(self._into, pairwise(bounds), strict=True):
                step = Shift(dim, -low, high - low)
                name = self._pattern.filled(new, found)
                made.append((name, _with_size(row.shape, dim, high - low), [(old, step)]))
        _put(edit, made)

    def _parts(self, label: str, row: TensorRow) -> tuple[int, list[int]]:
        """Return the dimension, and the bounds of the parts in it."""
        dim, count = _check_dimension(self, self._dim, label, row), len(self._into)
        size = row.shape[dim]
        if self._sizes is None and size % count:
            raise ShapeMismatch(
                f"Split: dimension {dim} of size {size} has not {count} equal parts",
                key=label,
                hint="Pass sizes=[...], one for each name",
            )
        sizes = self._sizes or (size // count,) * count
        if sum(sizes) != size:
            raise ShapeMismatch(
                f"Split: the sizes {list(sizes)} are {sum(sizes)} together, and dimension {dim} "
                f"has {size}",
                key=label,
                hint=f"The shape in the checkpoint is {list(row.shape)}",
            )
        return dim, list(accumulate(sizes, initial=0))


class Fuse(Transform):
    """Join tensors along a dimension into one, such as the projections of attention.

    Args:
        names: Globs of the tensors to join, in their order, such as ``["*.q.weight",
            "*.k.weight", "*.v.weight"]``. Tensors whose ``*`` match the same belong together.
        into: The name of the result, such as ``"*.qkv.weight"``.
        dim: The dimension, in which their sizes may differ.

    Raises:
        UsageError: If the arguments do not fit each other.
    """

    def __init__(self, names: Sequence[str], into: str, dim: int = 0) -> None:
        self._patterns = [Pattern(self, name, [into]) for name in texts(self, names)]
        self._into, (self._dim,) = into, whole_numbers(self, "dim", [dim])

    def _apply(self, edit: ManifestEdit) -> None:
        made: list[_Made] = []
        for new, olds, shapes in _groups(self, self._patterns, self._into, edit, self._dim):
            dim = self._dim % len(shapes[0])
            *starts, size = accumulate((shape[dim] for shape in shapes), initial=0)
            steps = [(old, Shift(dim, at, size)) for old, at in zip(olds, starts, strict=True)]
            made.append((new, _with_size(shapes[0], dim, size), steps))
        _put(edit, made)


class Stack(Transform):
    """Stack tensors of one shape in a new first dimension, such as those of experts.

    Args:
        name: A glob of the tensors with ``{}`` in place of their number, which counts from 0, such
            as ``"*.experts.{}.up.weight"``.
        into: The name of the result, such as ``"*.experts.up"``.

    Raises:
        UsageError: If the arguments do not fit each other.
    """

    def __init__(self, name: str, into: str) -> None:
        self._patterns, self._into = [Pattern(self, name, [into], numbered=True)], into

    def _apply(self, edit: ManifestEdit) -> None:
        made: list[_Made] = []
        for new, olds, shapes in _groups(self, self._patterns, self._into, edit):
            steps = [(old, Lift(number)) for number, old in enumerate(olds)]
            made.append((new, (len(olds), *shapes[0]), steps))
        _put(edit, made)


_MOST_PARTS = 100_000


class Unstack(Transform):
    """Take a tensor apart along its first dimension, such as that of stacked experts.

    Args:
        name: A glob of the tensors, such as ``"*.experts.up"``.
        into: The names of the parts, with ``{}`` in place of their number, which counts from 0,
            such as ``"*.experts.{}.up.weight"``.

    Raises:
        UsageError: If the arguments do not fit each other.
    """

    def __init__(self, name: str, into: str) -> None:
        self._pattern, self._into = Pattern(self, name, [into]), into
        check_numbered(self, into)

    def _apply(self, edit: ManifestEdit) -> None:
        made: list[_Made] = []
        for old, found, row in _matched(self, self._pattern, edit):
            _check_dimension(self, 0, old, row)
            if row.shape[0] > _MOST_PARTS:
                raise ShapeMismatch(
                    f"Unstack: these are {row.shape[0]} parts, and {_MOST_PARTS} are the most",
                    key=old,
                    hint="Check the name, or load it whole and take it apart in the program",
                )
            name = self._pattern.filled(self._into, found)
            made += [
                (name.replace("{}", str(n)), row.shape[1:], [(old, Take(n))])
                for n in range(row.shape[0])
            ]
        _put(edit, made)


class Rearrange(Transform):
    """Divide dimensions of a tensor into several, put these in another order, and join them.

    It does what ``reshape``, ``permute`` and another ``reshape`` do. ``Rearrange("*.weight",
    [-1, -1], [1, 0])`` is a transpose. ``Rearrange("*.wq.weight", [[32, -1, 2], -1], [[0, 2, 1],
    3])`` brings the rows of 32 heads from pairs of neighbours to two halves: the rotary layout of
    Meta's Llama to that of Hugging Face.

    Args:
        name: A glob of the tensors.
        shape: For each dimension its size, or a list of the sizes into which it is divided, the
            outermost first. -1 stands for the size that is left, once in each dimension.
        order: For each dimension of the result the number of a size, counted from 0 over all of
            ``shape``; or a list of numbers, the outermost first, whose sizes become one dimension.
        strict: False to let the glob match nothing.

    Raises:
        UsageError: If ``shape`` has no such sizes, or ``order`` has not each number once.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int | Sequence[int]],
        order: Sequence[int | Sequence[int]],
        *,
        strict: bool = True,
    ) -> None:
        self._pattern, self._strict = Pattern(self, name), strict
        try:
            self._sizes, self._order = (
                tuple(
                    whole_numbers(self, name, each if isinstance(each, Iterable) else [each])
                    for each in given
                )
                for name, given in (("shape", shape), ("order", order))
            )
            sizes, numbers = list(chain(*self._sizes)), list(chain(*self._order))
            fits = sorted(numbers) == list(range(len(sizes))) and bool(sizes)
            wrong = not fits or any(n < -1 or n == 0 for n in sizes)
        except TypeError:
            wrong = True
        if wrong or any(each.count(-1) > 1 for each in self._sizes):
            raise UsageError(
                f"Rearrange: {shape!r:.200} and {order!r:.200} are no shape with an order",
                hint="Write [[32, -1, 2], -1] and [[0, 2, 1], 3]: one item for each dimension, "
                "and each number of a size once",
            )

    def _apply(self, edit: ManifestEdit) -> None:
        if not self._strict and not any(map(self._pattern.match, edit.tensors())):
            return
        made: list[_Made] = []
        for label, _, row in _matched(self, self._pattern, edit):
            sizes = self._divided(label, row.shape)
            parts = list(chain(*sizes))
            shape = tuple(math.prod(parts[n] for n in group) for group in self._order)
            made.append((label, shape, [(label, Regroup(sizes, self._order))]))
        _put(edit, made)

    def _divided(self, label: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the sizes into which each dimension of a tensor is divided."""
        found = []
        for size, given in zip(shape, self._sizes, strict=False):
            left = size // math.prod(n for n in given if n != -1)
            found.append(tuple(left if n == -1 else n for n in given))
        if len(shape) != len(self._sizes) or tuple(map(math.prod, found)) != shape:
            raise ShapeMismatch(
                f"Rearrange: the shape {list(shape)} cannot be divided into "
                f"{[list(each) for each in self._sizes]}",
                key=label,
                hint="Pass one item for each dimension, whose product is its size; -1 stands for "
                "the size that is left",
            )
        return tuple(found)


_Made = tuple[str, tuple[int, ...], Sequence[tuple[str, Step]]]
"""The label and shape of a new tensor, and the labels that it is made of, each with its step."""


def _put(edit: ManifestEdit, made: Sequence[_Made]) -> None:
    """Put new tensors in place of those that they are made of, in each structure that has some."""
    edit.note({new: [old for old, _ in steps] for new, _, steps in made})
    for draft in edit.drafts:
        numbers = draft.tensors()
        moves: dict[str, list[tuple[str, Node]]] = {}
        for new, shape, steps in made:
            here = [(numbers[old], step) for old, step in steps if old in numbers]
            if not here:
                continue
            sources = [
                (source, (*before, step))
                for number, step in here
                for source, before in draft.sources[number]
            ]
            rows = [draft.rows[number] for number, _ in here]
            scale = next((row.scale for row in rows if row.scale is not None), None)
            row = replace(rows[0], label=new, shape=shape, attributes=None, scale=scale)
            leaf = draft.add(row, sources)
            olds = [old for old, _ in steps if old in numbers]
            for old in olds:
                moves.setdefault(old, [])
            moves[olds[0]].append((new, leaf))
        draft.move(moves)


def _matched(
    transform: Transform, pattern: Pattern, edit: ManifestEdit
) -> list[tuple[str, re.Match[str], TensorRow]]:
    """Return the tensors that a glob matches, each with its label and the match.

    Raises:
        StructureMismatch: If it matches none, or one that cannot be cut or joined.
    """
    rows = edit.tensors().items()
    found = [(label, each, row) for label, row in rows if (each := pattern.match(label))]
    if not found:
        raise transform._matches_nothing(pattern.glob, edit)
    for label, _, row in found:
        if row.kind in _UNCUT or row.lazy:
            raise StructureMismatch(
                f"{type(transform).__name__} takes plain tensors, and this is "
                + _UNCUT.get(row.kind, "a conjugate or negative view of another"),
                key=label,
                hint="Load it as it is, and change it in the program",
            )
    return found


_UNCUT = {"numpy": "an array of numpy", "subclass": "of a class of its own"}


def _groups(
    transform: Transform,
    patterns: Sequence[Pattern],
    into: str,
    edit: ManifestEdit,
    dim: int | None = None,
) -> Iterator[tuple[str, list[str], list[tuple[int, ...]]]]:
    """Yield the label of each result with the labels and shapes of its tensors, in their order.

    Args:
        transform: The transform.
        patterns: The globs of the tensors in their order, or one with the number in it.
        into: The name of the result.
        edit: The edit.
        dim: The dimension in which their sizes may differ.

    Raises:
        TargetMismatch: If they do not fit each other.
    """
    kind = type(transform).__name__
    groups: dict[str, dict[int, str]] = {}
    rows: dict[str, TensorRow] = {}
    for place, pattern in enumerate(patterns):
        for label, found, row in _matched(transform, pattern, edit):
            new, rows[label] = pattern.filled(into, found), row
            number = int(found["number"]) if pattern.numbered else place
            other = groups.setdefault(new, {}).setdefault(number, label)
            if other != label:
                raise two_with_one_name(new, [other, label])
    for new, group in groups.items():
        places = range(max(len(patterns), len(group)))
        olds = [group[n] for n in places if n in group]
        lacking = next((n for n in places if n not in group), None)
        if lacking is not None:
            lacks = f"number {lacking}" if patterns[0].numbered else patterns[lacking].glob
            raise StructureMismatch(
                f"{kind}: the checkpoint has {first_of(list(map(repr, olds)), 4)} but not {lacks} "
                "with them",
                key=olds[0],
                hint="Rename or Drop those that do not belong together before",
            )
        first = rows[olds[0]]
        axis = None if dim is None else _check_dimension(transform, dim, olds[0], first)
        for old in olds:
            row = rows[old]
            if (row.dtype, row.cast) != (first.dtype, first.cast):
                raise StructureMismatch(
                    f"{kind}: {olds[0]!r} is {first.cast or first.dtype} and {old!r} is "
                    f"{row.cast or row.dtype}; only tensors saved alike can be joined",
                    key=old,
                    hint="Load them apart and join them in the program; a Cast belongs behind",
                )
            if _with_size(row.shape, axis, -1) != _with_size(first.shape, axis, -1):
                raise ShapeMismatch(
                    f"{kind}: {olds[0]!r} has the shape {list(first.shape)} and {old!r} "
                    f"{list(row.shape)}",
                    key=old,
                    hint="Check the dimension and the order of the names",
                )
        yield new, olds, [rows[old].shape for old in olds]


def _check_dimension(transform: Transform, dim: int, label: str, row: TensorRow) -> int:
    """Return a dimension counted from the front.

    Raises:
        ShapeMismatch: If the tensor does not have it.
    """
    if not -len(row.shape) <= dim < len(row.shape):
        raise ShapeMismatch(
            f"{type(transform).__name__}: the tensor has no dimension {dim}",
            key=label,
            hint=f"Its shape in the checkpoint is {list(row.shape)}",
        )
    return dim % len(row.shape)


def _with_size(shape: tuple[int, ...], dim: int | None, size: int) -> tuple[int, ...]:
    return shape if dim is None or dim >= len(shape) else (*shape[:dim], size, *shape[dim + 1 :])
