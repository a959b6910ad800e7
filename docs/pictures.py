"""Draw the pictures of the documentation: ``make pictures``.

python docs/pictures.py [FOLDER]    draw all into docs/pictures, or into another folder

Diagrams are plain shapes. The pictures of the command line, the live line and the report show real
output: of the run that ``docs/demo_run.py`` writes, and of a save that is made here. Chromium takes
that of the report, driven by playwright. Each picture is one SVG for light and dark pages.
"""

from __future__ import annotations

import base64
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from io import BytesIO, StringIO
from pathlib import Path

import demo_run
from PIL import Image
from plots import SHOWN_WIDTH, STYLE
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH = 540
"""The width of a diagram in its own units; its text has 14."""
COLUMNS = 64
"""The width of the terminal, which can be read on a phone too."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "google-chrome"


class Sheet:
    """A diagram of boxes, words and lines."""

    def __init__(self, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{SHOWN_WIDTH}" height="{height * SHOWN_WIDTH // WIDTH}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}text{{font-size:14px;fill:var(--text)}}"
            ".mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px}"
            ".small{font-size:13px}.muted{fill:var(--muted)}.on{fill:var(--ground)}"
            ".bold{font-weight:600}</style>"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="var(--muted)"/>'
            "</marker></defs>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="var(--ground)"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Write words; ``kind`` names classes."""
        self._parts.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, wide: float, high: float, words: str = "", fill: str = "panel",
        kind: str = "",
    ) -> None:  # fmt: skip
        """Draw a box with lines of words in its middle."""
        outline = ' stroke="var(--rule)"' if fill in ("panel", "ground") else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="4" '
            f'fill="var(--{fill})"{outline}/>'
        )
        lines = words.split("\n") if words else []
        ink = kind if fill in ("panel", "ground") else f"{kind} on"
        for number, line in enumerate(lines):
            middle = y + high / 2 + 5 + 18 * (number - (len(lines) - 1) / 2)
            self.text(x + wide / 2, middle, line, ink, "middle")

    def line(self, *points: tuple[float, float], dashed: bool = False, tip: bool = True) -> None:
        """Draw a line through points, with a tip at its end."""
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        more = ' stroke-dasharray="4 4"' if dashed else ""
        more += ' marker-end="url(#tip)"' if tip else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="var(--muted)" stroke-width="1.4"{more}/>'
        )

    def svg(self) -> str:
        """Return the finished picture."""
        return "\n".join([*self._parts, "</svg>\n"])


def save() -> Sheet:
    """Draw what runs at which time during a save, and what is durable when."""
    sheet = Sheet(296, "A save: copied while training waits, written while training continues")
    for x in (250, 529):
        sheet.line((x, 14), (x, 236), dashed=True, tip=False)
    lanes = ("training", "host memory", "background", "store")
    for number, lane in enumerate(lanes):
        sheet.text(14, 42 + 52 * number, lane, "muted")
    sheet.box(108, 20, 48, 34, "step", kind="small")
    sheet.box(158, 20, 92, 34, "save()", "ours", "bold")
    for x in (252, 302, 352, 402, 452):
        sheet.box(x, 20, 48, 34, "step", kind="small")
    sheet.box(502, 20, 26, 34, "…", kind="small")
    sheet.box(170, 72, 80, 34, "copy", "ours")
    sheet.text(258, 94, "blocks: the image of the file", "small")
    sheet.box(186, 124, 216, 34, "checksum and write blocks", "good")
    sheet.box(186, 176, 216, 34, "data files")
    sheet.box(404, 176, 72, 34, "manifest", kind="small")
    sheet.box(478, 176, 50, 34, "index", "good", "small")
    sheet.text(250, 252, "save() returns:", "bold", "middle")
    sheet.text(250, 272, "you may change the state", "small", "middle")
    sheet.text(529, 252, "handle.wait() returns:", "bold", "end")
    sheet.text(529, 272, "complete and durable", "small", "end")
    return sheet


def checkpoint() -> Sheet:
    """Draw the objects of a checkpoint in the order in which they become durable."""
    sheet = Sheet(330, "What lies in a checkpoint: data files, manifests, and the index at last")
    sheet.text(14, 28, "checkpoints/run-17/", "mono bold")
    rows = (
        ("1", "step-000000000500.<launch>.0/rank-00000.safetensors",
         "the tensors of a rank, in blocks with checksums; one file a rank", "ours"),
        ("2", "step-000000000500.<launch>.0/m/0/000/rank-00000.json",
         "the manifest of a rank, where there are several", "ours"),
        ("3", "step-000000000500.<launch>.0.json",
         "the index, created once and last: now the checkpoint is complete", "good"),
    )  # fmt: skip
    for number, (order, key, words, color) in enumerate(rows):
        y = 44 + 68 * number
        sheet.box(14, y, 514, 56)
        sheet.box(14, y, 30, 56, order, color, "bold")
        sheet.text(56, y + 23, key, "mono")
        sheet.text(56, y + 44, words, "small muted")
    sheet.text(14, 272, ".ckpipe/", "mono bold")
    sheet.text(94, 272, "beside them, not needed for a load", "small muted")
    for x, key, words in ((14, "digests/", "metrics for lists"), (188, "pins/", "protected ones"),
                          (362, "deleted/", "half removed ones")):  # fmt: skip
        sheet.box(x, 282, 166, 38)
        sheet.text(x + 10, 298, key, "mono")
        sheet.text(x + 10, 314, words, "small muted")
    return sheet


def ranks() -> Sheet:
    """Draw a save of four ranks and a load by two."""
    sheet = Sheet(330, "Four ranks save together without a collective, and two load")
    sheet.text(14, 30, "save with 4 ranks: each writes its own part", "bold")
    for rank in range(4):
        x = 14 + 130 * rank
        sheet.box(x, 44, 124, 32, f"rank {rank}", "ours", "bold")
        sheet.line((x + 62, 78), (x + 62, 98))
        sheet.box(x, 100, 124, 44, f"data files\nmanifest {rank}", kind="small")
        sheet.line((x + 62, 146), (x + 62, 166))
    sheet.box(14, 168, 514, 34, "index: the rank that commits last creates it", "good")
    sheet.line((140, 204), (140, 226))
    sheet.line((402, 204), (402, 226))
    for rank in range(2):
        x = 14 + 262 * rank
        sheet.box(
            x, 228, 252, 44, f"rank {rank} of 2\nreads only the ranges it needs", kind="small"
        )
    sheet.text(14, 300, "load with 2 ranks: no collective, no copy of the whole state", "bold")
    sheet.text(14, 318, "A rank that dies leaves the older checkpoints as they are.", "small muted")
    return sheet


def preemption() -> Sheet:
    """Draw the last save between a signal and the end of a program."""
    sheet = Sheet(232, "A signal, the step in progress, the last save, and the resume")
    for y, lane in ((42, "scheduler"), (102, "training"), (162, "store")):
        sheet.text(14, y, lane, "muted")
    sheet.box(150, 20, 74, 34, "SIGTERM", "bad", "bold small")
    sheet.box(342, 20, 74, 34, "SIGKILL", kind="small")
    sheet.text(283, 32, "grace_seconds", "mono", "middle")
    sheet.line((226, 40), (338, 40))
    sheet.box(96, 80, 54, 34, "step", kind="small")
    sheet.box(152, 80, 54, 34, "step", kind="small")
    sheet.box(208, 80, 62, 34, "save()", "ours", "bold small")
    sheet.box(272, 80, 50, 34, "exit", kind="small")
    sheet.box(424, 80, 50, 34, "load", "ours", "bold small")
    sheet.box(476, 80, 52, 34, "step", kind="small")
    sheet.line((187, 56), (187, 78))
    sheet.line((239, 116), (239, 138))
    sheet.box(208, 140, 112, 34, "last step", "good")
    sheet.line((322, 157), (449, 157), (449, 116))
    sheet.text(96, 204, "should_save() is true after the step in progress;", "small muted")
    sheet.text(96, 222, "leaving the pipeline waits until that step is durable.", "small muted")
    return sheet


def worker() -> Sheet:
    """Draw the work of the trainer and of its worker process."""
    sheet = Sheet(236, "The trainer copies; the worker process uploads, also if the trainer dies")
    sheet.box(14, 40, 150, 112)
    sheet.text(89, 30, "trainer", "bold", "middle")
    sheet.text(89, 70, "lock, plan", "", "middle")
    sheet.box(34, 84, 110, 32, "copy", "ours", "bold")
    sheet.text(89, 138, "next steps", "muted", "middle")
    sheet.box(206, 40, 110, 112, fill="ground")
    sheet.text(261, 30, "shared memory", "bold", "middle")
    for row in range(3):
        for column in range(3):
            sheet.box(216 + 31 * column, 52 + 31 * row, 27, 27, fill="ours")
    sheet.box(358, 40, 170, 112)
    sheet.text(443, 30, "worker process", "bold", "middle")
    for number, words in enumerate(("checksums", "upload", "commit", "retention")):
        sheet.text(443, 66 + 23 * number, words, "", "middle")
    sheet.line((146, 100), (204, 100))
    sheet.line((318, 100), (356, 100))
    sheet.line((443, 154), (443, 178))
    sheet.box(358, 180, 170, 34, "store", "good")
    sheet.text(14, 190, "The trainer is killed after the copy:", "small")
    sheet.text(14, 210, "the worker still commits the checkpoint.", "small")
    return sheet


def incremental() -> Sheet:
    """Draw the files that three saves write, and the one that the third links."""
    sheet = Sheet(252, "Three checkpoints: the third save links the file that did not change")
    for number, words in enumerate(("writes all", "digests what rests", "links what rests")):
        x = 14 + 180 * number
        sheet.text(x + 77, 28, f"save {number + 1}", "bold", "middle")
        sheet.text(x + 77, 48, words, "small muted", "middle")
        sheet.box(x, 60, 154, 130)
        sheet.box(x + 14, 74, 126, 46, "base", "good" if number == 2 else "ours")
        sheet.box(x + 14, 130, 126, 46, "adapters", "ours")
    sheet.line((386, 97), (338, 97))
    sheet.box(14, 208, 18, 18, fill="ours")
    sheet.text(40, 222, "written", "small")
    sheet.box(112, 208, 18, 18, fill="good")
    sheet.text(138, 222, "linked: the file of the earlier checkpoint", "small")
    sheet.text(14, 244, "Each checkpoint is whole by itself.", "small muted")
    return sheet


def transforms() -> Sheet:
    """Draw three transforms between a checkpoint and a model."""
    sheet = Sheet(
        262, "Transforms give the entries of a checkpoint the names and shapes of a model"
    )
    for x, words in ((14, "checkpoint"), (210, "transform"), (344, "your model")):
        sheet.text(x, 28, words, "bold")
    rows = (
        ("Rename", ("encoder.0.weight",), ("backbone.0.weight",)),
        ("Split", ("attn.qkv.weight",), ("attn.q.weight", "attn.k.weight", "attn.v.weight")),
        ("Cast", ("head.weight float32",), ("head.weight bfloat16",)),
    )
    y = 44
    for name, old, new in rows:
        high = 28 * len(new) + 8
        middle = y + high / 2
        sheet.box(14, middle - 16, 160, 32, old[0], kind="mono")
        sheet.line((176, middle), (206, middle))
        sheet.box(210, middle - 16, 84, 32, name, "ours", "bold")
        for number, each in enumerate(new):
            at = y + 18 + 28 * number
            sheet.line((296, middle), (340, at))
            sheet.box(344, at - 12, 184, 24, each, kind="mono")
        y += high + 12
    sheet.text(14, y + 12, "Each byte goes straight from the store to its place.", "small muted")
    return sheet


DIAGRAMS: tuple[Callable[[], Sheet], ...] = (
    save, checkpoint, ranks, preemption, worker, incremental, transforms,
)  # fmt: skip


TERMINAL = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 WIDE HIGH" width="SHOWN"
 role="img"><title>TITLE</title><style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas,
 "DejaVu Sans Mono", monospace; font-size: {char_height}px; }}
{styles}</style><defs>{lines}</defs><rect width="WIDE" height="HIGH" rx="12" fill="#1b1f27"/>
<g transform="translate(14, 12)" class="{unique_id}-matrix">{backgrounds}{matrix}</g></svg>
"""
"""A terminal without a window around it, in the fonts of the reader."""


def terminal(lines: Sequence[str], title: str, columns: int = COLUMNS) -> str:
    """Draw lines as a terminal shows them; they may have escape sequences."""
    console = Console(width=columns, record=True, file=StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), overflow="crop", no_wrap=True)
    wide, high = columns * 12.2 + 28, len(lines) * 24.4 + 28
    frame = TERMINAL.replace("WIDE", f"{wide:.0f}").replace("HIGH", f"{high:.0f}")
    frame = frame.replace("SHOWN", str(SHOWN_WIDTH)).replace("TITLE", escape(title))
    return console.export_svg(code_format=frame, unique_id="shell")


CKPIPE = (sys.executable, "-c", "from ckpipe.cli import main; main()")


def shown_by(command: Sequence[str], folder: Path, columns: int = COLUMNS) -> str:
    """Return what a program in a folder writes to a terminal, with its escape sequences."""
    master, slave = pty.openpty()
    given = {**os.environ, "COLUMNS": str(columns), "LINES": "40", "TERM": "xterm-256color"}
    given["COLORTERM"] = "truecolor"
    process = subprocess.Popen(
        command, stdout=slave, stderr=slave, stdin=slave, env=given, cwd=folder
    )
    os.close(slave)
    parts = []
    try:
        while part := os.read(master, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    os.close(master)
    if process.wait():
        raise SystemExit(f"{command} ended with {process.returncode}")
    return b"".join(parts).decode()


LIVE_COLUMNS = 88
LIVE = """
import sys, tempfile, time, torch, ckpipe
from ckpipe.live_line import LiveLine
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as root:
    state = {"weights": [torch.randn(16, 2**20) for _ in range(20)]}
    with ckpipe.SyncPipeline(root) as pipeline, LiveLine() as line:
        pipeline.events.add(line)
        pipeline.save(state, step=500).wait()
        time.sleep(0.5)  # the line is drawn eight times a second
"""


def live_line(folder: Path) -> str:
    """Draw the live line in the middle of a real save and after it."""
    output = shown_by([sys.executable, "-c", LIVE, str(folder)], folder, LIVE_COLUMNS)
    drawn = re.split(r"\r?\n|\r|\x1b\[2K|\x1b\[\?25[lh]|\x1b\[1A", output)
    writing = [each for each in drawn if " left" in each]
    last = [each for each in drawn if "saved step" in each]
    if not writing or not last:
        raise SystemExit(f"the live line was not seen: {output!r}")
    lines = [writing[len(writing) // 2], last[-1]]
    return terminal(lines, "The live line during and after a save", LIVE_COLUMNS)


def ls(run: Path) -> str:
    """Draw the list of the checkpoints of the demo run."""
    output = shown_by([*CKPIPE, "ls", run.name], run.parent)
    lines = [f"$ ckpipe ls {run.name}", *output.splitlines()]
    return terminal(lines, "The list of a run that was killed twice")


def page(file: Path, width: int, height: int, title: str) -> str:
    """Put what a browser shows of a page into an SVG, once in light and once in dark colours."""
    from playwright.sync_api import sync_playwright

    images = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            view = browser.new_page(
                viewport={"width": width, "height": height}, device_scale_factor=2,
                color_scheme=scheme,
            )  # fmt: skip
            view.goto(file.as_uri())
            shot, small = Image.open(BytesIO(view.screenshot())), BytesIO()
            shot.convert("RGB").quantize(64).save(small, "PNG", optimize=True)
            data = base64.b64encode(small.getvalue()).decode()
            images.append(
                f'<image class="{scheme}" width="{width}" height="{height}" '
                f'href="data:image/png;base64,{data}"/>'
            )
        browser.close()
    shown = min(SHOWN_WIDTH, width)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{shown}" '
        f'height="{height * shown // width}" role="img"><title>{escape(title)}</title>'
        "<style>.dark{display:none}@media (prefers-color-scheme:dark){.dark{display:inline}"
        f".light{{display:none}}}}</style>{''.join(images)}</svg>\n"
    )


def report(run: Path) -> str:
    """Draw the head of the report of the demo run."""
    html = run.parent / "report.html"
    shown_by([*CKPIPE, "report", run.name, "--html", str(html)], run.parent)
    return page(html, 640, 745, "The report of a run that was killed twice")


def main() -> None:
    """Draw all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, svg: str) -> None:
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")

    for diagram in DIAGRAMS:
        write(diagram.__name__, diagram().svg())
    with tempfile.TemporaryDirectory() as made:
        run = demo_run.make(Path(made) / "run-17")
        write("ls", ls(run))
        write("live_line", live_line(Path(made)))
        write("report", report(run))


if __name__ == "__main__":
    main()
