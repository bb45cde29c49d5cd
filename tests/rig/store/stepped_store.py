"""A memory store whose commits wait for `step`, for tests that choose the interleaving.

`step` executes a commit, calls the listeners and then resolves its future, in the order of
the engines. `fail_with` makes the next commits fail instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from polybus.errors import PolybusError
from polybus.model.commit import Commit, CommitResult
from polybus.store.memory.memory_store import MemoryStore


class SteppedStore(MemoryStore):
    def __init__(self, *, wall_ns: Callable[[], int], clock_s: Callable[[], float]) -> None:
        super().__init__(wall_ns=wall_ns, clock_s=clock_s)
        self.waiting: deque[tuple[Commit, Future[CommitResult]]] = deque()
        self.fail_with: PolybusError | None = None

    def commit(self, commit: Commit) -> Future[CommitResult]:
        future: Future[CommitResult] = Future()
        self.waiting.append((commit, future))
        return future

    def step(self) -> None:
        """Execute the oldest waiting commit."""
        commit, future = self.waiting.popleft()
        try:
            if self.fail_with is not None:
                raise self.fail_with
            done = super().commit(commit).result()
        except PolybusError as error:
            future.set_exception(error)
        else:
            future.set_result(done)
