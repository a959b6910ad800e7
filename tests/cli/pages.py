"""Runs to look at, and pages taken apart."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import torch

import ckpipe

HOSTILE = (
    '"><img src="https://example.org/x" onerror="alert(1)">',
    "</script></title></svg><script>alert(1)</script>",
    "\x1b[31mred\x00 \u202egnp.exe",
    "{{ 7 * 7 }}{% for a in b %}",
    "long" * 50_000,
)


class Page(html.parser.HTMLParser):
    """A page taken apart: elements, and what is written in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    @property
    def text(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.elements if attrs.get("class") == name]


def state_of(step: int) -> dict[str, Any]:
    """A small training state."""
    return {
        "model": {f"layers.{n}.w": torch.full((200,), 1.0 + n + step / 100) for n in range(3)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(200)}}, "param_groups": []},
        "loader": torch.arange(10),
        "rng": torch.arange(7),
    }


def killed_run(root: Path) -> Path:
    """Write a run whose first launch ended in a save, behind the step that the second resumed."""
    for first, steps in ((None, (10, 20, 30, 35)), (20, (30, 40))):
        with ckpipe.SyncPipeline(root) as pipeline:
            if first is not None:
                pipeline.load(step=first)
            for step in steps:
                metrics = {"loss": 9 / step, "accuracy": step / 100}
                info = pipeline.save(state_of(step), step=step, metrics=metrics).wait()
                if step == 35:
                    (root / f"{info.id}.json").unlink()  # as if it was killed before
    return root


def tree_of(root: Path) -> dict[str, tuple[int, int]]:
    """The sizes and times of all files below a folder."""
    found = {path: path.stat() for path in sorted(root.rglob("*"))}
    return {str(path): (facts.st_size, facts.st_mtime_ns) for path, facts in found.items()}
