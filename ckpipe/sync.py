"""The pipeline for code without an event loop: the same methods, blocking."""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, SupportsIndex, TypeVar

from ckpipe.backend import without_secrets
from ckpipe.catalog.sweep import SweepReport
from ckpipe.errors import CheckpointNotFound, UsageError
from ckpipe.handles import SyncSaveHandle
from ckpipe.loading.select import PerRankPolicy
from ckpipe.loop_thread import Caller
from ckpipe.pipeline import Pipeline
from ckpipe.retention import Decision
from ckpipe.running.base import PipelineBase
from ckpipe.running.validation import Which, note_failures, raise_or_warn, which
from ckpipe.settings import Settings
from ckpipe.types import CheckpointInfo, LoadResult, VerifyResult

T = TypeVar("T")


class SyncPipeline(PipelineBase):
    """:class:`~ckpipe.Pipeline` for a plain loop: a context manager whose methods block.

    :meth:`open` and :meth:`close` do what entering and leaving it do.

    What a method does, takes, returns and raises is what the method of the same name does there.

    Args:
        url: Where checkpoints lie: a plain path, ``file:///…``, or the URL of another backend.
        guard: Optimizers whose steps must not run into a copy.
        state_lock: A lock that others who look at the same state use too, such as the :attr:`lock`
            of another pipeline; None for one of its own.
        settings: Settings to start from.
        fields: Fields of :class:`~ckpipe.Settings`; they go before ``settings``.

    Raises:
        SettingsError: If a setting is unknown or out of range, or there is no url.
    """

    def open(self) -> Self:
        """Open the store and write nothing; see :meth:`ckpipe.Pipeline.open`."""
        with self._opening():
            self._open()
        return self

    def close(self) -> None:
        """Wait until all saves are durable and close; see :meth:`ckpipe.Pipeline.aclose`."""
        self._leave(None)

    def __enter__(self) -> Self:
        """Open the pipeline; see :meth:`open`."""
        return self.open()

    async def __aenter__(self) -> NoReturn:
        raise UsageError(
            "SyncPipeline blocks, and cannot be entered by async with",
            hint="Write async with ckpipe.Pipeline(...), or with ckpipe.SyncPipeline(...)",
        )

    async def __aexit__(self, *exc: object) -> None:
        """Is there so that ``async with`` calls :meth:`__aenter__`, which says what to write."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(exc)

    def _leave(self, error: BaseException | None) -> None:
        with self._leaving():
            failures = self._close(failed=error is not None)
        if error is None:
            raise_or_warn(failures, self._settings.on_error)
        else:
            note_failures(failures, error)

    def _call(
        self,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        caller: Caller | None = None,
        **kwargs: Any,
    ) -> T:
        """Run a coroutine function of the engine on the pipeline's loop; blocking."""
        return self._engine.loop.call(function, *args, caller=caller, **kwargs)

    def save(
        self,
        state: Any,
        step: SupportsIndex | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        until: Literal["captured", "staged", "committed"] = "staged",
        final: bool = False,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> SyncSaveHandle:
        """Save a state; return as ``until`` says. See :meth:`ckpipe.Pipeline.save`."""
        with Caller() as caller:
            request = self._save_request(
                state, step, until, metrics, metadata, final, include, exclude, caller
            )
            with self._while_it_copies(request):
                save = self._call(self._engine.saves.begin, request)
                handle = SyncSaveHandle(self, save)
                copied = save.safe if until == "captured" else save.staged
                caller.serve_until(copied)
        handle._wait(copied)
        if until == "committed" and handle.status != "skipped":
            handle.wait()
        return handle

    def load(
        self,
        into: Any = None,
        step: Which | None = None,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        fallback: bool = False,
        per_rank: PerRankPolicy | None = None,
        pickle: Literal["refuse", "allow"] = "refuse",
    ) -> LoadResult | None:
        """Load a checkpoint, into a state or as a fresh one. See :meth:`ckpipe.Pipeline.load`."""
        chosen = None if step is None else which(step)
        with Caller() as caller:
            request = self._load_request(
                into,
                include,
                exclude,
                strict=strict,
                cast=cast,
                per_rank=per_rank,
                pickle=pickle,
                caller=caller,
            )
            return self._call(
                self._engine.loads.load, chosen, request, fallback=fallback, caller=caller
            )

    def steps(self, *, metadata: bool = False) -> list[CheckpointInfo]:
        """List all checkpoints, the oldest first. See :meth:`ckpipe.Pipeline.steps`."""
        return self._call(self._engine.steps, metadata=metadata)

    def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint; None if there is none."""
        return self._call(self._engine.latest)

    def best(self, metric: str, *, mode: Literal["min", "max"] = "min") -> CheckpointInfo | None:
        """The checkpoint with the best value of a metric. See :meth:`ckpipe.Pipeline.best`."""
        return self._call(self._engine.best, metric, mode)

    def verify(self, step: Which) -> VerifyResult:
        """Read a checkpoint whole and check every byte of it."""
        return self._call(self._engine.verify, which(step))

    def delete(self, step: Which, *, force: bool = False) -> None:
        """Delete a checkpoint. See :meth:`ckpipe.Pipeline.delete`."""
        self._call(self._engine.delete, which(step), force=force)

    def pin(self, step: Which) -> None:
        """Protect a checkpoint from retention until it is unpinned.

        Raises:
            CheckpointNotFound: If it is absent, incomplete, or being deleted at this moment.
        """
        self._call(self._engine.pin, which(step))

    def unpin(self, step: Which) -> None:
        """End the protection of a checkpoint."""
        self._call(self._engine.unpin, which(step))

    def prune(self, *, dry_run: bool = False) -> Decision:
        """Apply the retention rules now, or say only what they would do, and why."""
        return self._call(self._engine.prune, dry_run=dry_run)

    def trim(self) -> int:
        """Give staging memory back to the system. See :meth:`ckpipe.Pipeline.trim`."""
        return self._call(self._engine.context.give_memory_back)

    def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Remove what crashed runs left. See :meth:`ckpipe.Pipeline.sweep`."""
        return self._call(self._engine.sweep, dry_run=dry_run)


def _complete_docstrings() -> None:
    """Put the text of each method of :class:`Pipeline` below the line of its counterpart here."""
    for name, method in vars(SyncPipeline).items():
        text = inspect.getdoc(getattr(Pipeline, name, None))
        if not name.startswith("_") and method.__doc__ and text:
            own = method.__doc__.partition("\n")[0].partition(" See :meth:`ckpipe.Pipeline")[0]
            _, _, rest = text.partition("\n")
            method.__doc__ = f"{own}\n{rest}" if rest else own


_complete_docstrings()


def load(
    url: str | os.PathLike[str] | None = None,
    into: Any = None,
    step: Which | None = None,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    fallback: bool = False,
    per_rank: PerRankPolicy | None = None,
    pickle: Literal["refuse", "allow"] = "refuse",
    settings: Settings | None = None,
    **fields: Any,
) -> LoadResult:
    """Load a checkpoint, to evaluate or to look at it: in one line, and only reading.

    Opens a pipeline with ``read_only=True``, loads, and closes it; blocks until then.

    Args:
        url: Where checkpoints lie: a plain path, ``file:///…``, or the URL of another backend.
        into: The state to load into; None makes a fresh state, on the CPU.
        step: A step, the id of a checkpoint, or its info; None takes the newest complete one.
        include: As for :meth:`ckpipe.Pipeline.load`, and so are the arguments up to ``pickle``.
        exclude: Globs of labels to leave as they are.
        strict: Whether keys of plain containers must be the same on both sides.
        cast: Whether tensors may change their dtype on the way.
        fallback: Whether to go on to the next older checkpoint if one is damaged.
        per_rank: What becomes of values that were different on each rank.
        pickle: Whether pickled objects may be loaded, which runs code from the checkpoint.
        settings: Settings to start from.
        fields: Fields of :class:`~ckpipe.Settings`; they go before ``settings``.

    Raises:
        CheckpointNotFound: If the step is absent or incomplete, or there is no complete
            checkpoint at all.
        CkpipeError: Whatever opening a pipeline or :meth:`ckpipe.Pipeline.load` raises.
    """
    fields["read_only"] = True
    with SyncPipeline(url, settings=settings, **fields) as pipeline:
        result = pipeline.load(
            into,
            step,
            include=include,
            exclude=exclude,
            strict=strict,
            cast=cast,
            fallback=fallback,
            per_rank=per_rank,
            pickle=pickle,
        )
        if result is None:
            incomplete = len(pipeline.steps())
            raise CheckpointNotFound(
                f"There is no complete checkpoint in {without_secrets(pipeline.settings.url or '')}"
                + (f", and {incomplete} that are not complete" if incomplete else ""),
                hint="Look with `ckpipe ls` whether this is the root of the run",
            )
    return result
