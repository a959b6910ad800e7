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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpipe.errors import UsageError
from ckpipe.notebook import shown
from ckpipe.types import age_text, first_of, size_text
from ckpipe.version import install_line

if TYPE_CHECKING:
    from jinja2 import Environment


@functools.cache
def templates() -> Environment:
    """Return the templates of this package.

    Raises:
        UsageError: If jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    except ModuleNotFoundError as error:
        raise UsageError("A page needs jinja2", hint=install_line("cli")) from error
    made = Environment(
        loader=PackageLoader("ckpipe.pages"), autoescape=select_autoescape(),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"short": shown, "size": size_text, "age": age_text, "number": number}
    made.filters |= {"when": when, "first_of": first_of, "log": math.log}
    return made


def render(template: str, **data: Any) -> str:
    """Render a template of this package."""
    return templates().get_template(template).render(data)


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


def number(value: float) -> str:
    """Write a number for people; NaN and infinities by their names."""
    return "NaN" if math.isnan(value) else f"{value:.4g}".replace("inf", "∞")


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
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()

    def at(self, value: float) -> float:
        """Return the position of a number in percent; it may lie outside."""
        width = self.high - self.low
        return round(100 * (value - self.low) / width, 2) if width > 0 else 50.0


def number_axis(values: Sequence[float], about: int = 5, digits: int = 6) -> Axis:
    """Make an axis for finite numbers, with about so many ticks at round numbers."""
    axis = Axis(min(values, default=0.0), max(values, default=1.0))
    rough = (axis.high - axis.low) / about
    power = 10.0 ** math.floor(math.log10(rough)) if 0 < rough < math.inf else 0.0
    if not power:
        return replace(axis, ticks=[(axis.at(axis.low), f"{axis.low:.{digits}g}")])
    step = next((each * power for each in (1, 2, 5) if each * power >= rough), 10 * power)
    marks = [
        step * each for each in range(math.ceil(axis.low / step), math.floor(axis.high / step) + 1)
    ]
    return replace(axis, ticks=[(axis.at(each), f"{each:.{digits}g}") for each in marks])


_SPANS = (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800)


def time_axis(times: Sequence[datetime]) -> Axis:
    """Make an axis of times, in seconds since 1970."""
    low, high = min(times).timestamp(), max(times).timestamp()
    axis = Axis(low, max(high, low + 1))
    span = axis.high - axis.low
    step = (
        next((each for each in _SPANS if span <= 5 * each), 0) or math.ceil(span / 432000) * 86400
    )
    form = "%H:%M:%S" if step < 60 else "%H:%M" if span < 86400 else "%d %b %H:%M"
    form = "%d %b" if step >= 86400 else form
    marks = range(math.ceil(axis.low / step) * step, math.floor(axis.high) + 1, step)
    texts = [f"{datetime.fromtimestamp(each, UTC):{form}}" for each in marks]
    return replace(axis, ticks=[*zip(map(axis.at, marks), texts, strict=True)])
