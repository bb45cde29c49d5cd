"""The admin socket's rules, one connection in memory at a time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from polybus.bus.admin_verb import AdminVerb
from polybus.model.identity import ANONYMOUS, Identity
from polybus.server.admin import MAX_LINE_BYTES, AdminServer, AdminSession
from tests.rig.memory_pipe import MemoryPipe

OWNER = Identity(uid=1000, gid=1000, pid=1)
ROOT = Identity(uid=0, gid=0, pid=2)
STRANGER = Identity(uid=2000, gid=2000, pid=3)


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **fields: self.lines.append({"level": level, "event": event, **fields})


class Bench:
    """An admin server with a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log = Log()
        self.server = AdminServer(
            {
                "stats": AdminVerb(lambda *_: {"n": 1}, for_everyone=True),
                "connections": AdminVerb(lambda *_: []),
                "big": AdminVerb(lambda *_: "x" * 500_000),
                "echo": AdminVerb(lambda request, _: request.get("text"), keys=frozenset({"text"})),
                "broken": AdminVerb(self._fail),
            },
            own_uid=1000,
            max_connections=8,
            idle_timeout_s=30,
            clock=lambda: self.now,
            log=self.log,
        )

    def _fail(self, _request: dict[str, Any], _identity: Identity) -> None:
        raise ZeroDivisionError

    def connect(
        self, identity: Identity = OWNER, appetite: int | None = None
    ) -> tuple[MemoryPipe, AdminSession]:
        pipe = MemoryPipe(identity=identity, appetite=appetite)
        session = self.server.open(pipe)
        pipe.attach(session)
        return pipe, session


@pytest.fixture
def bench() -> Bench:
    return Bench()


def answers(pipe: MemoryPipe) -> list[dict[str, Any]]:
    assert not pipe.taken or pipe.taken.endswith(b"\n")
    return [json.loads(line) for line in bytes(pipe.taken).splitlines()]


def codes(pipe: MemoryPipe) -> list[str]:
    return [one["error"]["code"] if "error" in one else "ok" for one in answers(pipe)]


def test_request_and_response(bench):
    pipe, _ = bench.connect()
    pipe.deliver(b'{"verb": "stats"}\n')
    assert answers(pipe) == [{"ok": {"n": 1}}]


def test_requests_in_one_piece_and_in_many(bench):
    whole, _ = bench.connect()
    questions = b"".join(b'{"verb": "echo", "text": %d}\n' % n for n in range(100))
    whole.deliver(questions)
    assert answers(whole) == [{"ok": n} for n in range(100)]
    dripped, _ = bench.connect()
    for position in range(len(questions)):
        dripped.deliver(questions[position : position + 1])
    assert dripped.taken == whole.taken


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"", "bad_request"),
        (b"stats", "bad_request"),
        (b"{", "bad_request"),
        (b"[]", "bad_request"),
        (b'"stats"', "bad_request"),
        (b"null", "bad_request"),
        (b"{}", "bad_request"),
        (b'{"verb": 1}', "bad_request"),
        (b'{"verb": ["stats"]}', "bad_request"),
        (b'{"verb": "stats", "more": 1}', "bad_request"),
        (b'{"verb": "\xff"}', "bad_request"),
        ('{"verb": "stats"}'.encode("utf-16"), "bad_request"),
        (b"[" * 100_000, "bad_request"),
        (b'{"verb": "stats", "n": ' + b"9" * 10_000 + b"}", "bad_request"),
        (b"\0" * 10, "bad_request"),
        (b'{"verb": "frob"}', "unknown_verb"),
        (b'{"verb": "' + b"x" * 10_000 + b'"}', "unknown_verb"),
        (b'{"verb": "__class__"}', "unknown_verb"),
        (b'{"verb": "broken"}', "internal"),
    ],
)
def test_invalid_request_gets_an_error_and_the_connection_continues(bench, line, code):
    pipe, _ = bench.connect()
    pipe.deliver(line + b"\n")
    pipe.deliver(b'{"verb": "stats"}\n')
    assert codes(pipe) == [code, "ok"]
    assert not pipe.closed
    assert len(pipe.taken) < 1000


def test_failing_verb_is_logged_with_its_traceback(bench):
    pipe, _ = bench.connect()
    pipe.deliver(b'{"verb": "broken"}\n')
    assert [line["level"] for line in bench.log.lines] == ["exception"]


@pytest.mark.parametrize(
    ("identity", "outcome"),
    [(OWNER, "ok"), (ROOT, "ok"), (STRANGER, "denied"), (ANONYMOUS, "denied")],
)
def test_rights_of_admin_verbs(bench, identity, outcome):
    pipe, _ = bench.connect(identity)
    pipe.deliver(b'{"verb": "stats"}\n{"verb": "connections"}\n{"verb": "stats"}\n')
    assert codes(pipe) == ["ok", outcome, "ok"]


def test_line_over_the_limit_closes(bench):
    question = b'{"verb": "echo", "text": "%s"}'
    room = MAX_LINE_BYTES - len(question % b"")
    pipe, _ = bench.connect()
    pipe.deliver(question % (b"a" * room) + b"\n")
    assert codes(pipe) == ["ok"]
    pipe, _ = bench.connect()
    pipe.deliver(question % (b"a" * (room + 1)) + b"\n" + b'{"verb": "stats"}\n')
    assert codes(pipe) == ["too_large"]
    assert pipe.closed


def test_endless_line_is_buffered_up_to_the_limit(bench):
    pipe, session = bench.connect()
    for _ in range(40):
        pipe.deliver(b"a" * 65536)
    assert codes(pipe) == ["too_large"]
    assert pipe.closed
    assert len(session._line) <= MAX_LINE_BYTES


@pytest.mark.parametrize("said", [b"", b'{"verb": "sta', b'{"verb": "stats"}\n'])
def test_idle_and_half_line_connections_are_closed(bench, said):
    pipe, _ = bench.connect()
    pipe.deliver(said)
    bench.now = 30
    bench.server.tick()
    assert not pipe.aborted
    bench.now = 30.1
    bench.server.tick()
    assert pipe.aborted


def test_trickled_line_counts_as_idle(bench):
    pipe, _ = bench.connect()
    for second in range(31):
        bench.now = float(second)
        pipe.deliver(b"a")
    bench.now = 31
    bench.server.tick()
    assert pipe.aborted


def test_active_connection_is_not_closed(bench):
    pipe, _ = bench.connect()
    for second in range(0, 300, 20):
        bench.now = float(second)
        pipe.deliver(b'{"verb": "stats"}\n')
        bench.server.tick()
    assert not pipe.aborted


def test_client_that_does_not_read_answers_is_paused(bench):
    pipe, _ = bench.connect(appetite=0)
    pipe.deliver(b'{"verb": "big"}\n' * 50)
    assert not pipe.reading
    assert pipe.backlog_bytes() < 2_000_000
    for _ in range(50):
        pipe.eat(1_000_000)
    assert pipe.reading
    assert codes(pipe) == ["ok"] * 50


def test_unfinished_last_line_is_dropped(bench):
    pipe, session = bench.connect()
    pipe.deliver(b'{"verb": "stats"}\n{"verb": "stats"}')
    assert session.on_half_closed() is False  # the transport closes
    assert codes(pipe) == ["ok"]


def test_other_users_cannot_take_the_owners_connections(bench):
    strangers = [bench.connect(STRANGER) for _ in range(4)]
    late, _ = bench.connect(STRANGER)
    assert codes(late) == ["limit_reached"]
    assert late.closed
    late.deliver(b'{"verb": "stats"}\n')
    assert codes(late) == ["limit_reached"]
    owner, _ = bench.connect(OWNER)
    owner.deliver(b'{"verb": "connections"}\n')
    assert codes(owner) == ["ok"]
    strangers[0][0].hang_up()
    again, _ = bench.connect(STRANGER)
    again.deliver(b'{"verb": "stats"}\n')
    assert codes(again) == ["ok"]


# --- verbs that take their time


class Slow:
    """A server whose verb `wait` answers when the test lets it."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.bench.server._verbs = {
            "wait": AdminVerb(self._wait, for_everyone=True, keys=frozenset({"text"})),
            "stats": AdminVerb(lambda *_: {"n": 1}, for_everyone=True),
            "who": AdminVerb(lambda _, identity: identity.uid, for_everyone=True),
        }
        self.asked: list[asyncio.Future[Any]] = []

    async def _wait(self, _request: dict[str, Any], _identity: Identity) -> Any:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


WAIT, STATS = b'{"verb": "wait"}\n', b'{"verb": "stats"}\n'


def test_verb_gets_the_callers_identity():
    pipe, _ = Slow().bench.connect(STRANGER)
    pipe.deliver(b'{"verb": "who"}\n')
    assert answers(pipe) == [{"ok": 2000}]


def test_slow_answer_keeps_the_order_of_answers():
    async def scene() -> None:
        slow = Slow()
        pipe, _ = slow.bench.connect()
        pipe.deliver(STATS + WAIT + STATS + WAIT + STATS)
        await slow.turn()
        assert codes(pipe) == ["ok"]
        assert not pipe.reading
        slow.asked[0].set_result("first")
        await slow.turn()
        assert [one["ok"] for one in answers(pipe)] == [{"n": 1}, "first", {"n": 1}]
        slow.asked[1].set_exception(ZeroDivisionError())
        await slow.turn()
        assert codes(pipe) == ["ok", "ok", "ok", "internal", "ok"]
        assert pipe.reading

    asyncio.run(scene())


def test_half_closed_client_gets_its_answer():
    async def scene() -> None:
        slow = Slow()
        pipe, session = slow.bench.connect()
        pipe.deliver(WAIT)
        await slow.turn()
        assert session.on_half_closed() is True
        slow.asked[0].set_result("done")
        await slow.turn()
        assert answers(pipe) == [{"ok": "done"}]
        assert pipe.closed

    asyncio.run(scene())


def test_disconnected_client_gets_no_answer():
    async def scene() -> None:
        slow = Slow()
        pipe, _ = slow.bench.connect()
        pipe.deliver(WAIT + WAIT)
        await slow.turn()
        pipe.hang_up()
        slow.asked[0].set_result("done")
        await slow.turn()
        assert pipe.writes == []
        assert len(slow.asked) == 1

    asyncio.run(scene())


def test_pending_answer_does_not_count_as_idle():
    async def scene() -> None:
        slow = Slow()
        pipe, _ = slow.bench.connect()
        pipe.deliver(WAIT)
        await slow.turn()
        slow.bench.now = 1000
        slow.bench.server.tick()
        assert not pipe.aborted
        slow.asked[0].set_result("done")
        await slow.turn()
        slow.bench.now = 1029
        slow.bench.server.tick()
        assert not pipe.aborted

    asyncio.run(scene())


def test_admin_rule_grants_admin_verbs(bench):
    bench.server._has_admin_rule = lambda identity: identity == STRANGER
    pipe, _ = bench.connect(STRANGER)
    pipe.deliver(b'{"verb": "connections"}\n')
    assert codes(pipe) == ["ok"]
