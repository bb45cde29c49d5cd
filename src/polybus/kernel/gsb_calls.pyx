"""What calls are made of: the state that bus/calls works on, and its short path.

A call is in two tables while it is open: its caller's, by the id that the caller chose,
and its service's, by an id of the bus's own.
"""
cimport cython
from libc.stdint cimport uint64_t


cdef class Service:
    """One registered name."""

    cdef readonly str id
    cdef readonly End end
    cdef readonly object since_ms
    cdef public Py_ssize_t calls, pending

    def __init__(self, str id not None, End end not None, since_ms):
        self.id = id
        self.end = end
        self.since_ms = since_ms


@cython.final
cdef class Route:
    """What an address means to one caller, who may call it."""

    cdef readonly Service service
    cdef readonly bytes address  # without the node

    def __init__(self, Service service not None, bytes address not None):
        self.service = service
        self.address = address


@cython.final
cdef class Call:
    """One open call."""

    cdef readonly End caller
    cdef readonly Service service
    cdef readonly End end  # the service's, which it may have left behind
    cdef readonly bytes request_id, id, address
    cdef readonly double begun_s
    cdef readonly Py_ssize_t request_bytes
    cdef public Py_ssize_t partials, reply_bytes
    cdef public Py_ssize_t credit  # granted and not used
    # The deadline's clock: since when it runs, how long the service had been unread by then,
    # and since when it stands for lack of credit (0: it does not).
    cdef public double last_s, unread_before_s, dry_since_s

    def __init__(
        self, End caller not None, Route route not None, bytes request_id not None,
        bytes id not None, Py_ssize_t request_bytes, double now_s,
    ):
        self.caller = caller
        self.service = route.service
        self.end = route.service.end
        self.request_id = request_id
        self.id = id
        self.address = route.address
        self.request_bytes = request_bytes
        self.begun_s = now_s
        self.restart_clock(now_s)

    cpdef restart_clock(self, double now_s):
        """The service has given a sign of life."""
        self.last_s = now_s
        self.unread_before_s = self.end.unread_s


cdef class End:
    """One connection, as calls know it: it calls, serves, or both.

    `full`: it is owed so much that streams to it stop. `full_calls`: how many calls that it
    serves have a full caller, if it knows no credits: then it is not read from.
    """

    cdef readonly dict calls  # own, by request id
    cdef readonly dict serving  # others', by the bus's id
    cdef readonly dict services  # registered, by name
    cdef readonly dict routes  # addresses that were resolved and allowed
    cdef readonly dict wanting  # calls of its own whose service waits for credit
    cdef readonly dict waiters  # ends that are not read until this one has room
    cdef public uint64_t generation  # of `routes`
    cdef public bint full, credits, gone, halted, lifted, pinged
    cdef public Py_ssize_t full_calls
    cdef public double deadline_s, unread_s, halted_since_s, heard_s
    cdef public bytes caller_name

    def __cinit__(self, *args, **kwargs):
        self.calls = {}
        self.serving = {}
        self.services = {}
        self.routes = {}
        self.wanting = {}
        self.waiters = {}
