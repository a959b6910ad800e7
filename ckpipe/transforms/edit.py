"""Edit a manifest: rename, cut, join and rearrange tensors, without a byte being read.

Theory. A tensor of a manifest is a set of boxes. Each lies in an entry of a data file by strides:
row by row as it was saved. If a tensor is cut, joined with others, stacked or rearranged, each of
its boxes becomes a box of the new tensor, again with strides, or several such boxes. So a
:class:`ManifestEdit` keeps for each tensor its sources, and for each source the *steps* that place
its boxes. :meth:`ManifestEdit.finished` makes an ordinary manifest of the result. Match, read plan
and reader treat it like any other.

Names. The tree has keys, and a label is a path of them. A leaf with a new label stays in its
container if the label still begins there. A container moves as a whole if all of its leaves do.
Everything else goes into the innermost mapping whose label begins the new one; the rest of the
label is one key there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ckpipe.errors import ShapeMismatch, StructureMismatch
from ckpipe.format.boxes import box_shape, contiguous_stride, whole
from ckpipe.format.data_file import item_bytes
from ckpipe.format.labels import Json, canonical, encode_key, join, key_of
from ckpipe.format.manifest import (
    Chunk,
    Layout,
    ManifestDocument,
    OptimizerRow,
    PerRank,
    Structure,
    TensorRow,
)
from ckpipe.format.merge import differ_privately
from ckpipe.format.tree import (
    LEAVES,
    MAPPINGS,
    WRAPPERS,
    Node,
    children_of,
    containers,
    mapping,
    rewritten,
    walk,
    wrappers_in,
)
from ckpipe.transforms.box_steps import PlacedBox, Step
from ckpipe.types import first_of

Moves = Mapping[str, Sequence[tuple[str, Node]]]
"""For the label of a leaf, the leaves in its place, each with its label; none removes it."""

Derivation = tuple[int, tuple[Step, ...]]
"""The number of a stored tensor, and the steps that place its boxes."""


@dataclass(slots=True)
class Draft:
    """One structure of a manifest while it is edited.

    Args:
        structure: The structure as it was.
        tree: Its root node now.
        rows: Its tensors now; a number without a leaf is left out at the end.
        sources: The sources of each of them.
        optimizers: Its optimizers now.

    Attributes:
        values: Inline values that all ranks of the structure get besides their own.
    """

    structure: Structure
    tree: Node
    rows: list[TensorRow]
    sources: list[tuple[Derivation, ...]]
    optimizers: list[OptimizerRow]
    values: list[Json] = field(init=False, default_factory=list)
    _leaves: tuple[Node, dict[str, Node]] = field(init=False, default=(Node("absent"), {}))

    def leaves(self) -> dict[str, Node]:
        """Return the leaves of the tree by label."""
        if self._leaves[0] is not self.tree:
            found = {label: node for node, label in walk(self.tree) if node.kind in LEAVES}
            self._leaves = self.tree, found
        return self._leaves[1]

    def tensors(self) -> dict[str, int]:
        """Return the number of each tensor in the tree, by the label of its leaf."""
        return {label: node.head for label, node in self.leaves().items() if node.kind == "tensor"}

    def wrapped(self) -> dict[str, str]:
        """Return for each label in a wrapper tensor that of the outermost wrapper."""
        wrappers = wrappers_in(self.tree)
        return {where: label for label, node in wrappers for _, where in walk(node, label)}

    def add(self, row: TensorRow, sources: Sequence[Derivation]) -> Node:
        """Add a tensor, and return its leaf."""
        self.rows.append(row)
        self.sources.append(tuple(sources))
        return Node("tensor", len(self.rows) - 1)

    def add_value(self, value: Json) -> Node:
        """Add an inline value, and return its leaf."""
        self.values.append(value)
        return Node("value", self.structure.values + len(self.values) - 1)

    def move(self, moves: Moves, rename: Callable[[str], str] | None = None) -> None:
        """Put other leaves in place of some.

        Args:
            moves: The leaves that change; others stay as they are.
            rename: Renames containers and rows of tensors as well.

        Raises:
            StructureMismatch: If two leaves get one name, or one would have to leave a container
                without names, such as a list.
        """
        mover = _Mover(moves, rename)
        leaves = reversed(self.leaves().items())
        before = {node.head: label for label, node in leaves if node.kind == "tensor"}
        self.tree = mover.moved(self.tree)
        self.optimizers = [
            replace(row, label=mover.containers[row.label])
            for row in self.optimizers
            if row.label in mover.containers
        ]
        if rename is None:
            return
        for number, row in enumerate(self.rows):
            label = before.get(number)
            new = moves[label][0][0] if label == row.label and label in moves else rename(row.label)
            self.rows[number] = replace(row, label=new)


@dataclass(slots=True)
class ManifestEdit:
    """An edit of a manifest of all ranks.

    Args:
        document: The manifest, which does not change.
        drafts: Its structures while they are edited.
        origins: For the label of each leaf, the labels that were saved and are now in it.
        touched: Labels that were saved and that an edit has changed.
    """

    document: ManifestDocument
    drafts: list[Draft] = field(init=False)
    origins: dict[str, tuple[str, ...]] = field(init=False)
    touched: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.drafts = [
            Draft(
                each,
                each.tree,
                list(each.tensors),
                [((number, ()),) for number in range(len(each.tensors))],
                list(each.optimizers),
            )
            for each in self.document.structures
        ]
        self.origins = {label: (label,) for each in self.drafts for label in each.leaves()}

    def tensors(self) -> dict[str, TensorRow]:
        """Return the row of each tensor leaf of any structure, by the label of the leaf.

        The inner tensors of wrapper tensors are left out: a transform takes a wrapper as a whole.
        """
        found: dict[str, TensorRow] = {}
        for draft in reversed(self.drafts):
            wrapped = draft.wrapped()
            for label, number in draft.tensors().items():
                if label not in wrapped:
                    found[label] = draft.rows[number]
        return found

    def names(self) -> list[str]:
        """Return the labels of leaves, with that of a wrapper tensor in place of those inside."""
        found: set[str] = set()
        for draft in self.drafts:
            wrapped = draft.wrapped()
            found.update(wrapped.get(label, label) for label in draft.leaves())
        return sorted(found)

    def note(self, made: Mapping[str, Sequence[str]], gone: Iterable[str] = ()) -> None:
        """Note new labels with those of which they are made, and labels that are left out.

        Raises:
            StructureMismatch: If another tensor or value has a new label already.
        """
        used = {old for olds in made.values() for old in olds}
        for taken in made.keys() & (self.origins.keys() - used):
            raise two_with_one_name(taken, [*made[taken], taken])
        origins = {
            new: tuple(dict.fromkeys(each for old in olds for each in self.origins[old]))
            for new, olds in made.items()
        }
        for label in {*used, *gone}:
            self.touched.update(self.origins.pop(label))
        self.origins |= origins

    def told(self) -> dict[str, tuple[str, ...]]:
        """Return for each saved label that was changed the labels that it is loaded under."""
        found: dict[str, list[str]] = {label: [] for label in sorted(self.touched)}
        for new, olds in self.origins.items():
            for old in olds:
                if old in found:
                    found[old].append(new)
        return {old: tuple(news) for old, news in found.items()}

    def finished(self) -> ManifestDocument:
        """Return the edited manifest.

        Raises:
            StructureMismatch: If two tensors of a structure have one name.
        """
        numbers = [_numbers_in_use(draft) for draft in self.drafts]
        structures = tuple(map(_structure, self.drafts, numbers))
        places: dict[tuple[int, int], int] = {}
        layouts: list[Layout] = []
        parts = []
        for part in self.document.parts:
            where = part.structure, part.layout
            if where not in places:
                places[where] = len(layouts)
                old = self.document.layouts[part.layout]
                layouts.append(_layout(self.drafts[part.structure], old, numbers[part.structure]))
            values = (*part.values, *self.drafts[part.structure].values)
            parts.append(replace(part, layout=places[where], values=values))
        private = self._private()
        known = range(len(self.document.per_rank))
        return replace(
            self.document,
            structures=structures,
            layouts=tuple(layouts),
            parts=tuple(parts),
            per_rank=tuple(self._per_rank(number, numbers, private) for number in known),
        )

    def _per_rank(
        self, structure: int, numbers: Sequence[Sequence[int]], private: set[str]
    ) -> PerRank:
        """Return what differs between the ranks of a structure, under the new numbers."""
        old, draft = self.document.per_rank[structure], self.drafts[structure]
        rows = draft.structure.tensors
        differing = {*old.tensors, *(n for n, row in enumerate(rows) if row.label in private)}
        tensors = tuple(
            new
            for new, number in enumerate(numbers[structure])
            if any(source in differing for source, _ in draft.sources[number])
        )
        return replace(old, tensors=tensors)

    def _private(self) -> set[str]:
        """Return the saved labels with steps of which structures have other private values.

        Unedited private tensors are compared when the structures are merged.
        """
        document = self.document
        cut = {
            draft.structure.tensors[n].label
            for draft in self.drafts
            for each in draft.sources
            for n, steps in each
            if steps
        }
        if len(document.structures) < 2 or not cut:
            return set()
        holders: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        first = {part.structure: number for number, part in reversed([*enumerate(document.parts)])}
        for number, part in sorted(first.items()):
            for tensor, row in enumerate(document.structures[number].tensors):
                holders[row.label].append((part, tensor))
        return {label for label in cut if differ_privately(document, holders[label])}


def _numbers_in_use(draft: Draft) -> list[int]:
    """Return the numbers of the tensors in the tree, and in attributes of these."""
    found: set[int] = set()
    pending: list[Node] = [draft.tree]
    while pending:
        for outer in containers([pending.pop()]):
            numbers = {each.head for each in (outer, *outer.nodes) if each.kind == "tensor"}
            given = [draft.rows[number].attributes for number in numbers - found]
            pending += [each for each in given if each is not None]
            found |= numbers
    return sorted(found)


def _structure(draft: Draft, numbers: Sequence[int]) -> Structure:
    places = {number: new for new, number in enumerate(numbers)}
    rows = [draft.rows[number] for number in numbers]
    known: dict[str, int] = {}
    for number, row in zip(numbers, rows, strict=True):
        if known.setdefault(row.label, number) != number:
            raise two_with_one_name(row.label)

    def renumbered(node: Node) -> Node:
        return Node("tensor", places[node.head]) if node.kind == "tensor" else node

    rows = [
        row
        if row.attributes is None
        else replace(row, attributes=rewritten(row.attributes, renumbered))
        for row in rows
    ]
    tree, optimizers = rewritten(draft.tree, renumbered), tuple(draft.optimizers)
    values = draft.structure.values + len(draft.values)
    return replace(
        draft.structure, tree=tree, tensors=tuple(rows), values=values, optimizers=optimizers
    )


def _layout(draft: Draft, layout: Layout, numbers: Sequence[int]) -> Layout:
    """Return a layout with the chunks of the new tensors."""
    uses: defaultdict[int, list[tuple[int, tuple[Step, ...]]]] = defaultdict(list)
    for new, number in enumerate(numbers):
        for source, steps in draft.sources[number]:
            uses[source].append((new, steps))
    rows = draft.structure.tensors
    if all(uses[number] == [(number, ())] for number in range(len(rows))):
        return layout
    found: list[Chunk] = []
    for chunk in layout.chunks:
        for new, steps in uses[chunk.tensor]:
            if steps:
                found += placed(chunk._replace(tensor=new), rows[chunk.tensor], steps)
            else:
                found.append(chunk._replace(tensor=new))
    return Layout(layout.entries, found)


def placed(chunk: Chunk, row: TensorRow, steps: Sequence[Step]) -> list[Chunk]:
    """Return the chunks of a new tensor that have elements of one chunk of its source.

    Raises:
        StructureMismatch: If elements of the chunk lie in no row-major order of any dimensions.
        ShapeMismatch: If they lie in too many pieces in the new order.
    """
    box = whole(row.shape) if chunk.box is None else chunk.box
    shape = box_shape(box)
    stride = contiguous_stride(shape) if chunk.stride is None else chunk.stride
    # Without indices that stand alone, each stride is a multiple of all of the next dimension.
    dims = sorted(((by, n) for by, n in zip(stride, shape, strict=True) if n > 1), reverse=True)
    pairs = pairwise([*dims, (1, 1)])
    if any(not inner or by % inner or n * inner > by for (by, _), (inner, n) in pairs):
        raise StructureMismatch(
            f"It shares memory with other tensors, with the strides {list(stride)}, and can be "
            "neither cut nor joined",
            key=row.label,
            hint="Load it as it is, and change it in the program",
        )
    places = [] if 0 in shape else [PlacedBox(box, 0, stride)]
    try:
        for step in steps:
            places = [made for place in places for made in step(place)]
    except ShapeMismatch as error:
        error.key = row.label
        raise
    item = item_bytes(row.dtype) or 1
    return [
        chunk._replace(
            offset=chunk.offset + start * item,
            stride=stride,
            original_stride=None,
            box=box,
            cut=True,
        )
        for box, start, stride in places
    ]


def two_with_one_name(label: str, olds: Sequence[str] = ()) -> StructureMismatch:
    """Return the error for two tensors or values with one label.

    Args:
        label: The label.
        olds: The labels that they had before.
    """
    given = f"{first_of(list(map(repr, olds)), 4)} one name" if olds else "two tensors one name"
    return StructureMismatch(
        f"The transforms give {given}",
        key=label,
        hint="Rename one of them to another name, or leave it out before with ckpipe.Drop",
    )


class _Mover:
    """Rebuild a tree with other leaves.

    Args:
        moves: The leaves that change.
        rename: Renames containers; None if only leaves change.

    Attributes:
        containers: The new label of each container that is still there.
    """

    def __init__(self, moves: Moves, rename: Callable[[str], str] | None) -> None:
        self._moves, self._rename = moves, rename
        self._away: list[tuple[str, Node]] = []
        self.containers: dict[str, str] = {}

    def moved(self, tree: Node) -> Node:
        """Return the new tree."""
        if tree.kind in LEAVES:
            return tree
        head = self._head(tree, "", "")
        made = self._rebuilt(tree, "", head) or _emptied(tree)
        for part in reversed(head.split(".") if head else []):
            made = mapping({part: made})
        _insert(made, self._away)
        return made

    def _after(self, node: Node, label: str) -> list[tuple[str, str]]:
        """Return the old and new labels of all leaves in a node."""
        return [
            (old, new)
            for each, old in walk(node, label)
            if each.kind in LEAVES
            for new, _ in self._moves.get(old, ((old, each),))
        ]

    def _head(self, node: Node, label: str, default: str) -> str:
        """Return the new label of a container."""
        after = self._after(node, label)
        if not after:
            return default
        renamed = label if self._rename is None or not label else self._rename(label)
        for head in (renamed, label) if label else ():
            if all(new.startswith(f"{head}.") for _, new in after):
                return head
        old, new = after[0]
        end = old[len(label) :] if label else f".{old}"
        if new.endswith(end):
            head = new[: len(new) - len(end)]
            start = len(label) if label else 0
            dot = "" if label else "."
            if all(b == f"{head}{dot}{a[start:]}" for a, b in after):
                return head
        return label

    def _rebuilt(self, node: Node, label: str, to: str) -> Node | None:
        """Return a container with its new content; None if all of it has gone."""
        self.containers[label] = to
        if node.kind in WRAPPERS:
            if node.kind in ("registered", "wrapper_tensor") and any(
                new != to + old[len(label) :] for old, new in self._after(node, label)
            ):
                raise _fixed(label, f"of one {node.kind}")
            if node.inner.kind in LEAVES:
                return node
            made = self._rebuilt(node.inner, label, to)
            if made is None and node.kind == "shared":
                made = _emptied(node.inner)  # references to it stay
            return None if made is None else node.with_nodes([made])
        return self._items(node, label, to)

    def _items(self, node: Node, label: str, to: str) -> Node | None:
        children = children_of(node, label)
        found: list[tuple[str, Node, list[Json]]] = []  # its key, unless that is new
        heads: set[str] = set()
        for key, child, where in children:
            stays, own = join(to, key), [encode_key(key)]
            if child.kind in (*LEAVES, "absent"):
                made = self._moves.get(where, ((stays, child),))
                found += [(new, each, own if new == stays else []) for new, each in made]
                if node.kind not in MAPPINGS and [new for new, _ in made] != [stays]:
                    raise _fixed(where, f"an element of a {node.kind}")
                continue
            head = self._head(child, where, stays)
            inner = self._rebuilt(child, where, head)
            if inner is not None:
                found.append((head, inner, own if head == stays else []))
                heads |= {head} if inner.kind in (*MAPPINGS, *WRAPPERS) else set()
            if node.kind not in MAPPINGS and (inner is None or head != stays):
                raise _fixed(where, f"an element of a {node.kind}")
        if node.kind not in MAPPINGS:
            return node.with_nodes(each for _, each, _ in found)
        items: list[tuple[Json, Node]] = []
        taken: set[str] = set()
        for new, each, own in found:
            inside = not own and any(head in heads for head in _above(new))
            if not own and (inside or not new.startswith(f"{to}." if to else "")):
                self._away.append((new, each))
                continue
            key = own[0] if own else key_of(new[len(to) + 1 if to else 0 :])
            items.append((key, each))
            if canonical(key) in taken:
                raise two_with_one_name(new)
            taken.add(canonical(key))
        return node.with_items(items) if items or not children else None


def _emptied(node: Node) -> Node:
    if node.kind in WRAPPERS:
        return node.with_nodes([_emptied(node.inner)])
    return node.with_items([]) if node.kind in MAPPINGS else node.with_nodes([])


def _above(label: str) -> Iterator[str]:
    """Yield the labels that may be those of containers around a label, the innermost first."""
    while "." in label:
        label = label.rpartition(".")[0]
        yield label


def _insert(tree: Node, away: Sequence[tuple[str, Node]]) -> None:
    """Put nodes into the innermost mappings of a new tree whose labels begin their own."""
    containers = {label: node for node, label in walk(tree) if node.kind not in LEAVES}
    taken: dict[str, set[str]] = {}
    added: defaultdict[str, list[tuple[Json, Node]]] = defaultdict(list)
    for label, node in away:
        at = next((each for each in _above(label) if each in containers), "")
        here = containers[at]
        if here.kind not in MAPPINGS:
            raise _fixed(label, f"inside a {here.kind}")
        key = key_of(label[len(at) + 1 if at else 0 :])
        if at not in taken:
            taken[at] = {each for each in here.keys if isinstance(each, str)}
        if key in taken[at]:
            raise two_with_one_name(label)
        taken[at].add(key)
        added[at].append((key, node))
        inner = walk(node, label)
        containers |= {where: each for each, where in inner if each.kind not in LEAVES}
    for at, items in added.items():
        here = containers[at]
        here.become(here.with_items([*here.items(), *items]))


def _fixed(label: str, what: str) -> StructureMismatch:
    return StructureMismatch(
        f"The transforms would move this out of its place: it is {what}",
        key=label,
        hint="Such a place has no name that could change; leave the whole object out with "
        "ckpipe.Drop, or exclude it in the globs",
    )
