"""The admin socket: questions to a running bus, one JSON object a line.

    → {"verb": "stats"}
    ← {"ok": {...}}   or   {"error": {"code": "unknown_verb", "text": "..."}}

Answers come in the order of the questions. `VERBS` says what may be asked and
by whom: everyone who reaches the socket, or only root and the user that the bus
runs as; the kernel vouches for who is who.

What happens to bad input:

    not JSON, not an object, no verb, an unknown one,   an error, the connection
    a key the verb does not take                        lives on
    a line over 1 MiB                                   an error, then closed
    a line that is not finished, or silence             closed after admin_idle_timeout_s
    input that ends inside a line                       that line is dropped, then closed
    questions faster than answers are read              reading pauses

Strangers hold at most half the places, so they cannot lock the owner out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.party import Pipe
    from polybus.model.identity import Identity

# A request is a verb and some names; a rule table of thousands of lines still fits.
MAX_LINE_BYTES = 1024 * 1024
# Answers that wait for a reader: one large answer may pass it, the next question then waits.
MAX_BACKLOG_BYTES = 1024 * 1024
ROOT_UID = 0

Answer = dict[str, Any]
Request = dict[str, Any]


class Wrong(Exception):
    """A question without an answer; `code` is stable, the text is for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Verb:
    """One row: who may ask, which keys it takes, and what answers."""

    answer: Callable[[Request], Any]
    for_everyone: bool = False
    keys: frozenset[str] = frozenset()


class AdminDesk:
    """All admin connections of one bus: its verbs, its places, its clock."""

    def __init__(
        self,
        verbs: Mapping[str, Verb],
        *,
        own_uid: int,
        max_connections: int,
        idle_timeout_s: float,
        clock: Callable[[], float],
        log: Any,
    ) -> None:
        self._verbs = verbs
        self._admins = frozenset({ROOT_UID, own_uid})
        self._max_strangers = max_connections // 2
        self._idle_timeout_s = idle_timeout_s
        self.clock = clock
        self._log = log
        self._sessions: set[AdminSession] = set()

    def open(self, pipe: Pipe) -> AdminSession:
        """A session for a new connection; one too many is told so and closed."""
        session = AdminSession(self, pipe)
        strangers = sum(not self.is_admin(one.identity) for one in self._sessions)
        if not self.is_admin(pipe.identity) and strangers >= self._max_strangers:
            session.refuse(Wrong("limit_reached", "too many admin connections: try again"))
        else:
            self._sessions.add(session)
        return session

    def forget(self, session: AdminSession) -> None:
        self._sessions.discard(session)

    def is_admin(self, identity: Identity) -> bool:
        return identity.uid in self._admins

    def tick(self) -> None:
        """Close those that said nothing whole for too long."""
        deadline = self.clock() - self._idle_timeout_s
        for session in [one for one in self._sessions if one.last_whole_s < deadline]:
            self._log.info("connection closed", dialect="admin", peer=session.peer, reason="idle")
            session.abort()

    def answer(self, line: bytes, identity: Identity) -> Answer:
        """What to say to one line. Never raises: a defect of ours is an answer, too."""
        try:
            request = _parse(line)
            return {"ok": self._verb(request, identity).answer(request)}
        except Wrong as wrong:
            return _error(wrong)
        except Exception:
            self._log.exception("unexpected error", dialect="admin")
            return _error(Wrong("internal", "the bus failed to answer; its log says why"))

    def _verb(self, request: Request, identity: Identity) -> Verb:
        name = request.get("verb")
        if not isinstance(name, str):
            raise Wrong("bad_request", "a request has a verb, which is a string")
        verb = self._verbs.get(name)
        if verb is None:
            raise Wrong("unknown_verb", f"unknown verb {name[:64]!r}: {', '.join(self._verbs)}")
        if not verb.for_everyone and not self.is_admin(identity):
            self._log.warning("denied", dialect="admin", identity=identity.name, verb=name)
            raise Wrong("denied", f"{name} is for root and the user of the bus only")
        unknown = sorted(request.keys() - verb.keys - {"verb"})
        if unknown:
            raise Wrong("bad_request", f"{name} takes no {unknown[0][:64]!r}")
        return verb


class AdminSession:
    """One connection: cuts lines, answers them one after another."""

    def __init__(self, desk: AdminDesk, pipe: Pipe) -> None:
        self._desk = desk
        self._pipe = pipe
        self._line = bytearray()
        self._stalled = False
        self._paused = False
        self._closing = False
        self.last_whole_s = desk.clock()

    @property
    def peer(self) -> str:
        return self._pipe.peer

    @property
    def identity(self) -> Identity:
        return self._pipe.identity

    def refuse(self, wrong: Wrong) -> None:
        self._say(_error(wrong))
        self._closing = True
        self._pipe.close()

    def abort(self) -> None:
        self._pipe.abort()

    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        """Takes all it is given, unless answers are not being read: then the rest waits."""
        if self._closing:
            return end - start
        with memoryview(buffer) as view:
            data = bytes(view[start:end])
        taken = 0
        while taken < len(data) and not self._closing:
            if self._must_wait():
                self._paused = True
                self._pipe.pause_reading()
                return taken
            taken = self._take(data, taken)
        return len(data)

    def stalled(self) -> None:
        self._stalled = True

    def writable(self) -> None:
        self._stalled = False
        self.last_whole_s = self._desk.clock()
        if self._paused:
            self._paused = False
            self._pipe.resume_reading()

    def half_closed(self) -> bool:
        """Everything whole has been answered: the connection may go once that is read."""
        return False

    def ended(self) -> None:
        self._desk.forget(self)

    def _must_wait(self) -> bool:
        return self._stalled or self._pipe.backlog() > MAX_BACKLOG_BYTES

    def _take(self, data: bytes, at: int) -> int:
        """Add up to one line to what is there, answer it if it is whole; where it ended."""
        newline = data.find(b"\n", at)
        stop = len(data) if newline < 0 else newline
        if len(self._line) + stop - at > MAX_LINE_BYTES:
            self.refuse(Wrong("too_large", f"a line has at most {MAX_LINE_BYTES} bytes"))
            return len(data)
        self._line += data[at:stop]
        if newline >= 0:
            line = bytes(self._line)
            self._line.clear()
            self.last_whole_s = self._desk.clock()
            self._say(self._desk.answer(line, self.identity))
        return stop + 1

    def _say(self, answer: Answer) -> None:
        self._pipe.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")


def _parse(line: bytes) -> Request:
    try:
        request = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Wrong("bad_request", f"not JSON: {str(error)[:200]}") from None
    if not isinstance(request, dict):
        raise Wrong("bad_request", "a request is a JSON object")
    return request


def _error(wrong: Wrong) -> Answer:
    return {"error": {"code": wrong.code, "text": str(wrong)}}
