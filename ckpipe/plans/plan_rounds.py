"""How ranks come to one plan for a save, through a ``torch.distributed`` store.

Theory. A plan that ranks share serves until their states change. Whether it serves for a save must
be decided alike by all ranks, yet a rank cannot know whether another one's state has changed, and
is not to wait for it. So for every save there is a *way*, which whoever comes first decides for
all, by an atomic compare-and-set: ``keep n`` if ``n`` is the newest plan that fits that rank, else
``new``.

* On the way ``keep``, nobody waits for anybody. A rank whose state has changed still does what the
  others leave to it (see :mod:`ckpipe.plans.shared_plan`), writes what is new by itself, and
  *wishes*: it raises a counter. A plan is older than its wishes if the counter was lower when it
  was made, and is kept no longer. So the save after that goes the other way, whoever is first.
* On the way ``new``, every rank posts an offer. Rank 0 waits for all of them, makes the plan and
  posts an answer for each rank, or posts why there is none. Nobody waits longer than the timeout,
  and whoever waited in vain names the ranks that have posted nothing.

A rank that was left out of a plan finds its answer in the store when a later save keeps that plan.

Every rank that is through with a save counts itself; the last one removes its keys. Saves that
some rank never came to are removed when they are ``_ROUNDS_KEPT`` saves old, plans when there are
``_PLANS_KEPT`` newer ones. Whoever comes too late for that finds nothing and decides anew, and its
manifest cannot become part of a checkpoint that others had planned differently: an index is only
written if each rank has written what others leave to it.

Long values are cut into pieces. No process group is used, and requests that wait are avoided: they
hold the connection.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from anyio.from_thread import check_cancelled

from ckpipe.errors import CkpipeError, PlanTimeout, SaveError, UnsupportedState
from ckpipe.plans.assignment import Answer, Cut, assign
from ckpipe.plans.offers import Offer, Offered, decode_offer, digest_of
from ckpipe.plans.shared_plan import SharedPlan, shared_plan

Store = Any
"""A ``torch.distributed.Store``; torch's type hints lack parts of it."""

_PREFIX = "ckpipe/plan"
_PIECE_BYTES = 256 << 10
_ROUNDS_KEPT = 16
_PLANS_KEPT = 3
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02
_MOST_NAMED = 20


class PlanRounds:
    """One rank's end of the planning of one run; its methods block, and may run in any thread.

    Args:
        store: What all ranks can reach.
        run: What keeps this launch on this root apart from all others.
        rank: This rank.
        world_size: How many ranks there are.
        timeout_seconds: How long to wait for others in one save.
    """

    def __init__(
        self, store: Store, run: str, *, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        # Only here, where a store proves that this torch has torch.distributed at all.
        from torch._C._distributed_c10d import PrefixStore

        connection = store.clone()
        connection.set_timeout(timedelta(seconds=max(1.0, timeout_seconds)))
        self._store: Store = PrefixStore(f"{_PREFIX}/{run}", connection)
        self._rank, self._world_size, self._seconds = rank, world_size, timeout_seconds
        self._changing = threading.Lock()
        self._plans: dict[int, SharedPlan] = {}
        self._offers: OrderedDict[str, tuple[Offered, ...]] = OrderedDict()
        self._settled: OrderedDict[str, SharedPlan] = OrderedDict()
        self._left: deque[tuple[str, str]] = deque()
        self._published: deque[list[str]] = deque()
        self._count = 0

    def agree(self, save: str, offer: Offer, data: bytes) -> SharedPlan:
        """Comes to the plan of a save together with the other ranks.

        Asked again for one save, it gives the same answer, whatever this rank has by then.

        Args:
            save: What names the save in its run, alike on all ranks.
            offer: What this rank has.
            data: The shares of the offer, encoded.

        Raises:
            PlanTimeout: If ranks have not taken part in time; names them.
            UnsupportedState: If ranks contradict each other.
            SaveError: If this rank was left out of the plan that others go by, or the store
                does not serve.
        """
        if save not in self._settled:
            with _store_errors(self._rank):
                self._settled[save] = self._agree(save, offer, data, digest_of(data))
            while len(self._settled) > _ROUNDS_KEPT:
                self._settled.popitem(last=False)
        return self._settled[save]

    def wish(self) -> None:
        """Has the next save that nobody has begun yet plan anew.

        Raises:
            SaveError: If the store does not serve.
        """
        with _store_errors(self._rank):
            self._store.add("wishes", 1)

    def _agree(self, save: str, offer: Offer, data: bytes, digest: str) -> SharedPlan:
        way = self._decide(save, digest)
        try:
            if way == "new":
                return self._plan_anew(save, offer, data, digest)
            return self._kept(int(way.removeprefix("keep ")))
        finally:
            self._leave(save, way)

    def _decide(self, save: str, digest: str) -> str:
        wish = self._store.add("wishes", 0)
        plans = list(self._plans.values())
        fit = [each.number for each in plans if each.digest == digest and each.wish >= wish]
        proposal = f"keep {max(fit)}" if fit else "new"
        way: bytes = self._store.compare_set(f"{save}/way", "", proposal)
        return way.decode()

    def _kept(self, number: int) -> SharedPlan:
        return self._plans.get(number) or self._fetch(number)

    def _plan_anew(self, save: str, offer: Offer, data: bytes, digest: str) -> SharedPlan:
        self._offers[digest] = offer.shares
        while len(self._offers) > _PLANS_KEPT:
            self._offers.popitem(last=False)
        if self._rank == 0:
            self._post(f"{save}/offer/0", b"")
            return self._plan_for_all(save, offer, digest)
        head = json.dumps({"digest": digest, "private": offer.private}).encode()
        self._post(f"{save}/offer/{self._rank}", head + b"\n" + data)
        found = self._awaited(save, [f"{save}/answer"])
        if not found:
            raise self._late(self._absent(save) or [0])
        answer = json.loads(self._store.get(f"{save}/answer"))
        if "plan" not in answer:
            raise _failure(answer)
        return self._fetch(answer["plan"])

    # Rank 0

    def _plan_for_all(self, save: str, mine: Offer, digest: str) -> SharedPlan:
        try:
            wish = self._store.add("wishes", 0)
            offers, digests = self._collect(save, mine, digest)
            answers = assign(offers)
        except CkpipeError as error:
            self._store.set(f"{save}/answer", _told(error))
            raise
        number = self._count = self._count + 1
        self._publish(number, wish, digests, answers)
        self._store.set(f"{save}/answer", json.dumps({"plan": number}))
        return self._remember(shared_plan(number, wish, digest, mine.shares, answers[0]))

    def _collect(self, save: str, mine: Offer, digest: str) -> tuple[list[Offer], list[str]]:
        """The offers of all ranks; equal ones are one object, which makes them fast to compare."""
        keys = [f"{save}/offer/{rank}" for rank in range(1, self._world_size)]
        if not self._awaited(save, keys):
            raise self._late(self._absent(save))
        known = {digest: mine.shares}
        offers, digests = [mine], [digest]
        for key in keys:
            head, _, data = self._get(key).partition(b"\n")
            told = json.loads(head)
            if told["digest"] not in known:
                known[told["digest"]] = decode_offer(data)
            offers.append(Offer(known[told["digest"]], told["private"]))
            digests.append(told["digest"])
        return offers, digests

    def _publish(
        self, number: int, wish: int, digests: Sequence[str], answers: Sequence[Answer]
    ) -> None:
        keys: dict[str, str] = {}
        for rank, (digest, answer) in enumerate(zip(digests, answers, strict=True)):
            body = _encode_answer(answer)
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
        """Gets this rank's part of a plan from the store."""
        key = f"plans/{number}/{self._rank}"
        header = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        offered = self._offers.get(header.get("offer", ""))
        if offered is None:
            self._store.add("wishes", 1)
            raise SaveError(
                "Other ranks save by a plan that this rank had no part in",
                rank=self._rank,
                hint="The next save plans anew",
            )
        answer = _decode_answer(zlib.decompress(self._get(header["body"])))
        return self._remember(shared_plan(number, header["wish"], header["offer"], offered, answer))

    def _remember(self, plan: SharedPlan) -> SharedPlan:
        with self._changing:
            self._plans[plan.number] = plan
            while len(self._plans) > _PLANS_KEPT:
                del self._plans[min(self._plans)]
        return plan

    def _awaited(self, save: str, keys: Sequence[str]) -> bool:
        """Waits until all keys are there; False if they are not in time."""
        until = time.monotonic() + self._seconds
        pause = _FIRST_PAUSE_SECONDS
        for key in keys:
            while not self._store.check([key]):
                # A save that is cancelled is not to wait for the end of its time.
                _stop_if_cancelled()
                if time.monotonic() > until:
                    return False
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.5)
        return True

    def _absent(self, save: str) -> list[int]:
        return [
            rank
            for rank in range(self._world_size)
            if rank != self._rank and not self._store.check([f"{save}/offer/{rank}"])
        ]

    def _late(self, ranks: list[int]) -> PlanTimeout:
        return _absence(ranks, self._seconds)

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
        """Puts a long value, in pieces; the key itself comes last."""
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


def _encode_answer(answer: Answer) -> str:
    rows = [[cut and (cut.dim, cut.stops) for cut in cuts] for cuts in answer]
    return json.dumps(rows, separators=(",", ":"))


def _decode_answer(data: bytes) -> Answer:
    return tuple(
        tuple(cut and Cut(tuple((owner, stop) for owner, stop in cut[1]), cut[0]) for cut in cuts)
        for cuts in json.loads(data)
    )


_ERRORS: dict[str, type[CkpipeError]] = {
    each.__name__: each for each in (PlanTimeout, UnsupportedState, SaveError)
}


def _told(error: CkpipeError) -> str:
    """An error as other ranks get it."""
    kind = type(error).__name__
    return json.dumps(
        {
            "kind": kind if kind in _ERRORS else SaveError.__name__,
            "message": error.message,
            "key": error.key,
            "rank": error.rank,
            "hint": error.hint,
        }
    )


def _failure(told: dict[str, Any]) -> CkpipeError:
    kind = _ERRORS[told["kind"]]
    return kind(told["message"], key=told["key"], rank=told["rank"], hint=told["hint"])


def _absence(ranks: list[int], seconds: float) -> PlanTimeout:
    more = len(ranks) - _MOST_NAMED
    named = ", ".join(map(str, ranks[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
    return PlanTimeout(
        f"Rank{'s' if len(ranks) > 1 else ''} {named} did not take part in planning within "
        f"{seconds:g} s",
        hint="Look why they are late or gone; the next save plans again. plan.timeout_seconds "
        "says how long to wait",
    )


@contextlib.contextmanager
def _store_errors(rank: int) -> Iterator[None]:
    """Gives errors of a store, which have no class of their own, a name."""
    try:
        yield
    except RuntimeError as error:
        raise SaveError(
            f"The store that ranks plan through does not serve: {error}",
            rank=rank,
            hint="It lives in the process that made it, often that of rank 0",
        ) from error


def _stop_if_cancelled() -> None:
    # Outside of a worker thread of anyio there is nothing to be cancelled by.
    with contextlib.suppress(RuntimeError):
        check_cancelled()


__all__ = ["PlanRounds"]
