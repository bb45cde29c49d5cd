"""Columns in Arrow's layout from messages that are Python tuples.

Only valid messages without headers are accepted. For anything else the function returns None,
and the caller finds the error.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef int64_t MAX_OFFSET = 0x7FFFFFFF  # Arrow's offsets are int32


def columns_of(list requests not None, kind, int64_t max_key_bytes, int64_t max_body_bytes):
    """Return validity of keys (None: all valid), offsets and bytes of keys, and of bodies.

    Each request must be a tuple of exactly this kind: a key (str or None), a body (bytes), and
    None. Returns None if one is not or is over a limit, or if all exceed one batch.
    """
    if not issubclass(kind, tuple):
        raise TypeError("kind must be a subclass of tuple")
    # Copy the list, which another thread could change; its tuples, str and bytes are immutable.
    cdef tuple items = tuple(requests)
    cdef tuple sizes = _measure(items, kind, max_key_bytes, max_body_bytes)
    if sizes is None:
        return None
    return _fill(items, sizes[0], sizes[1], sizes[2])


cdef tuple _measure(tuple items, kind, int64_t max_key_bytes, int64_t max_body_bytes):
    """Return the number of missing keys, and the bytes of all keys and all bodies."""
    cdef int64_t missing = 0, key_bytes = 0, body_bytes = 0
    cdef Py_ssize_t size = 0
    cdef tuple item
    for request in items:
        if type(request) is not kind:
            return None
        item = <tuple>request
        if len(item) != 3 or item[2] is not None or type(item[1]) is not bytes:
            return None
        size = len(<bytes>item[1])
        if size > max_body_bytes:
            return None
        body_bytes += size
        if item[0] is None:
            missing += 1
            continue
        if type(item[0]) is not str:
            return None
        try:
            PyUnicode_AsUTF8AndSize(item[0], &size)
        except UnicodeEncodeError:
            return None
        if size > max_key_bytes:
            return None
        key_bytes += size
    if key_bytes > MAX_OFFSET or body_bytes > MAX_OFFSET:
        return None
    return missing, key_bytes, body_bytes


cdef tuple _fill(tuple items, int64_t missing, int64_t key_bytes, int64_t body_bytes):
    """Fill the buffers. The items must be those that were measured."""
    cdef Py_ssize_t count = len(items), at = 0, size = 0
    cdef int32_t key_at = 0, body_at = 0
    cdef bytes validity = PyBytes_FromStringAndSize(NULL, (count + 7) // 8)
    cdef bytes key_offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * 4)
    cdef bytes body_offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * 4)
    cdef bytes keys = PyBytes_FromStringAndSize(NULL, key_bytes)
    cdef bytes bodies = PyBytes_FromStringAndSize(NULL, body_bytes)
    cdef unsigned char* bits = <unsigned char*>PyBytes_AS_STRING(validity)
    cdef int32_t* key_ends = <int32_t*>PyBytes_AS_STRING(key_offsets)
    cdef int32_t* body_ends = <int32_t*>PyBytes_AS_STRING(body_offsets)
    cdef char* key_out = PyBytes_AS_STRING(keys)
    cdef char* body_out = PyBytes_AS_STRING(bodies)
    cdef const char* text
    cdef tuple item
    memset(bits, 0, (count + 7) // 8)
    key_ends[0] = body_ends[0] = 0
    for at in range(count):
        item = <tuple>items[at]
        if item[0] is not None:
            text = PyUnicode_AsUTF8AndSize(item[0], &size)
            memcpy(key_out + key_at, text, size)
            key_at += <int32_t>size
            bits[at >> 3] |= <unsigned char>(1 << (at & 7))
        size = len(<bytes>item[1])
        memcpy(body_out + body_at, PyBytes_AS_STRING(<bytes>item[1]), size)
        body_at += <int32_t>size
        key_ends[at + 1] = key_at
        body_ends[at + 1] = body_at
    return (validity if missing else None), key_offsets, keys, body_offsets, bodies
