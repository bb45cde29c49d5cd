"""The head of an entry of a store's log, read in one step; polybus.store.lmdb.log_entry has the form.

A read meets one for every block, so that taking it apart in Python would cost about as
much as copying the block's messages does.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cdef extern from "xxh64.h" nogil:
    uint64_t hash_of "polybus_xxh64"(const unsigned char* at, size_t size, uint64_t seed)

cdef enum:
    HEAD = 56
    TABLES_AT = 64  # the checksum is between
    RUN = 24
    PART = 24
    SMALL = 1024


class BadEntry(ValueError):
    """The bytes are not a valid entry; the text says why."""


cdef packed struct Head:
    char[4] magic
    unsigned char kind
    char[3] unused
    uint32_t topic
    uint32_t shard
    int64_t first
    int64_t count
    int64_t charged
    int64_t block_bytes
    uint32_t runs
    uint32_t parts


def read_head(value, bytes magic not None, bint checksum) -> tuple:
    """Kind, topic, shard, first, count, charged bytes; runs and parts as they are written,
    and an empty tuple if there are no parts; where the block begins, and its size.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(value, &view, PyBUF_SIMPLE)
    try:
        return parse(<const unsigned char*>view.buf, view.len, magic, checksum)
    finally:
        PyBuffer_Release(&view)


cdef tuple parse(const unsigned char* at, int64_t size, bytes magic, bint checksum):
    cdef Head head
    cdef int64_t runs, parts, block_at
    if size < TABLES_AT:
        raise BadEntry("an entry of the log is cut off")
    memcpy(&head, at, HEAD)
    runs = head.runs * <int64_t>RUN
    parts = head.parts * <int64_t>PART
    block_at = TABLES_AT + runs + parts
    if head.magic[:4] != magic or head.block_bytes < 0 or head.block_bytes > size - block_at:
        raise BadEntry("an entry of the log has an invalid head")
    if checksum and not is_sound(at, runs + parts):
        raise BadEntry("an entry of the log does not match its checksum")
    return (
        head.kind, head.topic, head.shard, head.first, head.count, head.charged,
        PyBytes_FromStringAndSize(<const char*>at + TABLES_AT, runs),
        PyBytes_FromStringAndSize(<const char*>at + TABLES_AT + runs, parts) if parts else (),
        block_at, head.block_bytes,
    )


cdef bint is_sound(const unsigned char* at, int64_t tables) except -1:
    """Return whether head and tables match the checksum between them."""
    cdef unsigned char small[SMALL]
    cdef unsigned char* joined = small
    cdef uint64_t wanted
    if HEAD + tables > SMALL:
        joined = <unsigned char*>malloc(HEAD + tables)
        if joined is NULL:
            raise MemoryError
    memcpy(joined, at, HEAD)
    memcpy(joined + HEAD, at + TABLES_AT, tables)
    memcpy(&wanted, at + HEAD, 8)
    sound = hash_of(joined, HEAD + tables, 0) == wanted
    if joined != small:
        free(joined)
    return sound
