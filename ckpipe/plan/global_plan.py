"""Plan a save together (``plan="global"``), through a ``torch.distributed`` store.

A shared plan binds its ranks: each rank relies on others to write the pieces that the plan gives
them. It stays valid when a rank's state changes, as long as that rank still has those pieces. The
rank writes all its other tensors itself; that is never wrong, only some bytes are written twice.

Theory. A shared plan serves until states change. All ranks must decide alike whether it serves for
a save. But a rank cannot know whether another one's state has changed, and must not wait for it. So
the first rank at each save decides for all, by an atomic compare-and-set of the key ``way``:
``keep n`` if ``n`` is the newest plan that fits that rank, else ``new``.

* On ``keep``, no rank waits for another. A rank whose state has changed still writes the pieces
  that others leave to it, and writes new tensors by itself. It also *wishes* for a new plan: it
  increments a counter. A plan keeps the value of the counter from before it was made. If the
  counter has a higher value now, the plan is outdated, and the next save decides ``new``, no matter
  which rank is first.
* On ``new``, every rank posts an offer. Rank 0 waits for all offers, makes the plan and posts an
  answer for each rank, or posts an error. No rank waits longer than the timeout, and a rank whose
  wait has timed out names the ranks that have posted no offer.

A rank that was left out of a plan finds its answer in the store when a later save keeps that plan.

Every rank that is done with a save increments a counter; the last one removes its keys. A save that
some rank never reaches is removed when it is ``_ROUNDS_KEPT`` saves old, a plan when there are
``_PLANS_KEPT`` newer ones. A rank that comes even later finds no keys and decides anew. Its
manifest cannot become part of a checkpoint that others planned differently: an index is only
written if each rank has written the pieces that others leave to it.

Long values are cut into several keys. No process group is used. Blocking requests are avoided,
since they occupy the connection.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from anyio.from_thread import check_cancelled

from ckpipe.errors import CkpipeError, PlanTimeout, SaveError, UnsupportedState, UnsupportedTopology
from ckpipe.plan.assignment import (
    Answer,
    Cut,
    DescribedState,
    Offered,
    assign,
    decode_description,
    describe,
)
from ckpipe.plan.division import Piece, Share, Unit, rows_of, units, whole_of
from ckpipe.plan.plan import RankPlan, Replicated, ReplicatedMarks, assemble, fingerprint
from ckpipe.ranks.launch import Store, below, default_store
from ckpipe.state.flatten import Captured
from ckpipe.state.tensors import TensorLeaf
from ckpipe.store.retry import pauses
from ckpipe.types import first_of


class GlobalPlanner:
    """Plans with all ranks together: rank 0 assigns all tensors to writers.

    Compared with :class:`~ckpipe.LocalPlanner`, it balances the bytes that ranks really have.
    Replicated tensors may be held by only some of the ranks, and as DTensors on several meshes, and
    are still written once. A plan is proved before a byte is copied: each element of a tensor is
    written exactly once, and tensors of one name have one shape and dtype on all ranks. The price:
    a save after a change of the structure waits for all ranks. While no structure changes, no rank
    waits for another.

    Plain tensors that are not marked as replicated, such as buffers and the state of random
    generators, are each rank's own, also if their names are equal.

    The ranks communicate through a ``torch.distributed`` store, under keys that begin with
    ``ckpipe/plan``. No process group is used and no collective called.

    An object serves one pipeline.

    Args:
        store: A store that all ranks can reach, such as a ``TCPStore`` or ``FileStore``; None for
            that of the default process group.
        replicated: As for :class:`~ckpipe.LocalPlanner`; a tensor so marked is the same on every
            rank that has it, or on every rank of its group. It must be the same on all ranks.
        timeout_seconds: Seconds that a save waits for the other ranks at most.
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
        self._own: tuple[Hashable, DescribedState] | None = None
        self._plans: dict[tuple[str, int], RankPlan] = {}
        self._calls = 0

    def prepare(self, *, rank: int, world_size: int, max_file_bytes: int | None = None) -> None:
        """Find the store, when a pipeline is opened; blocking.

        Args:
            rank: This rank.
            world_size: Number of ranks that save together; a single rank needs no store.
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
        """Plan the next of a series of saves; all ranks must call it in the same order.

        Raises:
            UnsupportedTopology: If there is no store to plan through, or a DTensor lies on ranks
                outside of this world.
            PlanTimeout: If some ranks do not take part in time; names them.
            UnsupportedState: If a tensor cannot be saved, or ranks contradict each other.
            SaveError: If there is no plan for another reason.
        """
        self._calls += 1
        save = f"calls/{self._calls}"
        return self.plan_save(captured, save=save, rank=rank, world_size=world_size)

    def plan_save(self, captured: Captured, *, save: str, rank: int, world_size: int) -> RankPlan:
        """See :class:`~ckpipe.planning.JointPlanner`; the errors are those of :meth:`plan`."""
        now = fingerprint(captured)
        known_own = self._own  # read once, since other saves plan in threads of their own
        if known_own is None or known_own[0] != now:
            leaves, marked = captured.tensors, self._marked(captured)
            described = describe(leaves, marked, rank=rank, world_size=world_size)
            known_own = self._own = (now, described)
        own = known_own[1]
        run, _, name = save.rpartition("/")
        shared = None
        if world_size > 1:
            rounds = self._rounds_of(run, rank, world_size)
            shared = rounds.agree(name, own)
            if not fits(shared, own.shares, rank=rank):
                rounds.wish()
        key = (run, shared.number if shared else 0)
        known = self._plans.get(key)
        if known is not None and known.fingerprint == now:
            return known
        if shared is None:
            divided = units(captured.tensors, {}, rank=rank, world_size=1)
        else:
            divided = divide(shared, captured.tensors, own.shares, rank=rank)
        most = self._max_file_bytes
        made = assemble(captured, divided, rank=rank, world_size=world_size, max_file_bytes=most)
        self._plans = {key: made}
        return made

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


_PREFIX = "ckpipe/plan"
_PIECE_BYTES = 256 << 10
_ROUNDS_KEPT = 16
_PLANS_KEPT = 3
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02


class PlanRounds:
    """The planning of one run, on one rank; its methods block, and may run in any thread.

    Args:
        store: The store that all ranks can reach.
        run: A name that identifies this launch on this root.
        rank: This rank.
        world_size: Number of ranks.
        timeout_seconds: Seconds that one save waits for other ranks at most.
    """

    def __init__(
        self, store: Store, run: str, *, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        connection = store.clone()
        connection.set_timeout(timedelta(seconds=max(1.0, timeout_seconds)))
        self._store: Store = below(f"{_PREFIX}/{run}", connection)
        self._rank, self._world_size, self._seconds = rank, world_size, timeout_seconds
        self._changing = threading.Lock()
        self._plans: dict[int, SharedPlan] = {}
        self._offers: OrderedDict[str, tuple[Offered, ...]] = OrderedDict()
        self._settled: OrderedDict[str, SharedPlan] = OrderedDict()
        self._left: deque[tuple[str, str]] = deque()
        self._published: deque[list[str]] = deque()
        self._count = 0

    def agree(self, save: str, own: DescribedState) -> SharedPlan:
        """Agree on the plan of a save with the other ranks.

        A second call for one save returns the same plan, even if this rank's state has changed.

        Args:
            save: The name of the save in its run, the same on all ranks.
            own: The state of this rank.

        Raises:
            PlanTimeout: If some ranks have not taken part in time; names them.
            UnsupportedState: If ranks contradict each other.
            SaveError: If this rank was left out of the plan that others use, or the store failed.
        """
        if save not in self._settled:
            with _store_errors(self._rank):
                self._settled[save] = self._agree(save, own)
            while len(self._settled) > _ROUNDS_KEPT:
                self._settled.popitem(last=False)
        return self._settled[save]

    def wish(self) -> None:
        """Make the next save that no rank has begun yet plan anew.

        Raises:
            SaveError: If the store failed.
        """
        with _store_errors(self._rank):
            self._store.add("wishes", 1)

    def _agree(self, save: str, own: DescribedState) -> SharedPlan:
        wish = self._store.add("wishes", 0)
        plans = list(self._plans.values())
        fit = [each.number for each in plans if each.digest == own.digest and each.wish >= wish]
        proposal = f"keep {max(fit)}" if fit else "new"
        way: str = self._store.compare_set(f"{save}/way", "", proposal).decode()
        try:
            if way == "new":
                return self._plan_anew(save, own)
            number = int(way.removeprefix("keep "))
            return self._plans.get(number) or self._fetch(number)
        finally:
            self._leave(save, way)

    def _plan_anew(self, save: str, own: DescribedState) -> SharedPlan:
        self._offers[own.digest] = own.offer
        while len(self._offers) > _PLANS_KEPT:
            self._offers.popitem(last=False)
        if self._rank == 0:
            self._post(f"{save}/offer/0", b"")
            return self._plan_for_all(save, own)
        head = json.dumps({"digest": own.digest, "private": own.private}).encode()
        self._post(f"{save}/offer/{self._rank}", head + b"\n" + own.data)
        if not self._awaited([f"{save}/answer"]):
            raise self._late(self._absent(save) or [0])
        answer = json.loads(self._store.get(f"{save}/answer"))
        if "plan" not in answer:
            kind = _ERRORS[answer["kind"]]
            raise kind(
                answer["message"], key=answer["key"], rank=answer["rank"], hint=answer["hint"]
            )
        return self._fetch(answer["plan"])

    # Rank 0

    def _plan_for_all(self, save: str, own: DescribedState) -> SharedPlan:
        try:
            wish = self._store.add("wishes", 0)
            keys = [f"{save}/offer/{rank}" for rank in range(1, self._world_size)]
            if not self._awaited(keys):
                raise self._late(self._absent(save))
            private, digests = [own.private], [own.digest]
            # Equal offers are one object, so comparisons are fast.
            offers = {own.digest: own.offer}
            for key in keys:
                head, _, data = self._get(key).partition(b"\n")
                told = json.loads(head)
                digest = told["digest"]
                if digest not in offers:
                    offers[digest] = decode_description(data)
                private.append(told["private"])
                digests.append(digest)
            answers = assign([offers[digest] for digest in digests], private)
        except CkpipeError as error:
            kind = type(error).__name__
            told = {
                "kind": kind if kind in _ERRORS else SaveError.__name__,
                "message": error.message,
                "key": error.key,
                "rank": error.rank,
                "hint": error.hint,
            }
            self._store.set(f"{save}/answer", json.dumps(told))
            raise
        number = self._count = self._count + 1
        self._publish(number, wish, digests, answers)
        self._store.set(f"{save}/answer", json.dumps({"plan": number}))
        return self._remember(number, wish, own.digest, own.offer, answers[0])

    def _publish(
        self, number: int, wish: int, digests: Sequence[str], answers: Sequence[Answer]
    ) -> None:
        keys: dict[str, str] = {}
        for rank, (digest, answer) in enumerate(zip(digests, answers, strict=True)):
            body = json.dumps(answer, separators=(",", ":"))
            key = keys.get(body)
            if key is None:
                key = keys[body] = f"plans/{number}/body/{len(keys)}"
                self._post(key, zlib.compress(body.encode(), 1))
            header = {"wish": wish, "offer": digest, "body": key}
            self._store.set(f"plans/{number}/{rank}", json.dumps(header))
        self._published.append([f"plans/{number}", *keys.values()])
        while len(self._published) > _PLANS_KEPT:
            old, *bodies = self._published.popleft()
            for rank in range(self._world_size):
                self._store.delete_key(f"{old}/{rank}")
            for body in bodies:
                self._drop(body)

    # All ranks

    def _fetch(self, number: int) -> SharedPlan:
        """Read this rank's answer of a plan from the store."""
        key = f"plans/{number}/{self._rank}"
        header = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        offered = self._offers.get(header.get("offer", ""))
        if offered is None:
            self._store.add("wishes", 1)
            raise SaveError(
                "Other ranks use a plan that this rank had no part in",
                rank=self._rank,
                hint="The next save plans anew",
            )
        rows = json.loads(zlib.decompress(self._get(header["body"])))
        answer = tuple(
            tuple(cut and Cut(tuple(map(tuple, cut[0])), cut[1]) for cut in cuts) for cuts in rows
        )
        return self._remember(number, header["wish"], header["offer"], offered, answer)

    def _remember(
        self, number: int, wish: int, digest: str, offered: Sequence[Offered], answer: Answer
    ) -> SharedPlan:
        pairs = zip(offered, answer, strict=True)
        plan = SharedPlan(number, wish, digest, {each.name: (each, cuts) for each, cuts in pairs})
        with self._changing:
            self._plans[number] = plan
            while len(self._plans) > _PLANS_KEPT:
                del self._plans[min(self._plans)]
        return plan

    def _awaited(self, keys: Sequence[str]) -> bool:
        """Wait until all keys exist; False if they do not in time."""
        until = time.monotonic() + self._seconds
        absent = deque(keys)
        for pause in pauses(until, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
            # A cancelled save must not wait for the timeout. Outside of anyio's worker threads
            # nothing can cancel it, and check_cancelled raises RuntimeError.
            with contextlib.suppress(RuntimeError):
                check_cancelled()
            time.sleep(pause)
            while absent and self._store.check([absent[0]]):
                absent.popleft()
            if not absent:
                return True
        return False

    def _absent(self, save: str) -> list[int]:
        return [
            rank
            for rank in range(self._world_size)
            if rank != self._rank and not self._store.check([f"{save}/offer/{rank}"])
        ]

    def _late(self, ranks: list[int]) -> PlanTimeout:
        return PlanTimeout(
            f"Rank{'s' if len(ranks) > 1 else ''} {first_of(ranks)} did not take part in "
            f"planning within {self._seconds:g} s",
            hint="Find out why they are late or gone; the next save plans again. Set "
            "plan.timeout_seconds to wait longer",
        )

    def _leave(self, save: str, way: str) -> None:
        if self._store.add(f"{save}/seen", 1) >= self._world_size:
            self._remove(save, way)
            return
        self._left.append((save, way))
        while len(self._left) > _ROUNDS_KEPT:
            self._remove(*self._left.popleft())

    def _remove(self, save: str, way: str) -> None:
        if way == "new":
            for rank in range(self._world_size):
                if self._store.check([f"{save}/offer/{rank}"]):
                    self._drop(f"{save}/offer/{rank}")
            self._store.delete_key(f"{save}/answer")
        for each in ("way", "seen"):
            self._store.delete_key(f"{save}/{each}")

    def _post(self, key: str, data: bytes) -> None:
        """Write a long value in several keys; the key itself comes last."""
        pieces = range(0, len(data), _PIECE_BYTES)
        for number, start in enumerate(pieces):
            self._store.set(f"{key}/{number}", data[start : start + _PIECE_BYTES])
        self._store.set(key, str(len(pieces)))

    def _get(self, key: str) -> bytes:
        return b"".join(self._store.get(each) for each in self._pieces(key))

    def _drop(self, key: str) -> None:
        for each in self._pieces(key):
            self._store.delete_key(each)
        self._store.delete_key(key)

    def _pieces(self, key: str) -> list[str]:
        return [f"{key}/{number}" for number in range(int(self._store.get(key)))]


_ERRORS: dict[str, type[CkpipeError]] = {
    each.__name__: each for each in (PlanTimeout, UnsupportedState, SaveError)
}


@contextlib.contextmanager
def _store_errors(rank: int) -> Iterator[None]:
    """Translate RuntimeError of a store to SaveError; torch has no class of its own for them."""
    try:
        yield
    except RuntimeError as error:
        raise SaveError(
            f"The store that ranks plan through failed: {error}",
            rank=rank,
            hint="It ends with the process that made it, often that of rank 0",
        ) from error


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """One rank's view of a plan of all ranks.

    Args:
        number: Its number in this run; the first plan is 1.
        wish: The value of the wish counter before it was made.
        digest: The hash of this rank's offer.
        answers: By the names of the shares that the rank offered: the share, and the division of
            each of its boxes.
    """

    number: int
    wish: int
    digest: str
    answers: dict[str, tuple[Offered, tuple[Cut | None, ...]]]


def fits(plan: SharedPlan, found: Sequence[tuple[Share, Offered | None]], *, rank: int) -> bool:
    """True if a plan has an owner for all that a rank offers, and binds it to nothing else."""
    told = all(offered is None or _cuts(plan, offered) is not None for _, offered in found)
    return told and _broken(plan, found, rank) is None


def divide(
    plan: SharedPlan,
    leaves: list[TensorLeaf],
    found: Sequence[tuple[Share, Offered | None]],
    *,
    rank: int,
) -> Iterator[Unit]:
    """Yield the units of a rank's state, divided as a shared plan has it.

    Args:
        plan: The plan.
        leaves: The tensors.
        found: The shares of the present state.
        rank: The rank.

    Raises:
        SaveError: If the rank no longer has a tensor that others leave to it.
    """
    broken = _broken(plan, found, rank)
    if broken is not None:
        raise SaveError(
            "Other ranks rely on this rank to write a part of this tensor, which has changed or is "
            "gone",
            key=broken,
            rank=rank,
            hint="Change replicated tensors on all ranks together; the next save plans anew",
        )
    for share, offered in found:
        cuts = None if offered is None else _cuts(plan, offered)
        if cuts is None:
            pieces = share.holding.written_by(rank) if share.holding.replicas else ()
        else:
            pieces = tuple(_pieces(leaves[share.members[0]], share, cuts, rank))
        yield Unit(share.members, pieces, share.overlapping, private=offered is None)


def _cuts(plan: SharedPlan, offered: Offered) -> tuple[Cut | None, ...] | None:
    known = plan.answers.get(offered.name)
    return known[1] if known is not None and known[0] == offered else None


def _pieces(
    leaf: TensorLeaf, share: Share, cuts: tuple[Cut | None, ...], rank: int
) -> Iterator[Piece]:
    boxes = share.holding.boxes
    for held, cut in zip((None,) if boxes is None else boxes, cuts, strict=True):
        if cut is None:
            yield Piece(rank, held)
        elif cut.dim is None:
            yield Piece(cut.stops[0][0], held)
        else:
            start, box = 0, held or whole_of(leaf.shape)
            for owner, stop in cut.stops:
                yield Piece(owner, rows_of(box, cut.dim, start, stop))
                start = stop


def _broken(
    plan: SharedPlan, found: Sequence[tuple[Share, Offered | None]], rank: int
) -> str | None:
    """Return the name of a tensor that others leave to a rank and that it lacks now, or None."""
    now = {offered.name: offered for _, offered in found if offered is not None}
    for name, (promised, cuts) in plan.answers.items():
        owed = any(cut is not None and any(rank == owner for owner, _ in cut.stops) for cut in cuts)
        if owed and now.get(name) != promised:
            return name
    return None
