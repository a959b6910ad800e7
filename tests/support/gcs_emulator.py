"""A strict emulator of the JSON API of Google Cloud Storage, as a server on the loopback interface.

    python tests/support/gcs_emulator.py PORT [--authorize]

It serves what clients of the JSON API need to write, read, list, compose, copy and delete objects,
and refuses what the reference does not name, so that a misspelt parameter is an error. Pages of
lists are short, as the real ones may be. A bucket whose name begins with ``payer`` wants
``userProject``. With ``--authorize`` requests need a token from ``POST /token``, an OAuth endpoint.
Tests look at it through ``/emulator``.
"""

from __future__ import annotations

import argparse
import contextlib
import email.parser
import email.policy
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from aiohttp import web

from tests.support.gcs_store import QUANTUM, Refusal, Session, Store, check_conditions

PAGE = 100
CONDITIONS = {"ifGenerationMatch", "ifGenerationNotMatch"}
COMMON = {"userProject", "fields"}
PARAMETERS = {
    "upload": {"uploadType", "name", "kmsKeyName", *CONDITIONS},
    "session": {"uploadType", "name", "upload_id"},
    "look": {"alt", "generation", *CONDITIONS},
    "delete": {"generation", *CONDITIONS},
    "compose": {"kmsKeyName", *CONDITIONS},
    "rewrite": {"destinationKmsKeyName", "rewriteToken", *CONDITIONS},
    "list": {"prefix", "delimiter", "pageToken", "maxResults"},
}
TOKEN_SECONDS = 3600

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The routes, over a store.

    Args:
        store: What is kept.
        authorize: Whether requests need a token.
    """

    def __init__(self, store: Store, authorize: bool) -> None:
        self._store, self._authorize = store, authorize
        self._tokens: set[str] = set()
        self._granted = 0

    def application(self) -> web.Application:
        """The routes of the API, and those of the emulator's own."""
        app = web.Application(client_max_size=1 << 32, middlewares=[self._guard])
        objects = "/storage/v1/b/{bucket}/o"
        one = objects + "/{name:[^/]+}"
        app.router.add_post("/upload" + objects, self.upload)
        app.router.add_put("/upload" + objects, self.go_on)
        app.router.add_delete("/upload" + objects, self.cancel)
        app.router.add_get(objects, self.list)
        app.router.add_get(one, self.look)
        app.router.add_delete(one, self.delete)
        app.router.add_post(one + "/compose", self.compose)
        app.router.add_post(one + "/rewriteTo/b/{to_bucket}/o/{to_name:[^/]+}", self.rewrite)
        app.router.add_post("/storage/v1/b", self.make_bucket)
        app.router.add_post("/token", self.grant)
        app.router.add_get("/emulator", self.state)
        app.router.add_post("/emulator/buckets/{bucket}", self.add_bucket)
        app.router.add_delete("/emulator/tokens", self.expire)
        app.router.add_delete("/emulator/sessions", self.end_sessions)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path.startswith(("/storage/", "/upload/")):
                self._check(request)
            return await handler(request)
        except Refusal as refusal:
            # The client is still sending; it gets its answer all the same once it has sent.
            with contextlib.suppress(ConnectionError):
                await request.read()
            return refused(refusal)

    def _check(self, request: web.Request) -> None:
        """Refuse requests without a good token, or for which nobody pays."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # The name of a session is as good as a token, for that session.
        if self._authorize and token not in self._tokens and "upload_id" not in request.query:
            raise Refusal(401, "authError", "Invalid Credentials")
        bucket = request.match_info.get("bucket", "")
        session = "upload_id" in request.query
        if bucket.startswith("payer") and not session and "userProject" not in request.query:
            raise Refusal(400, "userProjectMissing", "the bucket wants a user project")

    # Writing

    async def upload(self, request: web.Request) -> web.Response:
        """``objects.insert``: everything at once, or the beginning of a session."""
        bucket, query = place(request)[0], asked(request, "upload")
        body = await request.read()
        if query.get("uploadType") == "multipart":
            told, content = parts(request.headers["Content-Type"], body)
            made = self._store.put(bucket, content, named(told, query), query)
            return answer(made.resource(), query)
        if query.get("uploadType") != "resumable":
            raise Refusal(400, "invalid", "uploadType")
        told = named(json.loads(body) if body else {}, query)
        session = self._store.begin(bucket, told, query)
        where = f"http://{request.host}{request.path}?uploadType=resumable&upload_id={session.id}"
        return web.Response(headers={"Location": where, "X-GUploader-UploadID": session.id})

    async def go_on(self, request: web.Request) -> web.Response:
        """More bytes of a session, or the question how many it has."""
        query = asked(request, "session")
        session = self._store.session(query.get("upload_id", ""))
        span = re.fullmatch(
            r"bytes (\*|(\d+)-(\d+))/(\d+|\*)", request.headers.get("Content-Range", "")
        )
        if span is None:
            raise Refusal(400, "invalid", "Content-Range")
        if session.done is not None:
            await request.read()
            return answer(session.done, session.query)
        total = None if span[4] == "*" else int(span[4])
        if span[2] is not None:
            await self._receive(request, session, int(span[2]), int(span[3]) + 1, total)
        if total is not None and len(session.received) == total:
            return answer(self._store.finish(session), session.query)
        had = len(session.received)
        headers = {"Range": f"bytes=0-{had - 1}"} if had else {}
        return web.Response(status=308, reason="Resume Incomplete", headers=headers)

    async def _receive(
        self, request: web.Request, session: Session, start: int, end: int, total: int | None
    ) -> None:
        size = int(request.headers["Content-Length"])
        if size != end - start or (total is not None and end > total):
            raise Refusal(400, "invalid", "Content-Range and body differ")
        if end != total and size % QUANTUM:
            raise Refusal(400, "invalid", "not a multiple of 256 KiB")
        if start > len(session.received):
            raise Refusal(503, "backendError", "bytes before these are missing")
        at = start
        try:
            async for piece in request.content.iter_chunked(QUANTUM):
                # What is there already stays, also if other bytes come now.
                session.received += piece[max(0, len(session.received) - at) :]
                at += len(piece)
        finally:
            if at != end:  # its connection broke, after which only whole pieces stay
                del session.received[len(session.received) // QUANTUM * QUANTUM :]

    async def cancel(self, request: web.Request) -> web.Response:
        """End a session."""
        self._store.end(self._store.session(asked(request, "session").get("upload_id", "")))
        return web.Response(status=499)

    async def compose(self, request: web.Request) -> web.Response:
        """``objects.compose``."""
        (bucket, name), query = place(request), asked(request, "compose")
        body = await request.json()
        sources = [
            self._store.find(bucket, source["name"], source.get("generation"))
            for source in body["sourceObjects"]
        ]
        told = body.get("destination", {}) | {"name": name}
        return answer(self._store.compose(bucket, sources, told, query).resource(), query)

    async def rewrite(self, request: web.Request) -> web.Response:
        """``objects.rewrite``, which takes two calls if the object is not small."""
        query = asked(request, "rewrite")
        stored = self._store.find(*place(request))
        told = await request.json() | {"name": request.match_info["to_name"]}
        size = stored.resource()["size"]
        if int(size) > QUANTUM and "rewriteToken" not in query:
            token = secrets.token_urlsafe(16)
            self._tokens.add(token)
            part = {"totalBytesRewritten": str(QUANTUM), "objectSize": size}
            return answer({"done": False, "rewriteToken": token, **part}, query)
        if query.get("rewriteToken", "") not in self._tokens | {""}:
            raise Refusal(400, "invalid", "rewriteToken")
        if "destinationKmsKeyName" in query:
            query["kmsKeyName"] = query.pop("destinationKmsKeyName")
        content = self._store.content(stored)
        made = self._store.put(request.match_info["to_bucket"], content, told, query)
        done = {"done": True, "totalBytesRewritten": size, "objectSize": size}
        return answer({**done, "resource": made.resource()}, query)

    async def delete(self, request: web.Request) -> web.Response:
        """``objects.delete``."""
        query = asked(request, "delete")
        stored = self._store.find(*place(request), query.get("generation"))
        check_conditions(query, stored)
        self._store.delete(stored)
        return web.Response(status=204)

    # Reading

    async def look(self, request: web.Request) -> web.StreamResponse:
        """``objects.get``: what is told of an object, or its content."""
        query = asked(request, "look")
        stored = self._store.find(*place(request), query.get("generation"))
        check_conditions(query, stored)
        if query.get("alt") != "media":
            return answer(stored.resource(), query)
        content, headers = self._store.content(stored), {
            "x-goog-generation": str(stored.generation),
            "x-goog-hash": f"crc32c={stored.checksum}",
        }  # fmt: skip
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if span is None:
            return web.Response(body=content, headers=headers)
        start, end = int(span[1]), min(int(span[2]) + 1, len(content))
        if start >= end:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return web.Response(status=206, body=content[start:end], headers=headers)

    async def list(self, request: web.Request) -> web.Response:
        """``objects.list``."""
        bucket, query = request.match_info["bucket"], asked(request, "list")
        self._store.check_bucket(bucket)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        entries: dict[str, dict[str, Any] | None] = {}
        for (where, name), stored in self._store.objects.items():
            if where == bucket and name.startswith(prefix):
                head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("",) * 3
                entries[prefix + head + cut if cut else name] = None if cut else stored.resource()
        after = unquote(query.get("pageToken", ""))
        left = sorted(entry for entry in entries if entry > after)
        count = min(int(query.get("maxResults", PAGE)), PAGE)
        shown = left[:count]
        page: dict[str, Any] = {"kind": "storage#objects"}
        if found := [entries[entry] for entry in shown if entries[entry]]:
            page["items"] = found
        if cuts := [entry for entry in shown if entries[entry] is None]:
            page["prefixes"] = cuts
        if len(left) > count:
            page["nextPageToken"] = quote(shown[-1])
        return answer(page, query)

    # Around it

    async def make_bucket(self, request: web.Request) -> web.Response:
        """``buckets.insert``."""
        name = (await request.json())["name"]
        self._store.make_bucket(name)
        return web.json_response({"kind": "storage#bucket", "name": name})

    async def grant(self, request: web.Request) -> web.Response:
        """Give a token to who has the refresh token (RFC 6749, section 6)."""
        form = await request.post()
        if form.get("refresh_token") != "good":
            return web.json_response({"error": "invalid_grant"}, status=400)
        token = secrets.token_urlsafe(16)
        self._tokens.add(token)
        self._granted += 1
        return web.json_response({"access_token": token, "expires_in": TOKEN_SECONDS})

    async def expire(self, request: web.Request) -> web.Response:
        """Make all tokens bad."""
        self._tokens.clear()
        return web.Response(status=204)

    async def add_bucket(self, request: web.Request) -> web.Response:
        """Make a bucket without a token."""
        self._store.make_bucket(request.match_info["bucket"])
        return web.Response(status=204)

    async def end_sessions(self, request: web.Request) -> web.Response:
        """End all sessions, as the store does after a week."""
        for session in self._store.sessions.values():
            self._store.end(session)
        return web.Response(status=204)

    async def state(self, request: web.Request) -> web.Response:
        """What is there, for tests: names of objects, open sessions, how many tokens were given."""
        sessions = self._store.sessions.values()
        return web.json_response(
            {
                "objects": {
                    f"{bucket}/{name}": stored.resource()
                    for (bucket, name), stored in self._store.objects.items()
                },
                "sessions": [
                    [f"{each.bucket}/{each.told['name']}", len(each.received)]
                    for each in sessions
                    if each.done is None and not each.ended
                ],
                "tokens": self._granted,
            }
        )


def place(request: web.Request) -> tuple[str, str]:
    """The bucket and name that a path names."""
    # The router has decoded the name once, which is right.
    return request.match_info["bucket"], request.match_info.get("name", "")


def asked(request: web.Request, verb: str) -> dict[str, str]:
    """The query, without anything that the reference does not name."""
    unknown = set(request.query) - PARAMETERS[verb] - COMMON
    if unknown:
        raise Refusal(400, "invalidParameter", f"unknown parameters: {sorted(unknown)}")
    return dict(request.query)


def named(told: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """What is told of an object, with its name from there or from the query."""
    return told | {"name": query.get("name") or told.get("name")}


def parts(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """The two parts of a ``multipart/related`` body: JSON and content."""
    parser = email.parser.BytesHeaderParser(policy=email.policy.HTTP)
    header = parser.parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode())
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/related" or not boundary:
        raise Refusal(400, "badContent", "no boundary")
    edge = b"--" + boundary.encode()
    start, *found, end = (b"\r\n" + body).split(b"\r\n" + edge)
    if start or end.strip() != b"--" or len(found) != 2:
        raise Refusal(400, "badContent", "not two parts")
    told, content = (part.partition(b"\r\n\r\n")[2] for part in found)
    return json.loads(told), content


def answer(told: dict[str, Any], query: Mapping[str, str]) -> web.Response:
    """An answer of JSON, with the fields that were asked for."""
    return web.json_response(selected(told, query.get("fields")))


def selected(told: dict[str, Any], fields: str | None) -> dict[str, Any]:
    """The fields of an answer that a ``fields`` parameter selects, such as ``items(name),more``."""
    if fields is None:
        return told
    chosen = {}
    for name, inner in re.findall(r"(\w+)(?:\(([^)]*)\))?", fields):
        if name in told:
            value = told[name]
            chosen[name] = [selected(each, inner) for each in value] if inner else value
    return chosen


def refused(refusal: Refusal) -> web.Response:
    """An answer that says no, in the form of the API."""
    one = {"domain": "global", "reason": refusal.reason, "message": refusal.message}
    error = {"code": refusal.status, "message": refusal.message, "errors": [one]}
    headers = {"X-GUploader-UploadID": "REQ-42"}
    return web.json_response({"error": error}, status=refusal.status, headers=headers)


def main() -> None:
    """Serve until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--authorize", action="store_true", help="requests need a token")
    arguments = parser.parse_args()
    app = Api(Store(), arguments.authorize).application()
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
