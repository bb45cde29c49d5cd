"""rqueue's wire for its clients: many messages in, many messages out, one call each.

`scan` walks the frames of a received buffer once and returns a NotificationBatch: one copy of
the bytes, and for each message its offsets in them. A Python object per message is made only
on access. A scan stops at the first bad frame and returns the reason; the messages before it
are in the batch.

`encode_run` writes the PUBLISH frames of many messages into one buffer.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

from polybus.kernel.byte_order cimport load_u16_be
from polybus.kernel.client_batch cimport (
    DIALECT_REASON, NO_MARK, NO_REASON, FrameBatch, FrameFormat, LengthField, RequestPrefix, Scan,
    encode_all, encode_run as encode_contents, grow, next_frame, start_scan,
)

cdef enum:
    HEADER = 5  # payload length 4, type 1
    PUBLISH_HEADER = 11  # PUBLISH's header, NOTIFICATION's header, the topic's length
    MESSAGE_ID = 16
    PART_HEADER = 20  # message id 16, index 2, count 2
    MAX_TOPIC = 255

cdef enum Type:
    PUBLISH = 0
    NOTIFICATION = 7
    PART = 8

cdef Py_ssize_t MAX_U32 = 0xFFFFFFFF

# The approximate size of a batch's objects besides their tables.
cdef Py_ssize_t BATCH_OVERHEAD_BYTES = 256

# Names shared with dialects/rqueue/server/rqueue_framing.pyx where both sides detect the fault.
PAYLOAD_TOO_LARGE = "payload_too_large"
TOPIC_LENGTH = "topic_length"
PART_LENGTH = "part_length"
PART_INDEX = "part_index"

cdef enum:
    BAD_TOPIC = DIALECT_REASON
    BAD_PART
    BAD_INDEX

# In the order of client_batch.StopReason, then of the enum above. rqueue has no mark.
cdef tuple REASONS = (None, PAYLOAD_TOO_LARGE, None, TOPIC_LENGTH, PART_LENGTH, PART_INDEX)

cdef struct Entry:
    uint32_t topic  # offset in the region
    uint32_t body  # offset in the region; of an assembled message: its place in `wholes`
    uint32_t size
    uint8_t topic_size
    uint8_t is_whole  # assembled from PARTs: the content is an object of its own

cdef struct PartEntry:
    Entry entry  # body and size are those of the chunk
    uint32_t before  # number of messages in the batch before this part


@cython.final
@cython.freelist(256)
cdef class Message:
    """One notification: an immutable value, equal by its fields and hashable."""

    cdef readonly bytes topic
    cdef readonly bytes content

    __match_args__ = ("topic", "content")

    def __init__(self, bytes topic not None, bytes content not None):
        self.topic = topic
        self.content = content

    def __eq__(self, other):
        cdef Message that
        if not isinstance(other, Message):
            return NotImplemented
        that = other
        return self.topic == that.topic and self.content == that.content

    def __hash__(self):
        return hash((self.topic, self.content))

    def __repr__(self):
        return f"Message(topic={self.topic!r}, content={self.content!r})"


@cython.final
cdef class Part:
    """One piece of a larger message, as received."""

    cdef readonly bytes topic
    cdef readonly bytes message_id
    cdef readonly int index
    cdef readonly int count
    cdef readonly bytes chunk

    def __init__(
        self,
        bytes topic not None,
        bytes message_id not None,
        int index,
        int count,
        bytes chunk not None,
    ):
        self.topic = topic
        self.message_id = message_id
        self.index = index
        self.count = count
        self.chunk = chunk

    def __repr__(self):
        return f"Part(topic={self.topic!r}, {self.index} of {self.count}, {len(self.chunk)} bytes)"


@cython.final
cdef class NotificationBatch(FrameBatch):
    """The messages of one received buffer, in order.

    `len`, indexing, slicing and iteration return messages. PARTs are kept apart until
    `with_wholes` puts the messages that were assembled from them in their place. A batch is
    immutable: methods that change something return another batch over the same bytes.
    """

    cdef list wholes
    cdef Entry* entries
    cdef Py_ssize_t capacity
    cdef PartEntry* part_entries
    cdef Py_ssize_t part_capacity
    cdef readonly Py_ssize_t part_count
    cdef readonly Py_ssize_t total_bytes
    cdef bytes last_topic

    def __cinit__(self):
        self.wholes = []

    def __dealloc__(self):
        PyMem_Free(self.entries)
        PyMem_Free(self.part_entries)

    # --- filling: only in this module, before the batch is returned

    cdef int add_frame(self, const unsigned char* start, Py_ssize_t at, Py_ssize_t size) except -1:
        """Add the frame with the payload start[at:at + size]. Returns 0 or why it is bad."""
        cdef int kind = start[at - 1]
        cdef Py_ssize_t topic_size, body
        cdef Entry* entry
        # Frames of other types are skipped by their length.
        if kind != NOTIFICATION and kind != PART:
            return NO_REASON
        topic_size = start[at] if size else 0
        if size < 2 or topic_size == 0 or topic_size > size - 1:
            return BAD_TOPIC
        body = at + 1 + topic_size
        if kind == PART:
            if at + size - body < PART_HEADER:
                return BAD_PART
            if load_u16_be(start + body + MESSAGE_ID) >= load_u16_be(start + body + MESSAGE_ID + 2):
                return BAD_INDEX
            body += PART_HEADER
            entry = self.new_part()
        else:
            entry = self.new_entry()
            self.total_bytes += at + size - body
        # Field by field: copying a struct that was just filled stalls the processor.
        entry.topic = <uint32_t>(at + 1)
        entry.topic_size = <uint8_t>topic_size
        entry.body = <uint32_t>body
        entry.size = <uint32_t>(at + size - body)
        entry.is_whole = False
        return NO_REASON

    cdef inline Entry* new_entry(self) except NULL:
        if self.count == self.capacity:
            self.entries = <Entry*>grow(self.entries, &self.capacity, sizeof(Entry))
        self.count += 1
        return &self.entries[self.count - 1]

    cdef Entry* new_part(self) except NULL:
        cdef PartEntry* part
        if self.part_count == self.part_capacity:
            self.part_entries = <PartEntry*>grow(
                self.part_entries, &self.part_capacity, sizeof(PartEntry)
            )
        part = &self.part_entries[self.part_count]
        part.before = <uint32_t>self.count
        self.part_count += 1
        return &part.entry

    cdef int add(self, const Entry* entry) except -1:
        self.new_entry()[0] = entry[0]
        self.total_bytes += entry.size
        return 0

    cdef NotificationBatch sibling(self):
        """Return an empty batch over the same bytes."""
        cdef NotificationBatch other = NotificationBatch.__new__(NotificationBatch)
        other.region = self.region
        other.wholes = self.wholes
        return other

    # --- objects, made on access

    cdef bytes topic_of(self, const Entry* entry):
        # Consecutive messages usually have the same topic and then share its object.
        cdef const char* at = PyBytes_AS_STRING(self.region) + entry.topic
        cdef bytes last = self.last_topic
        if (
            last is None
            or PyBytes_GET_SIZE(last) != entry.topic_size
            or memcmp(PyBytes_AS_STRING(last), at, entry.topic_size) != 0
        ):
            last = PyBytes_FromStringAndSize(at, entry.topic_size)
            self.last_topic = last
        return last

    cdef bytes content_of(self, const Entry* entry):
        if entry.is_whole:
            return <bytes>self.wholes[entry.body]
        return PyBytes_FromStringAndSize(PyBytes_AS_STRING(self.region) + entry.body, entry.size)

    cdef Message message(self, Py_ssize_t position):
        cdef Message message = Message.__new__(Message)
        message.topic = self.topic_of(&self.entries[position])
        message.content = self.content_of(&self.entries[position])
        return message

    cdef Part part(self, Py_ssize_t number):
        cdef const Entry* entry = &self.part_entries[number].entry
        cdef const char* head = PyBytes_AS_STRING(self.region) + entry.body - PART_HEADER
        cdef Part part = Part.__new__(Part)
        part.topic = self.topic_of(entry)
        part.message_id = PyBytes_FromStringAndSize(head, MESSAGE_ID)
        part.index = load_u16_be(<const unsigned char*>head + MESSAGE_ID)
        part.count = load_u16_be(<const unsigned char*>head + MESSAGE_ID + 2)
        part.chunk = self.content_of(entry)
        return part

    # --- the public interface

    def __getitem__(self, key):
        cdef Py_ssize_t number, first, past, step
        cdef NotificationBatch other
        if not isinstance(key, slice):
            return self.message(self.index(key))
        other = self.sibling()
        first, past, step = key.indices(self.count)
        for number in range(len(range(first, past, step))):
            other.add(&self.entries[first + number * step])
        return other

    def __iter__(self):
        cdef Py_ssize_t position
        for position in range(self.count):
            yield self.message(position)

    def __repr__(self):
        return f"<NotificationBatch of {self.count} messages, {self.total_bytes} bytes>"

    @property
    def memory_bytes(self):
        """Return the approximate memory of the batch."""
        cdef Py_ssize_t total = BATCH_OVERHEAD_BYTES + PyBytes_GET_SIZE(self.region)
        total += self.capacity * <Py_ssize_t>sizeof(Entry)
        total += self.part_capacity * <Py_ssize_t>sizeof(PartEntry)
        return total + sum([len(whole) for whole in self.wholes])

    def contents(self):
        """Return the contents of all messages."""
        cdef Py_ssize_t position
        # Not a comprehension: a list that cannot grow for lack of memory frees an item twice.
        cdef list found = [None] * self.count
        for position in range(self.count):
            found[position] = self.content_of(&self.entries[position])
        return found

    def parts(self):
        """Return the PARTs that arrived among the messages."""
        cdef Py_ssize_t number
        cdef list found = [None] * self.part_count
        for number in range(self.part_count):
            found[number] = self.part(number)
        return found

    def without(self, bytes topic not None):
        """Return (a batch without the messages of `topic`, the contents of those messages)."""
        cdef Py_ssize_t position, number, part = 0
        cdef NotificationBatch kept
        cdef list taken = []
        for position in range(self.count):
            if self.has_topic(&self.entries[position], topic):
                taken.append(self.content_of(&self.entries[position]))
        if not taken:
            return self, taken
        kept = self.sibling()
        for position in range(self.count + 1):
            while part < self.part_count and self.part_entries[part].before == position:
                kept.new_part()[0] = self.part_entries[part].entry
                part += 1
            if position < self.count and not self.has_topic(&self.entries[position], topic):
                kept.add(&self.entries[position])
        return kept, taken

    cdef inline bint has_topic(self, const Entry* entry, bytes topic) noexcept:
        return entry.topic_size == PyBytes_GET_SIZE(topic) and memcmp(
            PyBytes_AS_STRING(self.region) + entry.topic, PyBytes_AS_STRING(topic), entry.topic_size
        ) == 0

    def with_wholes(self, dict wholes not None):
        """Return the batch without PARTs, with the messages assembled from them in their place.

        `wholes` maps the number of a part (its place in `parts()`) to the content that this
        part completed.
        """
        cdef NotificationBatch other = self.sibling()
        cdef Py_ssize_t position, part = 0
        other.wholes = list(self.wholes)
        for position in range(self.count + 1):
            while part < self.part_count and self.part_entries[part].before == position:
                if part in wholes:
                    other.add_whole(&self.part_entries[part].entry, wholes[part])
                part += 1
            if position < self.count:
                other.add(&self.entries[position])
        return other

    cdef int add_whole(self, const Entry* part, bytes content) except -1:
        cdef Entry entry = part[0]
        if content is None or PyBytes_GET_SIZE(content) > MAX_U32:
            raise ValueError("a whole message is bytes, and its length fits 32 bits")
        entry.body = <uint32_t>len(self.wholes)
        entry.size = <uint32_t>PyBytes_GET_SIZE(content)
        entry.is_whole = True
        self.wholes.append(content)
        return self.add(&entry)


def scan(
    const unsigned char[::1] buffer not None,
    Py_ssize_t start,
    Py_ssize_t end,
    Py_ssize_t max_payload,
):
    """Read the complete frames in buffer[start:end] as a client.

    Returns (bytes consumed, NotificationBatch, None or the reason why the next frame is bad).
    An incomplete frame at the end is left unconsumed.
    """
    cdef NotificationBatch batch = NotificationBatch.__new__(NotificationBatch)
    cdef Scan scan = start_scan(buffer.shape[0], start, end)
    cdef FrameFormat format = FrameFormat(HEADER, 0, 4, True, NO_MARK)
    cdef const unsigned char* data = &buffer[start] if scan.size else NULL
    while next_frame(&scan, data, &format, max_payload):
        scan.reason = batch.add_frame(data, scan.payload, scan.length)
        if scan.reason != NO_REASON:
            break
    if batch.count or batch.part_count:
        batch.region = PyBytes_FromStringAndSize(<const char*>data, scan.consumed)
    return scan.consumed, batch, REASONS[scan.reason]


cdef RequestPrefix publish_prefix(bytes topic, Py_ssize_t max_payload) except *:
    """Return the bytes of a PUBLISH frame before its content.

    PUBLISH holds a complete NOTIFICATION frame, so there are two headers and two lengths.
    """
    cdef RequestPrefix prefix
    cdef Py_ssize_t topic_size = PyBytes_GET_SIZE(topic)
    if not 1 <= topic_size <= MAX_TOPIC:
        raise ValueError(f"a topic has 1 to {MAX_TOPIC} bytes, not {topic_size}")
    if not 0 <= max_payload <= MAX_U32:
        raise ValueError("max_payload must fit 32 bits")
    prefix.data[4] = PUBLISH
    prefix.data[9] = NOTIFICATION
    prefix.data[10] = <unsigned char>topic_size
    memcpy(&prefix.data[PUBLISH_HEADER], PyBytes_AS_STRING(topic), topic_size)
    prefix.size = PUBLISH_HEADER + topic_size
    prefix.lengths[0] = LengthField(0, prefix.size - HEADER, True)
    prefix.lengths[1] = LengthField(HEADER, prefix.size - 2 * HEADER, True)
    prefix.length_count = 2
    return prefix


def encode_publishes(bytes topic not None, contents, Py_ssize_t max_payload):
    """Return one buffer with a PUBLISH frame for each of `contents` (bytes-like objects).

    Raises OverflowError that names the first content that is too large for one frame.
    """
    cdef RequestPrefix prefix = publish_prefix(topic, max_payload)
    return encode_all(&prefix, contents, max_payload - prefix.lengths[0].empty)


def encode_run(
    bytes topic not None,
    contents not None,
    Py_ssize_t first,
    Py_ssize_t max_payload,
    Py_ssize_t max_bytes,
):
    """Return (PUBLISH frames for a run of contents[first:], the place after the run).

    The run ends at the end of the list, before a content that is too large for one frame, or
    before the buffer would exceed `max_bytes`; a single frame may exceed that.
    """
    cdef RequestPrefix prefix = publish_prefix(topic, max_payload)
    cdef Py_ssize_t max_content = max_payload - prefix.lengths[0].empty
    return encode_contents(&prefix, contents, first, max_content, max_bytes)
