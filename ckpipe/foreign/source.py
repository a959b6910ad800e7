"""Find the format of a place, and describe the checkpoint there."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

from anyio import to_thread

from ckpipe.backend import Backend, ObjectInfo, without_secrets
from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.find import discover, pick, present, stat_or_none, top
from ckpipe.catalog.opened import Opened
from ckpipe.errors import (
    CheckpointNotFound,
    CkpipeError,
    MissingObject,
    ObjectNotFound,
    StoreError,
    UsageError,
    naming_refusals,
)
from ckpipe.foreign.files import LEGACY, MAX_METADATA_BYTES, TORCH_FILES, read_range
from ckpipe.format.manifest import ManifestDocument
from ckpipe.store.registry import Access, open_store
from ckpipe.store.retry import OnRead
from ckpipe.types import CheckpointInfo, first_of

if TYPE_CHECKING:
    from ckpipe.settings import Settings

logger = logging.getLogger("ckpipe")

ENTRY_POINT_GROUP = "ckpipe.sources"
"""The group of entry points in which installed packages offer sources; each names a class."""

_ARRAYS = {
    "TensorFlow or Keras": (".h5", ".keras", ".pb", ".index"),
    "Flax": (".msgpack",),
    "numpy": (".npz", ".npy"),
    "ONNX": (".onnx",),
    "pickle": (".pkl", ".pickle"),
}
"""The ends of the names of files that ckpipe does not open, by the library that reads them."""

_OWN_SOURCES = {
    "ckpipe.foreign.dcp:DcpSource": (),
    "ckpipe.foreign.safetensors:SafetensorsSource": (".safetensors",),
    "ckpipe.foreign.torch_zip:TorchSource": TORCH_FILES,
}
"""ckpipe's own sources in the order in which they are asked, named as packages name theirs, each
with the ends of the names of files that are a checkpoint by themselves."""

FILES = (".gguf", *chain(*_OWN_SOURCES.values(), *_ARRAYS.values()))
"""The ends of the names of files that are a checkpoint by themselves, also of refused ones."""


class Source(Protocol):
    """A format of another program, which ckpipe opens.

    A package offers one through an entry point of the group ``ckpipe.sources``: a class without
    arguments. It is asked after ckpipe's own sources, and before ckpipe refuses a format.
    """

    name: str
    """The name of the format."""

    def recognizes(self, listing: Sequence[ObjectInfo]) -> bool:
        """Tell whether a place has this format, by the files directly in it; nothing is read.

        Args:
            listing: The files of the folder; of a file only that one. If the place has an ending
                that ckpipe does not know, it is asked first with a file of this name and no size,
                to know whether the place may be a file.
        """
        ...

    async def describe(
        self, store: Backend, listing: Sequence[ObjectInfo], place: str
    ) -> ManifestDocument:
        """Describe the checkpoint, mostly by :func:`~ckpipe.sources.virtual_manifest`.

        Only metadata is read, in bounded memory, and nothing from a file may be run.

        Args:
            store: The store, with retries; its root is the folder, or that of the file.
            listing: As for :meth:`recognizes`.
            place: The place, for the document's ``source``.

        Raises:
            CorruptCheckpoint: If the files contradict themselves.
            StoreError: If the store failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A root of checkpoints, or a checkpoint that another program wrote.

    Args:
        store: The store, with retries; its root is the folder, or that of the file.
        name: The place, without secrets.
        file: The file; None for a folder.
    """

    store: Backend
    name: str
    file: ObjectInfo | None = None

    async def checkpoints(self) -> list[CheckpointInfo]:
        """List the checkpoints of ckpipe, the newest first."""
        return [] if self.file else await present(self.store, await discover(self.store))

    async def chosen(self, which: int | str | None) -> CheckpointInfo | None:
        """Find a checkpoint of ckpipe; None if another program may have written one here.

        Args:
            which: Its step or id; None for the newest complete one.

        Raises:
            CheckpointNotFound: If the named one is absent or incomplete, or all are incomplete.
            StoreError: If the store failed.
        """
        infos = await self.checkpoints()
        if which is not None:
            return pick(infos, which)
        newest = next((each for each in infos if each.complete), None)
        if infos and newest is None:
            raise CheckpointNotFound("There is no complete checkpoint here")
        return newest

    async def own(self, which: int | str | None) -> CheckpointInfo:
        """Find a checkpoint of ckpipe.

        Raises:
            CheckpointNotFound: As :meth:`chosen` does, and if there is none.
            StoreError: If the store failed.
        """
        info = await self.chosen(which)
        if info is None:
            raise CheckpointNotFound(
                f"There is no complete checkpoint of ckpipe in {self.name}",
                hint="ckpipe.import_checkpoint, or `ckpipe import`, takes over those of others",
            )
        return info

    async def listing(self) -> Sequence[ObjectInfo]:
        """List the files of the place that a source may recognize."""
        return [self.file] if self.file else (await self.store.children("")).objects

    async def described(self) -> ManifestDocument:
        """Describe the checkpoint of another program.

        Raises:
            UsageError: If the format is known and not opened.
            CheckpointNotFound: If no source recognizes the place.
            CorruptCheckpoint: If the checkpoint contradicts itself.
            StoreError: If the store failed.
        """
        listing = await self.listing()
        source: Source | None = await self.source(listing)
        gone = [] if self.file else await to_thread.run_sync(_dangling, self.name)
        gone = [each for each in gone if each.endswith((*FILES, ".index.json"))]
        if gone:  # a source may not take another file in place of one that it would prefer
            listing = [*listing, *(ObjectInfo(each, 1, datetime.now(UTC)) for each in gone)]
            source = await recognized(listing)
        if source is None:
            raise self._gone(gone)
        try:
            return await source.describe(self.store, listing, self.name)
        except (MissingObject, ObjectNotFound) as error:
            if error.key not in gone:
                raise
            raise self._gone(gone) from error

    async def source(self, listing: Sequence[ObjectInfo]) -> Source:
        """Find the source of the place, by its files.

        Raises:
            UsageError: If the format is known and not opened.
            CheckpointNotFound: If no source recognizes the place; tells the contents.
            StoreError: If the store failed.
        """
        source = await recognized(listing)
        if source is None and self.file is not None:
            head = await read_range(self.store, self.file, 0, min(self.file.size, _HEAD_BYTES))
            source = next((each for each in _own_sources() if each.name == _format_of(head)), None)
        if source is not None:
            return source
        if refused := _refused(listing):
            what, hint = refused
            raise UsageError(f"{self.name} is {what}; ckpipe does not open it", hint=hint)
        if (await top(self.store))[0] is not None:
            raise CheckpointNotFound(
                f"{self.name} is the root of ckpipe's own checkpoints, and no source",
                hint="Load it with ckpipe.load(url, state), or copy a checkpoint with `ckpipe cp`",
            )
        raise await self._not_found(listing)

    async def _not_found(self, listing: Sequence[ObjectInfo]) -> CkpipeError:
        names = [each.key for each in listing]
        if self.file is None:
            names += (await self.store.children("")).prefixes
        if gone := await to_thread.run_sync(_dangling, self.name):
            return self._gone(gone)
        where = f"There is no checkpoint in {self.name} that ckpipe opens"
        if found := contents(names, self.name):
            name, what, hint = found
            inside = (await self.store.children(name)).objects if name.endswith("/") else []
            short = [replace(each, key=each.key.removeprefix(name)) for each in inside]
            if refused := _refused(short):
                what, hint = f"{refused[0]} ({name})", refused[1]
            kind = CheckpointNotFound if self.file is None else UsageError
            return kind(f"{where}: {what} is there", hint=hint)
        return CheckpointNotFound(
            f"{where}; there are: {first_of(sorted(names), 8) or 'no files'}",
            hint="Name the root of a run (`ckpipe ls` lists its checkpoints), the folder with the "
            "files of weights, or one file",
        )

    def _gone(self, links: Sequence[str]) -> CheckpointNotFound:
        return CheckpointNotFound(
            f"There is no checkpoint in {self.name} that ckpipe opens: the files to which these "
            f"links lead are gone: {first_of(links, 8)}",
            hint="Download them again, such as with huggingface_hub.snapshot_download",
        )

    @asynccontextmanager
    async def opened(
        self, info: CheckpointInfo | None, *, lease: bool = True
    ) -> AsyncIterator[Opened]:
        """Open a checkpoint that :meth:`chosen` has found, or that of another program.

        Args:
            info: The checkpoint; None for that of another program.
            lease: Whether to hold a lease meanwhile.

        Raises:
            As :meth:`described` and :meth:`ckpipe.catalog.catalog.Catalog.opened` do.
        """
        if info is None:
            yield Opened(self.store, await self.described())
            return
        catalog = Catalog(self.store, read_only=not lease)
        with naming_refusals(step=info.step):
            async with catalog.opened(info.key) as opened:
                yield opened


@asynccontextmanager
async def open_place(
    url: str, settings: Settings, on_read: OnRead | None = None
) -> AsyncIterator[Place]:
    """Open the store of a root of checkpoints, or of a foreign checkpoint, to read it.

    Args:
        url: A path or URL: of a folder, or of a file that is a checkpoint by itself.
        settings: The options of backends, and the retry settings.
        on_read: Called as bytes are read.

    Raises:
        CheckpointNotFound: If there is no such folder, and the place may be a hub id.
        StoreError: If the store cannot be used, or has no such file.
    """
    await to_thread.run_sync(refuse_hub_id, url)
    if await to_thread.run_sync(names_file, url):
        root, name = split_file(url)
        async with open_store(root, settings, Access.READ, on_read) as store:
            info = await stat_or_none(store, name)
            if info is not None:
                yield Place(store, without_secrets(url), info)
                return
            inside = await store.children(f"{name}/")
            if await to_thread.run_sync(_is_dangling, url):
                raise StoreError(
                    f"{without_secrets(url)} is a link to a file that is gone",
                    hint="Download it again, such as with huggingface_hub.snapshot_download",
                )
            if not inside.objects and not inside.prefixes:
                raise StoreError(
                    f"There is no file or folder {without_secrets(url)}",
                    hint="Look for a mistake in the path",
                )
    async with open_store(url, settings, Access.READ, on_read) as store:
        yield Place(store, without_secrets(url))


def names_file(url: str) -> bool:
    """Tell whether a place may be a file that is a checkpoint by itself; blocking.

    If the name has an ending that ckpipe does not know, the first bytes of a local file tell, and
    sources of other packages are asked.
    """
    path = url.removeprefix("file://")
    if url.endswith(FILES):
        return True
    if os.path.isfile(path):  # opening a pipe would wait for its writer
        with suppress(OSError), open(path, "rb") as opened:
            if _format_of(opened.read(_HEAD_BYTES)):
                return True
    name = split_file(url)[1]
    file = ObjectInfo(name, 0, datetime.now(UTC))
    return bool(PurePosixPath(name).suffix) and any(
        each.recognizes([file]) for each in _installed_sources()
    )


_HEAD_BYTES = 1024


def _format_of(head: bytes) -> str:
    """Return the name of the source for a file of any name by its first bytes; empty if none."""
    if head.startswith(LEGACY) or (head.startswith(b"PK\3\4") and b"/data.pkl" in head):
        return "torch"
    length = int.from_bytes(head[:8], "little")
    return "safetensors" if head[8:9] == b"{" and length <= MAX_METADATA_BYTES else ""


def _is_dangling(path: str) -> bool:
    path = path.removeprefix("file://")
    return os.path.islink(path) and not os.path.exists(path)


def _dangling(folder: str) -> list[str]:
    """Return the names of links in a local folder that lead to no file."""
    folder = folder.removeprefix("file://")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [each for each in names if _is_dangling(os.path.join(folder, each))]


def split_file(url: str) -> tuple[str, str]:
    """Return the root in which a file lies, and its name."""
    root, slash, name = url.rpartition("/")
    return root or slash or ".", name


async def recognized(listing: Sequence[ObjectInfo]) -> Source | None:
    """Return the first source that recognizes the files of a place; None if none does.

    Only sources of other packages are asked for a format that ckpipe refuses.
    """
    if _refused(listing) is None:
        own = next((each for each in _own_sources() if each.recognizes(listing)), None)
        if own is not None:
            return own
    installed = await to_thread.run_sync(_installed_sources)
    return next((each for each in installed if each.recognizes(listing)), None)


def _own_sources() -> list[Source]:
    # Imported late, since these need torch, which a list of checkpoints does not.
    return [metadata.EntryPoint("", each, ENTRY_POINT_GROUP).load()() for each in _OWN_SOURCES]


def _installed_sources() -> list[Source]:
    """Return the sources of other packages; blocking, since it imports them.

    One that cannot be imported is left out with a warning: other formats can be opened without it.
    """
    found: list[Source] = []
    for each in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            found.append(each.load()())
        except Exception:
            logger.warning(
                "The source %s = %s cannot be used", each.name, each.value, exc_info=True
            )
    return found


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def refuse_hub_id(url: str) -> None:
    """Refuse the name of a model on the Hugging Face hub, a folder here; blocking."""
    if _HUB_ID.fullmatch(url) and not url.startswith(".") and not os.path.exists(url):
        raise CheckpointNotFound(
            f"There is no folder {url!r}, and if this is the id of a model on the Hugging Face "
            "hub, ckpipe downloads nothing from there",
            hint="Look for a mistake in the path, or pass the folder that "
            f"huggingface_hub.snapshot_download({url!r}) returns",
        )


_LINE = "Write ckpipe.load({path!r}, state), or pipeline.load(state, source={path!r})"
_CONVERT = "Read it with {library} and write the arrays with safetensors.numpy.save_file"

_CONTENTS = (
    (r"checkpoint-\d+/", "the output_dir of a Trainer of transformers", _LINE),
    (r"models--.+/|snapshots/", "a cache of the Hugging Face hub",
     "Write pipeline.load(state, source=huggingface_hub.snapshot_download({hub!r}))"),
    (r"snapshots/", "a model of the Hugging Face hub, with a folder for each revision",
     "Name one folder in {path!r} as source"),
    *((f"({models})/", "a pipeline of diffusers, with a folder for each model", _LINE)
      for models in ("transformer|unet|prior|decoder", r"text_encoder\w*|vae|controlnet")),
    (r"lightning_logs/|version_\d+/|checkpoints/", "a folder of Lightning's or another trainer",
     "Name the file or folder of one checkpoint in {path!r} as source"),
    (r"global_step\d+/", "a folder of DeepSpeed's checkpoints",
     "Run zero_to_fp32.py with --safe_serialization, and load the result"),
    (r"(iter|mp_rank)_\d+\w*/", "a folder of Megatron's checkpoints",
     "Convert one to Hugging Face's format with Megatron's own converter"),
    (r"consolidated\.(?!00)\d+\.pth", "a model in Meta's form, its tensors cut into several files",
     "Convert it with convert_llama_weights_to_hf of transformers, and load the result"),
    (r"consolidated\.00\.pth", "a model in Meta's form", _LINE),
    (r"(\D*[\W_])?\d+/", "a folder for each step", _LINE),
    (f".+({'|'.join(map(re.escape, TORCH_FILES))})", "a file of torch.save", _LINE),
    *((f".+({'|'.join(map(re.escape, ends))})", f"a file for {library}",
       _CONVERT.format(library=library)) for library, ends in _ARRAYS.items()),
    (r"config\.json", "the configuration of a model without its weights",
     "Download it again with huggingface_hub.snapshot_download"),
)  # fmt: skip
"""The contents of places that no source opens whole: a pattern of names of files and of folders,
which end with a slash, their description, and a hint."""


def contents(names: Sequence[str], place: str) -> tuple[str, str, str] | None:
    """Recognize the contents of a place that no source opens; return one, its kind and a hint.

    Args:
        names: The names of its files, and of its folders with a slash at the end.
        place: The place, for the hint.
    """
    for pattern, what, hint in _CONTENTS:
        if there := [name for name in names if re.fullmatch(pattern, name)]:
            numbers = {each: [int(n) for n in re.findall(r"\d+", each)] for each in there}
            newest = max(sorted(there), key=numbers.__getitem__)
            path = f"{place}/{newest}".rstrip("/")
            hub = re.search(r"models--([^/]+)", path)
            if hub is None and "{hub" in hint:  # a folder that is called like one of such a cache
                continue
            name = "" if hub is None else hub[1].replace("--", "/", 1)
            return newest, f"{what} ({newest})", hint.format(path=path, hub=name)
    return None


def _refused(listing: Sequence[ObjectInfo]) -> tuple[str, str] | None:
    """Return the format of a place that is known and not opened, and the way round."""
    names = {each.key for each in listing}
    for is_there, what, hint in (
        (
            "_METADATA" in names or "_CHECKPOINT_METADATA" in names or "manifest.ocdbt" in names,
            "an Orbax checkpoint, whose arrays only tensorstore reads",
            "Restore it with orbax.checkpoint, and write its arrays with "
            "safetensors.numpy.save_file",
        ),
        (
            "common.pt" in names and "metadata.json" in names,
            "a checkpoint of Megatron (torch_dist), whose names belong to its model code",
            "Convert it to Hugging Face's format with Megatron's own converter, or resave it with "
            "torch.distributed.checkpoint",
        ),
        (
            ".metadata" not in names and any(re.match(r"__\d+\.metadata", name) for name in names),
            "a folder of torch.distributed.checkpoint in which each rank has metadata of its own "
            "(use_collectives=False)",
            "Load it with torch.distributed.checkpoint on as many ranks, and save it with ckpipe",
        ),
        (
            ".metadata" not in names and any(name.endswith(".distcp") for name in names),
            "an incomplete folder of torch.distributed.checkpoint: .metadata, which is written "
            "last, is not there",
            "Take an older checkpoint, or copy the missing file",
        ),
        (
            "zero_to_fp32.py" in names
            or any(re.match(r"(mp|zero_pp)_rank_\d+|layer_\d+-model_", name) for name in names),
            "a checkpoint of DeepSpeed, whose tensors are flat partitions",
            "Run its zero_to_fp32.py with --safe_serialization, and load the result",
        ),
        (
            any(name.endswith(".gguf") for name in names)
            and not any(name.endswith(".safetensors") for name in names),
            "a GGUF file, whose tensors are quantized in blocks",
            "Load the model's safetensors files instead, or convert it with "
            "transformers.AutoModel.from_pretrained(folder, gguf_file=…)",
        ),
    ):
        if is_there:
            return what, hint
    return None
