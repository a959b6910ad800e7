"""The options of a load, and the request of one call: its options checked, in the form of use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

import torch

from ckpipe.errors import UsageError
from ckpipe.format.labels import Json, LabelFilter, globs_filter, label_filter
from ckpipe.lock.state_lock import LoadHold
from ckpipe.loop_thread import Caller
from ckpipe.options import completed, one_of
from ckpipe.reading.reader import ReadTally
from ckpipe.reading.select import PerRankPolicy
from ckpipe.reading.targets import LiveTensor
from ckpipe.transforms.transform import Transform, transforms_of
from ckpipe.types import PicklePolicy

if TYPE_CHECKING:
    from ckpipe.settings import Settings

Unwrap = Callable[[str, Mapping[str, Json], Callable[[], Any]], torch.Tensor]
"""Makes a plain tensor of a fresh wrapper tensor: of its label, its facts, and its factory."""


class LoadOptions(TypedDict, total=False):
    """The options of a load: of each its type, its default and what it does."""

    include: Annotated[Sequence[str] | None, None]
    """Globs of labels to load; None loads all. Each must match a label in the checkpoint, unless
    ``strict`` is False; then globs without a match are ``missing``."""

    exclude: Annotated[Sequence[str] | None, None]
    """Globs of labels to leave as they are."""

    strict: Annotated[bool | Literal["shapes"], True]
    """True, the default, if the keys of plain containers must be the same in target and checkpoint;
    modules and other objects are always as strict as their own code, see ``allow_missing``.
    ``"shapes"`` also leaves tensors as they are that have another shape in the checkpoint, such as
    a new head, and lists them in ``missing``. Objects whose own code looks at shapes may refuse
    them all the same: optimizers, and modules with load hooks."""

    cast: Annotated[bool, False]
    """True to convert tensors to the dtype of the target."""

    optimizer_class: Annotated[Literal["same", "any"], "same"]
    """``"any"`` to give an optimizer the state of an optimizer of another class, as torch's
    ``load_state_dict`` does; options and state that only one of the classes has are not converted.
    ``"same"``, the default, raises ``StructureMismatch``. A class of the same name and options in
    another module is the same."""

    fallback: Annotated[bool, False]
    """True to continue with the next older checkpoint if one is damaged. All of several ranks must
    call alike, and damage that one of them finds counts for all."""

    without_nan: Annotated[bool, False]
    """True to load the newest complete checkpoint in which no NaN was counted, the same on all
    ranks, which must call alike. ``CheckpointNotFound`` if there are complete checkpoints and all
    have some. A step or a source cannot be named then. See the settings ``nan``."""

    per_rank: Annotated[PerRankPolicy | None, None]
    """Treatment of per-rank values, and of random generators (:class:`~ckpipe.RngState`), if
    another number of ranks has saved them. None takes the setting ``per_rank``. ``"raise"`` is an
    error, ``"drop"`` keeps the values of the target, and ``"rank0"`` takes the values of rank 0;
    several ranks cannot take its generators, which is an error. ``"derive"`` makes generators of
    each rank's own from the saved ones, and is an error for other values. A function takes a label
    and the values in the order of ranks, and returns a value; it is not called for generators,
    which are derived."""

    pickle: Annotated[PicklePolicy | None, None]
    """``"allow"`` to load pickled objects, which runs code from the checkpoint. None takes the
    setting ``pickle``."""

    transform: Annotated[Sequence[Transform], ()]
    """Transforms of the checkpoint, applied in their order before it is compared with the target:
    :class:`~ckpipe.Rename`, :class:`~ckpipe.Only`, :class:`~ckpipe.Drop`, :class:`~ckpipe.Cast`,
    :class:`~ckpipe.Split`, :class:`~ckpipe.Fuse`, :class:`~ckpipe.Stack`, :class:`~ckpipe.Unstack`
    and :class:`~ckpipe.Rearrange`. Other arguments, such as ``include``, see the new names. All of
    several ranks pass the same ones."""

    allow_missing: Annotated[Sequence[str], ()]
    """Globs of labels of the target that the checkpoint may lack, in modules as in plain
    containers: they keep their values and are named in ``missing``. All other labels must be there,
    as ``strict`` says."""

    allow_unexpected: Annotated[Sequence[str], ()]
    """Globs of labels of the checkpoint that the target may lack: they are not read, and are named
    in ``unexpected``."""

    device: Annotated[str | torch.device | None, None]
    """The device on which the tensors of a fresh state are made, such as ``"cuda:0"``; None for the
    CPU. Bytes go there from the read buffers. Arrays of numpy stay on the CPU. On ``"meta"``
    nothing is read. With ``into`` it is a ``UsageError``."""


class LoadRequest:
    """The request of one call of ``load``; its options are checked here, and only here.

    Args:
        into: The target; None for a fresh state.
        settings: Of the pipeline; None for the defaults of the options that they hold.
        caller: Runs user code on the calling thread; None to use another thread.
        select: Selects the labels to load, in place of ``include`` and ``exclude``.
        unwrap: Makes plain tensors of the wrapper tensors of a fresh state; None leaves these.
        begun: For each checkpoint that was begun, its count of reads and the tensors to fill.
        options: As for :meth:`ckpipe.Pipeline.load`.

    Attributes:
        began: The time of the call of ``load``, by :func:`time.perf_counter`.
        hold: Taken by the load before it reads the target, and ended by its caller; None for a
            target that no other code knows.
        switch_interval: The switch interval of the GIL meanwhile, in seconds; None leaves it alone.

    Raises:
        TypeError: If an option is unknown.
        UsageError: If one has a wrong value.
    """

    hold: LoadHold | None = None
    switch_interval: float | None = None

    def __init__(
        self,
        into: Any = None,
        settings: Settings | None = None,
        caller: Caller | None = None,
        *,
        select: LabelFilter | None = None,
        unwrap: Unwrap | None = None,
        begun: Iterable[tuple[ReadTally, Sequence[LiveTensor]]] = (),
        **options: Unpack[LoadOptions],
    ) -> None:
        given = completed("load", LoadOptions, options)
        policy, pickle = given["per_rank"], given["pickle"]
        if settings is not None:
            self.switch_interval = settings.switch_interval_seconds
            policy = settings.per_rank if policy is None else policy
            pickle = settings.pickle if pickle is None else pickle
        self.into, self.caller, self.unwrap, self.begun = into, caller, unwrap, [*begun]
        self.began = time.perf_counter()
        self.select = select or label_filter(given["include"], given["exclude"])
        self.strict = one_of("strict", given["strict"], True, False, "shapes")
        self.cast = given["cast"]
        self.optimizer_class = one_of("optimizer_class", given["optimizer_class"], "same", "any")
        self.fallback = given["fallback"]
        self.without_nan = one_of("without_nan", given["without_nan"], True, False)
        self.per_rank = _policy("raise" if policy is None else policy)
        self.pickle = one_of("pickle", "refuse" if pickle is None else pickle, "refuse", "allow")
        self.transform = transforms_of(given["transform"])
        self.allow_missing = globs_filter("allow_missing", given["allow_missing"])
        self.allow_unexpected = globs_filter("allow_unexpected", given["allow_unexpected"])
        self.device = _fresh_device(given["device"], into)

    def selecting(self, select: LabelFilter) -> LoadRequest:
        """Return the same request with another selection of labels."""
        other = copy(self)
        other.select = select
        return other

    @property
    def filled(self) -> list[LiveTensor]:
        """The tensors of the target that may have got values so far."""
        return [each for tally, tensors in self.begun if tally.delivered for each in tensors]

    def holding(self) -> AbstractContextManager[None]:
        """Let the calling thread work for the load, whose hold is taken."""
        return nullcontext() if self.hold is None else self.hold.here()


def _policy(per_rank: PerRankPolicy) -> PerRankPolicy:
    if not callable(per_rank) and per_rank not in ("raise", "drop", "rank0", "derive"):
        raise UsageError(
            f"per_rank is 'raise', 'drop', 'rank0', 'derive' or a function, not {per_rank!r}"
        )
    return per_rank


def _fresh_device(device: str | torch.device | None, into: object) -> torch.device:
    """Return the device of the tensors of a fresh state.

    Raises:
        UsageError: If there is no such device here, or a target is given, whose tensors have one.
    """
    if device is None:
        return torch.device("cpu")
    if into is not None:
        raise UsageError(
            "device is for a fresh state; the tensors of a target stay on their devices",
            hint="Leave out device, or leave out the target",
        )
    try:
        made = torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"There is no device {device!r:.100} here: {reason:.200}",
            hint="Pass 'cpu', 'cuda:0' or another device that torch can use, or 'meta'",
        ) from None
    return made.device
