"""Finds out whether a store is fit to commit to, before anything is entrusted to it.

A checkpoint is complete when an object was *created*, and several processes may try. On a store
that ignores ``If-None-Match`` all of them succeed, each over the other, and nobody is told.
"""

from __future__ import annotations

from ckpipe.errors import ObjectExists, PermissionDenied, StoreError
from ckpipe_s3.address import PROBE_KEY
from ckpipe_s3.objects import Objects
from ckpipe_s3.requests import Requests

TEXT = b"ckpipe tries to create this object twice, to see whether the store refuses it.\n"

_fitness: dict[tuple[str | None, str], bool] = {}


async def honours_create_only(requests: Requests, objects: Objects, endpoint: str | None) -> bool:
    """Whether creating an object fails where there is one; asked once per bucket and process.

    The object stays, since whoever may write may not be allowed to delete; a second probe needs
    one request less for it. Credentials that may not write here learn nothing; what they wanted
    to write is refused in its own name.

    Raises:
        StoreError: If the store failed, or does not list what it holds.
    """
    store = (endpoint, requests.address.bucket)
    if store not in _fitness:
        try:
            _fitness[store] = await _probe(requests, objects)
        except PermissionDenied:
            return True
    return _fitness[store]


async def _probe(requests: Requests, objects: Objects) -> bool:
    name = requests.address.prefix + PROBE_KEY
    honoured = False
    for _ in range(2):
        try:
            await objects.write(name, TEXT, {"IfNoneMatch": "*"})
        except ObjectExists:
            honoured = True
            break
    pages = await requests.pages("list_objects_v2", Prefix=name)
    if name not in {entry["Key"] for page in pages for entry in page.get("Contents", ())}:
        message = f"{requests.address} does not list an object that was just written"
        raise StoreError(message, hint="Use a store whose lists are consistent")
    return honoured
