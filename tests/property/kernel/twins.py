"""The kernel's fan-out and its oracle side by side: one call does both and compares.

An object that exists on both sides (a reader, a source, an encoding) is a Pair. Values
must be equal, byte for byte; errors must have the same type. Only the ids of PARTs that an
encoding makes are random: those are numbered in the order they appear.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from polybus.dialects.rqueue.server.rqueue_framing import REASONS, RqueueEncoding, RqueueFraming
from polybus.kernel import fanout as kernel
from tests.rig.oracle import fanout as oracle
from tests.rig.oracle import rqueue

STOPS = {
    kernel.END: oracle.END,
    kernel.CONTROL_FRAME: oracle.CONTROL_FRAME,
    kernel.BLOCKED: oracle.BLOCKED,
    kernel.FRAGMENTS_FIRST: oracle.FRAGMENTS_FIRST,
    kernel.BAD_FRAME: oracle.BAD_FRAME,
}


class Pair:
    def __init__(self, kernel: Any, oracle: Any) -> None:
        self.kernel = kernel
        self.oracle = oracle


class EncodingPair(Pair):
    def __init__(self, number: int, max_payload: int) -> None:
        super().__init__(RqueueEncoding(number, max_payload), rqueue.Encoding(number, max_payload))
        self.framing = RqueueFraming(self.kernel)


class SourcePair(Pair):
    def __init__(self, identity: int, trusted: bool) -> None:
        super().__init__(
            kernel.Source(identity, trusted=trusted),
            oracle.Source(identity=identity, trusted=trusted),
        )


class ReaderPair(Pair):
    """Its number on each side, and the one outbox that both hand back."""

    def __init__(self, kernel: int, oracle: int, outbox: object) -> None:
        super().__init__(kernel, oracle)
        self.outbox = outbox


@dataclass(frozen=True)
class Outcome:
    value: object = None
    error: type[BaseException] | None = None


def outcome(call: Callable[..., object], arguments: Iterable[object]) -> Outcome:
    try:
        return Outcome(value=call(*arguments))
    except Exception as error:
        return Outcome(error=type(error))


class Twins:
    """`policy(identity class, topic)` judges for both; each side's questions are compared."""

    def __init__(self, policy: Callable[[int, bytes], bool]) -> None:
        self.policy = policy
        self.kernel_asked: list[tuple[int, bytes]] = []
        self.oracle_asked: list[tuple[int, bytes]] = []
        self.kernel = kernel.Fanout(self._judge(self.kernel_asked))
        self.oracle = oracle.Fanout(self._judge(self.oracle_asked))
        self.readers: list[ReaderPair] = []
        self.sources: list[SourcePair] = []

    def _judge(self, asked: list[tuple[int, bytes]]) -> Callable[[int, bytes], bool]:
        def judge(identity: int, topic: bytes) -> bool:
            asked.append((identity, topic))
            return self.policy(identity, topic)

        return judge

    # --- operations ----------------------------------------------------------

    def source(self, identity: int, *, trusted: bool = False) -> SourcePair:
        self.sources.append(SourcePair(identity, trusted))
        return self.sources[-1]

    def join(self, encoding: EncodingPair) -> ReaderPair:
        outbox = object()
        number = self.kernel.add_subscriber(outbox, encoding.kernel)
        assert number not in [reader.kernel for reader in self.readers], "numbers are unique"
        reader = ReaderPair(number, self.oracle.add_subscriber(outbox, encoding.oracle), outbox)
        self.readers.append(reader)
        return reader

    def leave(self, reader: ReaderPair) -> None:
        self.call("remove_subscriber", reader)
        self.readers.remove(reader)

    def call(self, verb: str, *arguments: object) -> Outcome:
        """A method of the registry, on both."""
        by_kernel = outcome(getattr(self.kernel, verb), _faces(arguments, "kernel"))
        by_oracle = outcome(getattr(self.oracle, verb), _faces(arguments, "oracle"))
        assert by_kernel == by_oracle, verb
        return by_kernel

    def set_judge_unheard(self, value: bool) -> None:
        self.kernel.has_produce_rules = self.oracle.has_produce_rules = value

    def route(
        self, own: EncodingPair, source: SourcePair, data: Any, start: int, end: int
    ) -> oracle.RouteResult:
        got = self.kernel.route(own.framing, source.kernel, data, start, end)
        expected = self.oracle.route(own.oracle, source.oracle, data, start, end)
        self._compare(got, expected, own.oracle)
        return expected

    def publish(
        self,
        source: SourcePair,
        topic: bytes,
        bodies: list[bytes],
        skip: EncodingPair | None = None,
    ) -> oracle.RouteResult:
        ends = [sum(map(len, bodies[:count])) for count in range(len(bodies) + 1)]
        whole, offsets = b"".join(bodies), array("i", ends)
        theirs = None if skip is None else skip.kernel
        got = self.kernel.publish(source.kernel, topic, offsets, whole, theirs)
        ours = None if skip is None else skip.oracle
        expected = self.oracle.publish(source.oracle, topic, offsets, whole, ours)
        self._compare(got, expected, None)
        return expected

    def encode_for(self, reader: ReaderPair, topic: bytes, bodies: list[bytes]) -> None:
        ends = [sum(map(len, bodies[:count])) for count in range(len(bodies) + 1)]
        given = (topic, array("i", ends), b"".join(bodies))
        got = outcome(self.kernel.encode_for, (reader.kernel, *given))
        expected = outcome(self.oracle.encode_for, (reader.oracle, *given))
        assert got.error == expected.error
        if expected.error is None:
            assert isinstance(got.value, bytes)
            assert isinstance(expected.value, bytes)
            assert with_numbered_ids(got.value) == with_numbered_ids(expected.value)

    # --- comparing -----------------------------------------------------------

    def _compare(
        self, got: kernel.RouteResult, expected: oracle.RouteResult, own: rqueue.Encoding | None
    ) -> None:
        assert STOPS[got.stop] == expected.stop
        assert got.consumed == expected.consumed
        assert (REASONS[got.code] if got.stop == kernel.BAD_FRAME else None) == expected.reason
        control = (got.code, got.topic) if got.stop == kernel.CONTROL_FRAME else None
        assert control == expected.control
        if got.stop == kernel.BLOCKED:
            assert got.blocker in expected.blockers
        else:
            assert got.blocker is None
        assert self._outputs(got, own) == self._expected_outputs(expected, own)
        assert _columns(got) == _expected_columns(expected)
        assert list(got.fragments) == expected.fragments
        assert self.kernel_asked == self.oracle_asked

    def _outputs(
        self, got: kernel.RouteResult, own: rqueue.Encoding | None
    ) -> dict[ReaderPair, bytes]:
        outboxes = [outbox for outbox, _ in got.outputs]
        assert len(outboxes) == len(set(outboxes)), "at most one output per reader"
        by_outbox = {reader.outbox: reader for reader in self.readers}
        return {
            by_outbox[outbox]: self._shown(by_outbox[outbox], data, own)
            for outbox, data in got.outputs
        }

    def _expected_outputs(
        self, expected: oracle.RouteResult, own: rqueue.Encoding | None
    ) -> dict[ReaderPair, bytes]:
        by_number = {reader.oracle: reader for reader in self.readers}
        return {
            by_number[number]: self._shown(by_number[number], data, own)
            for number, data in expected.outputs.items()
        }

    def _shown(self, reader: ReaderPair, data: bytes, own: rqueue.Encoding | None) -> bytes:
        """Readers of the sender's encoding get the raw frames, ids included."""
        is_own = self.oracle.readers[reader.oracle].encoding is own
        return data if is_own else with_numbered_ids(data)

    def check(self, names: Iterable[bytes]) -> None:
        """Compare all observable state of kernel and oracle."""
        assert self.kernel.topic_count == self.oracle.topic_count
        assert self.kernel.set_count == self.oracle.set_count
        assert self.kernel.delivered == self.oracle.delivered
        assert self.kernel.delivered_bytes == self.oracle.delivered_bytes
        assert self.kernel.too_large == self.oracle.too_large
        assert tally(self.kernel) == tally(self.oracle.total)
        for source in self.sources:
            assert tally(source.kernel) == tally(source.oracle)
        for reader in self.readers:
            for question in ("sent_totals", "topics_of", "subscription_count"):
                self.call(question, reader)
        for name in names:
            for question in ("has_topic", "next_id", "subscriber_count"):
                self.call(question, name)


def tally(counted: Any) -> tuple[int, int, int, int]:
    return counted.messages, counted.bytes, counted.denied, counted.unheard


def _faces(arguments: Iterable[object], side: str) -> list[object]:
    return [getattr(one, side) if isinstance(one, Pair) else one for one in arguments]


def _columns(got: kernel.RouteResult) -> dict[bytes, tuple[int, list[bytes]]]:
    columns = {}
    for batch in got.collected:
        bounds = array("i", batch.offsets)
        assert len(bounds) == batch.count + 1
        assert bounds[0] == 0
        assert bounds[-1] == len(batch.bodies)
        bodies = [batch.bodies[bounds[at] : bounds[at + 1]] for at in range(batch.count)]
        columns[batch.topic] = (batch.first_id, bodies)
    assert len(columns) == len(got.collected), "one batch per topic"
    return columns


def _expected_columns(expected: oracle.RouteResult) -> dict[bytes, tuple[int, list[bytes]]]:
    return {one.topic: (one.first_id, one.bodies) for one in expected.collected.values()}


def with_numbered_ids(encoded: bytes) -> bytes:
    """The same frames with the ids of PARTs replaced by 0, 1, ... in order of appearance."""
    changed = bytearray(encoded)
    numbers: dict[bytes, int] = {}
    at = 0
    while at < len(encoded):
        length, kind, topic_size = struct.unpack_from(">IBB", encoded, at)
        if kind == rqueue.PART:
            spot = slice(at + 6 + topic_size, at + 22 + topic_size)
            number = numbers.setdefault(encoded[spot], len(numbers))
            changed[spot] = number.to_bytes(16, "big")
        at += 5 + length
    return bytes(changed)
