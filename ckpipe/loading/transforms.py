"""Transforms: load a checkpoint under other names, cut or joined, or with other dtypes.

``load(state, transform=[...])`` applies them in their order to the description of the checkpoint,
before it is compared with the target. No tensor is copied for it: each byte goes from the store to
its place in the target. All errors are raised before the first write.

Globs are those of ``include``: they begin at the start of a label as ``ckpipe info`` lists it, and
``*`` also matches dots.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any

import torch

from ckpipe.errors import ShapeMismatch, StructureMismatch, UsageError
from ckpipe.format.dtypes import DTYPES, NAMES
from ckpipe.format.edit import (
    Derivation,
    Draft,
    Lift,
    ManifestEdit,
    Shift,
    Step,
    Take,
    two_with_one_name,
)
from ckpipe.format.labels import LabelFilter
from ckpipe.format.manifest import ManifestDocument, TensorRow
from ckpipe.format.tree import Node, shared_containers
from ckpipe.loading.select import pruned
from ckpipe.types import first_of


class Transform(ABC):
    """One change of a checkpoint's names, shapes or dtypes on its way into a target."""

    @abstractmethod
    def _apply(self, edit: ManifestEdit) -> None:
        """Change the edit.

        Raises:
            TargetMismatch: If it does not fit the checkpoint.
        """

    def _matches_nothing(self, glob: str, edit: ManifestEdit) -> StructureMismatch:
        known = sorted(edit.origins)
        near = get_close_matches(glob, known, 3, 0.5) or known
        return StructureMismatch(
            f"{type(self).__name__}: {glob!r:.200} matches nothing in the checkpoint",
            hint=f"It holds {first_of(near, 5) or 'no label'}; globs begin at the start of a "
            "label, as `ckpipe info` lists it, and see the names that earlier transforms gave",
        )


def transforms_of(transform: Iterable[Transform]) -> tuple[Transform, ...]:
    """Check the argument ``transform`` of a load.

    Raises:
        UsageError: If it is no list of transforms.
    """
    if isinstance(transform, Transform):
        name = type(transform).__name__
        raise UsageError(
            "transform is a list of transforms, not a single one",
            hint=f"Write transform=[ckpipe.{name}(...)]",
        )
    found = tuple(transform) if isinstance(transform, Iterable) else (transform,)
    for each in found:
        if not isinstance(each, Transform):
            raise UsageError(
                f"transform is a list of transforms, and {each!r:.100} is none",
                hint="Write transform=[ckpipe.Rename({'0.*': 'up.*'})]",
            )
    return found


def transformed(
    document: ManifestDocument, transforms: Sequence[Transform]
) -> tuple[ManifestDocument, dict[str, tuple[str, ...]]]:
    """Apply transforms to the manifest of a checkpoint.

    Args:
        document: The manifest of all ranks.
        transforms: The transforms, in their order.

    Returns:
        The manifest of the transformed checkpoint; and for each saved label that was changed the
        labels that it is loaded under.

    Raises:
        TargetMismatch: If a transform does not fit the checkpoint.
    """
    edit = ManifestEdit(document)
    for each in transforms:
        each._apply(edit)
    return edit.finished(), edit.told()


# Names


class Rename(Transform):
    """Give labels other names.

    A glob also matches the labels below those that it matches, so ``{"model": "net"}`` renames a
    whole object. The first glob that matches a label counts, and a label that none matches keeps
    its name. A regular expression replaces every match in every label, as ``re.sub`` does.

    Args:
        names: Globs with the new names, such as ``{"0.*": "up.*"}``: each ``*`` of a new name is
            replaced by the match of the ``*`` in the same place. Or a regular expression, or a
            function that gets a label and returns the new one.
        replacement: The replacement for the regular expression.

    Raises:
        UsageError: If the arguments are none of these.
    """

    def __init__(
        self,
        names: Mapping[str, str] | str | Callable[[str], str],
        replacement: str | None = None,
    ) -> None:
        if isinstance(names, str) != (replacement is not None):
            raise UsageError(
                "Rename takes a dict of globs, a regular expression with its replacement, or a "
                "function",
                hint="Write Rename({'0.*': 'up.*'}) or Rename(r'^module\\.', '')",
            )
        self._patterns: list[tuple[_Pattern, str]] = []
        self._function: Callable[[str], object] | None = None
        self._shown = ""
        if isinstance(names, str):
            try:
                compiled = re.compile(names)
                compiled.sub(replacement or "", "")
            except (re.error, IndexError) as error:
                raise UsageError(f"Rename: {names!r:.200} cannot be used: {error}") from None
            self._shown = names
            self._function = lambda label: compiled.sub(replacement or "", label)
        elif isinstance(names, Mapping):
            for old, new in names.items():
                pattern = _Pattern(self, old, below=True)
                pattern.check_filled(new)
                self._patterns.append((pattern, new))
        elif callable(names):
            self._shown = getattr(names, "__name__", repr(names))
            self._function = names
        else:
            raise UsageError(f"Rename takes a dict, a text or a function, not {names!r:.100}")

    def _name(self, label: str) -> str:
        """Return the new name of a label."""
        if self._function is not None:
            new = self._function(label)
            if not isinstance(new, str) or not new:
                raise UsageError(
                    f"Rename: the function returned {new!r:.100} for {label!r:.200}",
                    hint="Return the label for a name that stays, and use ckpipe.Drop for others",
                )
            return new
        for pattern, new in self._patterns:
            found = pattern.match(label)
            if found is not None:
                return pattern.filled(new, found)
        return label

    def _apply(self, edit: ManifestEdit) -> None:
        for pattern, _ in self._patterns:
            if not any(pattern.match(label) for label in edit.origins):
                raise self._matches_nothing(pattern.glob, edit)
        news = {label: self._name(label) for label in edit.origins}
        news = {old: new for old, new in news.items() if old != new}
        if self._function is not None and not news:
            raise self._matches_nothing(self._shown, edit)
        for new in news.values():
            if not new.strip(".") or ".." in new or new[0] == "." or new[-1] == ".":
                raise StructureMismatch(
                    f"Rename: {new!r:.200} is no name", hint="Each part between dots needs a name"
                )
        made: dict[str, list[str]] = {}
        for old, new in news.items():
            made.setdefault(new, []).append(old)
            if len(made[new]) > 1:
                raise two_with_one_name(new, made[new])
        edit.note(made)
        for draft in edit.drafts:
            leaves = draft.leaves()
            moves = {old: [(new, leaves[old])] for old, new in news.items() if old in leaves}
            draft.move(moves, self._name)


class Only(Transform):
    """Keep some labels and leave all others out, as if they had not been saved.

    Args:
        globs: Globs of labels to keep, each with all labels below.

    Raises:
        UsageError: If one is no text, or there is none.
    """

    def __init__(self, *globs: str) -> None:
        self._globs = _texts(self, globs)

    def _apply(self, edit: ManifestEdit) -> None:
        _leave_out(self, edit, self._globs, LabelFilter(self._globs))


class Drop(Transform):
    """Leave labels out, as if they had not been saved.

    Args:
        globs: Globs of labels to leave out, each with all labels below.

    Raises:
        UsageError: If one is no text, or there is none.
    """

    def __init__(self, *globs: str) -> None:
        self._globs = _texts(self, globs)

    def _apply(self, edit: ManifestEdit) -> None:
        _leave_out(self, edit, self._globs, LabelFilter(None, self._globs))


def _leave_out(
    transform: Transform, edit: ManifestEdit, globs: Sequence[str], select: LabelFilter
) -> None:
    for glob in globs:
        if not any(map(LabelFilter([glob]), edit.origins)):
            raise transform._matches_nothing(glob, edit)
    for draft in edit.drafts:
        draft.tree, _ = pruned(draft.tree, select, shared_containers([draft.tree]))
    left = {label for draft in edit.drafts for label in draft.leaves()}
    edit.note({}, [label for label in edit.origins if label not in left])


# Dtypes


class Cast(Transform):
    """Load tensors as another floating-point dtype, narrower or wider than they were saved.

    As ``module.to(dtype)``, it converts tensors of floating-point dtypes and leaves others. A
    target must have the new dtype, or be loaded with ``cast=True``.

    Args:
        dtypes: Globs with the dtype of what they match, such as ``{"*": torch.bfloat16}``; the
            first glob that matches a label counts. A dtype may be given by its name.

    Raises:
        UsageError: If a dtype is no floating-point dtype.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype | str]) -> None:
        if not isinstance(dtypes, Mapping) or not dtypes:
            raise UsageError("Cast takes a dict of globs", hint="Write Cast({'*': torch.bfloat16})")
        _texts(self, dtypes)
        self._dtypes: dict[str, str] = {}
        for glob, given in dtypes.items():
            dtype = DTYPES.get(given) if isinstance(given, str) else given
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise UsageError(
                    f"Cast: {given!r:.100} is no floating-point dtype",
                    hint="Write {'*': torch.bfloat16}, or the name: {'*': 'bfloat16'}",
                )
            self._dtypes[glob] = NAMES[dtype]

    def _apply(self, edit: ManifestEdit) -> None:
        filters = [(LabelFilter([glob]), dtype) for glob, dtype in self._dtypes.items()]
        rows = edit.tensors()
        floating = [label for label, row in rows.items() if _is_floating(row)]
        for glob in self._dtypes:
            if not any(map(LabelFilter([glob]), floating)):
                raise self._matches_nothing(glob, edit)
        chosen = {
            label: next((dtype for matches, dtype in filters if matches(label)), None)
            for label in floating
        }
        for draft in edit.drafts:
            for label, node in draft.leaves().items():
                dtype = chosen.get(label) if node[0] == "tensor" else None
                if dtype is not None:
                    row = draft.rows[node[1]]
                    draft.rows[node[1]] = replace(row, cast=None if dtype == row.dtype else dtype)
        edit.note({label: [label] for label, dtype in chosen.items() if dtype is not None})


def _is_floating(row: TensorRow) -> bool:
    dtype = DTYPES.get(row.dtype)
    return dtype is not None and dtype.is_floating_point and row.kind != "numpy"


# Boxes


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
        self._pattern = _Pattern(self, name)
        self._into, self._dim = _texts(self, into), dim
        self._sizes = None if sizes is None else list(sizes)
        for each in self._into:
            self._pattern.check_filled(each)
        if self._sizes is not None and len(self._sizes) != len(self._into):
            raise UsageError(f"Split: {len(self._into)} names and {len(self._sizes)} sizes")
        if self._sizes is not None and min(self._sizes) < 0:
            raise UsageError("Split: a size is negative")

    def _apply(self, edit: ManifestEdit) -> None:
        rows = edit.tensors()
        groups = {
            old: [self._pattern.filled(new, found) for new in self._into]
            for old in rows
            if (found := self._pattern.match(old)) is not None
        }
        if not groups:
            raise self._matches_nothing(self._pattern.glob, edit)
        parts = {old: self._parts(old, rows[old]) for old in groups}
        edit.note({new: [old] for old, news in groups.items() for new in news})
        for draft in edit.drafts:
            leaves, moves = draft.leaves(), {}
            for old in groups.keys() & leaves.keys():
                number, (dim, bounds) = leaves[old][1], parts[old]
                made = []
                for new, (low, high) in zip(groups[old], pairwise(bounds), strict=True):
                    row = draft.rows[number]
                    shape = (*row.shape[:dim], high - low, *row.shape[dim + 1 :])
                    sources = _with_step(draft, number, Shift(dim, -low, high - low))
                    made.append((new, draft.add(_row_like(row, new, shape), sources)))
                moves[old] = made
            draft.move(moves)

    def _parts(self, label: str, row: TensorRow) -> tuple[int, list[int]]:
        """Return the dimension, and the bounds of the parts in it."""
        _check_plain(self, label, row)
        dim, count = _dimension(self, self._dim, label, row), len(self._into)
        size = row.shape[dim]
        if self._sizes is None and size % count:
            raise ShapeMismatch(
                f"Split: dimension {dim} of size {size} has not {count} equal parts",
                key=label,
                hint="Pass sizes=[...], one for each name",
            )
        sizes = self._sizes or [size // count] * count
        if sum(sizes) != size:
            raise ShapeMismatch(
                f"Split: the sizes {sizes} are {sum(sizes)} together, and dimension {dim} has "
                f"{size}",
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
        self._patterns = [_Pattern(self, name) for name in _texts(self, names)]
        self._into, self._dim = into, dim
        for pattern in self._patterns:
            pattern.check_filled(into)

    def _apply(self, edit: ManifestEdit) -> None:
        rows = edit.tensors()
        groups: dict[tuple[str, ...], list[str | None]] = {}
        for place, pattern in enumerate(self._patterns):
            found = [(label, each) for label in rows if (each := pattern.match(label)) is not None]
            if not found:
                raise self._matches_nothing(pattern.glob, edit)
            for label, captured in found:
                groups.setdefault(captured, [None] * len(self._patterns))[place] = label
        joined: dict[str, list[str]] = {}
        for captured, labels in groups.items():
            olds = [label for label in labels if label is not None]
            if len(olds) < len(labels):
                lacks = self._patterns[labels.index(None)].glob
                raise _incomplete(self, olds, lacks)
            new = self._patterns[0].filled(self._into, captured)
            if new in joined:
                raise two_with_one_name(new, [*joined[new], *olds])
            joined[new] = olds
        edit.note(joined)
        placed: dict[str, _Joined] = {}
        for new, olds in joined.items():
            first = _check_alike(self, olds, rows)
            dim = _dimension(self, self._dim, olds[0], first)
            for old in olds:
                if _without(rows[old].shape, dim) != _without(first.shape, dim):
                    raise _unequal(self, olds[0], old, rows)
            sizes = [rows[old].shape[dim] for old in olds]
            shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
            starts = accumulate(sizes[:-1], initial=0)
            steps = (Shift(dim, at, shape[dim]) for at in starts)
            placed[new] = shape, dict(zip(olds, steps, strict=True))
        _join(edit, placed)


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
        self._pattern, self._into = _Pattern(self, name, numbered=True), into
        self._pattern.check_filled(into)

    def _apply(self, edit: ManifestEdit) -> None:
        rows = edit.tensors()
        groups: dict[str, dict[int, str]] = {}
        for label in rows:
            found = self._pattern.match(label)
            if found is not None:
                new = self._pattern.filled(self._into, found)
                numbered = groups.setdefault(new, {})
                other = numbered.setdefault(self._pattern.number(label), label)
                if other != label:
                    raise two_with_one_name(new, [other, label])
        if not groups:
            raise self._matches_nothing(self._pattern.glob, edit)
        edit.note({new: list(numbered.values()) for new, numbered in groups.items()})
        joined: dict[str, _Joined] = {}
        for new, numbered in groups.items():
            olds = [numbered[number] for number in sorted(numbered)]
            lacking = next((n for n in range(len(olds)) if n not in numbered), None)
            if lacking is not None:
                raise _incomplete(self, olds, f"number {lacking}")
            first = _check_alike(self, olds, rows)
            for old in olds:
                if rows[old].shape != first.shape:
                    raise _unequal(self, olds[0], old, rows)
            steps = {old: Lift(number) for number, old in enumerate(olds)}
            joined[new] = (len(olds), *first.shape), steps
        _join(edit, joined)


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
        self._pattern, self._into = _Pattern(self, name), into
        self._pattern.check_filled(into)
        if into.count("{}") != 1:
            raise UsageError(
                f"Unstack: {into!r:.200} has not one {{}} in place of the number",
                hint="Write it as '*.experts.{}.up.weight'",
            )

    def _apply(self, edit: ManifestEdit) -> None:
        rows = edit.tensors()
        groups: dict[str, list[str]] = {}
        for old, row in rows.items():
            found = self._pattern.match(old)
            if found is not None:
                _check_plain(self, old, row)
                _dimension(self, 0, old, row)
                if row.shape[0] > _MOST_PARTS:
                    raise ShapeMismatch(
                        f"Unstack: these are {row.shape[0]} parts, and {_MOST_PARTS} are the most",
                        key=old,
                        hint="Check the name, or load it whole and take it apart in the program",
                    )
                new = self._pattern.filled(self._into, found)
                groups[old] = [new.replace("{}", str(n)) for n in range(row.shape[0])]
        if not groups:
            raise self._matches_nothing(self._pattern.glob, edit)
        edit.note({new: [old] for old, news in groups.items() for new in news})
        for draft in edit.drafts:
            leaves, moves = draft.leaves(), {}
            for old in groups.keys() & leaves.keys():
                number, made = leaves[old][1], []
                row = draft.rows[number]
                for n, new in enumerate(groups[old]):
                    sources = _with_step(draft, number, Take(n))
                    made.append((new, draft.add(_row_like(row, new, row.shape[1:]), sources)))
                moves[old] = made
            draft.move(moves)


def _with_step(draft: Draft, number: int, step: Step) -> list[Derivation]:
    return [(source, (*steps, step)) for source, steps in draft.sources[number]]


def _row_like(row: TensorRow, label: str, shape: tuple[int, ...]) -> TensorRow:
    return replace(row, label=label, shape=shape, attributes=None)


_Joined = tuple[tuple[int, ...], Mapping[str, Step]]
"""The shape of a joined tensor, and for each of its tensors the step that places it there."""


def _join(edit: ManifestEdit, joined: Mapping[str, _Joined]) -> None:
    """Put one tensor in place of several, in each structure that has some of them."""
    for draft in edit.drafts:
        leaves = draft.leaves()
        moves: dict[str, list[tuple[str, Node]]] = {}
        for new, (shape, steps) in joined.items():
            here = [old for old in steps if old in leaves]
            if here:
                numbers = {old: leaves[old][1] for old in here}
                sources = [s for old in here for s in _with_step(draft, numbers[old], steps[old])]
                row = _row_like(draft.rows[numbers[here[0]]], new, shape)
                moves |= {old: [] for old in here}
                moves[here[0]] = [(new, draft.add(row, sources))]
        draft.move(moves)


def _check_plain(transform: Transform, label: str, row: TensorRow) -> None:
    if row.kind in ("numpy", "subclass"):
        raise StructureMismatch(
            f"{type(transform).__name__} cuts and joins tensors, and this is "
            + ("an array of numpy" if row.kind == "numpy" else "of a class of its own"),
            key=label,
            hint="Load it as it is, and change it in the program",
        )


def _check_alike(
    transform: Transform, labels: Sequence[str], rows: Mapping[str, TensorRow]
) -> TensorRow:
    """Check that tensors can be joined, apart from their shapes; return the first."""
    first = rows[labels[0]]
    for label in labels:
        row = rows[label]
        _check_plain(transform, label, row)
        if (row.dtype, row.cast, row.lazy) != (first.dtype, first.cast, first.lazy):
            raise StructureMismatch(
                f"{type(transform).__name__}: {labels[0]!r} is {first.cast or first.dtype} and "
                f"{label!r} is {row.cast or row.dtype}; only tensors saved alike can be joined",
                key=label,
                hint="Load them apart and join them in the program; a Cast belongs behind",
            )
    return first


def _dimension(transform: Transform, dim: int, label: str, row: TensorRow) -> int:
    """Return a dimension counted from the front."""
    if not -len(row.shape) <= dim < len(row.shape):
        raise ShapeMismatch(
            f"{type(transform).__name__}: the tensor has no dimension {dim}",
            key=label,
            hint=f"Its shape in the checkpoint is {list(row.shape)}",
        )
    return dim % len(row.shape)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], -1, *shape[dim + 1 :]) if dim < len(shape) else shape


def _unequal(
    transform: Transform, first: str, label: str, rows: Mapping[str, Any]
) -> ShapeMismatch:
    return ShapeMismatch(
        f"{type(transform).__name__}: {first!r} has the shape {list(rows[first].shape)} and "
        f"{label!r} {list(rows[label].shape)}",
        key=label,
        hint="Check the dimension and the order of the names",
    )


def _incomplete(transform: Transform, labels: Sequence[str], lacks: str) -> StructureMismatch:
    return StructureMismatch(
        f"{type(transform).__name__}: the checkpoint has {first_of(list(map(repr, labels)), 4)} "
        f"but not {lacks} with them",
        key=labels[0],
        hint="Rename or Drop those that do not belong together before",
    )


# Globs


def _texts(transform: Transform, globs: Iterable[str]) -> list[str]:
    found = [globs] if isinstance(globs, str) else list(globs)
    if isinstance(globs, str) or not found or not all(isinstance(each, str) for each in found):
        raise UsageError(
            f"{type(transform).__name__} takes names as texts, not {found!r:.100}",
            hint="Names and globs are texts, several of them a list",
        )
    return found


class _Pattern:
    """A glob of labels, whose wildcards can be filled into other names.

    Args:
        transform: The transform, for errors.
        glob: The glob.
        below: Whether it also matches the labels below those that it matches.
        numbered: Whether it has ``{}`` in place of a number.
    """

    def __init__(
        self, transform: Transform, glob: str, *, below: bool = False, numbered: bool = False
    ) -> None:
        self._name = type(transform).__name__
        if not isinstance(glob, str) or not glob:
            raise UsageError(f"{self._name}: {glob!r:.100} is no glob", hint="Write it as text")
        if numbered and glob.count("{}") != 1:
            raise UsageError(
                f"{self._name}: {glob!r:.200} has not one {{}} in place of the number",
                hint="Write it as '*.experts.{}.up.weight'",
            )
        self.glob, self._below = glob, below
        made = {
            "*": "(.*)",
            "?": "(.)",
            "{}": "(?P<number>0|[1-9][0-9]{0,8})" if numbered else r"\{\}",
        }
        parts = re.split(r"(\*|\?|\{\})", glob)
        self._regex = re.compile(
            "".join(made.get(part) or re.escape(part) for part in parts)
            + (r"(?P<below>\..*)?" if below else ""),
            re.DOTALL,
        )

    def match(self, label: str) -> tuple[str, ...] | None:
        """Return the matches of the wildcards, and that of what lies below; None if none."""
        found = self._regex.fullmatch(label)
        if found is None:
            return None
        number = self._regex.groupindex.get("number")
        return tuple(each or "" for n, each in enumerate(found.groups(), 1) if n != number)

    def number(self, label: str) -> int:
        """Return the number in a label that matches."""
        found = self._regex.fullmatch(label)
        assert found is not None
        return int(found["number"])

    def filled(self, name: str, captured: Sequence[str]) -> str:
        """Return a name with the matches in place of its wildcards."""
        *given, below = captured if self._below else (*captured, "")
        parts = iter(given)
        return re.sub(r"[*?]", lambda _: next(parts), name) + below

    def check_filled(self, name: str) -> None:
        """Refuse a name with more wildcards than the glob.

        Raises:
            UsageError: If it is one.
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"{self._name}: {name!r:.100} is no name", hint="Write it as text")
        if len(re.findall(r"[*?]", name)) > len(re.findall(r"[*?]", self.glob)):
            raise UsageError(
                f"{self._name}: {name!r:.200} has more wildcards than {self.glob!r:.200}",
                hint="Each * of the new name stands for the * in the same place of the glob",
            )
