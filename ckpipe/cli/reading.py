"""The commands that read data: ``verify``, ``diff``, ``cp``, ``import`` and ``export``.

Modules that need torch are imported when a command runs, so that no help waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

import typer
from anyio import to_thread
from rich.text import Text

from ckpipe.catalog.copy import CopySettings, copy_checkpoint
from ckpipe.catalog.inspect import data_bytes
from ckpipe.cli.running import (
    FOUND,
    OK,
    Expanded,
    MaybeStep,
    Url,
    files_text,
    serve,
    steps_of_root,
    stored_sizes,
    wanted,
)
from ckpipe.cli.screen import Meter, Screen, marks, visible
from ckpipe.errors import CheckpointIncomplete, CheckpointNotFound, CorruptCheckpoint, UsageError
from ckpipe.foreign.source import Place, open_place
from ckpipe.store.registry import Access, open_store
from ckpipe.types import CheckpointId, CheckpointInfo, Form, size_text


async def _each(
    screen: Screen,
    place: Place,
    meter: Meter,
    named: str | None,
    every: bool,
    find: Callable[[int | str | None], Awaitable[CheckpointInfo | None]],
    read: Callable[[Any, int], Awaitable[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Read the named checkpoint; with ``--all`` every complete one, the oldest first.

    Those that are deleted meanwhile are left out with a note. ``read`` gets the bytes that the
    meter expects already.
    """
    if not every:
        return [await read(await find(wanted(named)), 0)]
    if named is not None:
        raise UsageError("--all takes every checkpoint", hint="Leave the step out")
    infos = [each for each in reversed(await place.checkpoints()) if each.complete]
    sizes = [each or 0 for each in await stored_sizes(place.store, infos)]
    meter.expect(sum(sizes))
    done = []
    for info, size in zip(infos, sizes, strict=True):
        try:
            done.append(await read(info, size))
        except CheckpointIncomplete:
            screen.note(f"{info.id} was deleted meanwhile and is left out")
    return done


def _seconds_since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


def verify(
    ctx: typer.Context,
    url: Url,
    step: MaybeStep = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all complete checkpoints, the oldest first.")
    ] = False,
) -> None:
    """Read a whole checkpoint and check every byte. Exits with 1 if it is damaged.

    Files of other programs have no checksums; all else is checked.
    """
    from ckpipe.calls import verified  # needs torch

    async def work(screen: Screen) -> int:
        settings = screen.settings
        with screen.meter("verifying") as meter:
            async with open_place(url, settings, meter.advance) as place:

                async def check(info: CheckpointInfo | None, known: int) -> dict[str, Any]:
                    began = time.perf_counter()
                    data: dict[str, Any] = {"id": info and info.id, "step": info and info.step}
                    data["source"] = None if info else place.name
                    try:
                        async with place.opened(info) as opened:
                            meter.expect(data_bytes(opened.document) - known)
                            done = await verified(opened, settings)
                        data |= {"ok": True, "files": done.files, "bytes": done.bytes}
                        differences = opened.document.differences
                        data["differences"] = differences.count if differences else 0
                    except CorruptCheckpoint as error:
                        data |= {"ok": False, "files": 0, "bytes": 0}
                        data |= {"error": type(error).__name__, "message": str(error)}
                    return data | {"seconds": _seconds_since(began)}

                results = await _each(screen, place, meter, step, every, place.chosen, check)
        if not results:
            raise CheckpointNotFound("There is no complete checkpoint here")
        names = screen.names([each["id"] for each in results if each["id"]], full=not every)
        shown = (_verdict(each, names.get(each["id"], "")) for each in results)
        screen.result({"url": url, "results": results}, *shown)
        return OK if all(each["ok"] for each in results) else FOUND

    serve(ctx, work)


def _verdict(result: dict[str, Any], id: str) -> Text:
    what, name, unchecked = f"step {result['step']}", f" ({result['id']})", ""
    if result["source"]:
        what, name = result["source"], " (another program wrote it)"
        unchecked = ", no checksums to check,"
    elif id != result["id"]:
        what, name = f"step {id}", ""
    if result["ok"]:
        read = f"{size_text(result['bytes'])} in {files_text(result['files'])} read{unchecked}"
        name += f", {result['differences']} differing copies" if result["differences"] else ""
        return marks(f"ok       {what}: {read} in {result['seconds']:.1f} s{name}")
    return marks(f"damaged  {what}: {result['message']}{name}")


_SIDE = "A step or an id; - for the newest, or for the checkpoint of another program."


def diff(
    ctx: typer.Context,
    url: Url,
    first: Annotated[str, typer.Argument(metavar="A", help=_SIDE, autocompletion=steps_of_root)],
    second: Annotated[str, typer.Argument(metavar="B", help=_SIDE, autocompletion=steps_of_root)],
    other: Annotated[
        str | None, typer.Option("--in", metavar="URL", help="The URL of B, if it is another one.")
    ] = None,
    match: Annotated[
        list[str] | None, typer.Option(help="Only names that this glob matches; repeatable.")
    ] = None,
    structure: Annotated[
        bool, typer.Option("--structure", help="Compare no values of tensors; read no data.")
    ] = False,
    expanded: Expanded = False,
) -> None:
    """Compare two checkpoints: structure, inline values, and norms of differences of tensors.

    Exits with 1 if they differ.
    """

    from ckpipe.cli.diff import differences  # needs torch

    async def work(screen: Screen) -> int:
        urls, steps = (url, other or url), (wanted(first), wanted(second))
        return await differences(screen, urls, steps, match, structure=structure, expanded=expanded)

    serve(ctx, work)


TransformFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A TOML file of transforms.")
]
Source = Annotated[str, typer.Argument(metavar="SRC", help="The URL of the checkpoint.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="The target; created if missing.")]


def cp(
    ctx: typer.Context,
    source: Source,
    target: Target,
    step: MaybeStep = None,
    every: Annotated[
        bool, typer.Option("--all", help="Copy all complete checkpoints, the oldest first.")
    ] = False,
) -> None:
    """Copy a checkpoint to another store, verified; skip files that are there and whole.

    It is complete on the target or absent, even if copying is interrupted.
    """

    async def work(screen: Screen) -> int:
        settings = screen.settings
        with screen.meter("copying") as meter:
            how = CopySettings.of(settings, on_bytes=meter.advance)
            async with (
                open_place(source, settings) as origin,
                open_store(target, settings, Access.CREATE) as place,
            ):

                async def copy(info: CheckpointInfo, known: int) -> dict[str, Any]:
                    began = time.perf_counter()
                    async with origin.opened(info) as opened:
                        meter.expect(data_bytes(opened.document) - known)
                        done = await copy_checkpoint(origin.store, place, info.key, how)
                    return asdict(done) | {
                            "step": info.step, "seconds": _seconds_since(began)
                        }  # fmt: skip

                done = await _each(screen, origin, meter, step, every, origin.own, copy)
        screen.result(
            {"source": source, "target": target, "copied": done},
            *(Text(_copy_text(each)) for each in done),
            *([] if done else [Text("no complete checkpoints here")]),
        )
        return OK

    serve(ctx, work)


def _copy_text(done: dict[str, Any]) -> str:
    kept = done["files"] - done["copied_files"]
    there = f", {kept} of {done['files']} files were there" if kept else ""
    return (
        f"copied step {done['step']}: {size_text(done['copied_bytes'])} in {done['seconds']:.1f} s"
        f"{there} ({done['id']})"
    )


def import_(
    ctx: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A file or folder of another program, or a root.")
    ],
    target: Target,
    from_step: MaybeStep = None,
    *,
    step: Annotated[
        int | None, typer.Option(min=0, help="The step of the new checkpoint; else that of SRC.")
    ] = None,
    transform: TransformFile = None,
) -> None:
    """Take over a checkpoint of another program, or one of ckpipe with transforms.

    The new checkpoint is complete or absent, even if the import is interrupted.
    """
    from ckpipe.calls import imported  # needs torch
    from ckpipe.transforms.name_tables import read_file

    async def work(screen: Screen) -> int:
        began = time.perf_counter()
        changes = await to_thread.run_sync(read_file, transform) if transform else []
        with screen.meter("importing") as meter:
            info = await imported(
                source, target, screen.settings, wanted(from_step), step=step, transform=changes,
                on_read=meter.advance, expect=meter.expect,
            )  # fmt: skip
        data = {"source": source, "target": target, "seconds": _seconds_since(began)}
        data |= {name: getattr(info, name) for name in ("id", "step", "bytes")}
        size = size_text(info.bytes or 0)
        sentence = f"imported step {info.step}: {size} in {data['seconds']:.1f} s ({info.id})"
        screen.result(data, Text(sentence))
        return OK

    serve(ctx, work)


ExportTarget = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="The folder to write, or for torch a file such as x.pt; by default, and for -, "
        "<id>.<form> beside the checkpoint.",
        show_default=False,
    ),
]
ExportForm = Annotated[
    Form,
    typer.Option(
        help="One file for torch.load, safetensors for transformers, or a folder for "
        "torch.distributed.checkpoint."
    ),
]
Dtype = Annotated[
    Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"] | None,
    typer.Option(help="The dtype of all floating-point tensors."),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="A Python module to import first, which has classes of tensors; repeatable.",
    ),
]


def export(
    ctx: typer.Context,
    url: Url,
    target: ExportTarget = None,
    step: MaybeStep = None,
    *,
    form: ExportForm,
    part: Annotated[
        str | None, typer.Option(help="The label of the part to export; else export.part.")
    ] = None,
    dtype: Dtype = None,
    transform: TransformFile = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A file to copy beside the weights; repeatable."),
    ] = None,
    file_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The file of hf; else model.safetensors.")
    ] = None,
    max_shard: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The largest file, such as 2GB.")
    ] = None,
    expanded: Expanded = False,
    imports: Imports = None,
) -> None:
    """Write a checkpoint, verified, in a form that other programs load.

    No file there is ever replaced.
    """

    from ckpipe.convert.exports import export_url  # needs torch
    from ckpipe.transforms.name_tables import read_file

    content = {"part": part, "dtype": dtype, "max_shard_bytes": max_shard, "extra": extra}
    content["file_name"] = file_name
    given: dict[str, Any] = {name: each for name, each in content.items() if each is not None}

    async def work(screen: Screen) -> int:
        began = time.perf_counter()
        to = _target_of(url, target, step)
        for module in imports or ():
            await to_thread.run_sync(_import, module)
        if transform is not None:
            given["transform"] = await to_thread.run_sync(read_file, transform)
        settings = screen.settings.override(export=given)
        with screen.meter("exporting") as meter:
            done = await export_url(
                url, to, settings, form, wanted(step),
                expanded=expanded, on_read=meter.advance, expect=meter.expect,
            )  # fmt: skip
        data = asdict(done) | {"form": form, "seconds": _seconds_since(began)}
        what = f"{size_text(done.bytes)} in {files_text(len(done.files))}"
        name = url if done.step is None else f"step {done.step}"
        where = f"{done.url}/{done.files[0]}" if len(done.files) == 1 else done.url
        sentence = f"exported {name}: {what} to {where}"
        screen.result(data, Text(visible(sentence)))
        return OK

    serve(ctx, work)


def _target_of(url: str, target: str | None, step: str | None) -> str | None:
    """Return the target of an export; None for one beside the checkpoint.

    Raises:
        UsageError: If it is a step, and no step stands behind it.
    """
    if target is None or target == "-":
        return None
    if step is None and (isinstance(wanted(target), int) or CheckpointId.parse(target)):
        correct = f"ckpipe export {quote(url)} - {target}"
        raise UsageError(
            f"{target} is a step, and stands where the target stands",
            hint=f"Write the target first: {correct}, or ./{target} for a folder",
        )
    return target


def _import(module: str) -> None:
    try:
        import_module(module)
    except Exception as error:  # the module may raise anything
        raise UsageError(
            f"The module {module!r:.200} cannot be imported: {type(error).__name__}: {error}",
            hint="Install it for this Python, or set PYTHONPATH to the folder that has it",
        ) from error
