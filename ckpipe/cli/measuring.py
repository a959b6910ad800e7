"""The command ``bench``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.table import Table
from rich.text import Text

from ckpipe.checkpoints.measuring import Advice, Measurements, Trial, advise, measure
from ckpipe.cli.running import OK, Url, serve
from ckpipe.cli.screen import Screen, size, table
from ckpipe.errors import UsageError
from ckpipe.settings_groups import Size
from ckpipe.stores.opening import Access, open_store


def bench(
    ctx: typer.Context,
    url: Url,
    lanes: Annotated[str, typer.Option(help="Numbers of lanes to try.")] = "1,4,8",
    blocks: Annotated[str, typer.Option(help="Sizes of blocks to try.")] = "4MiB,16MiB",
    object_size: Annotated[
        str, typer.Option("--size", help="The size of the object written for each.")
    ] = "256MiB",
) -> None:
    """Measures what this machine and a store can do, and says what to set.

    It writes and reads an object for each number of lanes and size of blocks, and removes it.
    """

    async def work(screen: Screen) -> int:
        sizes = (_bytes(blocks, "--blocks"), _bytes(object_size, "--size"))
        with screen.meter("measuring") as meter:
            trial = Trial(_numbers(lanes), sizes[0], sizes[1][0], meter.advance)
            meter.expect(trial.total_bytes)
            async with open_store(url, screen.settings, Access.CREATE) as backend:
                found = await measure(backend, trial)
        advice = advise(found)
        screen.result(
            {"url": url, **asdict(found), "advice": asdict(advice)},
            Text(
                f"copy {_gigabytes(found.copy)}, checksum {_gigabytes(found.checksum)} "
                f"on one thread; a small object takes {found.put_seconds * 1000:.1f} ms"
            ),
            _rates(found),
            Text(_beside(found)),
            Text(_sentences(advice)),
        )
        return OK

    serve(ctx, work)


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(each) for each in text.split(",")))
    except ValueError:
        raise UsageError(f"--lanes is a list of numbers such as 1,4,8, not {text!r}") from None


def _bytes(text: str, name: str) -> list[int]:
    try:
        found = [TypeAdapter(Size).validate_python(each.strip()) for each in text.split(",")]
    except ValidationError:
        raise UsageError(f"{name} is a size such as 16MiB, not {text!r}") from None
    return list(dict.fromkeys(found))


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _rates(found: Measurements) -> Table:
    rows = [
        (rate.lanes, size(rate.block_bytes), _gigabytes(rate.write), _gigabytes(rate.read))
        for rate in found.rates
    ]
    return table(("lanes", "block", "write", "read"), rows, "lanes", "block", "write", "read")


def _beside(found: Measurements) -> str:
    rate = "?" if found.write_beside is None else _gigabytes(found.write_beside)
    return f"beside a trainer bound to Python {rate} are written from a thread"


def _sentences(advice: Advice) -> str:
    return (
        f"{advice.bottleneck}.\nSet upload.lanes to {advice.upload_lanes}, load.lanes to "
        f"{advice.load_lanes}, staging.block_bytes to {size(advice.block_bytes)} and worker to "
        f"{advice.worker}."
    )
