"""The blocking version of an async client, derived from it.

One background thread runs one event loop for all blocking clients of the process. A
blocking twin holds the async object and runs each call on that loop:

    class BlockingClient(BlockingFacade[Client], of=Client):
        publish = blocking_method(Client.publish)       # a coroutine     → a plain method
        batches = blocking_iterator(Client.batches)     # async iterator  → iterator
        subscribe = blocking_factory(Client.subscribe, BlockingSubscription)  # result → twin
        reconnects = blocking_property(Client.reconnects)  # property     → property

    connect = blocking_connect(client.connect, BlockingClient)

Signatures and docstrings are those of the async class, also for type checkers. A twin that
lacks a public name of its class raises TypeError when the class is made, so the two cannot
differ. `with` replaces `async with`.

Ctrl-C cancels a blocking call. Forking is safe: a child starts its own background thread
when it needs one, and using a client from before the fork raises UsageError. At interpreter
exit the loop is stopped, and nothing is waited for longer than EXIT_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from polybus.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
C = TypeVar("C")
B = TypeVar("B")

# At exit tasks get this long to end; then the thread dies with the process.
EXIT_TIMEOUT_S = 1.0


# --- the background loop -----------------------------------------------------


class LoopThread:
    """A thread that runs an event loop until `stop` is called."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._main, args=(started,), name="polybus-blocking", daemon=True
        )
        self._thread.start()
        started.wait()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and return its result to the calling thread."""
        try:
            if self.pid != os.getpid():
                raise UsageError("the client was opened before a fork; open one in this process")
            if threading.current_thread() is self._thread:
                raise UsageError(
                    "a blocking call on the background loop would deadlock;"
                    " use the async client there"
                )
            if not self._thread.is_alive():
                raise UsageError("the process is ending")
        except UsageError:
            work.close()  # else Python warns of a coroutine that was never awaited
            raise
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            if self._ending:
                raise SystemExit from None  # ends a waiting thread at exit without a traceback
            raise
        except BaseException:
            future.cancel()  # no effect if it is done
            raise

    def next(self, items: AsyncIterator[R]) -> R:
        """Return the next item of an async iterator. Raises StopIteration at its end."""

        async def next_item() -> R:
            return await anext(items)

        try:
            return self.run(next_item())
        except StopAsyncIteration:
            raise StopIteration from None

    def stop(self) -> None:
        """Stop all tasks and the thread. Waits up to EXIT_TIMEOUT_S."""
        self._ending = True
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(EXIT_TIMEOUT_S)

    def _main(self, started: threading.Event) -> None:
        import uvloop

        async def wait() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            started.set()
            await self._stop.wait()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(wait())


_lock = threading.Lock()
_shared: LoopThread | None = None
# A forked child must neither use nor close its parent's loop.
_parent_threads: list[LoopThread] = []


def get_loop_thread() -> LoopThread:
    """Return the loop thread of this process. Starts it at the first call."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = LoopThread()
        return _shared


def _stop_at_exit() -> None:
    if _shared is not None and _shared.pid == os.getpid():
        _shared.stop()


def _after_fork_in_child() -> None:
    global _lock, _shared
    _lock = threading.Lock()  # a thread that does not exist in the child may hold the old lock
    if _shared is not None:
        _parent_threads.append(_shared)
        _shared = None


atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)


# --- twins -------------------------------------------------------------------


class BlockingMethod(Protocol[P, R_co]):
    """The type of a method in a class body: bound when looked up."""

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R_co]: ...


class BlockingProperty(Protocol[R_co]):
    """The type of a read-only property."""

    def __get__(self, instance: object, owner: type) -> R_co: ...


class BlockingFacade(Generic[C]):
    """The blocking twin of an async object of class C."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._background = get_loop_thread()

        async def made() -> C:
            return make()

        # On the loop, because a client creates asyncio objects.
        self._async = self._background.run(made())

    def __init_subclass__(cls, of: type | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if of is None:
            return
        names = {name for name in dir(of) if not name.startswith("_")}
        if hasattr(of, "__aiter__"):
            names.add("__iter__")
        missing = sorted(name for name in names if not hasattr(cls, name))
        if missing:
            raise TypeError(f"{cls.__name__} leaves out of {of.__name__}: {', '.join(missing)}")

    def __enter__(self) -> Self:
        self._background.run(cast(Any, self._async).__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._background.run(cast(Any, self._async).__aexit__(kind, error, trace))


class BlockingIterator(Generic[R]):
    """A blocking iterator over an async iterator."""

    def __init__(self, background: LoopThread, steps: AsyncIterator[R]) -> None:
        self._background = background
        self._steps = steps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        return self._background.next(self._steps)


def blocking_method(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> BlockingMethod[P, R]:
    """Return a blocking method for a coroutine method."""

    def call(self: BlockingFacade[Any], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._background.run(method(self._async, *args, **kwargs))

    return cast(BlockingMethod[P, R], _copy_signature(method, call))


def blocking_factory(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, C]],
    twin: Callable[[Callable[[], C]], B],
) -> BlockingMethod[P, B]:
    """Return a blocking method whose async result is wrapped in its twin."""

    def call(self: BlockingFacade[Any], *args: P.args, **kwargs: P.kwargs) -> B:
        made = self._background.run(method(self._async, *args, **kwargs))
        return twin(lambda: made)

    same = _copy_signature(method, call)
    vars(same)["__signature__"] = inspect.signature(method).replace(return_annotation=twin)
    return cast(BlockingMethod[P, B], same)


def blocking_iterator(
    method: Callable[Concatenate[Any, P], AsyncIterator[R]],
) -> BlockingMethod[P, Iterator[R]]:
    """Return a method that returns an iterator for one that returns an async iterator."""

    def call(self: BlockingFacade[Any], *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        return BlockingIterator(self._background, method(self._async, *args, **kwargs))

    return cast(BlockingMethod[P, Iterator[R]], _copy_signature(method, call))


def blocking_property(attribute: Callable[[Any], R]) -> BlockingProperty[R]:
    """Return a property that is read in the calling thread, for small immutable values."""
    # At run time this is a property object; type checkers see the wrapped function.
    getter = cast(property, attribute).fget
    assert getter is not None
    return cast(BlockingProperty[R], property(lambda self: getter(self._async), doc=getter.__doc__))


def blocking_connect(make: Callable[P, C], twin: Callable[[Callable[[], C]], B]) -> Callable[P, B]:
    """Return a function that makes the twin for one that makes the async client."""

    def call(*args: P.args, **kwargs: P.kwargs) -> B:
        return twin(functools.partial(make, *args, **kwargs))

    same = _copy_signature(make, call)
    vars(same)["__signature__"] = inspect.signature(make).replace(return_annotation=twin)
    return cast(Callable[P, B], same)


def _copy_signature(model: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Give `function` the name, docstring and signature of `model`."""
    functools.update_wrapper(function, model)
    del function.__dict__["__wrapped__"]  # else inspect takes it for a coroutine function
    vars(function)["__signature__"] = inspect.signature(model)
    return function
