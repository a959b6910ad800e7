"""What programs and plug-ins lean on: names, signatures, settings, errors."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import ckpipe
from ckpipe import backend, errors, sources
from tests.support.command_line import forked_anew
from tests.support.sampling import sample

NAMES = """
    Backend Batches Cast CheckpointDescription CheckpointInfo Children CkpipeError CopyResult
    DifferingCopy Drop ExportResult Fuse GlobalPlanner KeepBest KeepEvery KeepIf KeepLast
    KeepWithin LoadReport LoadResult LocalPlanner ObjectInfo Only Pipeline Planner Progress
    PutMode Rearrange Rename Report RngState
    SaveHandle SaveReport Settings Split Stack StateLock Statistics SyncPipeline SyncSaveHandle
    TensorDescription Unstack Upload UploadLimits ValueDescription VerifyResult __version__ copy
    export import_checkpoint inspect load name_table register_backend register_type
    register_wrapper report verify
"""

MODULES = ["distributed", "errors", "events", "planning", "preemption", "testing"]

BACKEND_NAMES = """
    Backend Children ObjectInfo ObjectReader PutMode Upload UploadLimits check_key check_prefix
    for_each run_in_thread truncated without_secrets
"""

SOURCES_NAMES = """
    Extent ForeignTensor Source check_named read_metadata read_range virtual_manifest
"""

_OPEN = """(
    self, url: str | os.PathLike[str] | None = None, *, guard: Guarded = None,
    state_lock: StateLock | None = None, settings: Settings | None = None,
    **fields: Unpack[PipelineFields]
) -> None"""
_SAVE = """(
    self, state: Any, step: SupportsIndex | None = None, *,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    until: Literal['captured', 'staged', 'committed'] = 'staged',
    final: bool = False, export: Literal['torch', 'hf', 'dcp'] | None = None,
    include: Sequence[str] | None = None, exclude: Sequence[str] | None = None,
    replicated: Sequence[str] | None = None
) -> """
_PIPELINE = {
    "__init__": _OPEN,
    "load": """(
        self, into: Any = None, step: Which | None = None, *,
        include: Sequence[str] | None = None, exclude: Sequence[str] | None = None,
        strict: bool | Literal['shapes'] = True, cast: bool = False,
        optimizer_class: Literal['same', 'any'] = 'same', fallback: bool = False,
        without_nan: bool = False, per_rank: PerRankPolicy | None = None,
        pickle: Literal['refuse', 'allow'] | None = None,
        transform: Sequence[Transform] = (),
        allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = (),
        device: str | torch.device | None = None,
        source: str | os.PathLike[str] | None = None
    ) -> LoadResult | None""",
    "best": """(
        self, metric: str, *, mode: Literal['min', 'max'] = 'min'
    ) -> CheckpointInfo | None""",
    "delete": "(self, step: Which, *, force: bool = False) -> None",
    "guard": "(self, *optimizers: Optimizer) -> None",
    "choose": """(
        self, step: Which | None = None, *, name: str | None = None
    ) -> CheckpointInfo | None""",
    "latest": "(self) -> CheckpointInfo | None",
    "read_boxes": """(
        self, step: Which, boxes: Iterable[tuple[str, Sequence[int], torch.Tensor]]
    ) -> None""",
    "pin": "(self, step: Which) -> None",
    "preempt": "(self) -> None",
    "preempted": "property -> bool",
    "prune": "(self, *, dry_run: bool = False) -> Decision",
    "trim": "(self) -> int",
    "sweep": "(self, *, dry_run: bool = False) -> SweepReport",
    "steps": "(self, *, metadata: bool = False) -> list[CheckpointInfo]",
    "on_committed": "(self, hook: Hook[RankCommitted]) -> Hook[RankCommitted]",
    "on_complete": "(self, hook: Hook[Completed]) -> Hook[Completed]",
    "on_failed": "(self, hook: Hook[SaveFailed]) -> Hook[SaveFailed]",
    "on_staged": "(self, hook: Hook[Staged]) -> Hook[Staged]",
    "should_save": "(self, step: SupportsIndex, *, last: SupportsIndex | None = None) -> bool",
    "statistics": "(self) -> Statistics",
    "swapped": """(
        self, tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]
    ) -> AbstractContextManager[None]""",
    "unpin": "(self, step: Which) -> None",
    "verify": "(self, step: Which) -> VerifyResult",
    "events": "property -> EventBus",
    "lock": "property -> StateLock",
    "settings": "property -> Settings",
    "url": "property -> str",
}
_HANDLE = {
    "cancel": "(self) -> None",
    "id": "property -> str",
    "report": "property -> SaveReport",
    "status": "property -> SaveStatus",
    "step": "property -> int",
}
SIGNATURES: dict[str, dict[str, str]] = {
    "Pipeline": _PIPELINE
    | {
        "__aenter__": "(self) -> Self",
        "__enter__": "(self) -> NoReturn",
        "open": "(self) -> Self",
        "aclose": "(self) -> None",
        "save": _SAVE + "SaveHandle",
    },
    "SyncPipeline": _PIPELINE
    | {
        "__enter__": "(self) -> Self",
        "__aenter__": "(self) -> NoReturn",
        "open": "(self) -> Self",
        "close": "(self) -> None",
        "save": _SAVE + "SyncSaveHandle",
    },
    "SaveHandle": _HANDLE
    | {
        "__await__": "(self) -> Generator[Any, Any, CheckpointInfo]",
        "committed": "(self) -> CheckpointInfo",
        "complete": "(self, timeout: float | None = None) -> CheckpointInfo",
        "captured": "(self) -> None",
        "staged": "(self) -> None",
        "staged_state": "(self) -> AsyncIterator[Any]",
    },
    "SyncSaveHandle": _HANDLE
    | {
        "wait": "(self, timeout: float | None = None) -> CheckpointInfo",
        "wait_complete": "(self, timeout: float | None = None) -> CheckpointInfo",
        "staged_state": "(self) -> Iterator[Any]",
        "wait_captured": "(self, timeout: float | None = None) -> None",
        "wait_staged": "(self, timeout: float | None = None) -> None",
    },
    "Backend": {
        "__aenter__": "(self) -> Self",
        "can_link": "False",
        "children": "(self, prefix: str = '') -> Children",
        "delete": "(self, keys: Iterable[str]) -> None",
        "get": "(self, key: str, *, max_bytes: int) -> bytes",
        "limits": "UploadLimits(min_block_bytes=1, max_blocks=None, alignment=1, "
        "max_link_bytes=None)",
        "link": "(self, source: str, target: str) -> None",
        "list": "(self, prefix: str = '') -> AsyncIterator[ObjectInfo]",
        "open_object": "(self, key: str) -> ObjectReader | None",
        "open_upload": "(self, key: str, *, size: int, block_bytes: int) -> Upload",
        "prefers_worker": "False",
        "put": "(self, key: str, data: bytes, mode: PutMode) -> None",
        "put_volatile": "(self, key: str, data: bytes) -> None",
        "read_into": "(self, key: str, offset: int, buffer: memoryview) -> None",
        "remove_stale_uploads": "(self, prefix: str, *, before: datetime) -> int",
        "stat": "(self, key: str) -> ObjectInfo",
    },
    "Upload": {
        "abort": "(self) -> None",
        "complete": "(self) -> None",
        "landed": "(self) -> bool | None",
        "most_blocks": "1",
        "takes_checksums": "False",
        "write": "(self, offset: int, data: memoryview) -> None",
        "write_all": "(self, blocks: Sequence[tuple[int, memoryview]]) -> None",
        "write_summed": "(self, offset: int, data: memoryview, checksum: int) -> None",
    },
    "Planner": {"plan": "(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan"},
    "GlobalPlanner": {
        "__init__": """(
            self, store: Any = None, *, replicated: Replicated = 'auto',
            timeout_seconds: float = 60.0
        ) -> None""",
        "plan": "(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan",
        "plan_save": """(
            self, captured: Captured, *, save: str, rank: int, world_size: int
        ) -> RankPlan""",
        "prepare": """(
            self, *, rank: int, world_size: int, max_file_bytes: int | None = None
        ) -> None""",
    },
}
FUNCTIONS = {
    "register_backend": "(scheme: str, factory: BackendFactory) -> None",
    "register_type": """(
        cls: type[T], *, to_state: Callable[[T], Any], from_state: Callable[[Any], T],
        name: str | None = None
    ) -> None""",
    "register_wrapper": """(
        cls: type[torch.Tensor], *, cut: Cut | None = None, resize: Resize | None = None
    ) -> None""",
}
SETTINGS = """
    url attempt_id solo meeting_timeout_seconds incomplete_after_seconds
    incomplete_in_a_row final_format export.part export.dtype export.transform export.extra
    export.file_name export.max_shard_bytes
    save_every_steps save_every_seconds look_every_seconds nan.check nan.ignore
    replicas.mode replicas.share on_busy on_error
    drain_timeout_seconds per_rank pickle keep_reports read_only initial resume
    switch_interval_seconds
    staging.bytes staging.block_bytes staging.pinned staging.overlap
    incremental.enabled incremental.full_every
    upload.lanes upload.retries upload.backoff_seconds upload.backoff_max_seconds
    upload.attempt_timeout_seconds upload.deadline_seconds
    load.lanes load.agreement_timeout_seconds lock.timeout_seconds lock.max_step_wait_seconds
    plan.planner plan.timeout_seconds plan.replicated
    retention.keep_last retention.lines retention.rules retention.sweep_after_seconds
    preemption.enabled preemption.signals preemption.grace_seconds backends
    worker.mode worker.survive worker.niceness worker.hang_seconds
    worker.stop_seconds worker.resume_wait_seconds worker.log_dir
"""
_SPECIAL = ("__init__", "__aenter__", "__enter__", "__await__")


def normal(text: str) -> str:
    """One line, without the marks of an annotation that is text."""
    text = re.sub(r"""(?<=: )'([^']*)'|(?<=-> )'([^']*)'""", r"\1\2", text)
    text = re.sub(r'(?<=: )"([^"]*)"', r"\1", text)
    return re.sub(r"\s+", " ", text).replace("( ", "(").replace(" )", ")")


def members(cls: type[Any]) -> dict[str, str]:
    """What a class offers in public, each with how it is called."""
    found: dict[str, str] = {}
    for name in dir(cls):
        written_here = any(
            name in vars(base) and base.__module__.startswith("ckpipe") for base in cls.__mro__
        )
        if (name.startswith("_") and name not in _SPECIAL) or not written_here:
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, property):
            assert value.fget is not None
            found[name] = f"property -> {inspect.signature(value.fget).return_annotation}"
        else:
            found[name] = normal(str(inspect.signature(value)) if callable(value) else repr(value))
    return found


def test_names_are_these() -> None:
    assert ckpipe.__all__ == sorted(NAMES.split())
    assert sorted(backend.__all__) == sorted(BACKEND_NAMES.split())
    assert sources.__all__ == SOURCES_NAMES.split()


def test_type_checkers_see_every_name_where_it_comes_from() -> None:
    tree = ast.parse(Path(ckpipe.__file__).read_text())
    (seen,) = [each for each in tree.body if isinstance(each, ast.If)]
    imports = [each for each in seen.body if isinstance(each, ast.ImportFrom)]
    homes = {name.asname: each.module for each in imports for name in each.names}
    assert homes.keys() == {*ckpipe.__all__, *MODULES} - {"__version__"}
    for name, home in homes.items():
        assert getattr(ckpipe, str(name)) is getattr(importlib.import_module(str(home)), str(name))


def test_every_name_is_there_and_documented() -> None:
    for name in ckpipe.__all__:
        value = getattr(ckpipe, name)
        if name != "__version__":
            assert inspect.getdoc(value), name
            assert len(inspect.getdoc(value) or "") > 20, name


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_these(name: str) -> None:
    found = members(getattr(ckpipe, name))
    if name in ("SaveHandle", "SyncSaveHandle", "Planner"):
        found.pop("__init__", None)  # the library makes them
    assert found == {member: normal(text) for member, text in SIGNATURES[name].items()}


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_public_method_is_documented(name: str) -> None:
    cls = getattr(ckpipe, name)
    bare = [
        member
        for member in SIGNATURES[name]
        if not member.startswith("__")
        and member not in ("limits", "prefers_worker")
        and not inspect.getdoc(getattr(cls, member))
    ]
    assert bare == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_called_so(name: str) -> None:
    signature = normal(str(inspect.signature(getattr(ckpipe, name))))
    assert signature == normal(FUNCTIONS[name])


def test_both_pipelines_take_the_same() -> None:
    def parameters(cls: type[Any]) -> dict[str, str]:
        entered = {"__aenter__", "__enter__", "close", "aclose"}
        return {
            name: text.partition(" -> ")[0]
            for name, text in members(cls).items()
            if name not in entered
        }

    assert parameters(ckpipe.SyncPipeline) == parameters(ckpipe.Pipeline)


def test_settings_are_these() -> None:
    def names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
        for name, info in model.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                yield from names(info.annotation, f"{prefix}{name}.")
            else:
                yield prefix + name

    assert sorted(names(ckpipe.Settings)) == sorted(SETTINGS.split())


def tree(cls: type[Any], stem: str = "") -> Iterator[str]:
    """The subclasses of an error as lines of a drawing."""
    children = [each for each in cls.__subclasses__() if each.__module__ == errors.__name__]
    for number, child in enumerate(children):
        last = number == len(children) - 1
        yield f"{stem}{'└── ' if last else '├── '}{child.__name__}"
        yield from tree(child, stem + ("    " if last else "│   "))


def test_errors_are_the_tree_in_their_docstring() -> None:
    assert errors.__doc__ is not None
    _, _, rest = errors.__doc__.partition("CkpipeError\n")
    drawing = rest.partition("\n\n")[0]
    drawn = [re.sub(r"^ {4}(.*?\w+)\b.*", r"\1", line) for line in drawing.splitlines()]
    assert drawn == list(tree(ckpipe.CkpipeError))


def every_error(cls: type[Any] = ckpipe.CkpipeError) -> Iterator[type[errors.CkpipeError]]:
    yield cls
    for each in cls.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from every_error(each)


@pytest.mark.parametrize("cls", list(every_error()), ids=lambda cls: cls.__name__)
def test_errors_cross_processes_whole(cls: type[errors.CkpipeError]) -> None:
    error = cls("It broke", step=3, rank=2, key="model.weight", hint="Mend it")
    error.target_touched = True
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert vars(again) == vars(error)
    assert str(again) == str(error) == "It broke [step 3, rank 2, key 'model.weight']. Mend it."
    assert cls.__doc__


def test_only_errors_that_may_pass_are_transient() -> None:
    transient = {cls for cls in every_error() if cls.transient}
    assert transient == {errors.StoreUnavailable, errors.Throttled}


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(ckpipe.__path__[0]) / "py.typed").exists()


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_costs_nothing_that_is_not_used() -> None:
    heavy = "torch numpy pydantic anyio awscrt aiofiles aiobotocore aiohttp rich"
    code = f"import sys, ckpipe; print([n for n in {heavy.split()} if n in sys.modules])"
    assert run(code) == "[]\n"


def test_a_backend_or_a_lock_needs_no_settings() -> None:
    names = "ckpipe.Backend, ckpipe.StateLock, ckpipe.KeepLast, ckpipe.Progress, ckpipe.Planner"
    done = forked_anew(f"import ckpipe; {names}; print('pydantic' in sys.modules)", "pydantic")
    assert done.out == "False\n", done.err


def test_modules_are_there_without_being_imported_by_name() -> None:
    light = "ckpipe.errors, ckpipe.events"
    code = (
        f"import sys, ckpipe; {light}; print([n for n in ('torch', 'anyio') if n in sys.modules])"
    )
    assert run(code) == "[]\n"
    for name in sample(MODULES, 1):
        done = forked_anew(f"import ckpipe; print(ckpipe.{name}.__name__)")
        assert done.out == f"ckpipe.{name}\n", done.err
    done = forked_anew("import ckpipe; print(ckpipe.distributed.training_state.__name__)")
    assert done.out == "training_state\n", done.err


def test_no_module_takes_the_place_of_a_name() -> None:
    # Importing ckpipe.x sets the attribute x of ckpipe, whatever that was before.
    assert [name for name in ckpipe.__all__ if importlib.util.find_spec(f"ckpipe.{name}")] == []


def test_the_package_shows_its_names_and_no_others() -> None:
    assert dir(ckpipe) == sorted([*ckpipe.__all__, *MODULES])
    with pytest.raises(AttributeError, match="module 'ckpipe' has no attribute 'pipelin'"):
        _ = ckpipe.pipelin
    namespace: dict[str, Any] = {}
    exec("from ckpipe import *", namespace)
    assert set(NAMES.split()) <= namespace.keys()


def test_help_of_the_blocking_pipeline_has_the_whole_text() -> None:
    for name, method in vars(ckpipe.SyncPipeline).items():
        awaiting = getattr(ckpipe.Pipeline, name, None)
        if name.startswith("_") or awaiting is None:
            continue
        ours, theirs = (inspect.getdoc(each) or "" for each in (method, awaiting))
        assert ours.partition("\n")[2] == theirs.partition("\n")[2], name
        assert ours.partition("\n")[0]
    assert "metrics: Numbers by name" in (inspect.getdoc(ckpipe.SyncPipeline.save) or "")
