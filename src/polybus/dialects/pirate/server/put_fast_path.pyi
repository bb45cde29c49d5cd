from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, final

from polybus.model.topic import Topic

class Hash(Protocol):
    def copy(self) -> Hash: ...
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...

class ClientState:
    epoch: int
    counter: int
    in_flight: int
    alone: bool
    waiting: Any
    def __init__(self, client_id: bytes, producer: str, epoch: int) -> None: ...
    @property
    def id(self) -> bytes: ...
    @property
    def producer(self) -> str: ...

@final
class Target:
    def __init__(self, topic: Topic, shard: int, hashed: Hash) -> None: ...
    @property
    def topic(self) -> Topic: ...

class Put:
    bounded: Topic | None
    # The types are those of dialects/pirate/server/put_handler.py, which creates them.
    @property
    def client(self) -> Any: ...
    @property
    def counter(self) -> int: ...
    @property
    def topic(self) -> str: ...
    @property
    def then(self) -> Any: ...
    @property
    def stamp(self) -> Any: ...
    @property
    def block(self) -> Any: ...
    def __init__(
        self,
        client: ClientState,
        counter: int,
        topic: str,
        then: Callable[[Any], None],
        stamp: Any,
        block: Any,
    ) -> None: ...

@final
class PutFastPath:
    uncommitted_bytes: int
    max_uncommitted: int
    def __init__(
        self,
        find_client: Callable[[bytes], ClientState | None],
        kinds: tuple[type, type, type, type],
        is_open: Callable[[Topic], bool],
        wall_ns: Callable[[], int],
        max_body: int,
        max_uncommitted: int,
        max_targets: int,
    ) -> None: ...
    def learn(self, name: bytes, target: Target) -> None: ...
    def take(
        self, session: Any, peer: Any, frames: list[bytes], own_id: bytes | None = None
    ) -> bool: ...
    def add(self, put: Put, commit: Any) -> None: ...
    def has_waiting(self) -> bool: ...
    def take_batch(self) -> tuple[list[Put], list[Any]]: ...
    @staticmethod
    def outcomes(
        futures: list[Future[Any]], error_from_future: Callable[[Future[Any]], Any]
    ) -> tuple[list[Any], dict[int, int]]: ...
    def answer(
        self,
        puts: list[Put],
        results: list[Any],
        slow_path: Callable[[Put, Any], None],
        run_queued: Callable[[Any], None],
    ) -> None: ...
