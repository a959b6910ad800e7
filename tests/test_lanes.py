"""Tasks that belong together end together, and as what the first of them raised."""

from __future__ import annotations

import anyio
import pytest

from ckpipe.threads import all_of


class Crash(BaseException):
    """The end of a process, as it were."""


@pytest.mark.parametrize("failure", [ValueError, Crash])
async def test_calls_made_together_end_as_the_first_that_fails(
    failure: type[BaseException],
) -> None:
    async def fail() -> None:
        raise failure

    with pytest.raises(failure):
        await all_of([anyio.sleep_forever, fail])


async def test_calls_made_together_return_in_their_order() -> None:
    second = anyio.Event()

    async def wait() -> int:
        await second.wait()
        return 1

    async def go_first() -> int:
        second.set()
        return 2

    assert await all_of([wait, go_first]) == [1, 2]


async def test_calls_that_are_cancelled_are_cancelled_all() -> None:
    with anyio.move_on_after(0) as scope:
        await all_of([anyio.sleep_forever, anyio.sleep_forever])
    assert scope.cancelled_caught
