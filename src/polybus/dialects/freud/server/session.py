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


A Freud connection in the fields of `polybus connections`.

The fan-out knows only what is pushed; here messages are those produced and those read.
`outbox_bytes` are answers that the client has not taken. The state is what halts the
connection (session.py), or `ending`: the client is gone, and what it asked for is not
all done.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.bus.request_outcome import NO, OutcomeKind, RequestOutcome
from polybus.dialects.freud.codec import MALFORMED_TEXTS, Code
from polybus.dialects.freud.server.answer_encoder import answers, produced
from polybus.dialects.freud.server.answer_queue import (
    STEP_BYTES,
    AnswerQueue,
    GetGroup,
    ProduceSlot,
    ProduceSlots,
)
from polybus.dialects.freud.server.fair_scheduler import (
    COMMIT_WEIGHT,
    READER_WEIGHT,
    REQUEST_WEIGHT,
    SPLIT_PER_WEIGHT,
    TURN_WEIGHT,
    FairScheduler,
)
from polybus.dialects.freud.server.fast_session import ShortSession
from polybus.dialects.freud.server.request_executor import (
    READ_ONLY_REQUESTS,
    ProduceSlice,
    RequestExecutor,
    split_produces,
)
from polybus.dialects.freud.server.request_scanner import Gets, Malformed, Produces, Scanner
from polybus.kernel.framing import Encoding
from polybus.model import topic_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.broker import Broker
    from polybus.bus.connection import ConnectionIO
    from polybus.bus.timers import Timer, Timers
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.pull_reader import PullReader

# What a client may send behind a waiting Get before it is no longer read from.
MAX_UNSCANNED_BYTES = 64 * 1024

CODES = {
    OutcomeKind.OK: Code.OK,
    OutcomeKind.NOTHING_HAPPENED: Code.NOTHING_HAPPENED,
    OutcomeKind.NO: Code.NO,
    OutcomeKind.DOES_NOT_EXIST: Code.DOESNT_EXIST,
    OutcomeKind.OVER_QUOTA: Code.SERVER_ERROR,
}


class FreudServer:
    """What all Freud connections of a bus share; called with a pipe it opens a session."""

    def __init__(self, broker: Broker, limits: FreudLimits, timers: Timers) -> None:
        self.broker = broker
        self.timers = timers
        self.line = FairScheduler(timers.call_soon)
        self.encoding = Encoding(broker.new_encoding_number())
        self.scanner = Scanner(limits.max_frame_bytes, topic_name.is_shared)

    def __call__(self, pipe: ConnectionIO) -> FreudSession:
        return FreudSession(self, pipe)


class FreudSession(ShortSession):
    def __init__(self, dialect: FreudServer, pipe: ConnectionIO) -> None:
        self._broker = dialect.broker
        self._topics = dialect.broker.topics
        self._readers = dialect.broker.topics.readers
        self._scan = dialect.scanner.scan
        self._call_later = dialect.timers.call_later
        self._call_soon = dialect.timers.call_soon
        self._pipe = pipe
        self._party = dialect.broker.join("freud", pipe, dialect.encoding)
        self._party.on_resume = self._on_unblocked
        self._party.describe = lambda: session_stats(self)
        self._requests = RequestExecutor(dialect.broker, self._party)
        self._answers: AnswerQueue = AnswerQueue(pipe, self._readers)
        self._todo: deque[Any] = deque()
        self._getting = GetGroup(self._answers)
        self._waiting_on: PullReader | None = None
        self._timer: Timer | None = None
        self._scheduler = dialect.line
        self._weight_left = TURN_WEIGHT  # what is left of it
        self._blocked = False
        self._slots = ProduceSlots(dialect.broker.max_uncommitted_bytes)
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
        if end - at > MAX_UNSCANNED_BYTES:
            self._pipe.pause_reading()
            self._pipe.watch_hangup(self.on_hangup)
        return at - start

    def on_stalled(self) -> None:
        self._answers.stalled = True
        self._broker.watch_stall(self._party)

    def on_writable(self) -> None:
        self._broker.end_stall(self._party)
        self._answers.on_drained()
        self._resume()

    def on_hangup(self) -> None:
        self._hung_up = True
        if self._waiting_on is not None:
            self._on_get_timeout()

    def on_half_closed(self) -> bool:
        self._finished = True
        self.on_hangup()
        self._resume()
        return True

    def on_ended(self) -> None:
        self._gone = self._finished = True
        self._answers.discard()
        self._broker.end_stall(self._party)
        self._blocked = self._settling = False
        self._slots.clear()  # they are carried out; nobody is there to be told
        self._unsettled = 0
        self._stop_waiting()
        if self._closing:
            self._leave_bus()
        else:
            self._finish_abandoned()

    def _finish_abandoned(self) -> None:
        """What a client that has gone left behind."""
        self._run()
        self._pipe.redeliver()
        if self._resting:
            self._pipe.retain_slot()
        else:
            self._leave_bus()

    def _leave_bus(self) -> None:
        self._readers.release_readers(self._requests.readers.values())
        self._broker.leave(self._party)
        self._pipe.release_slot()

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
    def answers(self) -> AnswerQueue:
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
            if self._weight_left <= 0:
                self._yield_turn()
                break
            if self._execute(self._todo[0]):
                self._todo.popleft()
                self._getting.unanswered = None
            if self._answers.size >= STEP_BYTES:
                self._answers.flush()
        if not self._closing:
            self._answers.flush()

    def _yield_turn(self) -> None:
        self._resting = True
        self._scheduler.join(self._on_turn)

    def _on_turn(self) -> None:
        self._resting = False
        self._weight_left = TURN_WEIGHT
        if self._gone:
            self._finish_abandoned()
        else:
            self._resume()

    def _resume(self) -> None:
        """After a halt: the rest of the requests, then what came behind them."""
        if self._closing or self._gone:
            return
        self._run()
        if self._is_halted or self._closing:
            return
        self._pipe.redeliver()
        self._pipe.resume_reading()
        if self._is_done():
            self._closing = True
            self._broker.finish(self._party)

    def _is_done(self) -> bool:
        """Everything that the client will ever send has been answered."""
        halted = self._is_halted or bool(self._todo) or self._closing
        return self._finished and not halted and not self._unsettled

    def _execute(self, group: Any) -> bool:
        """True when the group is done; else it stays at the head, with what is left of it."""
        self._weight_left -= REQUEST_WEIGHT
        is_produce = isinstance(group, Produces | ProduceSlice)
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
        if self._gone and group.type in READ_ONLY_REQUESTS:
            return True
        self._weight_left -= self._requests.weight(group)
        outcome, payload = self._requests.execute(group)
        self._answer(outcome, 1, payload)
        return True

    def _answer(self, outcome: RequestOutcome, count: int, payload: bytes = b"") -> None:
        self._answers.add(answers(CODES[outcome.kind], count, payload or outcome.text.encode()))

    def _produce(self, group: Any) -> bool:
        self._weight_left -= READER_WEIGHT * self._topics.fan_out_count(group.topic)
        result = self._topics.produce(
            self._party,
            group.topic,
            group.offsets,
            group.bodies,
            group.count,
            waits=not self._gone,
        )
        kind = result.outcome.kind
        if kind is OutcomeKind.WAIT:
            self._blocked = True
            return False
        if kind is OutcomeKind.OVER_QUOTA and group.count > 1:
            # Together they are too much; some of them may fit.
            self._weight_left -= group.count // SPLIT_PER_WEIGHT
            self._todo.popleft()
            self._todo.extendleft(reversed(split_produces(group)))
            return False
        self._answer_produces(group, result.outcome, result.first_id)
        return True

    def _answer_produces(self, group: Any, outcome: RequestOutcome, first_id: int) -> None:
        if outcome.kind in (OutcomeKind.OK, OutcomeKind.NOTHING_HAPPENED):
            self.received_messages += group.count
            self.received_bytes += len(group.bodies)
        if outcome.kind is OutcomeKind.OK:
            self._answers.add(produced(first_id, group.count))
        else:
            self._requests.record_refusal(outcome, "produce", group.topic, group.count)
            self._answer(outcome, group.count)

    def _produce_durable(self, group: Any) -> bool:
        """Answered when it is on disk (slots.py); the next of its kind need not wait for that."""
        assert self._broker.publisher is not None
        keeping = self._broker.publisher
        if not self._slots.has_room_for(group):
            self._settling = True
            return False
        if not self._requests.can_produce(group.topic):
            self._open_slot(ProduceSlot(group, NO))
            return True
        self._weight_left -= COMMIT_WEIGHT
        if self._gone:
            keeping.publish(self._party, group.topic, group.offsets, group.bodies, group.count)
            return True
        slot = ProduceSlot(group)
        self._open_slot(slot)
        keeping.publish_with_outcome(
            group.topic, group.offsets, group.bodies, partial(self._on_committed, slot)
        )
        return True

    def _open_slot(self, slot: ProduceSlot) -> None:
        self._slots.add(slot)
        self._answer_slots()

    def _answer_slots(self) -> None:
        for slot in self._slots.take_filled():
            assert slot.outcome is not None
            self._answer_produces(slot.group, slot.outcome, slot.first_id)
        self._unsettled = len(self._slots)

    def _on_committed(self, slot: ProduceSlot, outcome: RequestOutcome, first_id: int) -> None:
        if self._gone:
            if outcome.kind is not OutcomeKind.OK:
                reason = outcome.text or outcome.kind.value
                self._broker.counters.count("dropped", reason, slot.group.count)
            return
        slot.outcome, slot.first_id = outcome, first_id
        self._answer_slots()
        self._settling = False  # whatever still has to wait says so again
        if not self._answers.stalled:
            self._resume()

    def _get(self, group: Gets) -> bool:
        getting = self._getting
        if getting.unanswered is None:
            getting.unanswered = group.count
        while getting.unanswered > 0 and self._weight_left > 0 and not self._answers.stalled:
            reader = self._readers.find(self._pipe.identity, group.subscriber)
            if reader is None:
                return getting.answer_all(Code.DOESNT_EXIST)
            weight = getting.answer_messages(group, reader)
            if not weight:
                polls = group.max_blocking_s == 0 or self._hung_up
                if polls and not reader.is_behind:
                    return getting.answer_all(Code.NOTHING_HAPPENED)
                self._wait(reader, group.max_blocking_s, polls=polls)
                return False
            self._weight_left -= weight
            if self._answers.size >= STEP_BYTES:
                self._answers.flush()
        return getting.unanswered == 0

    # --- waiting

    def _wait(self, reader: PullReader, max_blocking_s: int, *, polls: bool) -> None:
        self._answers.flush()
        if self._answers.stalled:
            return
        self._waiting_on = reader
        reader.wait(self._on_message, polls=polls)
        if max_blocking_s > 0:
            self._timer = self._call_later(max_blocking_s, self._on_get_timeout)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting_on is not None:
            self._waiting_on.stop_waiting(self._on_message)
            self._waiting_on = None

    def _on_message(self) -> None:
        """There is a message, or the subscription is gone. The rest of our requests comes later:

        whoever wakes us is in the middle of its own.
        """
        reader = self._waiting_on
        assert reader is not None
        self._stop_waiting()
        if reader.gone:
            self._getting.answer_one(Code.DOESNT_EXIST)
        elif weight := self._getting.answer_messages(self._todo[0], reader, most=1):
            self._weight_left -= weight
        else:  # it polls, and there is nothing
            self._getting.answer_one(Code.NOTHING_HAPPENED)
        self._answers.flush()
        self._call_soon(self._resume)

    def _on_get_timeout(self) -> None:
        self._stop_waiting()
        self._getting.answer_one(Code.NOTHING_HAPPENED)
        self._resume()

    def _on_unblocked(self) -> None:
        self._blocked = False
        self._resume()
        if not self._blocked:
            self._pipe.resume_reading()  # also if a Get waits by now: its client may hang up

    def _close(self, reason: str) -> None:
        self._answers.flush()
        self._closing = True
        self._broker.close(self._party, reason)


def session_stats(session: FreudSession) -> dict[str, int | str]:
    answers = session.answers
    return {
        "subscriptions": session.subscription_count,
        "received_messages": session.received_messages,
        "received_bytes": session.received_bytes,
        "sent_messages": session.sent_messages + answers.sent_messages,
        "sent_bytes": session.sent_bytes + answers.sent_bytes,
        "outbox_bytes": answers.unsent_bytes,
        "state": session.state,
    }
