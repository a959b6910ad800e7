"""Transforms: load a checkpoint under other names, cut or joined, or with other dtypes.

``load(state, transform=[...])`` applies them in their order to the description of the checkpoint,
before it is compared with the target. No tensor is copied for it: each byte goes from the store to
its place in the target. All errors are raised before the first write.

Globs are those of ``include``: they begin at the start of a label as ``ckpipe info`` lists it, and
``*`` also matches dots. Where their matches are filled into other names, ``[`` is refused.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from operator import index
from typing import Any

import torch

from ckpipe.errors import StructureMismatch, UsageError
from ckpipe.format.dtypes import DTYPES, NAMES
from ckpipe.format.labels import LabelFilter
from ckpipe.format.manifest import ManifestDocument, TensorRow
from ckpipe.format.tree import Node, shared_containers, walk
from ckpipe.reading.select import pruned
from ckpipe.transforms.edit import ManifestEdit, two_with_one_name
from ckpipe.transforms.moments import check_moments, followers_of, give_to_parts
from ckpipe.transforms.scales import with_scales
from ckpipe.types import DTYPE_ALIASES, first_of


class Transform(ABC):
    """One change of a checkpoint's names, shapes or dtypes on its way into a target."""

    @abstractmethod
    def _apply(self, edit: ManifestEdit) -> None:
        """Change the edit.

        Raises:
            TargetMismatch: If it does not fit the checkpoint.
        """

    def exported(self) -> Transform:
        """Return the transform that an export applies in place of this one."""
        return self

    def _matches_nothing(self, glob: str, edit: ManifestEdit) -> StructureMismatch:
        known = edit.names()
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
    document: ManifestDocument,
    transforms: Sequence[Transform],
    select: Callable[[str], bool],
    models: Mapping[str, Sequence[str]] | None = None,
) -> tuple[ManifestDocument, dict[str, tuple[str, ...]]]:
    """Apply transforms to the manifest of a checkpoint.

    Args:
        document: The manifest of all ranks.
        transforms: The transforms, in their order.
        select: Selects the labels of the transformed checkpoint that are of use.
        models: For the label of each model of the target those of its parameters, in their order.

    Returns:
        The manifest of the transformed checkpoint; and for each saved label that was changed the
        labels that it is loaded under.

    Raises:
        TargetMismatch: If a transform does not fit the checkpoint, or state of an optimizer, which
            is of use, does not fit the parameters any more.
    """
    edit = ManifestEdit(with_scales(document))
    for each in transforms:
        each._apply(edit)
    give_to_parts(edit)
    check_moments(edit, select, models or {})
    return edit.finished(), edit.told()


# Names


class Rename(Transform):
    """Give labels other names.

    Globs have ``*`` and ``?``, and no ``[``: a regular expression has more. A glob also matches the
    labels below those that it matches, so ``{"model": "net"}`` renames a whole object. The first
    glob that matches a label counts, and a label that none matches keeps its name. A regular
    expression replaces every match in every label, as ``re.sub`` does. The optimizers of a
    ``training_state`` follow the names of its model.

    Args:
        names: Globs with the new names, such as ``{"0.*": "up.*"}``: each ``*`` or ``?`` of a
            new name is replaced by the match of the ``*`` or ``?`` in the same place. Or a regular
            expression, or a function that gets a label and returns the new one.
        replacement: The replacement for the regular expression.
        strict: False to let globs match nothing, as long as one of them matches something.

    Raises:
        UsageError: If the arguments are none of these.
    """

    _leads = True  # whether optimizers follow

    def __init__(
        self,
        names: Mapping[str, str] | str | Callable[[str], str],
        replacement: str | None = None,
        *,
        strict: bool = True,
    ) -> None:
        if isinstance(names, str) != (replacement is not None):
            raise UsageError(
                "Rename takes a dict of globs, a regular expression with its replacement, or a "
                "function",
                hint="Write Rename({'0.*': 'up.*'}) or Rename(r'^module\\.', '')",
            )
        self._patterns: list[tuple[Pattern, str]] = []
        self._strict = strict
        self._function: Callable[[str], object] | None = None
        self._shown = ""
        if isinstance(names, str):
            try:
                compiled = re.compile(names)
                compiled.sub(replacement or "", "")
            except (re.error, IndexError, TypeError) as error:
                raise UsageError(f"Rename: {names!r:.200} cannot be used: {error}") from None
            self._shown = names
            self._function = lambda label: compiled.sub(replacement or "", label)
        elif isinstance(names, Mapping):
            for old, new in names.items():
                self._patterns.append((Pattern(self, old, [new], below=True), new))
            self._shown = ", ".join(names)
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
            if self._strict and not any(map(pattern.match, edit.origins)):
                raise self._matches_nothing(pattern.glob, edit)
        followers = followers_of(edit, self._name) if self._leads else {}

        def name(label: str) -> str:
            return followers.get(label) or self._name(label)

        news = {label: name(label) for label in edit.origins}
        news = {old: new for old, new in news.items() if old != new}
        if not news and (self._function is not None or not self._strict):
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
            draft.move(moves, name)


class Only(Transform):
    """Keep some labels and leave all others out, as if they had not been saved.

    Args:
        globs: Globs of labels to keep, each with all labels below.

    Raises:
        UsageError: If one is no text, or there is none.
    """

    def __init__(self, *globs: str) -> None:
        self._globs = texts(self, globs)

    def _apply(self, edit: ManifestEdit) -> None:
        _leave_out(self, edit, self._globs, LabelFilter(self._globs))


class Drop(Transform):
    """Leave labels out, as if they had not been saved.

    Args:
        globs: Globs of labels to leave out, each with all labels below.
        strict: False to let globs match nothing.

    Raises:
        UsageError: If one is no text, or there is none.
    """

    def __init__(self, *globs: str, strict: bool = True) -> None:
        self._globs, self._strict = texts(self, globs), strict

    def _apply(self, edit: ManifestEdit) -> None:
        required = self._globs if self._strict else ()
        _leave_out(self, edit, required, LabelFilter(None, self._globs))


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
            first glob that matches a label counts. A dtype may be given by its name, also
            by ``bf16``, ``fp16``, ``fp32`` or ``fp64``.

    Raises:
        UsageError: If a dtype is no floating-point dtype.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype | str]) -> None:
        if not isinstance(dtypes, Mapping) or not dtypes:
            raise UsageError("Cast takes a dict of globs", hint="Write Cast({'*': torch.bfloat16})")
        texts(self, dtypes)
        self._dtypes: dict[str, str] = {}
        for glob, given in dtypes.items():
            dtype = DTYPES.get(DTYPE_ALIASES.get(given, given)) if isinstance(given, str) else given
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

        def dtype_of(label: str) -> str | None:
            return next((dtype for matches, dtype in filters if matches(label)), None)

        chosen = {label: dtype_of(label) for label in floating}
        for first, second in _second_names(edit):
            if first in chosen and dtype_of(second) != chosen[first]:
                raise StructureMismatch(
                    f"Cast: {first!r} lies in an object that is also held as {second!r}, and the "
                    "globs give them different dtypes",
                    key=second,
                    hint="Let globs match both alike, or convert one in the program",
                )
        for draft in edit.drafts:
            dtypes: dict[int, tuple[str, str]] = {}
            moves: dict[str, list[tuple[str, Node]]] = {}
            for label, number in draft.tensors().items():
                row = draft.rows[number]
                dtype = chosen.get(label) or row.cast or row.dtype
                first, other = dtypes.setdefault(number, (label, dtype))
                if dtype != other:  # two names of one tensor become two tensors
                    draft.rows[number] = replace(row, label=first)
                    own = replace(row, label=label, cast=None if dtype == row.dtype else dtype)
                    moves[label] = [(label, draft.add(own, draft.sources[number]))]
            for number, (_, wanted) in dtypes.items():
                row = draft.rows[number]
                draft.rows[number] = replace(row, cast=None if wanted == row.dtype else wanted)
            if moves:
                draft.move(moves)
        edit.note({label: [label] for label, dtype in chosen.items() if dtype is not None})


def _second_names(edit: ManifestEdit) -> Iterator[tuple[str, str]]:
    """Yield the labels of leaves in containers that are held twice, with those of the copies."""
    for draft in edit.drafts:
        nodes = list(walk(draft.tree))
        held = {node.head: (node, label) for node, label in nodes if node.kind == "shared"}
        copies = [(node.head, label) for node, label in nodes if node.kind == "ref"]
        inside = {each: [label for _, label in walk(*held[each])] for each in dict(copies)}
        for each, second in copies:
            for label in inside[each]:
                yield label, second + label[len(held[each][1]) :]


def _is_floating(row: TensorRow) -> bool:
    dtype = DTYPES.get(row.dtype)
    return dtype is not None and dtype.is_floating_point and row.kind != "numpy"


# Globs


def texts(transform: Transform, globs: Iterable[str]) -> list[str]:
    listed = isinstance(globs, Iterable) and not isinstance(globs, str)
    found = list(globs) if listed else []
    if not found or not all(isinstance(each, str) for each in found):
        raise UsageError(
            f"{type(transform).__name__} takes names as texts, not {globs!r:.100}",
            hint="Names and globs are texts, several of them a list",
        )
    return found


def whole_numbers(transform: Transform, name: str, given: Any) -> tuple[int, ...]:
    """Return dimensions or sizes as ints, also from integers of numpy.

    Raises:
        UsageError: If it is no list of integers.
    """
    try:
        found = tuple(map(index, given))
    except TypeError:
        found = None
    if found is None or any(isinstance(each, bool) for each in given):
        raise UsageError(
            f"{type(transform).__name__}: {name} takes integers, not {given!r:.100}",
            hint="Write dim=1, sizes=[8, 4, 4]",
        )
    return found


class Pattern:
    """A glob of labels, whose wildcards can be filled into other names.

    Args:
        transform: The transform, for errors.
        glob: The glob.
        news: Names into which the matches of its wildcards are filled.
        below: Whether it also matches the labels below those that it matches.
        numbered: Whether it has ``{}`` in place of a number.

    Raises:
        UsageError: If one is no text, or a name has more wildcards than the glob.
    """

    def __init__(
        self,
        transform: Transform,
        glob: str,
        news: Iterable[str] = (),
        *,
        below: bool = False,
        numbered: bool = False,
    ) -> None:
        kind = type(transform).__name__
        for name in (glob, *news):
            if not isinstance(name, str) or not name:
                raise UsageError(f"{kind}: {name!r:.100} is no name", hint="Write it as text")
            if len(_WILDCARD.findall(name)) > len(_WILDCARD.findall(glob)):
                raise UsageError(
                    f"{kind}: {name!r:.200} has more wildcards than {glob!r:.200}",
                    hint="Each * of the new name stands for the * in the same place of the glob",
                )
        if "[" in glob:
            raise UsageError(
                f"{kind}: {glob!r:.200} has a bracket, which globs of new names do not take",
                hint="Write a glob for each letter, ? for any one, or Rename(regular expression, "
                "replacement)",
            )
        if numbered:
            check_numbered(transform, glob)
        self.glob, self.numbered, self._below = glob, numbered, below
        number = "(?P<number>0|[1-9][0-9]{0,8})" if numbered else r"\{\}"
        made = {"*": "(.*)", "?": "(.)", "{}": number}
        parts = re.split(r"(\*|\?|\{\})", glob)
        end = r"(?P<below>\..*)?" if below else ""
        self._regex = re.compile(
            "".join(made.get(part) or re.escape(part) for part in parts) + end, re.DOTALL
        )
        named = self._regex.groupindex.values()
        self._wild = [n for n in range(1, self._regex.groups + 1) if n not in named]
        self.match = self._regex.fullmatch

    def filled(self, name: str, found: re.Match[str]) -> str:
        """Return a name with what the wildcards matched in a label in place of its own."""
        parts = iter(self._wild)
        below = (found["below"] or "") if self._below else ""
        return _WILDCARD.sub(lambda _: found[next(parts)], name) + below


_WILDCARD = re.compile(r"[*?]")


def check_numbered(transform: Transform, name: str) -> None:
    if name.count("{}") != 1:
        raise UsageError(
            f"{type(transform).__name__}: {name!r:.200} has not one {{}} in place of the number",
            hint="Write it as '*.experts.{}.up.weight'",
        )
