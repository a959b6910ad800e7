"""What a strict emulator of Google Cloud Storage keeps: objects and upload sessions.

Written from the published reference of the JSON API, and as strict as that is: conditions hold
on every verb, checksums are verified, sessions keep what they have received in whole pieces of
256 KiB, and only objects of one storage class are composed. With a folder everything is on disk
when it is acknowledged, so that a server that was killed goes on where it was.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stored_files import crc32c

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
    """Buckets, their objects, and open sessions.

    Args:
        folder: Where they are kept; None for memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.buckets: set[str] = set()
        self.objects: dict[tuple[str, str], Stored] = {}
        self._content: dict[tuple[str, str], bytes] = {}
        self.sessions: dict[str, Session] = {}
        self._generations = itertools.count(time.time_ns() // 1000)
        if folder is not None:
            folder.mkdir(exist_ok=True)
            for file in sorted(folder.glob("*.json")):
                self._load(file)

    # On disk: what is told in a .json, the content beside it in a .data; the .json is written last.

    def _load(self, file: Path) -> None:
        told = json.loads(file.read_text())
        if file.name.startswith("bucket-"):
            self.buckets.add(told)
            return
        content = file.with_suffix(".data").read_bytes()
        if file.name.startswith("object-"):
            stored = Stored(**told)
            self.objects[stored.bucket, stored.name] = stored
            self._content[stored.bucket, stored.name] = content
        else:
            self.sessions[told["id"]] = Session(**told | {"received": bytearray(content)})

    def _file(self, kind: str, *names: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{kind}-{hashlib.sha256(repr(names).encode()).hexdigest()[:32]}.json"

    def _keep(self, file: Path | None, told: object, content: bytes | bytearray = b"") -> None:
        if file is None:
            return
        for path, data in ((file.with_suffix(".data"), content), (file, json.dumps(told).encode())):
            new = path.with_suffix(".new")
            new.write_bytes(data)
            os.replace(new, path)

    def make_bucket(self, name: str) -> None:
        """Make a bucket; one that is there is left alone."""
        self.buckets.add(name)
        self._keep(self._file("bucket", name), name)

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
        self._keep(self._file("object", bucket, name), asdict(stored), content)
        self.objects[bucket, name], self._content[bucket, name] = stored, content
        return stored

    def delete(self, stored: Stored) -> None:
        """Delete an object."""
        file = self._file("object", stored.bucket, stored.name)
        if file is not None:
            file.unlink()
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
        self.keep_session(session)
        return session

    def session(self, id: str) -> Session:
        """A session that is open or done."""
        found = self.sessions.get(id)
        if found is None:
            raise Refusal(404, "notFound", "no such upload session")
        if found.ended:
            raise Refusal(499, "clientClosedRequest", "the upload session was ended")
        return found

    def keep_session(self, session: Session, *, whole: bool = True) -> None:
        """Make durable what a session has.

        Args:
            session: The session.
            whole: False if its connection broke, after which only whole pieces stay.
        """
        if not whole:
            del session.received[len(session.received) // QUANTUM * QUANTUM :]
        told = asdict(replace(session, received=bytearray())) | {"received": None}
        self._keep(self._file("session", session.id), told, bytes(session.received))

    def finish(self, session: Session) -> dict[str, Any]:
        """Make the object of a session that has all its bytes."""
        try:
            made = self.put(session.bucket, bytes(session.received), session.told, session.query)
        except Refusal:
            self.end(session)
            raise
        session.done = made.resource()
        session.received = bytearray()
        self.keep_session(session)
        return session.done

    def end(self, session: Session) -> None:
        """End a session that was not done."""
        if session.done is None:
            session.ended, session.received = True, bytearray()
            self.keep_session(session)


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
