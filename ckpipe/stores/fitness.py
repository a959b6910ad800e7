"""Finds out whether a store is fit to commit to, before anything is entrusted to it.

A checkpoint is complete when an object was *created*, and several processes may try. On a store
that ignores the condition of a create-only put all of them succeed, each over the other, and
nobody is told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable

from ckpipe.errors import ObjectExists, PermissionDenied, StoreError

PROBE_TEXT = b"ckpipe tries to create this object twice, to see whether the store refuses it.\n"

_fitness: dict[Hashable, bool] = {}


async def honours_create_only(
    store: Hashable,
    where: str,
    create: Callable[[], Awaitable[None]],
    listed: Callable[[], Awaitable[bool]],
) -> bool:
    """Whether creating an object fails where there is one; asked once per store and process.

    The object stays, since whoever may write may not be allowed to delete; a second probe needs
    one request less for it. Credentials that may not write here learn nothing; what they wanted
    to write is refused in its own name.

    Args:
        store: What tells one store from another.
        where: The URL of the root.
        create: Creates the probe's object, with the content :data:`PROBE_TEXT`.
        listed: Whether a list shows it.

    Raises:
        StoreError: If the store failed, or does not list what it holds.
    """
    if store not in _fitness:
        try:
            _fitness[store] = await _probe(where, create, listed)
        except PermissionDenied:
            return True
    return _fitness[store]


async def _probe(
    where: str, create: Callable[[], Awaitable[None]], listed: Callable[[], Awaitable[bool]]
) -> bool:
    honoured = False
    for _ in range(2):
        try:
            await create()
        except ObjectExists:
            honoured = True
            break
    if not await listed():
        message = f"{where} does not list an object that was just written"
        raise StoreError(message, hint="Use a store whose lists are consistent")
    return honoured


def unfit(where: str, condition: str) -> StoreError:
    """The error for a store that ignores the condition of a create-only put."""
    return StoreError(
        f"The store of {where} ignores {condition}, so that two writers can "
        "overwrite each other's checkpoints unnoticed",
        hint="Use another store, or accept the risk with the option "
        "require_create_only=False and give every run a root of its own",
    )


__all__ = ["PROBE_TEXT", "honours_create_only", "unfit"]
