"""Answers that somebody waits for: what a `concurrent.futures.Future` does, per batch in C.

A store answers all commits of a transaction at once, and each commit is waited for by
itself. Python's Future has a lock and lists of its own, which cost more than the rest
of a small commit. Here a step of C is the lock: whoever holds the interpreter's changes
an answer alone, as long as nothing in that step can run Python code. Making an object
can, by way of the garbage collector: so whatever is needed is made before the look.
A lock is made only for a thread that has to sleep.

An answer carries what is to be done (`task`, called with its `subject`), and keeps the
outcome to itself until it is told: `run_tasks` does the work of many, `resolve_all` tells them.

    pending ──▶ running ──▶ finished       begun, then a value or an error
       └──────▶ cancelled                  by its caller, before it was begun
"""
from _thread import allocate_lock
from concurrent.futures import CancelledError, InvalidStateError
from logging import getLogger
from threading import Condition

cdef enum State:
    PENDING
    RUNNING
    CANCELLED
    NOTIFIED  # cancelled, and whoever waits for several answers knows
    FINISHED

cdef tuple NAMES = ("PENDING", "RUNNING", "CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED")


cdef class TaskFuture:
    """To be inherited from before `concurrent.futures.Future`, whose methods these replace."""

    cdef readonly object task, subject
    cdef readonly Py_ssize_t size
    cdef readonly bint alone
    cdef State state
    cdef object value, fault
    cdef list callbacks, sleepers
    cdef object condition
    cdef readonly list _waiters

    def __init__(self, task=None, subject=None, Py_ssize_t size=0, bint alone=False):
        self.task = task
        self.subject = subject
        self.size = size
        self.alone = alone

    # --- for whoever waits

    def cancel(self) -> bool:
        """Whether it is cancelled: what was begun cannot be."""
        if self.state == PENDING:
            self.finish(CANCELLED)
        return self.state == CANCELLED or self.state == NOTIFIED

    def cancelled(self) -> bool:
        return self.state == CANCELLED or self.state == NOTIFIED

    def running(self) -> bool:
        return self.state == RUNNING

    def done(self) -> bool:
        return self.state >= CANCELLED

    def result(self, timeout=None):
        self.wait(timeout)
        if self.fault is not None:
            try:
                raise self.fault
            finally:
                self = None  # else the error's traceback holds it, and it holds the error
        return self.value

    def exception(self, timeout=None):
        self.wait(timeout)
        return self.fault

    def add_done_callback(self, fn) -> None:
        cdef list made = [fn]
        if self.state >= CANCELLED:
            self.call(fn)
        elif self.callbacks is None:
            self.callbacks = made
        else:
            self.callbacks.append(fn)

    # --- for whoever answers

    def set_running_or_notify_cancel(self) -> bool:
        """Whether it may be worked on; from then on nobody can cancel it."""
        if self.state == RUNNING or self.state == FINISHED:
            raise RuntimeError("Future in unexpected state")
        return self.begin()

    def set_result(self, result) -> None:
        self.require_open()
        self.value = result
        self.finish(FINISHED)

    def set_exception(self, exception) -> None:
        self.require_open()
        self.fault = exception
        self.finish(FINISHED)

    # --- what `concurrent.futures` reads of a Future, to wait for several at once

    @property
    def _condition(self):
        """Once somebody has asked for it, the state changes under it alone."""
        made, waiters = Condition(), []
        if self.condition is None:
            self._waiters = waiters
            self.condition = made
        return self.condition

    @property
    def _state(self):
        return NAMES[self.state]

    @property
    def _result(self):
        return self.value if self.state == FINISHED else None

    @property
    def _exception(self):
        return self.fault if self.state == FINISHED else None

    # --- in here

    cdef int wait(self, timeout) except -1:
        if self.state < CANCELLED:
            self.sleep(timeout)
        if self.state != FINISHED:
            raise CancelledError
        return 0

    cdef int sleep(self, timeout) except -1:
        cdef list made = []
        lock = allocate_lock()
        lock.acquire()
        if self.state >= CANCELLED:
            return 0
        if self.sleepers is None:
            self.sleepers = made
        self.sleepers.append(lock)
        lock.acquire(True, -1 if timeout is None else max(0, timeout))
        if self.state < CANCELLED:
            if lock in self.sleepers:
                self.sleepers.remove(lock)
            raise TimeoutError
        return 0

    cdef int require_open(self) except -1:
        if self.state >= CANCELLED:
            raise InvalidStateError(f"{NAMES[self.state]}: {self!r}")
        return 0

    cdef bint begin(self) except -1:
        """Whether it is begun, by now or before."""
        if self.state == PENDING:
            self.state = RUNNING
        elif self.state == CANCELLED:
            self.change(NOTIFIED)
        return self.state == RUNNING

    cdef int finish(self, State state) except -1:
        """The end: whoever sleeps is woken, then whoever wants to be called is."""
        cdef list callbacks, sleepers
        self.change(state)
        callbacks, self.callbacks = self.callbacks, None
        sleepers, self.sleepers = self.sleepers, None
        self.task = self.subject = None
        if sleepers is not None:
            for lock in sleepers:
                lock.release()
        if callbacks is not None:
            for callback in callbacks:
                self.call(callback)
        return 0

    cdef int change(self, State state) except -1:
        if self.condition is None:
            self.state = state
            return 0
        with self.condition:
            self.state = state
            for waiter in self._waiters:
                if state == NOTIFIED:
                    waiter.add_cancelled(self)
                elif state == FINISHED and self.fault is None:
                    waiter.add_result(self)
                elif state == FINISHED:
                    waiter.add_exception(self)
        return 0

    cdef int call(self, callback) except -1:
        """What a callback raises is its own affair: this thread may be everybody's."""
        try:
            callback(self)
        except BaseException:
            getLogger("concurrent.futures").exception("exception calling callback for %r", self)
        return 0


def run_tasks(list answers not None, books, now_ns, refusal) -> list:
    """Does the task of each, in order, and keeps what comes of it; those that were begun.

    `refusal` is the type of errors that are the answer to one task; any other ends it all,
    and what was begun may be carried out again.
    """
    cdef list begun = []
    cdef TaskFuture answer
    for item in answers:
        answer = <TaskFuture?>item
        if not answer.begin():
            continue
        answer.value = answer.fault = None
        try:
            answer.value = answer.task(books, answer.subject, now_ns)
        except refusal as error:
            answer.fault = error
        begun.append(answer)
    return begun


def resolve_all(list answers not None) -> None:
    """All of them get to know what was kept for them."""
    cdef TaskFuture answer
    for item in answers:
        answer = <TaskFuture?>item
        if answer.state < CANCELLED:
            answer.finish(FINISHED)
