"""Futures of store commits: the interface of `concurrent.futures.Future`, resolved in batches.

A store resolves all commits of a transaction at once, and a caller waits for each. Python's
Future has a lock and lists of its own, which cost more than the rest of a small commit. Here
the GIL is the lock: a thread that holds it changes a future alone, as long as nothing in that
step can run Python code. Creating an object can (the garbage collector runs finalizers), so
every needed object is created before the state is read. A lock is created only for a thread
that has to block.

A future carries its work (`task`, called with its `subject`). `run_tasks` runs the tasks of
many futures and stores their results; `resolve_all` publishes the results.

    pending ──▶ running ──▶ finished       started, then a value or an error
       └──────▶ cancelled                  by its caller, before it was started

The properties at the end of the class are the private protocol of `concurrent.futures.wait`
and `as_completed`, which read these fields of each future instead of calling methods.
"""
from _thread import allocate_lock
from concurrent.futures import CancelledError, InvalidStateError
from logging import getLogger
from threading import Condition

cdef enum State:
    PENDING
    RUNNING
    CANCELLED
    NOTIFIED  # cancelled, and concurrent.futures.wait has been notified
    FINISHED

cdef tuple NAMES = ("PENDING", "RUNNING", "CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED")


cdef class TaskFuture:
    """A future with its task. A subclass must name `concurrent.futures.Future` as second base."""

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

    # --- for the caller that waits

    def cancel(self) -> bool:
        """Cancel unless the task has started. Returns whether the future is cancelled."""
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
                self = None  # breaks the cycle future → error → traceback → future
        return self.value

    def exception(self, timeout=None):
        self.wait(timeout)
        return self.fault

    def add_done_callback(self, fn) -> None:
        cdef list made = [fn]  # created before the state is read: see the module docstring
        if self.state >= CANCELLED:
            self.call(fn)
        elif self.callbacks is None:
            self.callbacks = made
        else:
            self.callbacks.append(fn)

    # --- for the thread that resolves

    def set_running_or_notify_cancel(self) -> bool:
        """Start. Returns False if the future was cancelled; after True it cannot be."""
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

    # --- the private protocol of `concurrent.futures.wait` and `as_completed`

    @property
    def _condition(self):
        """Return the condition. After the first access the state changes only while it is held."""
        made, waiters = Condition(), []
        # Another thread may have set it while these objects were created.
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

    # --- internal

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
        # Between this check and the append no Python code runs, so `finish` cannot be missed.
        if self.state >= CANCELLED:
            return 0
        if self.sleepers is None:
            self.sleepers = made
        self.sleepers.append(lock)
        lock.acquire(True, -1 if timeout is None else max(0, timeout))
        if self.state < CANCELLED:
            # Timed out. Without the removal, repeated waits would let the list grow.
            if lock in self.sleepers:
                self.sleepers.remove(lock)
            raise TimeoutError
        return 0

    cdef int require_open(self) except -1:
        if self.state >= CANCELLED:
            raise InvalidStateError(f"{NAMES[self.state]}: {self!r}")
        return 0

    cdef bint begin(self) except -1:
        """Start a pending future. Returns whether it is running."""
        if self.state == PENDING:
            self.state = RUNNING
        elif self.state == CANCELLED:
            self.change(NOTIFIED)
        return self.state == RUNNING

    cdef int finish(self, State state) except -1:
        """Set the final state, wake blocked threads, then run the callbacks."""
        cdef list callbacks, sleepers
        self.change(state)
        # Taken out first: a callback may add another one, which is then called at once.
        callbacks, self.callbacks = self.callbacks, None
        sleepers, self.sleepers = self.sleepers, None
        self.task = self.subject = None  # frees the block of the commit
        if sleepers is not None:
            for lock in sleepers:
                lock.release()
        if callbacks is not None:
            for callback in callbacks:
                self.call(callback)
        return 0

    cdef int change(self, State state) except -1:
        # The usual case: no thread waits by concurrent.futures, so there is no lock to take.
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
        """Call a callback and log its error: it must not stop the thread that serves all commits."""
        try:
            callback(self)
        except BaseException:
            getLogger("concurrent.futures").exception("exception calling callback for %r", self)
        return 0


def run_tasks(list futures not None, state, now_ns, refusal) -> list:
    """Run the task of each future, in order, and store its result. Returns those that ran.

    An error of type `refusal` is the result of its task. Any other error propagates; the
    caller may then run the started futures again.
    """
    cdef list started = []
    cdef TaskFuture future
    for item in futures:
        future = <TaskFuture?>item
        if not future.begin():
            continue
        # A task may run again after the group's transaction was rolled back.
        future.value = future.fault = None
        try:
            future.value = future.task(state, future.subject, now_ns)
        except refusal as error:
            future.fault = error
        started.append(future)
    return started


def resolve_all(list futures not None) -> None:
    """Publish the stored result of each future."""
    cdef TaskFuture future
    for item in futures:
        future = <TaskFuture?>item
        if future.state < CANCELLED:
            future.finish(FINISHED)
