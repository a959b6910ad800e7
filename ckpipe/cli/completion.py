"""Complete the steps and ids of a root for a shell; typer completes all else by itself."""

from __future__ import annotations

import logging
import os
import re
import signal
from contextlib import suppress

import anyio
import typer

from ckpipe.catalog.find import DELETING, list_root, list_summaries, read_summary
from ckpipe.settings import Settings
from ckpipe.store.registry import Access, open_store, scheme_of

_LONGEST_SECONDS = 3
_DESCRIBED = 30
"""The most checkpoints whose metrics are read."""


def steps(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the steps of the root that a command line names, or its ids, with help for each.

    A root in a bucket has none: no request goes over a network because a key is pressed. Errors
    are silent, and a root that does not answer ends the process after some seconds.
    """
    logging.disable()
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.alarm(_LONGEST_SECONDS)
    given = ctx.params
    of_b = given.get("other") if given.get("first") else None
    root = os.path.expandvars(of_b or given.get("url") or given.get("source") or "")
    found: dict[str, str] = {}
    with suppress(Exception):
        if root and scheme_of(root) == "file":
            found = anyio.run(_described, os.path.expanduser(root), incomplete.startswith("s"))
    return [*found.items()]


async def _described(root: str, as_ids: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    async with open_store(root, Settings(), Access.READ) as store:
        stored = await list_summaries(store)
        for number, info in enumerate((await list_root(store)).infos()):
            name = info.id if as_ids else str(info.step)
            if name in found or info.reason == DELETING or not (info.complete or as_ids):
                continue
            texts = ["incomplete" if info.saved_at is None else f"{info.saved_at:%Y-%m-%d %H.%M}"]
            if number < _DESCRIBED and info.complete:
                summary = await read_summary(store, info.key, stored)
                metrics = {} if summary is None else summary.metrics
                texts += [f"{metric}={value:.4g}" for metric, value in metrics.items()]
            # A shell evaluates the text, which may come from a hostile store.
            found[name] = re.sub(r"[^\w .=+-]", "?", " ".join(texts)[:100], flags=re.ASCII)
    return found
