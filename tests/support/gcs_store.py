"""What a strict emulator of Google Cloud Storage keeps: objects and upload sessions.

Written from the published reference of the JSON API, and as strict as that is: conditions hold
on every verb, checksums are verified, sessions keep what they have received in whole pieces of
256 KiB, and only objects of one storage class are composed.
"""

from __future__ import annotations

import base64
import itertools
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.support.stored_files import crc32c

QUANTUM = 256 * 1024
MAX_SOURCES = 32


class Refusal(Exception):
    """An answer that says no.

    Args:
        status: The HTTP status.
        reason: The store's word for it.
        message: More about it.
    """

    def __init__(self, status: int, reason: str, message: str = "") -> None:
        self.status, self.reason, self.message = status, reason, message or reason
        super().__init__(f"{status} {reason} {message}")


@dataclass(frozen=True)
class Stored:
    """One generation of an object, without its content."""

    bucket: str
    name: str
    generation: int
    size: int
    checksum: str
    created: str
    storage_class: str = "STANDARD"
    content_type: str = "application/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)
    components: int | None = None
    kms_key: str | None = None

    def resource(self) -> dict[str, Any]:
        """What the store tells of it."""
        told: dict[str, Any] = {
            "kind": "storage#object",
            "bucket": self.bucket,
            "name": self.name,
            "generation": str(self.generation),
            "metageneration": "1",
            "size": str(self.size),
            "crc32c": self.checksum,
            "timeCreated": self.created,
            "updated": self.created,
            "storageClass": self.storage_class,
            "contentType": self.content_type,
        }
        optional = {
            "metadata": self.metadata,
            "componentCount": self.components,
            "kmsKeyName": self.kms_key,
        }
        return told | {name: value for name, value in optional.items() if value}


@dataclass
class Session:
    """An upload that takes several requests."""

    id: str
    bucket: str
    told: dict[str, Any]
    query: dict[str, str]
    received: bytearray = field(default_factory=bytearray, repr=False)
    done: dict[str, Any] | None = None
    ended: bool = False


class Store:
    """Buckets, their objects, and open sessions."""

    def __init__(self) -> None:
        self.buckets: set[str] = set()
        self.objects: dict[tuple[str, str], Stored] = {}
        self._content: dict[tuple[str, str], bytes] = {}
        self.sessions: dict[str, Session] = {}
        self._generations = itertools.count(time.time_ns() // 1000)

    def make_bucket(self, name: str) -> None:
        """Make a bucket; one that is there is left alone."""
        self.buckets.add(name)

    def check_bucket(self, bucket: str) -> None:
        """Refuse what concerns a bucket that is not there."""
        if bucket not in self.buckets:
            raise Refusal(404, "notFound", "The specified bucket does not exist.")

    def find(self, bucket: str, name: str, generation: str | None = None) -> Stored:
        """An object, of a certain generation if one is given."""
        self.check_bucket(bucket)
        found = self.objects.get((bucket, name))
        if found is None or (generation is not None and int(generation) != found.generation):
            raise Refusal(404, "notFound", f"No such object: {bucket}/{name}")
        return found

    def content(self, stored: Stored) -> bytes:
        """The bytes of an object."""
        return self._content[stored.bucket, stored.name]

    def put(
        self,
        bucket: str,
        content: bytes,
        told: Mapping[str, Any],
        query: Mapping[str, str],
        components: int | None = None,
    ) -> Stored:
        """Make an object, if what was told of it and the conditions hold."""
        self.check_bucket(bucket)
        name = check_name(told.get("name"))
        check_conditions(query, self.objects.get((bucket, name)))
        checksum = encoded(crc32c(content))
        if told.get("crc32c", checksum) != checksum:
            message = f'Provided CRC32C "{told["crc32c"]}" doesn\'t match calculated CRC32C'
            raise Refusal(400, "invalid", message)
        stored = Stored(
            bucket, name, next(self._generations), len(content), checksum, now(),
            told.get("storageClass", "STANDARD"),
            told.get("contentType", "application/octet-stream"),
            dict(told.get("metadata", {})), components, query.get("kmsKeyName"),
        )  # fmt: skip
        self.objects[bucket, name], self._content[bucket, name] = stored, content
        return stored

    def delete(self, stored: Stored) -> None:
        """Delete an object."""
        del self.objects[stored.bucket, stored.name], self._content[stored.bucket, stored.name]

    def compose(
        self,
        bucket: str,
        sources: Iterable[Stored],
        told: Mapping[str, Any],
        query: Mapping[str, str],
    ) -> Stored:
        """Make an object of others."""
        found = list(sources)
        if not 1 <= len(found) <= MAX_SOURCES:
            raise Refusal(400, "invalid", f"between 1 and {MAX_SOURCES} source components")
        classes = {source.storage_class for source in found}
        if len(classes) > 1 or told.get("storageClass", *classes) not in classes:
            raise Refusal(400, "invalid", "the storage classes of composed objects differ")
        content = b"".join(self.content(source) for source in found)
        components = sum(source.components or 1 for source in found)
        # A checksum that is told of a composed object is not verified.
        kept = {name: value for name, value in told.items() if name != "crc32c"}
        whole = {**kept, "storageClass": classes.pop()}
        return self.put(bucket, content, whole, query, components)

    # Sessions

    def begin(self, bucket: str, told: dict[str, Any], query: Mapping[str, str]) -> Session:
        """Begin an upload session."""
        self.check_bucket(bucket)
        check_conditions(query, self.objects.get((bucket, check_name(told.get("name")))))
        session = Session(secrets.token_urlsafe(48), bucket, told, dict(query))
        self.sessions[session.id] = session
        return session

    def session(self, id: str) -> Session:
        """A session that is open or done."""
        found = self.sessions.get(id)
        if found is None:
            raise Refusal(404, "notFound", "no such upload session")
        if found.ended:
            raise Refusal(499, "clientClosedRequest", "the upload session was ended")
        return found

    def finish(self, session: Session) -> dict[str, Any]:
        """Make the object of a session that has all its bytes."""
        try:
            made = self.put(session.bucket, bytes(session.received), session.told, session.query)
        except Refusal:
            self.end(session)
            raise
        session.done = made.resource()
        session.received = bytearray()
        return session.done

    def end(self, session: Session) -> None:
        """End a session that was not done."""
        if session.done is None:
            session.ended, session.received = True, bytearray()


def encoded(value: int) -> str:
    """A CRC-32C as the API writes it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def now() -> str:
    """The time as the API writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def check_name(name: object) -> str:
    """Refuse names that no object may have."""
    if not isinstance(name, str) or not name:
        raise Refusal(400, "required", "Required")
    if len(name.encode()) > 1024 or name in (".", "..") or "\n" in name or "\r" in name:
        raise Refusal(400, "invalid", "Invalid object name")
    return name


def check_conditions(query: Mapping[str, str], found: Stored | None) -> None:
    """Refuse what concerns another generation than the conditions say; 0 is no object."""
    generation = found.generation if found else 0
    wanted, unwanted = query.get("ifGenerationMatch"), query.get("ifGenerationNotMatch")
    if wanted is not None and int(wanted) != generation:
        raise Refusal(412, "conditionNotMet", "a precondition does not hold")
    if unwanted is not None and int(unwanted) == generation:
        raise Refusal(412, "conditionNotMet", "a precondition does not hold")
