"""Tables of rows as JSON: an object with one array for each column.

A column in which every row has the default is left out, so that what is rare costs nothing. All
checks of types happen here, over whole columns, before a row is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Generic, TypeVar

from ckpipe.errors import InvalidManifest
from ckpipe.format.keys import Json

MAX_NUMBER = 1 << 62
MAX_DIMENSIONS = 256

Reader = Callable[[list[Any]], list[Any]]
"""Checks a column that was read and converts its cells; raises ValueError if it is malformed."""

Row = TypeVar("Row")
REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        name: Its name, in JSON and as an attribute of a row.
        read: What checks and converts it.
        default: What its cells are if it is left out; ``REQUIRED`` if it may not be.
    """

    name: str
    read: Reader
    default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """How rows of one kind are written.

    Args:
        name: What to call the table in an error.
        columns: The columns, the first of them required.
        row: The class of a row, whose attributes the columns are.
    """

    name: str
    columns: tuple[Column, ...]
    row: type[Row]

    def encode(self, rows: Sequence[Any]) -> dict[str, Json]:
        """The JSON form of rows."""
        data = {}
        for column in self.columns:
            cells = list(map(attrgetter(column.name), rows))
            if column.default is REQUIRED or cells.count(column.default) < len(cells):
                data[column.name] = cells
        return data

    def columns_of(self, data: Json) -> list[list[Any]]:
        """The checked and converted columns of a table that was read, all of one length.

        Raises:
            InvalidManifest: If it is no such table.
        """
        first = data.get(self.columns[0].name) if isinstance(data, dict) else None
        if not isinstance(first, list):
            raise InvalidManifest(f"The table of {self.name} is missing or lacks a column")
        return [self._column(column, data, len(first)) for column in self.columns]

    def decode(self, data: Json) -> tuple[Row, ...]:
        """The rows of a table that was read.

        Raises:
            InvalidManifest: If it is no such table.
        """
        return make_rows(self.row, [each.name for each in self.columns], self.columns_of(data))

    def _column(self, column: Column, data: dict[str, Json], rows: int) -> list[Any]:
        cells = data.get(column.name)
        if cells is None and column.default is not REQUIRED:
            return [column.default] * rows
        if not isinstance(cells, list) or len(cells) != rows:
            raise InvalidManifest(
                f"The column {column.name} of the {self.name} has not one cell for each of {rows}"
            )
        try:
            return column.read(cells)
        except ValueError as error:
            raise InvalidManifest(
                f"The column {column.name} of the {self.name} holds what it may not: {error}"
            ) from None


def make_rows(
    row: type[Row], names: Sequence[str], columns: Sequence[list[Any]]
) -> tuple[Row, ...]:
    """Rows of a dataclass with slots, from one list of cells for each attribute.

    Attributes are set column by column through their descriptors, which takes a third of the time
    of calling a frozen class for every row.
    """
    rows = list(map(object.__new__, repeat(row, len(columns[0]))))
    for name, cells in zip(names, columns, strict=True):
        deque(map(getattr(row, name).__set__, rows, cells), maxlen=0)
    return tuple(rows)


def texts(cells: list[Any]) -> list[Any]:
    """Cells that are texts."""
    return _all(cells, str)


def flags(cells: list[Any]) -> list[Any]:
    """Cells that are true or false."""
    return _all(cells, bool)


def nodes(cells: list[Any]) -> list[Any]:
    """Cells that are arrays of anything."""
    return _all(cells, list)


def numbers(cells: list[Any]) -> list[Any]:
    """Cells that are integers from 0 to ``MAX_NUMBER``."""
    _all(cells, int)
    if cells and not (min(cells) >= 0 and max(cells) <= MAX_NUMBER):
        raise ValueError("a number is out of range")
    return cells


def number_lists(cells: list[Any]) -> list[Any]:
    """Cells that are lists of integers from 0 to ``MAX_NUMBER``; read as tuples."""
    numbers(list(chain.from_iterable(_all(cells, list))))
    tuples = list(map(tuple, cells))
    # Most shapes of a state are equal; keeping one tuple of each spares memory.
    one_of_each: dict[tuple[int, ...], tuple[int, ...]] = {}
    return list(map(one_of_each.setdefault, tuples, tuples))


def sizes(cells: list[Any]) -> list[Any]:
    """Cells that are shapes or strides; read as tuples."""
    shapes = number_lists(cells)
    if max(map(len, shapes), default=0) > MAX_DIMENSIONS:
        raise ValueError(f"there are more than {MAX_DIMENSIONS} dimensions")
    return shapes


def boxes(cells: list[Any]) -> list[Any]:
    """Cells that are pairs of a lower and an upper corner; read as tuples of tuples."""
    if not set(map(len, _all(cells, list))) <= {2}:
        raise ValueError("a box has not two corners")
    corners = iter(sizes(list(chain.from_iterable(cells))))
    return list(zip(corners, corners, strict=True))


def optional(read: Reader) -> Reader:
    """Cells that are null or what another reader reads."""

    def read_optional(cells: list[Any]) -> list[Any]:
        present = [cell for cell in cells if cell is not None]
        if len(present) == len(cells):
            return read(cells)
        converted = iter(read(present))
        return [None if cell is None else next(converted) for cell in cells]

    return read_optional


def _all(cells: list[Any], kind: type) -> list[Any]:
    # Compared by exact type, since a bool is an int to isinstance.
    if not set(map(type, cells)) <= {kind}:
        raise ValueError(f"not every cell is of type {kind.__name__}")
    return cells
