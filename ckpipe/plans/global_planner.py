"""The planner that ranks plan together with: ``plan="global"``."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from ckpipe.errors import UnsupportedTopology
from ckpipe.plans.division import Share, Unit, units
from ckpipe.plans.offers import (
    Offer,
    Offered,
    encode_offer,
    not_held,
    offered_shares,
    private_bytes,
)
from ckpipe.plans.plan_rounds import PlanRounds
from ckpipe.plans.planning import (
    RankPlan,
    Replicated,
    ReplicatedMarks,
    assemble,
    fingerprint,
)
from ckpipe.plans.shared_plan import SharedPlan, divide, fits
from ckpipe.ranks.meeting import default_store
from ckpipe.state.captured import Captured


@dataclass(frozen=True, slots=True)
class _Own:
    """What this rank's state is, as far as plans depend on it."""

    fingerprint: Hashable
    shares: list[tuple[Share, Offered | None]]
    offer: Offer
    data: bytes


class GlobalPlanner:
    """Plans with all ranks together: one of them decides who writes what.

    Compared with :class:`~ckpipe.LocalPlanner`, bytes are balanced by what ranks really have;
    what is said to be replicated may be held by any of the ranks, and as a DTensor also on several
    meshes, and is still written once; and a plan is proved before a byte is copied: each
    element of a tensor is written exactly once, and what ranks hold by one name has one shape
    and dtype. The price is that a save in which the structure has changed waits for all ranks.
    While no structure changes, no rank waits for another.

    Plain tensors of which nothing says that they are replicated, such as buffers and the state
    of random generators, are each rank's own, whatever their names.

    The ranks talk through a ``torch.distributed`` store, under keys that begin with
    ``ckpipe/plan``. No process group is used and no collective called.

    An object serves one pipeline.

    Args:
        store: A store that all ranks can reach, such as a ``TCPStore`` or ``FileStore``; None for
            that of the default process group.
        replicated: As for :class:`~ckpipe.LocalPlanner`; a tensor so marked is the same on every
            rank that has it. It must be the same on all ranks.
        timeout_seconds: How long a save waits for the others.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        replicated: Replicated = "auto",
        timeout_seconds: float = 60.0,
    ) -> None:
        self._store, self._seconds = store, timeout_seconds
        self._marked = ReplicatedMarks(replicated)
        self._max_file_bytes: int | None = None
        self._changing = threading.Lock()
        self._rounds: tuple[str, PlanRounds] | None = None
        self._own: _Own | None = None
        self._plans: dict[tuple[str, int], RankPlan] = {}
        self._calls = 0

    def prepare(self, *, rank: int, world_size: int, max_file_bytes: int | None = None) -> None:
        """Finds the store, when a pipeline is opened; blocking.

        Args:
            rank: This rank.
            world_size: How many ranks save together; one needs no store.
            max_file_bytes: The largest data file that the store of checkpoints takes, in bytes.

        Raises:
            UnsupportedTopology: If there is no store to plan through.
        """
        self._max_file_bytes = max_file_bytes
        if world_size == 1 or self._store is not None:
            return
        self._store = default_store()
        if self._store is None:
            raise UnsupportedTopology(
                f"This program runs on {world_size} ranks, and they have no store to plan "
                "together through",
                rank=rank,
                hint="Call torch.distributed.init_process_group before opening the pipeline, or "
                "give plan=GlobalPlanner(store) a store that all ranks can reach",
            )

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        """Plans the next of a series of saves, in which all ranks have to take part in order.

        Raises:
            UnsupportedTopology: If there is no store to plan through, or a DTensor lies on ranks
                that are not of this world.
            PlanTimeout: If ranks do not take part in time; names them.
            UnsupportedState: If a tensor cannot be saved, or ranks contradict each other.
            SaveError: If there is no plan for another reason.
        """
        self._calls += 1
        save = f"calls/{self._calls}"
        return self.plan_save(captured, save=save, rank=rank, world_size=world_size)

    def plan_save(self, captured: Captured, *, save: str, rank: int, world_size: int) -> RankPlan:
        """See :class:`~ckpipe.planning.JointPlanner`; the errors are those of :meth:`plan`."""
        own = self._look(captured, rank, world_size)
        run, _, name = save.rpartition("/")
        if world_size == 1:
            shared, key = None, (run, 0)
        else:
            rounds = self._rounds_of(run, rank, world_size)
            shared = rounds.agree(name, own.offer, own.data)
            key = (run, shared.number)
            if not fits(shared, own.shares, rank=rank):
                rounds.wish()
        known = self._plans.get(key)
        if known is not None and known.fingerprint == own.fingerprint:
            return known
        divided = self._units(captured, own, shared, rank)
        most = self._max_file_bytes
        made = assemble(captured, divided, rank=rank, world_size=world_size, max_file_bytes=most)
        self._plans = {key: made}
        return made

    @staticmethod
    def _units(
        captured: Captured, own: _Own, shared: SharedPlan | None, rank: int
    ) -> Iterable[Unit]:
        if shared is None:
            return units(captured.tensors, (), rank=rank, world_size=1)
        return divide(shared, captured.tensors, own.shares, rank=rank)

    def _look(self, captured: Captured, rank: int, world_size: int) -> _Own:
        """Divides the state, unless it is what it was in the last save."""
        own, now = self._own, fingerprint(captured)
        if own is not None and own.fingerprint == now:
            return own
        leaves, marked = captured.tensors, self._marked(captured)
        found = offered_shares(leaves, marked, rank=rank, world_size=world_size)
        offered = tuple(each for _, each in found if each is not None)
        offer = Offer(offered, private_bytes(leaves, found))
        self._own = _Own(now, found, offer, encode_offer(offered, not_held(leaves, found)))
        return self._own

    def _rounds_of(self, run: str, rank: int, world_size: int) -> PlanRounds:
        if self._store is None:
            self.prepare(rank=rank, world_size=world_size, max_file_bytes=self._max_file_bytes)
        with self._changing:
            if self._rounds is None or self._rounds[0] != run:
                rounds = PlanRounds(
                    self._store,
                    run,
                    rank=rank,
                    world_size=world_size,
                    timeout_seconds=self._seconds,
                )
                self._rounds = (run, rounds)
            return self._rounds[1]


__all__ = ["GlobalPlanner"]
