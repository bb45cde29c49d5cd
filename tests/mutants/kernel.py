"""Ways to break the kernel, each of which its tests must notice.

A mutant is a small change that a tired programmer could make: a bound off by one,
a forgotten reset, two swapped arguments. `old` must occur exactly once in its file,
so that a mutant whose code was rewritten is rewritten, too.
"""

from __future__ import annotations

from tests.rig.patching import Edit, Patch, patches


def mutants(file: str, *changes: tuple[str, str, str]) -> list[Patch]:
    return patches(file, *changes)


FRAMING = mutants(
    "dialects/rqueue/server/rqueue_framing.h",
    (
        "cap is one short",
        "if (length > ((const pb_rqueue_framing *)self)->max_payload)",
        "if (length >= ((const pb_rqueue_framing *)self)->max_payload)",
    ),
    ("header of four bytes", "if (left < PB_RQUEUE_HEADER)", "if (left < PB_RQUEUE_HEADER - 1)"),
    (
        "payload one byte short",
        "if (left < PB_RQUEUE_HEADER + length)",
        "if (left < PB_RQUEUE_HEADER + length - 1)",
    ),
    ("type 6 is known", "|| kind == 4 || kind == 6)", "|| kind == 4)"),
    ("empty type 2 is a bad REMOVE", "if (kind == PB_RQUEUE_REMOVE && length == 0)", "if (0)"),
    ("deregister may have a payload", "kind == PB_RQUEUE_DEREGISTER && length != 0", "0"),
    (
        "inner length may be less",
        "(ssize_t)pb_load_u32_be(at) != inner)",
        "(ssize_t)pb_load_u32_be(at) > inner)",
    ),
    ("publish without a header", "if (inner < 0 || ", "if ("),
    (
        "any inner type",
        "if (at[4] != PB_RQUEUE_NOTIFICATION && at[4] != PB_RQUEUE_PART)",
        "if (at[4] < PB_RQUEUE_NOTIFICATION)",
    ),
    ("topic as long as the payload", "topic_size > inner - 1)", "topic_size > inner)"),
    ("lone topic past the payload", "|| at[0] > length - 1)", "|| at[0] > length)"),
    ("bytes after a lone topic", "if (at[0] != length - 1)", "if (0)"),
    (
        "short part",
        "if (frame->body_size < PB_RQUEUE_PART_HEADER)",
        "if (frame->body_size < PB_RQUEUE_PART_HEADER - 1)",
    ),
    (
        "index as large as count",
        "pb_load_u16_be(frame->body + 16) >= pb_load_u16_be(frame->body + 18)",
        "pb_load_u16_be(frame->body + 16) > pb_load_u16_be(frame->body + 18)",
    ),
    (
        "part taken for a message",
        "frame->kind = PB_FRAGMENT;\n",
        "frame->kind = PB_MESSAGE;\n",
    ),
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
        "kernel/topic_table.h",
        ("verdicts outlive the policy", "topic->generation != generation || identity", "identity"),
        (
            "old verdicts are not cleared",
            "memset(topic->verdicts, PB_UNKNOWN, topic->verdict_count);",
            "",
        ),
        ("identity classes read too far", "|| identity >= topic->verdict_count)", ")"),
        (
            "gap is not closed",
            "at = (hole + 1) & mask; table->slots[at] != NULL;",
            "at = (hole + 1) & mask; 0;",
        ),
        ("wrong entries are moved", "& mask) >= ((at - hole)", "& mask) > ((at - hole)"),
        (
            "table grows too late",
            "(table->count + 1) * 2 > table->capacity",
            "table->count > table->capacity",
        ),
        (
            "growing forgets hashes",
            "pb_topics_place(slots, wider, table->slots[at])",
            "slots[at] = table->slots[at]",
        ),
        (
            "sweep skips what moved",
            "pb_topics_drop(table, topic); /* may",
            "pb_topics_drop(table, topic), at++; /* may",
        ),
        ("collected topics are idle", " && !topic->collect", ""),
        ("dropped topics leak", "    free(topic);\n", ""),
        ("verdicts leak", "    free(topic->verdicts);\n", ""),
        ("held topics are idle", " && !topic->hold", ""),
        ("used entries stay idle ones", "table->idle -= was_idle;", ""),
        ("idle entries are booked twice", "table->idle += !was_idle;", ""),
        (
            "streak takes any topic of its size",
            "topic->name_size == size && polybus_same(topic->name, name, size)",
            "topic->name_size == size",
        ),
    ),
    *mutants(
        "kernel/subscriber_set.h",
        ("shared sets are counted once", "    found->references++;\n", ""),
        (
            "released sets stay known",
            "    pb_sets_leave(table, number);\n    pb_sets_give_back",
            "    pb_sets_give_back",
        ),
        (
            "members in order of arrival",
            "if (set->members[middle] < member)",
            "if (1)",
        ),
        (
            "kinds of a grown set",
            "set->kinds |= (uint64_t)1 << kind;",
            "set->kinds = (uint64_t)1 << kind;",
        ),
        (
            "kinds of a shrunk set",
            "if (set->counts != NULL && --set->counts[kind] == 0)",
            "if (set->counts != NULL)",
        ),
        ("kinds stay when the last leaves", "--set->counts[kind] == 0)", "0)"),
        (
            "members before the second kind are not counted",
            "set->counts[__builtin_ctzll(set->kinds)] = set->size;",
            "",
        ),
        (
            "wrong member leaves",
            "set->members + at, set->members + at + 1, (set",
            "set->members + at, set->members + at, (set",
        ),
        ("sets of other topics change", ".references == 1;", ".references >= 1;"),
        ("a step outlives its set", "|| found->version != old->step.to_version)", ")"),
        ("a step fits any member", "|| old->step.member != member\n", "\n"),
        ("a changed set keeps its step", "    set->step.to_version = 0;\n", ""),
        ("members of a freed set leak", "    free(set->members);\n", ""),
        ("a changed set keeps its hash", "    set->hash = hash;\n", ""),
    ),
    Patch(
        "members of one sum are equal",
        "kernel/subscriber_set.h",
        "? pb_set_extends(found, old, member, at)",
        "? 1",
        # With the seeded hash no test can find two sets of one sum.
        (Edit("kernel/subscriber_set.h", "return hash ^ (hash >> 31);", "return member;"),),
    ),
    *mutants(
        "kernel/subscriber_table.pyx",
        ("the table may change meanwhile", "        if self.routing:\n", "        if False:\n"),
        ("the dead may subscribe", "if not subscriber.alive:", "if False:"),
        ("two encodings with one number", "known is not None and known is not encoding", "False"),
        ("names of 256 bytes", "0 < len(topic) <= 255", "0 < len(topic) <= 256"),
    ),
    *mutants(
        "kernel/router.h",
        ("full twice counts twice", "if (was_full != (full != 0))", "if (1)"),
        (
            "numbers are given away twice",
            "router->free = pb_router_subscriber(router, number)->next_free;",
            "",
        ),
        ("subscribing keeps the old set", "topic->subscribers = set;", ";"),
        (
            "linking does not book idle entries",
            "    pb_topics_update_idle(&router->topics, topic, was_idle);\n",
            "",
        ),
        (
            "a topic outlives its last reader",
            "    pb_topics_update_idle(&router->topics, topic, 0);\n",
            "",
        ),
    ),
]

SCAN = mutants(
    "kernel/router.h",
    ("trusted sources are judged", "if (!source->trusted)\n", "if (1)\n"),
    (
        "blocked messages are counted",
        "if (stop != PB_STOP_END) return stop;",
        "pb_counter_add(&source->messages, stop != PB_STOP_END);\n"
        "        if (stop != PB_STOP_END) return stop;",
    ),
    ("skipped readers block", "\n            && reader->encoding != worker->skip) {", ") {"),
    (
        "one run for all sets",
        "\n            || worker->runs[worker->run_count - 1].subscribers != topic->subscribers)",
        ")",
    ),
    ("one idle topic fewer", "PB_MAX_IDLE_TOPICS = 4096", "PB_MAX_IDLE_TOPICS = 4095"),
    (
        "streak takes fragments",
        "frame)) == PB_MESSAGE\n",
        "frame)) >= PB_MESSAGE && kind <= PB_FRAGMENT\n",
    ),
    (
        "streak gives no ids",
        "pb_topic_advance(topic, count, router->worker_count > 1);",
        "",
    ),
    ("streak is not booked", "        run->count += count;\n", ""),
    ("streak where others listen", "worker->is_streak = !beyond;", "worker->is_streak = 1;"),
    (
        "fragments have ids",
        "    if (frame->kind == PB_FRAGMENT)\n        return beyond",
        "    if (frame->kind == PB_FRAGMENT)\n        pb_topic_advance(topic, 1, 1);\n"
        "    if (frame->kind == PB_FRAGMENT)\n        return beyond",
    ),
    (
        "fragments of collected topics are lost",
        "beyond = topic->collect || others;",
        "beyond = others != 0;",
    ),
    (
        "batches start at id 0",
        "(pb_column){topic, pb_topic_next_id(topic), 0, 0, NULL, NULL}",
        "(pb_column){topic, 0, 0, 0, NULL, NULL}",
    ),
    ("batches of the last buffer", "worker->columns[at].topic->collected = -1;", ";"),
    (
        "collected in the wrong column",
        "worker->run_count - 1, topic->collected, relayed}",
        "worker->run_count - 1, topic->collect ? 0 : -1, relayed}",
    ),
    (
        "output for the wrong encoding",
        "if (reader->encoding != encoding) continue;\n        *output++",
        "*output++",
    ),
    (
        "shares for the wrong encoding",
        "if (reader->encoding != encoding) continue;\n        if (worker->output_of",
        "if (worker->output_of",
    ),
    (
        "shares of the last encoding stay",
        "        worker->output_of[worker->outputs[at].subscriber] = 0;\n}",
        "        ;\n}",
    ),
    (
        "denied is counted once",
        "        pb_counter_add(&source->denied, 1);\n",
        "",
    ),
    (
        "unheard is counted once",
        "        pb_counter_add(&worker->unheard, 1);\n",
        "",
    ),
    (
        "frames are counted, not bodies",
        "pb_counter_add(&worker->bytes, (uint64_t)frame->body_size);",
        "pb_counter_add(&worker->bytes, (uint64_t)frame->size);",
    ),
    (
        "delivered bytes are messages",
        "pb_counter_add(&worker->delivered_bytes, readers * bytes);",
        "pb_counter_add(&worker->delivered_bytes, readers * messages);",
    ),
    (
        "control frames are not consumed",
        "worker->plain_only ? 0 : (size_t)frame.size;",
        "0;",
    ),
    (
        "control frames are consumed before the session sees them",
        "worker->plain_only ? 0 : (size_t)frame.size;",
        "(size_t)frame.size;",
    ),
)

FANOUT = mutants(
    "kernel/fanout.pyx",
    ("window past the buffer", "0 <= start <= end <= view.len", "0 <= start <= end"),
    ("window before the buffer", "0 <= start <= end <= view.len", "start <= end <= view.len"),
    (
        "idle topics are not swept",
        "if self.router.topics.idle >= PB_MAX_IDLE_TOPICS:",
        "if False:",
    ),
    (
        "skipped readers get it again",
        "encodings &= ~(<uint32_t>1 << self.worker.skip)",
        "pass",
    ),
    ("own readers get it twice", "        encodings &= ~self.worker.own_bit\n", ""),
    (
        "offsets start again",
        "column.offset[1] = column.offset[0] + <int32_t>piece",
        "column.offset[1] = <int32_t>piece",
    ),
    ("too large counts as delivered", "if out != before:", "if True:"),
    (
        "too large for one is uncounted",
        "pb_counter_add(&self.worker.too_large, run.unfit)\n                finally",
        "pass\n                finally",
    ),
    ("too large for many is uncounted", "            self.count_unfit(number)\n", ""),
    (
        "too large counts for all encodings",
        "readers.members[index]).encoding == encoding",
        "readers.members[index]).encoding >= 0",
    ),
    (
        "the buffer is kept",
        "            PyBuffer_Release(&view)\n        self.report_events()\n"
        "        return routed\n\n    def publish",
        "            pass\n        self.report_events()\n        return routed\n\n    def publish",
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
        "the verdict of another class is remembered",
        "topic, pb_source_identity(&source.publisher), self.router.generation, verdict",
        "topic, 0, self.router.generation, verdict",
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
    "kernel/receive_buffer.pyx",
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
    (
        "the pump's read has nothing in front",
        "        memcpy(data, PyBytes_AS_STRING(self.tail), used)\n",
        "",
    ),
    (
        "the pump reads over what is held",
        "size[0] = self.shared.size - used\n        return data + used",
        "size[0] = self.shared.size - used\n        return data",
    ),
    (
        "the pump reads over a large frame",
        "GET_SIZE(self.own) - used\n            return data + used",
        "GET_SIZE(self.own) - used\n            return data",
    ),
)

OUTBOX = [
    *mutants(
        "kernel/outbox.h",
        # Turns: the first push is written at once, later ones at the end.
        (
            "gathered output is forgotten",
            "        pb_outbox_flush(box, turn);\n        pb_outbox_release(box);\n",
            "        pb_outbox_release(box);\n",
        ),
        ("the next turn is the same", "    turn->id += turn->step;\n", ""),
        ("gathered once and never again", "        box->gathering = false;\n", ""),
        ("gathers without bound", "(is_first || box->held >= PB_WORTH_A_WRITE)", "(is_first)"),
        ("never gathers", "!box->stalled && box->written_in != turn->id;", "!box->stalled;"),
        (
            "a write at once is not the turn's first",
            "            box->written_in = turn->id;\n            sent =",
            "            sent =",
        ),
        (
            "a flush is not the turn's first write",
            "    box->written_in = turn->id;\n    if (box->by_pipe)",
            "    if (box->by_pipe)",
        ),
        ("without a turn in the list", "        box->gathering = pb_list_add(", "        (void)("),
        # Order and partial writes.
        (
            "order swapped",
            "pb_outbox_entry(box, count);",
            "pb_outbox_entry(box, box->count - 1 - count);",
        ),
        (
            "a grown ring is not unrolled",
            "entries[at] = box->entries[(box->first + at) % box->capacity];",
            "entries[at] = box->entries[at];",
        ),
        ("a ring does not turn", "(box->first + box->count++) % box->capacity]", "box->count++]"),
        ("the rest of a push is lost", "is_done = sent == size;", "is_done = sent > 0;"),
        ("the rest of a write is lost", "        if (sent < size)\n", "        if (sent == 0)\n"),
        (
            "the accepted part is sent twice",
            "        box->first_sent = sent;\n        box->held",
            "        box->held",
        ),
        ("the accepted part stays held", "        box->held -= sent;\n", ""),
        (
            "a part is sent again",
            "size_t skip = count == 0 ? box->first_sent : 0;",
            "size_t skip = 0;",
        ),
        ("parts are not added up", "    size += box->first_sent;\n", ""),
        (
            "the queue is jumped",
            "        if (box->count == 0 && !box->failed)\n",
            "        if (!box->failed)\n",
        ),
        # A full socket, and a broken one.
        (
            "a full socket is broken",
            "return error == EAGAIN || error == EWOULDBLOCK;",
            "return false;",
        ),
        ("room is not waited for", "stalled ? others | EPOLLOUT : others", "others"),
        (
            "reading ends with a stall",
            "box->interest & ~(uint32_t)EPOLLOUT;",
            "0;",
        ),
        (
            "stalls are not heeded",
            "        return;\n    box->stalled = stalled;\n",
            "        return;\n    box->stalled = false;\n",
        ),
        ("stalls are not reported", "    if (box->reports_stalls)\n", "    if (0)\n"),
        (
            "a broken socket is not reported",
            "    pb_outbox_report(box, turn, PB_BROKEN);\n",
            "",
        ),
        (
            "a part leaves the socket writable",
            "        if (sent < (ssize_t)size) {\n            pb_outbox_set_stalled(",
            "        if (sent < (ssize_t)size) {\n            (void)(",
        ),
        # Marks.
        ("never full", "else if (owed > box->high_water)", "else if (0)"),
        (
            "full at its mark",
            "else if (owed > box->high_water)",
            "else if (owed >= box->high_water)",
        ),
        (
            "full again and again",
            "    if (atomic_load_explicit(&box->full, memory_order_relaxed) == full)\n"
            "        return;\n",
            "",
        ),
        ("room too early", "+ box->handed <= box->low_water", "+ box->handed <= box->high_water"),
        ("never room", "!box->closed && box->held + box->handed <= box->low_water", "0"),
        (
            "room is not looked for",
            "        pb_outbox_check_room(box, turn);\n",
            "",
        ),
        (
            "what the pipe holds fills no mark",
            "size_t owed = box->held + box->handed;",
            "size_t owed = box->held;",
        ),
        (
            "fullness is not told",
            "atomic_store_explicit(box->reader_full, full,",
            "atomic_store_explicit(box->reader_full, false,",
        ),
        (
            "room is not told",
            "atomic_store_explicit(box->reader_full, full,",
            "atomic_store_explicit(box->reader_full, true,",
        ),
        ("full readers are not counted", "full ? 1 : UINT32_MAX", "0"),
        (
            "marks are not looked at",
            "    if (box->stalled)\n        pb_outbox_check_marks(box, turn);\n}",
            "}",
        ),
        # The bound, and the end.
        ("no upper bound", "if (owed > box->max_bytes)", "if (0)"),
        (
            "beyond the bound it takes more",
            "    box->closed = true;\n    pb_outbox_report(box, turn, PB_OVERFLOW);",
            "    pb_outbox_report(box, turn, PB_OVERFLOW);",
        ),
        (
            "overflow is not reported",
            "    box->closed = true;\n    pb_outbox_report(box, turn, PB_OVERFLOW);",
            "    box->closed = true;",
        ),
        (
            "closed, and takes more",
            "is_done = box->closed || box->failed;",
            "is_done = box->failed;",
        ),
        ("closed, and still full", "    pb_outbox_set_full(box, NULL, false);\n", ""),
        (
            "closed, and holds what is given up",
            "    if (!keep_held)\n        pb_outbox_drop_all(box);\n",
            "",
        ),
        ("closing gives up what is held", "    if (!keep_held)\n", ""),
    ),
    *mutants(
        "kernel/outbox.pyx",
        ("a turn never ends", "            self.call_soon(self.end)\n", "            pass\n"),
        ("order swapped for a pipe", "chunks.append(PyBytes_", "chunks.insert(0, PyBytes_"),
        (
            "stalls of a pipe are not heeded",
            "            self.box.stalled = True\n",
            "            pass\n",
        ),
        (
            "held chunks are dropped",
            "        self.turn.touch()\n        self.write_pipe()\n",
            "        self.turn.touch()\n        self.take_held()\n",
        ),
        (
            "what the pipe has taken stays handed",
            "        self.box.handed = 0\n        pthread_mutex_unlock(&self.box.lock)\n",
            "        pthread_mutex_unlock(&self.box.lock)\n",
        ),
        ("the host's queue counts as taken", " - self.pipe.unconfirmed_bytes()", ""),
        (
            "the backlog counts as taken",
            "            sent -= self.pipe.backlog_bytes()\n",
            "            pass\n",
        ),
        (
            "what is held counts as taken",
            "self.box.pushed - <long long>self.box.held",
            "self.box.pushed",
        ),
        (
            "what is written without a copy is not counted",
            "            box.pushed += ",
            "            0 + ",
        ),
        ("closed, and writes", "is_free = not box.closed and", "is_free ="),
        ("stalled, and writes", "not box.closed and not box.stalled and", "not box.closed and"),
        (
            "closing loses what is held",
            "                self.pipe.write_many(chunks)\n        pb_outbox_close",
            "                pass\n        pb_outbox_close",
        ),
        ("closing forgets what it owes", "self.handed = self.handed + chunks", "pass"),
        (
            "given up, and still owed",
            "            self.handed = []\n        elif self.box.by_pipe:\n",
            "        elif self.box.by_pipe:\n",
        ),
        (
            "what was half sent is not owed",
            "for chunk in reversed(self.handed):",
            "for chunk in ():",
        ),
        (
            "what is held is not owed",
            "            held = self.copy_held()\n",
            "            held = []\n",
        ),
        ("overflow is let be", "            self.owner.on_overflow(self)\n", "            pass\n"),
        ("closed, and reports", "events & PB_FILLED and not self.box.closed", "events & PB_FILLED"),
        ("events stay", "    box.events = 0\n", ""),
    ),
]

PUMP = mutants(
    "kernel/pump.pyx",
    (
        "the end of input is not seen",
        "        if count == 0:\n            self.on_eof()\n",
        "        if count == 0:\n            pass\n",
    ),
    (
        "the end of input is the end",
        "if not self.connection.eof_received():",
        "if not self.connection.eof_received() or True:",
    ),
    (
        "the end of input comes again",
        "        self.pause_reading()\n        if not self.connection",
        "        if not self.connection",
    ),
    (
        "a reset is not seen",
        "        elif errno != EAGAIN and errno != EINTR:\n",
        "        elif False:\n",
    ),
    ("closing does not wait for output", "is_sent = not self.box.held", "is_sent = True"),
    ("closing does not end", "        if is_sent:\n", "        if False:\n"),
    (
        "closing does not end when all is sent",
        "            if self.is_closing_:\n                self.end(None)\n",
        "            if self.is_closing_:\n                pass\n",
    ),
    (
        "closing, and writes",
        "        if self.is_closing_:\n            return\n        if not pb_outbox_write(",
        "        if not pb_outbox_write(",
    ),
    (
        "abort waits for output",
        '"""End the connection at once."""\n        self.end(None)',
        '"""End the connection at once."""\n        self.close()',
    ),
    (
        "an error does not end the connection",
        "must not end the others.\n        transport.fail(error)\n",
        "must not end the others.\n        pass\n",
    ),
    (
        "an error is not reported",
        '        self.pump.loop.call_exception_handler(\n            {"message": "a connection',
        '        dict(\n            {"message": "a connection',
    ),
    (
        "the reason of the end is lost",
        "        self.pump.loop.call_soon(self._lose, error)\n",
        "        self.pump.loop.call_soon(self._lose, None)\n",
    ),
    (
        "a broken socket is not ended",
        "            self.end(BrokenPipeError())\n",
        "            pass\n",
    ),
    (
        "reading does not resume",
        "        failed = self.change_interest(EPOLLIN, 0)\n        if failed:\n            self.end(",
        "        failed = 0\n        if failed:\n            self.end(",
    ),
    (
        "a turn of the pump has no end",
        "finally:\n            self.turn.end()\n        return 0\n",
        "finally:\n            pass\n        return 0\n",
    ),
    (
        "more turns behind a session",
        " or self.shared.session_calls != session_calls:\n",
        ":\n",
    ),
    (
        "no socket is expected",
        "self.latest if self.received_bytes and not self.changes else None",
        "None",
    ),
    (
        "one of several busy sockets is expected",
        "self.latest if self.received_bytes and not self.changes else None",
        "self.latest",
    ),
    ("room is not noticed", "        if events & EPOLLOUT:\n", "        if False:\n"),
    (
        "the outbox hears no events",
        "            self.outbox.on_events(events)\n",
        "            pass\n",
    ),
    # Connections of a thread.
    (
        "bytes of a thread are lost",
        "        self.received.put_held(PyBytes_FromStringAndSize(",
        "        (PyBytes_FromStringAndSize(",
    ),
    ("bytes of a thread come twice", "        pb_stream_hold(self.stream, NULL, 0)\n", ""),
    (
        "the session does not see them",
        "            self.received.redeliver_held()\n",
        "            pass\n",
    ),
    ("the loop keeps the connection", "        return self.give_back()\n", "        return 0\n"),
    (
        "paused, and given back",
        "if self.on_thread or not self.is_reading or",
        "if self.on_thread or",
    ),
    (
        "resumed, and kept",
        "            self.give_back()\n            return\n",
        "            return\n",
    ),
    (
        "what the session left is lost",
        "held = self.received.take_held()",
        'self.received.take_held()\n        held = b""',
    ),
    (
        "the end of a thread's input is not seen",
        "        if events & PB_HUNG_UP and not self.is_closing_:\n",
        "        if False:\n",
    ),
)

DELAYED_ACK = mutants(
    "kernel/delayed_ack.h",
    (
        "every read is acknowledged",
        "        setsockopt(descriptor, IPPROTO_TCP, TCP_QUICKACK, &off, sizeof(off));\n",
        "        (void)off;\n",
    ),
    ("as often again", "            ack->interval *= PB_ACK_GROWTH;\n", "            ;\n"),
)

PUMP_THREAD = mutants(
    "kernel/pump_thread.h",
    (
        "control frames do not park",
        "    else if (routed.stop != PB_STOP_END)\n",
        "    else if (0)\n",
    ),
    ("the rest is not held", "data + routed.consumed, size - routed.consumed)", "data, 0)"),
    ("what was routed is held", "data + routed.consumed, size - routed.consumed)", "data, size)"),
    (
        "what is held is not in front",
        "        memcpy(start, stream->held, stream->held_size);\n",
        "        ;\n",
    ),
    (
        "received over what is held",
        "recv(stream->out.descriptor, start + held,",
        "recv(stream->out.descriptor, start,",
    ),
    (
        "a resumed stream forgets what it holds",
        "    if (stream->held_size > 0)\n        pb_stream_route(",
        "    if (0)\n        pb_stream_route(",
    ),
    ("a resumed stream is not read", "stream->out.interest | EPOLLIN);", "stream->out.interest);"),
    ("a resumed stream stays parked", "    stream->is_parked = false;\n", ""),
    (
        "large frames have no memory of their own",
        "if (stream->held_size > PB_THREAD_BUFFER / 2) {",
        "if (0) {",
    ),
    (
        "a large frame has no room",
        "stream->held_capacity = 2 * size;",
        "stream->held_capacity = size;",
    ),
    (
        "the end of input is not reported",
        "    } else if (count == 0) {\n        pb_stream_park(stream, &thread->turn, PB_HUNG_UP);\n",
        "    } else if (count == 0) {\n",
    ),
    (
        "a stream is not released",
        "    pb_outbox_report(&stream->out, &thread->turn, PB_RELEASED);\n",
        "",
    ),
    ("requests wake no thread", "    if (is_done && was_empty)\n", "    if (0)\n"),
    ("reports do not wake the loop", "    if (was_empty)\n        pb_wake(mailbox->event);\n", ""),
    ("a request is made once", "        stream->requests = 0;\n", ""),
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
    (
        "what was read stays charged",
        "            self.account.refund(BYTES, taken.body_bytes())\n",
        "            pass\n",
    ),
    (
        "bytes are free",
        "        return self.account.try_charge(BYTES, size)\n",
        "        return True\n",
    ),
    (
        "no peer is woken",
        "        if reader.waiters:\n            (<object>reader).wake()\n",
        "",
    ),
)

ACCOUNTS = mutants(
    "kernel/quota_account.pyx",
    ("one too many", "return amount <= self.limits", "return amount - 1 <= self.limits"),
    ("one too few", "return amount <= self.limits", "return amount < self.limits"),
    ("releases too much", "if amount > self.used[quota]:", "if False:"),
    ("less than nothing", "    if amount < 0:\n", "    if False:\n"),
)

PLAIN_DELIVERY = mutants(
    "dialects/freud/server/plain_delivery.pyx",
    ("no reader, and Ok", "if not readers or entry is NULL", "if entry is NULL"),
    ("push readers hear nothing", " or entry.subscribers != 0:", ":"),
    ("any peer may produce", "if not self.may_produce(source, topic, entry):", "if False:"),
    (
        "verdicts of old policies",
        "self.subscribers.router.generation) == PB_ALLOW",
        "1) == PB_ALLOW",
    ),
    (
        "unread messages are endless",
        "if reader.held_messages + count > self.max_unread_messages:",
        "if False:",
    ),
    (
        "one message too many",
        "if reader.held_messages + count > self",
        "if reader.held_messages + count - 1 > self",
    ),
    ("bytes are endless", "elif not reader.try_charge(size):", "elif False:"),
    (
        "those charged before stay charged",
        "                release_all(readers, at, size)\n",
        "                pass\n",
    ),
    (
        "a blocked produce stays charged",
        "        release_all(readers, len(readers), size)\n",
        "        pass\n",
    ),
    ("a batch takes one id", "first_id + <uint64_t>run.count)", "first_id + 1)"),
    (
        "all have one id",
        "        pb_topic_set_next_id(entry, first_id + <uint64_t>run.count)\n",
        "",
    ),
    ("ids of others work", " or reader.account.key != account:", ":"),
    ("every topic is live", " or topic.state != STATE_LIVE:", " or topic.current is None:"),
    ("received is not counted", "        self.received += messages\n", ""),
)

PLAIN_SESSION = mutants(
    "dialects/freud/server/plain_session.pyx",
    (
        "goes on while it is halted",
        "self.answers.stalled or self.halt != HALT_NONE",
        "self.answers.stalled",
    ),
    ("goes on while it is stalled", "self.answers.stalled or self.halt", "self.halt"),
    ("goes on while it rests", "                self.halt = HALT_RESTING\n", ""),
    ("it never rests", "            if self.weight_left <= 0:\n", "            if False:\n"),
    ("who rests once rests forever", "                (<object>self).rest()\n", ""),
    ("many Gets never rest", "self.weight_left > 0 and not", "not"),
    ("small requests weigh nothing", "        self.weight_left -= request_weight\n", ""),
    (
        "fan-outs weigh nothing",
        "        self.weight_left -= plain_weight + reader_weight * readers\n",
        "",
    ),
    ("large Gets weigh nothing", "return plain_weight + size // bytes_per_weight", "return 1"),
    ("past commits that wait", "        if not self.uncommitted:\n", "        if True:\n"),
    ("gone, and it still gets", "if self.phase < PHASE_ENDING:", "if True:"),
    ("a use is not noted", "reader is not None and reader.is_owned and", "reader is not None and"),
    (
        "behind a wait it is read without end",
        "            (<object>self).stop_reading()\n",
        "            pass\n",
    ),
    (
        "after a notice it goes on",
        "            self.answers.flush()  # sending the notice ends the subscription, so send it now\n",
        "            pass\n",
    ),
    (
        "answers are gathered without bound",
        "            if self.answers.size >= STEP:\n"
        "                self.answers.flush()\n"
        "        return",
        "        return",
    ),
    (
        "received is not reported",
        "        self.count(run)\n        self.answers",
        "        self.answers",
    ),
)

ANSWER_QUEUE = mutants(
    "dialects/freud/server/answer_queue.pyx",
    ("records have no flags", "<int>NOTICE_FLAG if chunk.notice else 0", "0"),
    ("a notice is escaped", "elif not chunk.notice and taken", "elif taken"),
    (
        "no body is escaped",
        "elif not chunk.notice and taken.is_reserved(taken.start):",
        "elif False:",
    ),
    ("an escape has no size", "            header_bytes += len(payload) - len(body)\n", ""),
    (
        "sent is not consumed",
        "        else:\n            self.confirm_all()\n",
        "        else:\n            pass\n",
    ),
    (
        "consumed when written",
        "            self.confirm_until(size - self.pipe.backlog_bytes())",
        "            self.confirm_all()",
    ),
    (
        "half sent is consumed",
        "self.confirm_until(size - self.pipe.backlog_bytes())",
        "self.confirm_until(size)",
    ),
    (
        "nothing of it is consumed",
        "self.confirm_until(size - self.pipe.backlog_bytes())",
        "pass",
    ),
    (
        "drained is not consumed",
        "        self.stalled = False\n        self.confirm_all()\n",
        "        self.stalled = False\n",
    ),
    (
        "lost with the connection",
        "        if self.pipe.has_failed():\n            self.return_unsent()\n        elif",
        "        if",
    ),
    (
        "what was not sent is lost",
        "        self.parts = []\n        self.return_unsent()\n",
        "        self.parts = []\n",
    ),
    ("records are as short as messages", "            header_bytes += RECORD_HEADER\n", ""),
    (
        "the rest starts again",
        "rest = new_range(taken.chunk, place, taken.end)",
        "rest = new_range(taken.chunk, taken.start, taken.end)",
    ),
    (
        "answers before it do not count",
        "            end = written.start\n",
        "            end = 0\n",
    ),
    (
        "a read notice ends nothing",
        '            self.readers.end(reader, "deleted")\n',
        "            pass\n",
    ),
    ("read is not counted", "        self.counts.delivered_bytes += size\n", ""),
    ("sent is not reported", "        self.sent_messages += count\n", ""),
)

RUNS = mutants(
    "dialects/freud/server/request_scanner.pyx",
    (
        "parts lose their first",
        "self.bodies[ends[start] : ends[end]]",
        "self.bodies[ends[start + 1] : ends[end]]",
    ),
    (
        "offsets of the whole",
        "out[at] = ends[start + at] - ends[start]",
        "out[at] = ends[start + at]",
    ),
)

ALL = [
    *FRAMING,
    *ENCODING,
    *TABLES,
    *SCAN,
    *FANOUT,
    *COPYING,
    *INBOX,
    *OUTBOX,
    *PUMP,
    *DELAYED_ACK,
    *PUMP_THREAD,
    *UNREAD,
    *ACCOUNTS,
    *PLAIN_DELIVERY,
    *PLAIN_SESSION,
    *ANSWER_QUEUE,
    *RUNS,
]
