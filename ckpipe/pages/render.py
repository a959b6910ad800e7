"""Render templates, and compute positions on axes for their drawings.

Positions are percentages, so that a drawing is as wide as the page while its texts keep their size.
All text is escaped by the templates. Text from a store is cut off too, and characters that do not
print, such as those that change the direction of text, are shown by their number.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpipe.errors import UsageError
from ckpipe.pages.facts import duration
from ckpipe.types import first_of, size_text
from ckpipe.version import install_line

if TYPE_CHECKING:
    from jinja2 import Environment


@functools.cache
def _templates() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise UsageError("A page needs jinja2", hint=install_line("cli")) from error
    made = Environment(
        loader=PackageLoader("ckpipe.pages"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "short": short, "size": size_text, "duration": duration, "number": number,
        "when": when, "first_of": first_of,
    }  # fmt: skip
    return made


def render(template: str, **data: Any) -> str:
    """Render a template of this package.

    Raises:
        UsageError: If jinja2 is not installed.
    """
    return _templates().get_template(template).render(data)


def write_page(path: Path, page: str) -> None:
    """Write a page; a file gets the whole page or none of it.

    Raises:
        UsageError: If it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which must not be replaced
            path.write_text(page, encoding="utf-8")
            return
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            draft.write_text(page, encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"The page cannot be written to {path}: {error.strerror}") from error


def short(text: object, most: int = 80) -> str:
    """Cut off a text, and show characters that do not print by their number."""
    cut = str(text)[: most + 1]
    cut = cut if len(cut) <= most else f"{cut[: most - 1]}…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def number(value: float | None) -> str:
    """Write a number for people; NaN and infinities by their names."""
    if value is None:
        return ""
    try:
        return "NaN" if value != value else f"{float(value):.4g}".replace("inf", "∞")
    except OverflowError:  # a whole number of hundreds of digits
        return "∞"


def when(time: datetime | None) -> str:
    """Write a time in UTC."""
    return "" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from a range of numbers to percentages.

    Args:
        low: The number at 0 %.
        high: The number at 100 %.
        ticks: Positions in percent, each with its text.
        log: Whether it is logarithmic.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a number in percent; it may lie outside."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return round(100 * (value - low) / (high - low), 2) if high > low else 50.0


def number_axis(values: Sequence[float], unit: str = "", about: int = 5) -> Axis:
    """Make an axis for finite numbers; a logarithmic one if they span more than 500:1."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and high > 500 * low:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        axis = Axis(10.0 ** powers[0], 10.0 ** powers[-1], log=True)
        marks: Sequence[float] = [10.0**each for each in powers[:: -(-len(powers) // about)]]
    else:
        axis = Axis(low, high)
        marks = list(round_numbers(low, high, about))
    ticks = tuple((axis.at(each), f"{each:g}{unit}") for each in marks)
    return Axis(axis.low, axis.high, ticks, axis.log)


def round_numbers(low: float, high: float, about: int) -> Iterator[float]:
    """Yield round numbers in a range, about so many of them."""
    rough = (high - low) / about
    if not rough > 0 or not math.isfinite(rough):
        yield low
        return
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((each * power for each in (1, 2, 5) if each * power >= rough), 10 * power)
    first = math.ceil(low / step)
    for index in range(about + 2):
        value = float(f"{(first + index) * step:.12g}")
        if value <= high:
            yield value


_SPANS = (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800)


def time_axis(began: datetime, ended: datetime) -> Axis:
    """Make an axis of times, in seconds since 1970."""
    low, high = began.timestamp(), max(ended.timestamp(), began.timestamp() + 1)
    step = next((each for each in _SPANS if (high - low) / each <= 5), 0)
    step = step or 86400 * math.ceil((high - low) / 5 / 86400)
    form = "%H:%M:%S" if step < 60 else "%H:%M" if high - low < 86400 else "%d %b %H:%M"
    form = "%d %b" if step >= 86400 else form
    axis = Axis(low, high)
    marks = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    ticks = tuple((axis.at(each), f"{datetime.fromtimestamp(each, UTC):{form}}") for each in marks)
    return Axis(low, high, ticks)
