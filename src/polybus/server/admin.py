"""The admin socket: requests to a running bus, one JSON object per line.

    → {"verb": "stats"}
    ← {"ok": {...}}   or   {"error": {"code": "unknown_verb", "text": "..."}}

Responses come in the order of the requests. A table of verbs lists the requests and their
callers: any caller that reaches the socket, or admins only: root, the user that the bus runs
as, and callers with an admin rule. The kernel reports the identity. A verb may be slow: the
next request waits for its response.

Bad input:

    not JSON, not an object, no verb, an unknown one,   an error, the connection
    a key the verb does not take                        lives on
    a line over 1 MiB                                   an error, then closed
    a line that is not finished, or silence             closed after admin_idle_timeout_s
    input that ends inside a line                       that line is dropped, then closed
    questions faster than answers are read              reading pauses

Callers that are not admins get at most half of the connections, so they cannot lock the
owner out, and one of them at most its share of that half (`bus.shares`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from polybus.bus.admin_verb import AdminError, AdminVerb, Request
from polybus.bus.shares import ShareTable
from polybus.errors import LimitReached

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import ConnectionIO
    from polybus.model.identity import Identity

# A request is a verb and some names; a rule table of thousands of lines still fits.
MAX_LINE_BYTES = 1024 * 1024
# Unsent responses. One large response may exceed it; the next request then waits.
MAX_BACKLOG_BYTES = 1024 * 1024
ROOT_UID = 0

Answer = dict[str, Any]


class AdminServer:
    """All admin connections of one bus, with its verbs and limits."""

    def __init__(
        self,
        verbs: Mapping[str, AdminVerb],
        *,
        own_uid: int,
        max_connections: int,
        idle_timeout_s: float,
        clock: Callable[[], float],
        log: Any,
        made_admin: Callable[[Identity], bool] = lambda identity: False,
        user_share: float = 1.0,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._verbs = verbs
        self._has_admin_rule = made_admin
        self._admins = frozenset({ROOT_UID, own_uid})
        # Admins need no entry here: the listener counts all connections.
        strangers = max_connections // 2
        self._strangers = ShareTable(
            "max_admin_connections",
            strangers,
            max(1, int(strangers * user_share)),
            0,
            lambda identity: False,
            on_refused,
        )
        self._idle_timeout_s = idle_timeout_s
        self.clock = clock
        self._log = log
        self._sessions: set[AdminSession] = set()

    def open(self, pipe: ConnectionIO) -> AdminSession:
        """Open a session. A connection over the limit gets an error and is closed."""
        session = AdminSession(self, pipe)
        if not self.is_admin(pipe.identity):
            try:
                self._strangers.take(pipe.identity)
            except LimitReached as error:
                session.refuse(AdminError("limit_reached", f"too many admin connections: {error}"))
                return session
            session.stranger = pipe.identity.account_name
        self._sessions.add(session)
        return session

    def forget(self, session: AdminSession) -> None:
        self._sessions.discard(session)
        if session.stranger:
            self._strangers.release(session.stranger)
            session.stranger = ""

    def close_all(self) -> None:
        for session in list(self._sessions):
            session.close()

    def is_admin(self, identity: Identity) -> bool:
        return identity.uid in self._admins or self._has_admin_rule(identity)

    def tick(self) -> None:
        """Close sessions without a complete request for too long."""
        deadline = self.clock() - self._idle_timeout_s
        for session in [one for one in self._sessions if one.is_idle_since(deadline)]:
            self._log.info("connection closed", dialect="admin", peer=session.peer, reason="idle")
            session.abort()

    def answer(self, line: bytes, identity: Identity) -> Answer | Awaitable[Answer]:
        """Return the response to one line. Never raises: an internal error is a response, too."""
        try:
            request = _parse(line)
            found = self._verb(request, identity).answer(request, identity)
        except Exception as error:
            return self._error_answer(error)
        return self._later(found) if inspect.isawaitable(found) else {"ok": found}

    async def _later(self, found: Awaitable[Any]) -> Answer:
        try:
            return {"ok": await found}
        except Exception as error:
            return self._error_answer(error)

    def _error_answer(self, error: Exception) -> Answer:
        if isinstance(error, AdminError):
            return _error(error)
        self._log.exception("unexpected error", dialect="admin")
        return _error(AdminError("internal", "the bus failed to answer; its log says why"))

    def _verb(self, request: Request, identity: Identity) -> AdminVerb:
        name = request.get("verb")
        if not isinstance(name, str):
            raise AdminError("bad_request", "a request has a verb, which is a string")
        verb = self._verbs.get(name)
        if verb is None:
            raise AdminError(
                "unknown_verb", f"unknown verb {name[:64]!r}: {', '.join(self._verbs)}"
            )
        if not verb.for_everyone and not self.is_admin(identity):
            self._log.warning("denied", dialect="admin", user=identity.name, verb=name)
            who = "root, the user of the bus, and callers with an admin rule"
            raise AdminError("denied", f"{name} is for {who}")
        unknown = sorted(request.keys() - verb.keys - {"verb"})
        if unknown:
            raise AdminError("bad_request", f"{name} takes no {unknown[0][:64]!r}")
        return verb


class AdminSession:
    """One connection: splits input into lines and answers them in order."""

    def __init__(self, server: AdminServer, pipe: ConnectionIO) -> None:
        self._server = server
        self._pipe = pipe
        self.stranger = ""  # the account of a caller that is not an admin
        self._line = bytearray()
        self._stalled = False
        self._paused = False
        self._closing = False
        self._finishing = False  # the peer sends no more, and waits for an answer
        self._pending: asyncio.Future[Answer] | None = None
        self._last_whole_s = server.clock()

    @property
    def peer(self) -> str:
        return self._pipe.peer

    @property
    def identity(self) -> Identity:
        return self._pipe.identity

    def refuse(self, wrong: AdminError) -> None:
        self._write_answer(_error(wrong))
        self.close()

    def close(self) -> None:
        """Accept no more requests; pending responses are still sent."""
        self._closing = True
        self._pipe.close()

    def abort(self) -> None:
        self._pipe.abort()

    def is_idle_since(self, deadline: float) -> bool:
        """Return True without a complete or pending request since `deadline`."""
        return self._pending is None and self._last_whole_s < deadline

    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        """Answer complete lines. Reading pauses while answers are not read or one is pending."""
        if self._closing:
            return end - start
        with memoryview(buffer) as view:
            data = bytes(view[start:end])
        taken = 0
        while taken < len(data) and not self._closing:
            if (
                self._stalled
                or self._pending is not None
                or self._pipe.backlog_bytes() > MAX_BACKLOG_BYTES
            ):
                self._paused = True
                self._pipe.pause_reading()
                return taken
            taken = self._add_line_part(data, taken)
        return len(data)

    def on_stalled(self) -> None:
        self._stalled = True

    def on_writable(self) -> None:
        self._stalled = False
        self._last_whole_s = self._server.clock()
        self._read_on()

    def on_half_closed(self) -> bool:
        """Handle the end of input. Returns True while a response is pending."""
        self._finishing = self._pending is not None
        return self._finishing

    def on_ended(self) -> None:
        self._closing = True
        self._server.forget(self)

    def _read_on(self) -> None:
        if self._paused and not self._closing:
            self._paused = False
            self._pipe.resume_reading()

    def _add_line_part(self, data: bytes, at: int) -> int:
        """Add up to one line, answer it if it is complete. Returns the position after it."""
        newline = data.find(b"\n", at)
        stop = len(data) if newline < 0 else newline
        if len(self._line) + stop - at > MAX_LINE_BYTES:
            self.refuse(AdminError("too_large", f"a line has at most {MAX_LINE_BYTES} bytes"))
            return len(data)
        self._line += data[at:stop]
        if newline >= 0:
            line = bytes(self._line)
            self._line.clear()
            self._last_whole_s = self._server.clock()
            self._answer(line)
        return stop + 1

    def _answer(self, line: bytes) -> None:
        found = self._server.answer(line, self.identity)
        if isinstance(found, dict):
            self._write_answer(found)
        else:
            self._pending = asyncio.ensure_future(found)
            self._pending.add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[Answer]) -> None:
        self._pending = None
        self._last_whole_s = self._server.clock()
        if answer.cancelled() or self._closing:
            return
        self._write_answer(answer.result())
        self._read_on()
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Close after the last response to a peer that sends no more."""
        if self._finishing and self._pending is None and not self._paused:
            self.close()

    def _write_answer(self, answer: Answer) -> None:
        self._pipe.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")


def _parse(line: bytes) -> Request:
    try:
        request = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdminError("bad_request", f"not JSON: {str(error)[:200]}") from None
    if not isinstance(request, dict):
        raise AdminError("bad_request", "a request is a JSON object")
    return request


def _error(wrong: AdminError) -> Answer:
    return {"error": {"code": wrong.code, "text": str(wrong)}}
