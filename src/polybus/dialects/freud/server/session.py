"""One Freud connection: requests are executed one after another, answers keep their order.

The compiled scanner returns runs of like requests. The session executes them until
something halts the connection (`Halt`), or the client does not read its answers
(`AnswerQueue.stalled`). Each halt has an event that ends it, and the session continues
where it stopped. plain_session.pyx has the loop, plain Produces and Gets that have a message;
this file has all other requests, and the events. While the session is halted, the client's
further input is left unread beyond MAX_UNSCANNED_BYTES, so a connection holds a bounded amount
of memory.

`Phase` says how far the connection is from its end. A client that hangs up is answered
all its requests; a waiting Get is answered as if its time were up. If the client is gone
altogether, the session still executes the requests that it sent, except those that only
produce an answer (Gets, Lists, Counts). Until that is done, the connection keeps its slot
among the counted connections.
"""

from __future__ import annotations

from enum import Enum, IntEnum, auto
from functools import partial
from typing import TYPE_CHECKING

from polybus.bus.request_outcome import NO, OutcomeKind, RequestOutcome
from polybus.dialects.freud.codec import HEADER, MALFORMED_TEXTS, Code
from polybus.dialects.freud.server.answer_encoder import encode_answers
from polybus.dialects.freud.server.answer_queue import AnswerQueue
from polybus.dialects.freud.server.ephemeral_topics import EphemeralTopics
from polybus.dialects.freud.server.fair_scheduler import (
    COMMIT_WEIGHT,
    READER_WEIGHT,
    SPLIT_PER_WEIGHT,
    TURN_WEIGHT,
    FairScheduler,
)
from polybus.dialects.freud.server.plain_session import (
    CLOSING,
    DEPARTED,
    ENDING,
    NOT_HALTED,
    OPEN,
    RESTING,
    PlainSession,
)
from polybus.dialects.freud.server.produce_slots import ProduceSlot, ProduceSlots
from polybus.dialects.freud.server.request_executor import READ_ONLY_REQUESTS, RequestExecutor
from polybus.dialects.freud.server.request_scanner import (
    GetRun,
    Group,
    MalformedFrame,
    ProduceRun,
    RequestScanner,
)
from polybus.kernel.framing import Encoding
from polybus.model import topic_name
from polybus.model.unfinished_frame import UnfinishedFrame

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.connection import ConnectionIO
    from polybus.bus.timers import Timer, Timers
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.pull_reader import PullReader

# The likely causes of a request that stays unfinished.
STOPPED = "the client sends slowly or has stopped within a request, or its length is too large"
COUNTS_HEADER = (
    "the length counts the header, as freudctl writes it;"
    " give that client a listener with ?length=with-header"
)

CODES = {
    OutcomeKind.OK: Code.OK,
    OutcomeKind.NOTHING_HAPPENED: Code.NOTHING_HAPPENED,
    OutcomeKind.NO: Code.NO,
    OutcomeKind.DOES_NOT_EXIST: Code.DOESNT_EXIST,
    OutcomeKind.OVER_QUOTA: Code.SERVER_ERROR,
}


# --- states ------------------------------------------------------------------


class Phase(IntEnum):
    """How far a connection is from its end. The order matters: no event goes back."""

    OPEN = OPEN
    HUNG_UP = 1  # the client hung up, but not all of its input was read
    FINISHED = 2  # all input was read, and the client still reads answers
    CLOSING = CLOSING  # the bus closes the connection; no further request is executed
    ENDING = ENDING  # the socket is gone; the client's requests are still executed
    DEPARTED = DEPARTED  # the session has left the bus


class PhaseEvent(Enum):
    HANGUP = auto()  # the client hung up while it was not read from
    HALF_CLOSE = auto()  # end of the client's input
    CLOSE = auto()  # a request broke the protocol
    ENDED = auto()  # the transport closed the socket
    DRAINED = auto()  # all requests were executed and answered


_PHASES: dict[tuple[Phase, PhaseEvent], Phase] = {
    (Phase.OPEN, PhaseEvent.HANGUP): Phase.HUNG_UP,
    (Phase.OPEN, PhaseEvent.HALF_CLOSE): Phase.FINISHED,
    (Phase.OPEN, PhaseEvent.CLOSE): Phase.CLOSING,
    (Phase.OPEN, PhaseEvent.ENDED): Phase.ENDING,
    (Phase.HUNG_UP, PhaseEvent.HALF_CLOSE): Phase.FINISHED,
    (Phase.HUNG_UP, PhaseEvent.CLOSE): Phase.CLOSING,
    (Phase.HUNG_UP, PhaseEvent.ENDED): Phase.ENDING,
    (Phase.FINISHED, PhaseEvent.CLOSE): Phase.CLOSING,
    (Phase.FINISHED, PhaseEvent.ENDED): Phase.ENDING,
    (Phase.FINISHED, PhaseEvent.DRAINED): Phase.CLOSING,
    (Phase.CLOSING, PhaseEvent.ENDED): Phase.DEPARTED,
    (Phase.ENDING, PhaseEvent.CLOSE): Phase.DEPARTED,
    (Phase.ENDING, PhaseEvent.DRAINED): Phase.DEPARTED,
}


def next_phase(phase: int, event: PhaseEvent) -> Phase:
    """Return the phase after an event; an event that is not in the table changes nothing."""
    return _PHASES.get((Phase(phase), event), Phase(phase))


class Halt(IntEnum):
    """Why the session executes no request at the moment, beside stalled answers."""

    NONE = NOT_HALTED
    WAITING = 1  # a Get waits for a message; ended by a message or its time limit
    BLOCKED = 2  # a Produce waits for a full push reader; ended by that reader
    SETTLING = 3  # a request waits for commits of earlier Produces; ended by those
    RESTING = RESTING  # its share of the turn is used up; ended by the scheduler


HALT_NAMES = {
    Halt.NONE: "open",
    Halt.WAITING: "waiting",
    Halt.BLOCKED: "blocked",
    Halt.SETTLING: "blocked",
    Halt.RESTING: "resting",
}


# --- sessions ----------------------------------------------------------------


class FreudServer:
    """State shared by all Freud connections of a bus; a call with a pipe opens a session."""

    def __init__(self, broker: Broker, limits: FreudLimits, timers: Timers) -> None:
        self.broker = broker
        self.topics = EphemeralTopics.install(broker, limits)
        self.timers = timers
        self.scheduler = FairScheduler(timers.call_soon)
        self.encoding = Encoding(broker.new_encoding_number())
        self.scanner = RequestScanner(limits.max_frame_bytes, topic_name.is_shared)
        self.header_scanner = RequestScanner(
            limits.max_frame_bytes, topic_name.is_shared, with_header=True
        )

    def __call__(self, pipe: ConnectionIO) -> FreudSession:
        return FreudSession(self, pipe, self.scanner)

    def open_with_header(self, pipe: ConnectionIO) -> FreudSession:
        """Open a session of a client whose lengths count the header."""
        return FreudSession(self, pipe, self.header_scanner)


class FreudSession(PlainSession):
    def __init__(self, server: FreudServer, pipe: ConnectionIO, scanner: RequestScanner) -> None:
        self._server = server
        self._scanner = scanner
        self._broker = server.broker
        self._topics = server.topics
        self._readers = server.topics.readers
        self._call_later = server.timers.call_later
        self._call_soon = server.timers.call_soon
        self._connection = server.broker.join("freud", pipe, server.encoding)
        self._connection.on_resume = self._on_unblocked
        self._connection.describe = self._describe
        self._requests = RequestExecutor(server.broker, server.topics, self._connection)
        self._waiting_on: PullReader | None = None
        self._timer: Timer | None = None
        self._scheduler = server.scheduler
        self._slots = ProduceSlots(server.broker.max_uncommitted_bytes)
        super().__init__(
            pipe,
            scanner,
            self._topics.plain_delivery,
            AnswerQueue(pipe, self._readers, self._topics.message_counts),
            self._connection.source,
            pipe.identity.account,
        )

    # --- called by the transport

    def stop_reading(self) -> None:
        self.pipe.pause_reading()
        # While reading is paused, only this callback reports that the client hung up.
        self.pipe.watch_hangup(self.on_hangup)

    def describe_unfinished(self, head: bytes, held_bytes: int) -> UnfinishedFrame | None:
        """Describe the request that starts with `head`, of which `held_bytes` have arrived.

        Returns None if it waits for the bus, or is whole.
        """
        if self.is_halted or self.pending:
            return None
        if held_bytes < HEADER.size:
            return UnfinishedFrame(HEADER.size - held_bytes, STOPPED)
        header = head[: HEADER.size]
        missing = self._scanner.frame_bytes(header) - held_bytes
        if missing <= 0:
            return None
        # A request that would be whole in the other framing was probably written in it.
        if self._server.header_scanner.frame_bytes(header) == held_bytes:
            return UnfinishedFrame(missing, COUNTS_HEADER)
        return UnfinishedFrame(missing, STOPPED)

    def on_stalled(self) -> None:
        self.answers.stalled = True
        self._broker.watch_stall(self._connection)

    def on_writable(self) -> None:
        self._broker.end_stall(self._connection)
        self.answers.on_drained()
        self._resume()

    def on_hangup(self) -> None:
        self._change_phase(PhaseEvent.HANGUP)
        if self.halt == Halt.WAITING:
            self._on_get_timeout()

    def on_half_closed(self) -> bool:
        """Answer all requests before closing. Returns True: the socket stays open for that."""
        self._change_phase(PhaseEvent.HALF_CLOSE)
        if self.halt == Halt.WAITING:
            self._on_get_timeout()
        self._resume()
        return True

    def on_ended(self) -> None:
        self._change_phase(PhaseEvent.ENDED)
        self.answers.discard()
        self._broker.end_stall(self._connection)
        # Submitted commits continue, but there is no connection for their answers.
        self._slots.clear()
        self.uncommitted = 0
        self._stop_waiting()
        # A resting session stays in the scheduler's queue, which resumes it.
        if self.halt != Halt.RESTING:
            self.halt = Halt.NONE
        if self.phase == Phase.DEPARTED:
            self._leave_bus()
        else:
            self._finish_abandoned()

    # --- phases

    def _change_phase(self, event: PhaseEvent) -> None:
        self.phase = next_phase(self.phase, event)

    @property
    def _is_gone(self) -> bool:
        """True if the client can receive no answer."""
        return self.phase >= Phase.ENDING

    def _finish_abandoned(self) -> None:
        """Execute the requests of a client that is gone, a turn at a time."""
        self.run()
        # Requests that were received but not scanned, then those still in the socket.
        self.pipe.redeliver()
        if self.halt == Halt.RESTING:
            self.pipe.retain_slot()
        else:
            self._change_phase(PhaseEvent.DRAINED)
            self._leave_bus()

    def _leave_bus(self) -> None:
        self._readers.detach(self._requests.readers.values())
        self._broker.leave(self._connection)
        self.pipe.release_slot()

    # --- the fields of `polybus connections`

    @property
    def state(self) -> str:
        """The reason of the halt, or `ending` if its client is gone."""
        if self._is_gone:
            return "ending"
        if self.answers.stalled:
            return "stalled"
        return HALT_NAMES[Halt(self.halt)]

    def _describe(self) -> dict[str, int | str]:
        """Return the connection's own counters.

        The fan-out counts only pushed messages; these are the produced and the read ones.
        `outbox_bytes` are answers that the client has not read.
        """
        subscriptions = sum(not reader.gone for reader in self._requests.readers.values())
        return {
            "subscriptions": subscriptions,
            "received_messages": self.received_messages,
            "received_bytes": self.received_bytes,
            "sent_messages": self.answers.sent_messages,
            "sent_bytes": self.answers.sent_bytes,
            "outbox_bytes": self.answers.unsent_bytes,
            "state": self.state,
        }

    # --- executing requests

    def rest(self) -> None:
        """Wait for a new share of the turn."""
        self._scheduler.join(self._on_turn)

    def _on_turn(self) -> None:
        self.halt = Halt.NONE
        self.weight_left = TURN_WEIGHT
        if self._is_gone:
            self._finish_abandoned()
        else:
            self._resume()

    def _resume(self) -> None:
        """Execute pending requests after a halt, then the input that was left unread."""
        if self.phase >= Phase.CLOSING:
            return
        self.run()
        if self.is_halted or self.is_closed:
            return
        # Held input first, also if reading was never paused.
        self.pipe.redeliver()
        self.pipe.resume_reading()
        # A half-closed client is answered all its requests, also those that await a commit.
        if self.phase == Phase.FINISHED and self._is_drained():
            self._change_phase(PhaseEvent.DRAINED)
            self._broker.finish(self._connection)

    def _is_drained(self) -> bool:
        """Return True if every request that was read is executed and answered."""
        return not (self.is_halted or self.pending or self.uncommitted)

    def execute_other(self, run: Group) -> bool:
        """Execute requests that are not plain. Returns False if some of it is still to be done."""
        if isinstance(run, ProduceRun) and self._broker.is_durable(run.topic):
            return self._produce_durable(run)
        if self.uncommitted:
            self.halt = Halt.SETTLING
            return False
        if isinstance(run, ProduceRun):
            return self._produce(run)
        if isinstance(run, GetRun):
            return self._is_gone or self._get(run)
        if isinstance(run, MalformedFrame):
            text = MALFORMED_TEXTS[run.reason].encode()
            self.answers.add(encode_answers(Code.MALFORMED_REQUEST, 1, text))
            self._broker.counters.count("refused", f"malformed_{run.reason}")
            if run.closes:
                # After a frame over the limit the stream cannot be parsed any further.
                self.answers.flush()
                self._change_phase(PhaseEvent.CLOSE)
                self._broker.close(self._connection, run.reason)
            return True
        if self._is_gone and run.type in READ_ONLY_REQUESTS:
            return True
        self.weight_left -= self._requests.weight(run)
        outcome, payload = self._requests.execute(run)
        self._answer(outcome, 1, payload)
        return True

    def _answer(self, outcome: RequestOutcome, count: int, payload: bytes = b"") -> None:
        self.answers.add(
            encode_answers(CODES[outcome.kind], count, payload or outcome.text.encode())
        )

    # --- Produce

    def _produce(self, run: ProduceRun) -> bool:
        self.weight_left -= READER_WEIGHT * self._topics.fan_out_count(run.topic)
        result = self._topics.produce(self._connection, run, waits=not self._is_gone)
        kind = result.outcome.kind
        if kind is OutcomeKind.WAIT:
            self.halt = Halt.BLOCKED
            return False
        if kind is OutcomeKind.OVER_QUOTA and run.count > 1:
            # The batch as a whole exceeds the quota; some of its messages may fit. Halving
            # keeps the number of pending parts small.
            self.weight_left -= run.count // SPLIT_PER_WEIGHT
            middle = run.count // 2
            self.pending[-1:] = [run.part(middle, run.count), run.part(0, middle)]
            return False
        self._answer_produces(run, result.outcome, result.first_id)
        return True

    def _answer_produces(self, run: ProduceRun, outcome: RequestOutcome, first_id: int) -> None:
        if outcome.kind is OutcomeKind.OK:
            self.answer_produced(run, first_id)
            return
        if outcome.kind is OutcomeKind.NOTHING_HAPPENED:
            self.count_received(run)
        self._requests.record_refusal(outcome, "produce", run.topic, run.count)
        self._answer(outcome, run.count)

    def _produce_durable(self, run: ProduceRun) -> bool:
        """Submit a run for commit. Its slot is answered once the messages are on disk."""
        publisher = self._broker.durable
        if not self._slots.has_room_for(run):
            self.halt = Halt.SETTLING
            return False
        if not self._requests.can_produce(run.topic):
            self._open_slot(ProduceSlot(run, NO))
            return True
        self.weight_left -= COMMIT_WEIGHT
        if self._is_gone:
            # No connection to answer: the publisher counts a failure itself.
            publisher.publish(self._connection, run.topic, run.offsets, run.bodies, run.count)
            return True
        slot = ProduceSlot(run)
        self._open_slot(slot)
        publisher.publish_with_outcome(
            run.topic, run.offsets, run.bodies, partial(self._on_committed, slot)
        )
        return True

    def _open_slot(self, slot: ProduceSlot) -> None:
        self._slots.add(slot)
        self._answer_slots()

    def _answer_slots(self) -> None:
        for slot in self._slots.take_filled():
            assert slot.outcome is not None
            self._answer_produces(slot.run, slot.outcome, slot.first_id)
        self.uncommitted = len(self._slots)

    def _on_committed(self, slot: ProduceSlot, outcome: RequestOutcome, first_id: int) -> None:
        if self._is_gone:
            if outcome.kind is not OutcomeKind.OK:
                reason = outcome.text or outcome.kind.value
                self._broker.counters.count("dropped", reason, slot.run.count)
            return
        slot.outcome, slot.first_id = outcome, first_id
        self._answer_slots()
        # If the request at the head still has to wait, executing it halts again.
        if self.halt == Halt.SETTLING:
            self.halt = Halt.NONE
        if not self.answers.stalled:
            self._resume()

    # --- Get

    def _get(self, run: GetRun) -> bool:
        """Execute Gets that have no message, or whose subscription must be attached first."""
        reader = self._topics.plain_delivery.find_reader(self.pipe.identity.account, run.subscriber)
        if reader is None:
            self.answer_gets(run, Code.DOESNT_EXIST, run.unanswered)
            return True
        if not reader.is_owned:
            self._requests.own(reader)
        if reader.ranges:
            return self.read(run, reader)
        polls = run.max_blocking_s == 0 or self.phase != Phase.OPEN
        # A durable reader that is behind has messages to fetch, even for a poll.
        if polls and not reader.is_behind:
            self.answer_gets(run, Code.NOTHING_HAPPENED, run.unanswered)
            return True
        self._wait(reader, run.max_blocking_s, polls=polls)
        return False

    def _wait(self, reader: PullReader, max_blocking_s: int, *, polls: bool) -> None:
        self.answers.flush()
        if self.answers.stalled:
            return  # the Get is executed again when the client reads
        self.halt = Halt.WAITING
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
            self._readers.renew(self._waiting_on)
            self._waiting_on = None
            self.halt = Halt.NONE

    def _on_message(self) -> None:
        """Answer one waiting Get: a message arrived, or the subscription ended."""
        reader = self._waiting_on
        assert reader is not None
        self._stop_waiting()
        run = self._waiting_run()
        if reader.gone:
            self.answer_gets(run, Code.DOESNT_EXIST, 1)
        elif weight := self.answer_messages(run, reader, 1):
            self.weight_left -= weight
        else:  # a poll of a durable topic whose log has no further message
            self.answer_gets(run, Code.NOTHING_HAPPENED, 1)
        self.answers.flush()
        # Not at once: the producer that woke this session is in the middle of its request.
        self._call_soon(self._resume)

    def _on_get_timeout(self) -> None:
        self._stop_waiting()
        self.answer_gets(self._waiting_run(), Code.NOTHING_HAPPENED, 1)
        self._resume()

    def _waiting_run(self) -> GetRun:
        run = self.pending[-1]
        assert isinstance(run, GetRun)
        return run

    def _on_unblocked(self) -> None:
        if self.halt == Halt.BLOCKED:
            self.halt = Halt.NONE
        self._resume()
        if self.halt != Halt.BLOCKED:
            # Also if a Get waits now: reading is how a hangup of its client is noticed.
            self.pipe.resume_reading()
