"""The random generators of this process: seeded, and left as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators_left() -> Iterator[None]:
    """Give each generator back the state that it had."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed(number: int) -> None:
    """Seed each generator."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
