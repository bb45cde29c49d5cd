"""Futures of store commits and of produced messages, resolved in batches.

They have the interface of `concurrent.futures.Future`. A store resolves all commits of a
transaction at once, a producer all messages of a batch, and a caller waits for each. Python's
Future has a lock and lists of its own, which cost more than the rest of a small commit. Here
the GIL is the lock: a thread that holds it changes a future alone, as long as nothing in that
step can run Python code. Creating an object can (the garbage collector runs finalizers), so
every needed object is created before the state is read. A lock is created only for a thread
that has to block.

The future of a commit carries its work (`task`, called with its `subject`). `run_tasks` runs
the tasks of many futures and stores their results; `resolve_all` publishes the results.
`finish_all` gives many futures the same result.

    pending ──▶ running ──▶ finished       started, then a value or an error
       └──────▶ cancelled                  by its caller, before it was started

`concurrent.futures.wait` and `as_completed` read fields of each future instead of calling its
methods. These fields are those of Future itself: its constructor runs when one of them is
first read, and from then on each final state is also set by Future's own methods. Futures
that nothing waits for in this way, nearly all, do not pay for it: the constructor takes 2 µs,
that of this class 0.1 µs (CPython 3.11).
"""
from _thread import allocate_lock
from concurrent.futures import CancelledError, Future, InvalidStateError
from logging import getLogger
from threading import RLock

cdef enum State:
    PENDING
    RUNNING
    CANCELLED
    NOTIFIED  # cancelled, and concurrent.futures.wait has been notified
    FINISHED

# Held while Future's constructor runs, so that it runs once per future. Reentrant because the
# constructor allocates, and a finalizer that the collector runs there may read another future.
constructing = RLock()


cdef class TaskFuture:
    """A future with its task. A subclass must name `concurrent.futures.Future` as second base."""

    cdef readonly object task, subject
    cdef readonly Py_ssize_t size
    cdef readonly bint alone
    cdef State state
    cdef object value, fault
    cdef list callbacks, sleepers
    cdef bint is_constructed  # Future's constructor has run

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

    # --- for `concurrent.futures.wait` and `as_completed`

    def __getattr__(self, name):
        """Construct the Future when one of its fields is first read, then return the field."""
        cdef State state = PENDING
        with constructing:
            if not self.is_constructed:
                Future.__init__(self)
                # No Python code runs between these lines, so a change of the state is seen
                # either here or, after it, by `change`, and never by both.
                self.is_constructed = True
                state = self.state
        # Outside of the lock: another thread may hold the future's own lock and wait for ours.
        self.publish(state)
        return object.__getattribute__(self, name)

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
            raise InvalidStateError(f"future is already done: {self!r}")
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
        self.state = state
        if self.is_constructed:
            self.publish(state)
        return 0

    cdef int publish(self, State state) except -1:
        """Bring Future's own fields to a final state, which wakes `wait` and `as_completed`."""
        if state == FINISHED and self.fault is None:
            Future.set_result(self, self.value)
        elif state == FINISHED:
            Future.set_exception(self, self.fault)
        elif state == CANCELLED or state == NOTIFIED:
            Future.cancel(self)  # for NOTIFIED too: another thread may be about to publish CANCELLED
            if state == NOTIFIED:
                Future.set_running_or_notify_cancel(self)
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


def finish_all(list futures not None, value, fault) -> None:
    """Give each future the same result: the value, or the error if it is not None."""
    cdef TaskFuture future
    for item in futures:
        future = <TaskFuture?>item
        future.require_open()
        future.value = value
        future.fault = fault
        future.finish(FINISHED)
