"""How much of the long matrices a run takes: a sample drawn from one seed, or all of them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

#: Whether this is the long form of the tests (``make test-all``).
EVERY = bool(os.environ.get("CKPIPE_TEST_ALL"))

#: What samples are drawn from: of one run, the same in all its processes, and told at its end.
SEED = int(os.environ.setdefault("CKPIPE_TEST_SEED", str(random.randrange(2**32))))


def sample(cases: Iterable[T], count: int) -> list[T]:
    """So many of the cases, drawn from the seed, in order; all of them in the long form."""
    every = list(cases)
    if EVERY or count >= len(every):
        return every
    return [every[each] for each in sorted(random.Random(SEED).sample(range(len(every)), count))]
