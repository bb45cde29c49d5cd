"""Ways to break the kernel, each of which its tests must notice.

A mutant is a small change that a tired programmer could make: a bound off by one,
a forgotten reset, two swapped arguments. `old` must occur exactly once in its file,
so that a mutant whose code was rewritten is rewritten, too.
"""

from __future__ import annotations

from tests.rig.patching import Patch, patches


def mutants(file: str, *changes: tuple[str, str, str]) -> list[Patch]:
    return patches(file, *changes)


FRAMING = mutants(
    "dialects/rqueue/server/rqueue_framing.pyx",
    ("cap is one short", "if length > self.max_payload:", "if length >= self.max_payload:"),
    ("header of four bytes", "if left < HEADER:", "if left < HEADER - 1:"),
    ("payload one byte short", "if left < HEADER + length:", "if left < HEADER + length - 1:"),
    ("type 6 is known", "or kind == 4 or kind == 6:", "or kind == 4:"),
    ("empty type 2 is a bad REMOVE", "if kind == REMOVE and length == 0:", "if False:"),
    ("deregister may have a payload", "kind == DEREGISTER and length != 0", "False"),
    ("inner length may be less", "load_u32_be(at) != inner:", "read_u32(at) > inner:"),
    ("publish without a header", "if inner < 0 or", "if"),
    ("any inner type", "if at[4] != NOTIFICATION and at[4] != PART:", "if at[4] < NOTIFICATION:"),
    ("topic as long as the payload", "topic_size > inner - 1:", "topic_size > inner:"),
    ("lone topic past the payload", "or at[0] > length - 1:", "or at[0] > length:"),
    ("bytes after a lone topic", "if at[0] != length - 1:", "if False:"),
    ("short part", "if frame.body_size < PART_HEADER:", "if frame.body_size < PART_HEADER - 1:"),
    (
        "index as large as count",
        "load_u16_be(frame.body + 16) >= load_u16_be(frame.body + 18)",
        "load_u16_be(frame.body + 16) > load_u16_be(frame.body + 18)",
    ),
    ("part taken for a message", "frame.kind = FRAGMENT\n", "frame.kind = MESSAGE\n"),
)

ENCODING = mutants(
    "dialects/rqueue/server/rqueue_framing.pyx",
    ("index and count swapped", "(out + 16, index), parts)", "(out + 16, parts), index)"),
    ("chunk one byte too long", "frame.topic_size - PART_HEADER\n", "frame.topic_size - 19\n"),
    (
        "whole message one byte too long",
        "frame.topic_size + frame.body_size > self.max_payload:",
        "frame.topic_size + frame.body_size > self.max_payload + 1:",
    ),
    (
        "one part too many",
        "parts > MAX_PARTS:\n            return 0",
        "False:\n            return 0",
    ),
    ("all parts have one id", "return self.random_state[1] + b", "return 1"),
    ("last chunk as long as the others", "min(chunk, frame.body_size - index * chunk)", "chunk"),
    ("sent frames are counted", "messages += end > sent", "messages += end >= sent"),
    ("parts are messages", "sent and not is_early_part(start + at, end - at)", "sent"),
    ("the last part is early", "frame + at + 16) + 1 <", "frame + at + 16) <"),
    ("smallest cap", "HEADER + 1 + 255 + PART_HEADER + 1:", "HEADER + 1 + 255 + PART_HEADER:"),
)

TABLES = [
    *mutants(
        "kernel/topic_index.pyx",
        ("verdicts outlive the policy", "topic.generation != generation or identity", "identity"),
        (
            "old verdicts are not cleared",
            "memset(topic.verdicts, UNKNOWN, topic.verdict_count)",
            "pass",
        ),
        ("identity classes read too far", "or identity >= topic.verdict_count:", "or False:"),
        (
            "gap is not closed",
            "while self.slots[at] is not NULL:\n            home",
            "while False:\n            home",
        ),
        ("wrong entries are moved", "& mask) >= ((at - hole)", "& mask) > ((at - hole)"),
        (
            "table grows too late",
            "(self.count + 1) * 2 > self.capacity",
            "self.count > self.capacity",
        ),
        ("growing forgets hashes", "at = self.slots[old].hash & (wider - 1)", "at = old"),
        (
            "sweep skips what moved",
            "self.drop(topic)  # may",
            "self.drop(topic)\n                at += 1  # may",
        ),
        ("names of 256 bytes", "0 < size <= 255", "0 < size <= 256"),
    ),
    *mutants(
        "kernel/topic_index.pxd",
        ("collected topics are idle", " and not topic.collect", ""),
        ("held topics are idle", " and not topic.hold", ""),
    ),
    *mutants(
        "kernel/subscriber_set.pyx",
        ("shared sets are counted once", "self.sets[number].references += 1\n", "pass\n"),
        ("released sets stay known", "del self.numbers[key]", "pass"),
        (
            "members in order of arrival",
            "at = position(old.members, size, member)\n        cdef uint32_t* grown",
            "at = size\n        cdef uint32_t* grown",
        ),
        (
            "encodings of a grown set",
            "old.encodings | (<uint32_t>1 << encoding)",
            "<uint32_t>1 << encoding",
        ),
        ("wrong member leaves", "old.members + at + 1, (size", "old.members + at, (size"),
    ),
    *mutants(
        "kernel/subscriber_table.pyx",
        ("unsubscribing keeps the set", "self.sets.release(old)\n        return", "return"),
        (
            "subscribing keeps the old set",
            "            self.sets.release(old)\n        finally",
            "        finally",
        ),
        ("encodings of a shrunk set", "if member != number:", "if True:"),
        ("idle entries are not booked", "self.table.idle += <int>idle - <int>was_idle", "pass"),
        ("full twice counts twice", "<int>full - <int>subscriber.full", "1 if full else -1"),
        ("numbers are given away twice", "return self.free.pop()", "return self.free[-1]"),
        ("the dead may subscribe", "or not self.subscribers[number].alive:", "or False:"),
        ("the table may change meanwhile", "        if self.routing:\n", "        if False:\n"),
        ("two encodings with one number", "known is not None and known is not encoding", "False"),
    ),
]

FANOUT = mutants(
    "kernel/fanout.pyx",
    ("window past the buffer", "0 <= start <= end <= view.len", "0 <= start <= end"),
    ("window before the buffer", "0 <= start <= end <= view.len", "start <= end <= view.len"),
    (
        "verdicts are not remembered",
        "self.table.remember_verdict(topic, source.identity, self.generation, verdict)",
        "pass",
    ),
    ("trusted sources are judged", "if not source.trusted:", "if True:"),
    (
        "blocked messages are counted",
        "        if self.last_outcome == WAIT:\n            return WAIT\n",
        "",
    ),
    (
        "skipped readers block",
        "if reader.full and reader.encoding != self.skip:",
        "if reader.full:",
    ),
    ("skipped readers get it again", "encodings &= ~(<uint32_t>1 << self.skip)", "pass"),
    ("own readers get it twice", "        encodings &= ~self.own_bit\n", ""),
    (
        "one run for all sets",
        "self.run_count == 0 or self.runs[self.run_count - 1].subscribers != topic.subscribers",
        "self.run_count == 0",
    ),
    ("one idle topic fewer", "MAX_IDLE_TOPICS = 4096", "MAX_IDLE_TOPICS = 4095"),
    (
        "streak takes any topic of its size",
        "topic.name_size == frame.topic_size and same(topic.name, frame.topic, frame.topic_size)",
        "topic.name_size == frame.topic_size",
    ),
    (
        "streak takes fragments",
        "if kind == MESSAGE and self.streak is not NULL",
        "if kind <= FRAGMENT and kind >= MESSAGE and self.streak is not NULL",
    ),
    ("streak gives no ids", "self.streak.next_id += self.streak_count", "pass"),
    ("streak is not booked", "run.count += self.streak_count", "pass"),
    (
        "streak where others listen",
        "if not beyond and frame.kind == MESSAGE:\n                    self.start_streak(topic)",
        "if True:\n                    self.start_streak(topic)",
    ),
    (
        "fragments have ids",
        "if frame.kind == FRAGMENT:\n            if beyond:\n",
        "if frame.kind == FRAGMENT:\n            topic.next_id += 1\n            if beyond:\n",
    ),
    (
        "fragments of collected topics are lost",
        "beyond = topic.collect or (encodings & ~self.own_bit)",
        "beyond = encodings & ~self.own_bit",
    ),
    (
        "batches start at id 0",
        "Collecting(topic, topic.next_id, 0, 0, NULL, NULL)",
        "Collecting(topic, 0, 0, 0, NULL, NULL)",
    ),
    ("batches of the last buffer", "self.collecting[at].topic.collected = -1", "pass"),
    (
        "collected in the wrong column",
        "piece.collected = topic.collected",
        "piece.collected = 0 if topic.collect else -1",
    ),
    (
        "offsets start again",
        "column.offset[1] = column.offset[0] + <int32_t>piece",
        "column.offset[1] = <int32_t>piece",
    ),
    (
        "output for the wrong encoding",
        "if self.subscribers[member].encoding == encoding:\n                routed",
        "if True:\n                routed",
    ),
    (
        "shares for the wrong encoding",
        "if self.subscribers[member].encoding == encoding:\n                        self.touch",
        "if True:\n                        self.touch",
    ),
    (
        "pending bytes stay",
        ".pending = 0\n        self.touched_count",
        ".pending += 0\n        self.touched_count",
    ),
    ("pending messages stay", "            subscriber.pending_messages = 0\n", ""),
    (
        "denied is counted once",
        "            source.denied += 1\n            self.denied += 1",
        "            self.denied += 1",
    ),
    (
        "unheard is counted once",
        "            source.unheard += 1\n            self.unheard += 1",
        "            source.unheard += 1",
    ),
    (
        "frames are counted, not bodies",
        "self.bytes += frame.body_size\n        if",
        "self.bytes += frame.size\n        if",
    ),
    (
        "delivered bytes are messages",
        "self.delivered_bytes += size",
        "self.delivered_bytes += count",
    ),
    ("too large counts as delivered", "if out != before:", "if True:"),
    ("too large for one is uncounted", "self.too_large += self.runs[0].unfit", "pass"),
    ("too large for many is uncounted", "            self.count_unfit(number)\n", ""),
    (
        "too large counts for all encodings",
        "readers.members[index]].encoding == encoding",
        "readers.members[index]].encoding >= 0",
    ),
    (
        "the buffer is kept",
        "            PyBuffer_Release(&view)\n        return routed\n\n    def publish",
        "            pass\n        return routed\n\n    def publish",
    ),
    ("outputs leak", "        Py_XDECREF(self.out)\n", ""),
    (
        "still routing after an error",
        "finally:\n                self.reset_scratch()\n        finally:",
        "except MemoryError:\n                raise\n            self.reset_scratch()\n        finally:",
    ),
    (
        "offsets past the bodies",
        "sizeof(int32_t) - 1] > limit:",
        "sizeof(int32_t) - 1] > limit + 1:",
    ),
    ("offsets may go back", "if offsets[at] < offsets[at - 1]:", "if False:"),
    (
        "control frames are not consumed",
        "if kind == CONTROL:\n            done += frame.size",
        "if kind == CONTROL:\n            pass",
    ),
)

COPYING = mutants(
    "kernel/bytes_inline.h",
    ("tail of 8 to 15 bytes", "memcpy(out + size - 8, in + size - 8, 8);", ""),
    ("tail of 16 to 31 bytes", "memcpy(out + size - 16, in + size - 16, 16);", ""),
    ("tail of 32 to 64 bytes", "memcpy(out + size - 32, in + size - 32, 32);", ""),
    (
        "names differ in the tail",
        "return polybus_load8(a + size - 8) == polybus_load8(b + size - 8);",
        "return 1;",
    ),
    (
        "names differ in the middle",
        "if (polybus_load8(a + at) != polybus_load8(b + at)) return 0;",
        ";",
    ),
    (
        "small copies one byte short",
        "while (size--) *out++ = *in++;",
        "while (size-- > 1) *out++ = *in++;",
    ),
)

INBOX = mutants(
    "kernel/stream_io.pyx",
    ("half a frame is dropped", "self.hold(self.shared.view[consumed:end])", 'self.tail = b""'),
    (
        "what is held is not put in front",
        "self.shared.data[: len(self.tail)] = self.tail",
        "pass",
    ),
    ("offered again from the start", "self.tail = self.tail[consumed:]", "pass"),
    ("one byte short", "end = len(self.tail) + nbytes", "end = len(self.tail) + nbytes - 1"),
    ("a large frame has no room", "bytearray(2 * len(rest))", "bytearray(len(rest))"),
    (
        "room for what was never sent",
        "bytearray(2 * len(rest))",
        "bytearray(len(rest) + (1 << 26))",
    ),
    ("a large frame grows by bytes", "bytearray(2 * len(rest))", "bytearray(len(rest) + 1)"),
    (
        "the rest behind a large frame is lost",
        "memoryview(own)[consumed : self.own_filled]",
        "memoryview(own)[:0]",
    ),
    (
        "large ones are not offered again",
        "        if self.own is not None:\n            self.receive_own()\n        elif",
        "        if self.own is not None:\n            pass\n        elif",
    ),
    ("received without a session", "if self.receive is None:", "if False:"),
)

OUTLET = mutants(
    "kernel/stream_io.pyx",
    ("the queue is jumped", " and not self.queued_bytes()", ""),
    ("closed, and it sends", "not self.has_failed() and ", ""),
    ("the rest is lost", "if sent < size:", "if sent <= 0:"),
    ("sent twice", "memoryview(data)[sent:] if sent > 0 else data", "data"),
)

UNREAD = mutants(
    "dialects/freud/server/unread_queue.pyx",
    ("given back to the end", "self.ranges.insert(place, taken)", "self.ranges.append(taken)"),
    (
        "given back to the front",
        "self.ranges.insert(place, taken)",
        "self.ranges.appendleft(taken)",
    ),
    ("as many as there are", "end = min(first.end, first.start + count)", "end = first.end"),
    ("as large as they are", " > max_bytes:", " > max_bytes * 1000:"),
    (
        "a read message is read again",
        "        first.start = end\n",
        "        first.start = end - 1\n",
    ),
    ("a notice is counted as lost", " if not unread.chunk.notice]", "]"),
    (
        "a notice is charged",
        "        if not messages.chunk.notice:\n            self.held",
        "        if True:\n            self.held",
    ),
    ("times go back", "self.last_ns = max(self.last_ns, now_ns)", "self.last_ns = now_ns"),
    (
        "gathered though ids are not in a row",
        "if not chunk.is_open() or chunk.first_id + <uint64_t>chunk.count() != first_id:",
        "if not chunk.is_open():",
    ),
    (
        "a part has its chunk's ids",
        "Chunk(self.first_id + <uint64_t>start,",
        "Chunk(self.first_id,",
    ),
    ("a small rest keeps the chunk", "if whole > GATHERED and", "if False and"),
    ("any offsets will do", "    if ends[0] != 0 or ends[count] != size:", "    if False:"),
    ("ranges anywhere", "if not 0 <= start <= end <= self.count():", "if False:"),
    ("put beside what it touches", "last.end == messages.start:", "last.end <= messages.start:"),
    ("what is read stays held", "self.count_held(taken, -1)", "pass"),
)

ACCOUNTS = mutants(
    "kernel/quota_account.pyx",
    ("one too many", "return amount <= self.limits", "return amount - 1 <= self.limits"),
    ("one too few", "return amount <= self.limits", "return amount < self.limits"),
    ("releases too much", "if amount > self.used[quota]:", "if False:"),
    ("less than nothing", "    if amount < 0:\n", "    if False:\n"),
)

EPHEMERAL = mutants(
    "dialects/freud/server/fast_session.pyx",
    ("to one of many", "len(current.readers) != 1", "len(current.readers) < 1"),
    ("push readers hear nothing", "entry.subscribers != 0 or ", ""),
    ("any peer may produce", " or not self.may_produce(source, topic, entry):", ":"),
    ("verdicts of old policies", "self.subscribers.generation) == ALLOW", "1) == ALLOW"),
    ("unread messages are endless", "reader.held_messages >= self.max_unread_messages", "False"),
    ("one message too many", "reader.held_messages >= self", "reader.held_messages > self"),
    ("bytes are endless", "return reader.account.has_room(BYTES, size)", "return True"),
    ("bytes are free", "        reader.account.try_charge(BYTES, size)\n", ""),
    ("what was read stays charged", "        reader.account.refund(BYTES, size)\n", ""),
    ("all have one id", "        entry.next_id += 1\n", ""),
    ("no peer is woken", "        if reader.waiters:\n            (<object>reader).wake()\n", ""),
    ("ids of others work", "reader.account.key != account or ", ""),
    ("a use is not noted", " or not reader.is_owned", ""),
    ("a notice is a message", " or first.chunk.notice:", ":"),
    ("every topic is live", " or topic.state != STATE_LIVE", " or topic.current is None"),
    ("received is not counted", "        self.counts.received += 1\n", ""),
    ("read is not counted", "        self.counts.delivered_bytes += <uint64_t>size\n", ""),
)

SHORT = mutants(
    "dialects/freud/server/fast_session.pyx",
    ("past pending work", " or self.halt != HALT_NONE:", ":"),
    ("past what is left to do", " or self.pending:", ":"),
    ("past a stall", "return not self.answers.stalled", "return True"),
    ("for peers that have gone", "if self.phase != PHASE_OPEN or ", "if "),
    ("the first of many", "length != size - HEADER or ", "length > size - HEADER or "),
    ("any size", " or length > self.max_frame_bytes", ""),
    ("no body is escaped", "if record or not first.is_reserved(first.start) else", "if True else"),
    (
        "names of any length",
        "        if name_size > length - NAME_LENGTH:\n",
        "        if False:\n",
    ),
    ("consumed when written", "if self.answers.stalled or self.pipe.has_failed():", "if False:"),
    (
        "lost with the connection",
        "self.answers.stalled or self.pipe.has_failed()",
        "self.answers.stalled",
    ),
    ("a record is a message", "(RECORD_HEADER if record else 0)", "0"),
)

ALL = [
    *FRAMING,
    *ENCODING,
    *TABLES,
    *FANOUT,
    *COPYING,
    *INBOX,
    *OUTLET,
    *UNREAD,
    *ACCOUNTS,
    *EPHEMERAL,
    *SHORT,
]
