"""One Freud connection: requests are carried out one after another, answers keep their order.

The kernel hands over groups of like requests. They are carried out until one of
these stands in the way, and then the connection is *halted*:

    waiting   a Get waits for a message
    stalled   the client does not take its answers
    blocked   a Produce waits for a full push reader
    settling  Produces are on their way to the disk, and what comes behind waits for them
    resting   it has done so much that others come first (turns.py)

Each ends by itself (a message or the time limit, the socket, the reader, its turn),
and the session goes on where it stopped. While halted, what the client sends is left
unread beyond a small amount, so a connection holds a bounded amount of memory.

A client that hangs up is answered what it has sent, a waiting Get as if its time
were up. What a client asked for before it vanished is carried out, but for what only
it would have heard of: Gets, Lists, Counts. That, too, takes turns; until it is done
the connection keeps its place among those that are counted.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.bus.request_outcome import NO, Kind, Outcome
from polybus.dialects.freud.codec import MALFORMED_TEXTS, Code
from polybus.dialects.freud.server.answer_encoder import answers, produced
from polybus.dialects.freud.server.answer_queue import Answers
from polybus.dialects.freud.server.fair_scheduler import COMMIT, READER, REQUEST, SHARE, SPLIT, Line
from polybus.dialects.freud.server.fast_session import ShortSession
from polybus.dialects.freud.server.get_group import STEP_BYTES, Getting
from polybus.dialects.freud.server.produce_slots import Slot, Slots
from polybus.dialects.freud.server.request_executor import QUESTIONS, HalfProduces, Requests, halves
from polybus.dialects.freud.server.request_scanner import Gets, Malformed, Produces, Scanner
from polybus.dialects.freud.server.session_stats import describe
from polybus.kernel.framing import Encoding
from polybus.model import topic_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.bus.connection import Pipe
    from polybus.bus.timers import Timer, Timers
    from polybus.dialects.freud.server.pull_reader import Reader
    from polybus.model.limits import FreudLimits

# What a client may send behind a waiting Get before it is no longer read from.
BEHIND_BYTES = 64 * 1024

CODES = {
    Kind.OK: Code.OK,
    Kind.NOTHING_HAPPENED: Code.NOTHING_HAPPENED,
    Kind.NO: Code.NO,
    Kind.DOES_NOT_EXIST: Code.DOESNT_EXIST,
    Kind.OVER_QUOTA: Code.SERVER_ERROR,
}


class FreudDialect:
    """What all Freud connections of a bus share; called with a pipe it opens a session."""

    def __init__(self, broker: Broker, limits: FreudLimits, timers: Timers) -> None:
        self.broker = broker
        self.timers = timers
        self.line = Line(timers.call_soon)
        self.encoding = Encoding(broker.new_encoding_number())
        self.scanner = Scanner(limits.max_frame_bytes, topic_name.is_shared)

    def __call__(self, pipe: Pipe) -> FreudSession:
        return FreudSession(self, pipe)


class FreudSession(ShortSession):
    def __init__(self, dialect: FreudDialect, pipe: Pipe) -> None:
        self._broker = dialect.broker
        self._topics = dialect.broker.topics
        self._readers = dialect.broker.topics.readers
        self._scan = dialect.scanner.scan
        self._call_later = dialect.timers.call_later
        self._call_soon = dialect.timers.call_soon
        self._pipe = pipe
        self._party = dialect.broker.join("freud", pipe, dialect.encoding)
        self._party.resume = self._unblocked
        self._party.describe = lambda: describe(self)
        self._requests = Requests(dialect.broker, self._party)
        self._answers: Answers = Answers(pipe, self._readers)
        self._todo: deque[Any] = deque()
        self._getting = Getting(self._answers)
        self._waiting_on: Reader | None = None
        self._timer: Timer | None = None
        self._line = dialect.line
        self._share = SHARE  # what is left of it
        self._blocked = False
        self._slots = Slots(dialect.broker.max_uncommitted_bytes)
        self._settling = False
        self._hung_up = False  # the client has hung up, though not all it sent was read
        self._finished = False  # the client sends no more
        self._gone = False  # it does not read either
        self._closing = False
        self.take_short_path(
            self._topics.short_path,
            self._party.source,
            pipe.identity.account,
            dialect.scanner.max_frame_bytes,
        )

    # --- what the transport calls (`receive` is the short path's, and calls this if need be)

    def receive_groups(self, buffer: Buffer, start: int, end: int) -> int:
        at = start
        while not self._is_halted and not self._todo and not self._closing:
            scanned = self._scan(buffer, at, end)
            at += scanned.consumed
            self._todo.extend(scanned.groups)
            self._run()
            if not scanned.more:
                return at - start
        if self._closing:
            return end - start
        if end - at > BEHIND_BYTES:
            self._pipe.pause_reading()
            self._pipe.watch_hangup(self.hung_up)
        return at - start

    def stalled(self) -> None:
        self._answers.stalled = True
        self._broker.watch_stall(self._party)

    def writable(self) -> None:
        self._broker.end_stall(self._party)
        self._answers.drained()
        self._go_on()

    def hung_up(self) -> None:
        self._hung_up = True
        if self._waiting_on is not None:
            self._time_is_up()

    def half_closed(self) -> bool:
        self._finished = True
        self.hung_up()
        self._go_on()
        return True

    def ended(self) -> None:
        self._gone = self._finished = True
        self._answers.discard()
        self._broker.end_stall(self._party)
        self._blocked = self._settling = False
        self._slots.clear()  # they are carried out; nobody is there to be told
        self._unsettled = 0
        self._stop_waiting()
        if self._closing:
            self._depart()
        else:
            self._wind_up()

    def _wind_up(self) -> None:
        """What a client that has gone left behind."""
        self._run()
        self._pipe.offer_again()
        if self._resting:
            self._pipe.keep_place()
        else:
            self._depart()

    def _depart(self) -> None:
        self._readers.disown(self._requests.readers.values())
        self._broker.leave(self._party)
        self._pipe.leave_place()

    # --- what is told of it (describing.py)

    @property
    def state(self) -> str:
        states = {
            "ending": self._gone,
            "stalled": self._answers.stalled,
            "blocked": self._blocked or self._settling,
            "waiting": self._waiting_on is not None,
            "resting": self._resting,
        }
        return next((state for state, holds in states.items() if holds), "open")

    @property
    def answers(self) -> Answers:
        return self._answers

    @property
    def subscription_count(self) -> int:
        """Of those that it made and that are still there."""
        return sum(not reader.gone for reader in self._requests.readers.values())

    # --- carrying requests out

    @property
    def _is_halted(self) -> bool:
        halted = self._answers.stalled or self._blocked or self._settling or self._resting
        return halted or self._waiting_on is not None

    def _run(self) -> None:
        while self._todo and not self._is_halted and not self._closing:
            if self._share <= 0:
                self._rest()
                break
            if self._carry_out(self._todo[0]):
                self._todo.popleft()
                self._getting.left = None
            if self._answers.size >= STEP_BYTES:
                self._answers.flush()
        if not self._closing:
            self._answers.flush()

    def _rest(self) -> None:
        self._resting = True
        self._line.join(self._rested)

    def _rested(self) -> None:
        self._resting = False
        self._share = SHARE
        if self._gone:
            self._wind_up()
        else:
            self._go_on()

    def _go_on(self) -> None:
        """After a halt: the rest of the requests, then what came behind them."""
        if self._closing or self._gone:
            return
        self._run()
        if self._is_halted or self._closing:
            return
        self._pipe.offer_again()
        self._pipe.resume_reading()
        if self._is_done():
            self._closing = True
            self._broker.finish(self._party)

    def _is_done(self) -> bool:
        """Everything that the client will ever send has been answered."""
        halted = self._is_halted or bool(self._todo) or self._closing
        return self._finished and not halted and not self._unsettled

    def _carry_out(self, group: Any) -> bool:
        """True when the group is done; else it stays at the head, with what is left of it."""
        self._share -= REQUEST
        is_produce = isinstance(group, Produces | HalfProduces)
        if is_produce and self._broker.is_durable(group.topic):
            return self._produce_durable(group)
        if self._unsettled:
            self._settling = True
            return False
        if is_produce:
            return self._produce(group)
        if isinstance(group, Gets):
            return self._gone or self._get(group)
        if isinstance(group, Malformed):
            text = MALFORMED_TEXTS[group.reason].encode()
            self._answers.add(answers(Code.MALFORMED_REQUEST, 1, text))
            self._broker.counters.count("refused", f"malformed_{group.reason}")
            if group.closes:
                self._close(group.reason)
            return True
        if self._gone and group.type in QUESTIONS:
            return True
        self._share -= self._requests.weight(group)
        outcome, payload = self._requests.carry_out(group)
        self._answer(outcome, 1, payload)
        return True

    def _answer(self, outcome: Outcome, count: int, payload: bytes = b"") -> None:
        self._answers.add(answers(CODES[outcome.kind], count, payload or outcome.text.encode()))

    def _produce(self, group: Any) -> bool:
        self._share -= READER * self._topics.reach(group.topic)
        result = self._topics.produce(
            self._party,
            group.topic,
            group.offsets,
            group.bodies,
            group.count,
            waits=not self._gone,
        )
        kind = result.outcome.kind
        if kind is Kind.WAIT:
            self._blocked = True
            return False
        if kind is Kind.OVER_QUOTA and group.count > 1:
            # Together they are too much; some of them may fit.
            self._share -= group.count // SPLIT
            self._todo.popleft()
            self._todo.extendleft(reversed(halves(group)))
            return False
        self._answer_produces(group, result.outcome, result.first_id)
        return True

    def _answer_produces(self, group: Any, outcome: Outcome, first_id: int) -> None:
        if outcome.kind in (Kind.OK, Kind.NOTHING_HAPPENED):
            self.received_messages += group.count
            self.received_bytes += len(group.bodies)
        if outcome.kind is Kind.OK:
            self._answers.add(produced(first_id, group.count))
        else:
            self._requests.note(outcome, "produce", group.topic, group.count)
            self._answer(outcome, group.count)

    def _produce_durable(self, group: Any) -> bool:
        """Answered when it is on disk (slots.py); the next of its kind need not wait for that."""
        assert self._broker.keeping is not None
        keeping = self._broker.keeping
        if not self._slots.has_room_for(group):
            self._settling = True
            return False
        if not self._requests.may_produce(group.topic):
            self._open_slot(Slot(group, NO))
            return True
        self._share -= COMMIT
        if self._gone:
            keeping.keep(self._party, group.topic, group.offsets, group.bodies, group.count)
            return True
        slot = Slot(group)
        self._open_slot(slot)
        keeping.produce(group.topic, group.offsets, group.bodies, partial(self._kept, slot))
        return True

    def _open_slot(self, slot: Slot) -> None:
        self._slots.add(slot)
        self._answer_slots()

    def _answer_slots(self) -> None:
        for slot in self._slots.take_filled():
            assert slot.outcome is not None
            self._answer_produces(slot.group, slot.outcome, slot.first_id)
        self._unsettled = len(self._slots)

    def _kept(self, slot: Slot, outcome: Outcome, first_id: int) -> None:
        if self._gone:
            if outcome.kind is not Kind.OK:
                reason = outcome.text or outcome.kind.value
                self._broker.counters.count("dropped", reason, slot.group.count)
            return
        slot.outcome, slot.first_id = outcome, first_id
        self._answer_slots()
        self._settling = False  # whatever still has to wait says so again
        if not self._answers.stalled:
            self._go_on()

    def _get(self, group: Gets) -> bool:
        getting = self._getting
        if getting.left is None:
            getting.left = group.count
        while getting.left > 0 and self._share > 0 and not self._answers.stalled:
            reader = self._readers.find(self._pipe.identity, group.subscriber)
            if reader is None:
                return getting.answer_all(Code.DOESNT_EXIST)
            weight = getting.take(group, reader)
            if not weight:
                polls = group.max_blocking_s == 0 or self._hung_up
                if polls and not reader.is_behind:
                    return getting.answer_all(Code.NOTHING_HAPPENED)
                self._wait(reader, group.max_blocking_s, polls=polls)
                return False
            self._share -= weight
            if self._answers.size >= STEP_BYTES:
                self._answers.flush()
        return getting.left == 0

    # --- waiting

    def _wait(self, reader: Reader, max_blocking_s: int, *, polls: bool) -> None:
        self._answers.flush()
        if self._answers.stalled:
            return
        self._waiting_on = reader
        reader.wait(self._woken, polls=polls)
        if max_blocking_s > 0:
            self._timer = self._call_later(max_blocking_s, self._time_is_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting_on is not None:
            self._waiting_on.stop_waiting(self._woken)
            self._waiting_on = None

    def _woken(self) -> None:
        """There is a message, or the subscription is gone. The rest of our requests comes later:

        whoever wakes us is in the middle of its own.
        """
        reader = self._waiting_on
        assert reader is not None
        self._stop_waiting()
        if reader.gone:
            self._getting.answer_one(Code.DOESNT_EXIST)
        elif weight := self._getting.take(self._todo[0], reader, most=1):
            self._share -= weight
        else:  # it polls, and there is nothing
            self._getting.answer_one(Code.NOTHING_HAPPENED)
        self._answers.flush()
        self._call_soon(self._go_on)

    def _time_is_up(self) -> None:
        self._stop_waiting()
        self._getting.answer_one(Code.NOTHING_HAPPENED)
        self._go_on()

    def _unblocked(self) -> None:
        self._blocked = False
        self._go_on()
        if not self._blocked:
            self._pipe.resume_reading()  # also if a Get waits by now: its client may hang up

    def _close(self, reason: str) -> None:
        self._answers.flush()
        self._closing = True
        self._broker.close(self._party, reason)
