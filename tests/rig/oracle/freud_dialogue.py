"""The answers of the bus and their order: connections in front of freud_bus.

A connection executes its requests one after another. It gathers answers, and writes them
when it has no more to do, before it waits, and after a notice. A client that does not read
its answers delays only itself.

A waiting Get is answered in the middle of another connection's request. The later
requests of its connection run afterwards (`settle`), when that request is finished,
and in the order of connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.rig.oracle.freud import Get, Malformed, One, Produce, Request, escaped, scan
from tests.rig.oracle.freud_bus import (
    DOESNT_EXIST,
    MALFORMED,
    NOTHING_HAPPENED,
    OK,
    Caller,
    FreudBus,
    Message,
    Reply,
    Subscription,
)

TICK_S = 0.25


@dataclass(eq=False)
class Sent:
    """A sent answer, with its message if it answers a Get."""

    reply: Reply
    size: int
    lent: tuple[Subscription, Message] | None = None


@dataclass(eq=False)
class Connection:
    talk: Talk
    number: int
    caller: Caller
    room: int | None = None  # bytes the client takes before it stops; None: no limit
    held: bytes = b""
    todo: list[One] = field(default_factory=list)
    gathered: list[Sent] = field(default_factory=list)
    written: list[Sent] = field(default_factory=list)  # and not taken whole
    started: int = 0  # bytes taken of the first of them
    torn: int = 0  # bytes of an answer that was never completed
    learned: list[Sent] = field(default_factory=list)  # taken whole, and not marked as consumed yet
    heard: list[Reply] = field(default_factory=list)  # received by the client
    made: list[Subscription] = field(default_factory=list)
    waits_on: Subscription | None = None
    deadline: tuple[float, int] | None = None
    no_more: bool = False  # the client has half-closed
    broken: bool = False  # nothing that is written arrives
    gone: bool = False
    closing: bool = False

    @property
    def halted(self) -> bool:
        return bool(self.written) or self.waits_on is not None

    def served(self) -> None:
        self.talk.serve(self)


class Talk:
    """All connections of the bus. `texts` maps a rule to the text of its Malformed answer."""

    def __init__(self, bus: FreudBus, max_frame_bytes: int, texts: Mapping[str, str]) -> None:
        self.bus = bus
        self.max_frame_bytes = max_frame_bytes
        self.texts = texts
        self.connections: list[Connection] = []
        self.ids: dict[bytes, Subscription] = {}  # by the ids that the server chose
        self.ready: set[Connection] = set()
        self.waits = 0
        self.now_s = 0.0

    def connect(self, caller: Caller, room: int | None = None) -> Connection:
        made = Connection(self, len(self.connections), caller, room)
        self.connections.append(made)
        return made

    # --- events of clients

    def deliver(self, one: Connection, data: bytes) -> None:
        if one.closing or one.gone:
            return
        one.held += data
        self.look(one)
        self.settle()

    def half_close(self, one: Connection) -> None:
        one.no_more = True
        if one.waits_on is not None:
            self.time_is_up(one)
        self.go_on(one)
        self.settle()

    def eat(self, one: Connection, count: int | None) -> None:
        one.room = None if count is None else (one.room or 0) + count
        self.pass_on(one)
        if not one.written:
            self.book(one)
            self.go_on(one)
        self.settle()

    def end(self, one: Connection) -> None:
        """End a connection. Its requests are still executed, and no answer is sent."""
        one.gone = True
        self.give_back(one)
        self.stop_waiting(one)
        if not one.closing:
            self.run(one)
            self.look(one)
        for made in one.made:
            if not made.gone:
                self.bus.detach(made)
        self.settle()

    def pass_time(self, seconds: float) -> None:
        end = self.now_s + seconds
        while self.now_s < end:
            tick_s = self.now_s + TICK_S
            self.end_waits(tick_s)
            self.now_s = tick_s
            self.bus.tick()
            self.settle()

    # --- one request after another

    def run(self, one: Connection) -> None:
        while one.todo and not one.halted and not one.closing:
            if self.carry_out(one, one.todo[0]):
                one.todo.pop(0)
        self.flush(one)

    def go_on(self, one: Connection) -> None:
        if one.closing or one.gone:
            return
        self.run(one)
        self.look(one)
        if one.no_more and not one.halted and not one.todo:
            one.closing = True

    def look(self, one: Connection) -> None:
        """Scan the received bytes, unless requests are pending."""
        if one.todo or one.halted or one.closing:
            return
        consumed, one.todo = scan(one.held, self.max_frame_bytes)
        one.held = one.held[consumed:]
        self.run(one)

    def settle(self) -> None:
        while self.ready:
            first = min(self.ready, key=lambda one: one.number)
            self.ready.remove(first)
            self.go_on(first)

    def carry_out(self, one: Connection, asked: One) -> bool:
        """Execute a request. Returns False if it must wait; then it stays the next."""
        if isinstance(asked, Get):
            return one.gone or self.get(one, asked)
        if isinstance(asked, Malformed):
            self.say(one, Reply(MALFORMED, self.texts[asked.reason].encode()))
            if asked.closes:
                self.flush(one)
                one.closing = True
            return True
        if isinstance(asked, Produce):
            self.say(one, self.bus.produce(one.caller, asked.topic, asked.body))
        else:
            self.say(one, self.answer(one, asked))
        return True

    def answer(self, one: Connection, asked: Request) -> Reply:
        if asked.type == 0:
            return self.bus.create(one.caller, asked.subject)
        if asked.type == 1:
            return self.bus.delete(one.caller, asked.subject)
        if asked.type == 2:
            reply = self.bus.subscribe(one.caller, asked.subject)
            if reply.found is not None:
                one.made.append(reply.found)
            return reply
        if asked.type == 3:
            found = self.subscription(one, asked.subject)
            if found is None:
                return Reply(DOESNT_EXIST)
            self.bus.end(found, "unsubscribed")
            return Reply(OK)
        if asked.type == 6:
            return self.bus.names(one.caller)
        return self.bus.count(one.caller, asked.subject)

    def subscription(self, one: Connection, key: bytes) -> Subscription | None:
        found = self.ids.get(key)
        if found is None or found.gone or found.caller.uid != one.caller.uid:
            return None
        return found

    # --- Gets

    def get(self, one: Connection, asked: Get) -> bool:
        found = self.subscription(one, asked.subscriber)
        if found is not None and found in self.bus.detached:
            self.bus.detached.remove(found)  # it belongs to this connection now
            one.made.append(found)
        if found is None:
            self.say(one, Reply(DOESNT_EXIST))
        elif found.unread:
            self.lend(one, found, asked)
        elif asked.max_blocking_s == 0 or one.no_more:
            self.say(one, Reply(NOTHING_HAPPENED))
        else:
            self.wait(one, found, asked.max_blocking_s)
            return False
        return True

    def lend(self, one: Connection, found: Subscription, asked: Get) -> None:
        message = found.unread.pop(0)
        found.lent.append(message)
        payload = message.body
        if asked.record:
            flags = 1 if message.notice else 0
            fields = ((message.id, 8), (message.time_ns, 8), (flags, 4))
            payload = b"".join(value.to_bytes(size, "little") for value, size in fields) + payload
        elif not message.notice:
            payload = escaped(payload)
        self.say(one, Reply(OK, payload), (found, message))
        if message.notice:
            self.flush(one)

    def wait(self, one: Connection, found: Subscription, seconds: int) -> None:
        self.flush(one)
        if one.written:
            return
        self.waits += 1
        one.waits_on = found
        one.deadline = (self.now_s + seconds, self.waits) if seconds > 0 else None
        found.waiting.append(one)

    def stop_waiting(self, one: Connection) -> None:
        if one.waits_on is not None and one in one.waits_on.waiting:
            one.waits_on.waiting.remove(one)
        if one.waits_on in self.bus.detached:
            self.bus.detach(one.waits_on)
        one.waits_on = one.deadline = None

    def serve(self, one: Connection) -> None:
        found, asked = one.waits_on, one.todo.pop(0)
        assert found is not None
        assert isinstance(asked, Get)
        self.stop_waiting(one)
        if found.gone:
            self.say(one, Reply(DOESNT_EXIST))
        else:
            self.lend(one, found, asked)
        self.flush(one)
        self.ready.add(one)

    def time_is_up(self, one: Connection) -> None:
        self.stop_waiting(one)
        one.todo.pop(0)
        self.say(one, Reply(NOTHING_HAPPENED))
        self.go_on(one)

    def end_waits(self, until_s: float) -> None:
        def due() -> list[Connection]:
            return [one for one in self.connections if one.deadline and one.deadline[0] <= until_s]

        while waiting := due():
            first = min(waiting, key=lambda one: one.deadline or (0.0, 0))
            assert first.deadline is not None
            self.now_s = max(self.now_s, first.deadline[0])
            self.time_is_up(first)
            self.settle()

    # --- answers

    def say(
        self, one: Connection, reply: Reply, lent: tuple[Subscription, Message] | None = None
    ) -> None:
        size = 8 + (16 if reply.found else len(reply.payload))
        if not one.gone:
            one.gathered.append(Sent(reply, size, lent))

    def flush(self, one: Connection) -> None:
        if not one.gathered:
            return
        one.written += one.gathered
        one.gathered = []
        if one.broken:
            self.give_back(one)
            return
        self.pass_on(one)
        self.book(one)

    def pass_on(self, one: Connection) -> None:
        """Move written bytes to the client, as far as it has room."""
        while one.written:
            first = one.written[0]
            left = first.size - one.started
            taken = left if one.room is None else min(left, one.room)
            if one.room is not None:
                one.room -= taken
            one.started += taken
            if one.started < first.size:
                return
            one.started = 0
            one.learned.append(one.written.pop(0))
            one.heard.append(first.reply)

    def book(self, one: Connection) -> None:
        """Mark the messages of completely taken answers as consumed."""
        learned, one.learned = one.learned, []
        for sent in learned:
            if sent.lent is not None:
                self.bus.consumed(*sent.lent)

    def give_back(self, one: Connection) -> None:
        """Return the messages of unconfirmed answers to their subscriptions.

        When a socket breaks, the bus does not know the bytes it took since the last check.
        """
        unsent = one.learned + one.written + one.gathered
        lost = [sent.lent for sent in unsent if sent.lent is not None]
        one.torn += one.started
        one.learned, one.written, one.gathered, one.started = [], [], [], 0
        self.bus.given_back(lost)
