"""Decisions that all ranks of an attempt must share: the first create-only object wins.

Nobody is waited for. Whoever comes first decides for all, by what it knows, and everybody else
reads what was decided. An agreement is about one question, which its key names in a way that is
the same on all ranks and never asked twice in an attempt.
"""

from __future__ import annotations

import contextlib
import json

from ckpipe.backend import Backend, PutMode
from ckpipe.errors import InvalidManifest, ObjectExists, ObjectNotFound
from ckpipe.format.keys import Json
from ckpipe.format.names import agreement_key

_MAX_BYTES = 64 << 10


async def agreed(backend: Backend, attempt: str, question: str) -> tuple[Json] | None:
    """What was decided on a question, in a tuple of one; None if nothing is decided yet.

    Raises:
        InvalidManifest: If the decision cannot be read.
        StoreError: If the store failed.
    """
    key = agreement_key(attempt, question)
    try:
        data = await backend.get(key, max_bytes=_MAX_BYTES)
    except ObjectNotFound:
        return None
    try:
        return (json.loads(data)["decision"],)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidManifest("An agreement between ranks cannot be read", key=key) from error


async def agree(backend: Backend, attempt: str, question: str, proposal: Json) -> Json:
    """Decides a question, unless it is decided already; returns the decision, on all ranks alike.

    Args:
        backend: The store; its requests may be tried again, since whoever's object is there is
            read back.
        attempt: The name of the attempt.
        question: What it is about, of letters, digits, ``.``, ``_`` and ``-``.
        proposal: This rank's answer, plain JSON.

    Raises:
        InvalidManifest: If the decision cannot be read.
        StoreError: If the store failed.
    """
    body = json.dumps({"decision": proposal}).encode()
    # Whether the object that exists is ours, after a lost answer, or another rank's is the same.
    with contextlib.suppress(ObjectExists):
        await backend.put(agreement_key(attempt, question), body, PutMode.CREATE)
        return proposal
    decided = await agreed(backend, attempt, question)
    if decided is None:
        key = agreement_key(attempt, question)
        raise InvalidManifest("An agreement between ranks was deleted", key=key)
    return decided[0]
