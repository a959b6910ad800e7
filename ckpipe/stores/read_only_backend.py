"""A backend that nothing is written to or deleted from, whatever its user tries."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NoReturn

from ckpipe.backend import PutMode, Upload
from ckpipe.errors import PermissionDenied
from ckpipe.stores.patient_backend import PatientBackend


class ReadOnlyBackend(PatientBackend):
    """Reads as :class:`PatientBackend` does; everything that changes the store is refused.

    Raises:
        PermissionDenied: From whatever would change the store.
    """

    async def put(self, key: str, data: bytes, mode: PutMode) -> NoReturn:
        _refuse(key)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        _refuse(key)

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            _refuse(key)

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        _refuse(prefix)


def _refuse(key: str) -> NoReturn:
    raise PermissionDenied(
        "The pipeline was opened to read only", key=key, hint="Open one without read_only=True"
    )


__all__ = ["ReadOnlyBackend"]
