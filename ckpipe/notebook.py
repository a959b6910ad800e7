"""Tables for notebooks, and texts of a store for people.

A table has no colours and no script, so it fits light and dark themes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

_LONGEST = 200


def shown(value: object, most: int = _LONGEST) -> str:
    """Write a value that may be hostile: cut off, and without characters that do not print."""
    text = str(value)
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def names_text(names: Collection[str], most: int = 3) -> str:
    """Write the number of names and the first of them."""
    first = ", ".join(shown(name, 60) for name, _ in zip(names, range(most), strict=False))
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{len(names):,} ({first}{more})" if names else "0"


def html_table(
    title: str, rows: Iterable[Sequence[object]], headings: Sequence[str] = ("", "")
) -> str:
    """Return a table in HTML; the first cell of each row is its heading. All texts are escaped."""
    style = ' style="text-align:left"'

    def cells(row: Sequence[object]) -> str:
        first, *others = (escape(shown(each)) for each in row)
        return f'<th scope="row"{style}>{first}</th>' + "".join(
            f"<td{style}>{each}</td>" for each in others
        )

    head = "".join(f'<th scope="col"{style}>{escape(each)}</th>' for each in headings)
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    return (
        f"<table><caption{style}>{escape(shown(title))}</caption>"
        + (f"<thead><tr>{head}</tr></thead>" if any(headings) else "")
        + f"<tbody>{body}</tbody></table>"
    )
