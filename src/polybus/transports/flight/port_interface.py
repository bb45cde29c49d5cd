"""The interface of the bus that the Flight transport needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from polybus.model.block import Block
from polybus.model.commit import CommitResult
from polybus.model.delivery_time import DeliveryTime
from polybus.model.identity import Identity
from polybus.model.rows import Rows
from polybus.model.stamp import Stamp


class PortCaller(Protocol):
    @property
    def identity(self) -> Identity: ...
    @property
    def is_gone(self) -> Callable[[], bool]: ...


class PortStream(Protocol):
    """Batches of one caller for one topic."""

    def is_ready(self) -> bool: ...
    def produce(
        self, block: Block, stamp: Stamp | None, delivery: DeliveryTime | None
    ) -> Future[CommitResult]: ...
    def stage(self, stage: str, block: Block) -> Future[None]: ...


class PortReader(Protocol):
    """Chunks of rows. `columns` are the requested ones; None: all."""

    @property
    def columns(self) -> Collection[str] | None: ...
    def __iter__(self) -> Iterator[Rows]: ...


class PortInterface(Protocol):
    """Methods block and are thread-safe. They raise the errors of `polybus.errors`."""

    def begin_call(self, identity: Identity) -> None:
        """Count a call until `end_call`. Raises `LimitReached`."""

    def end_call(self, identity: Identity) -> None: ...
    def new_caller(self, identity: Identity, is_gone: Callable[[], bool]) -> PortCaller: ...
    def produce(self, caller: Any, topic: str, *, create: bool = True) -> PortStream: ...
    def read(self, caller: Any, ticket: Mapping[str, object]) -> PortReader: ...
    def act(self, caller: Any, name: str, request: Mapping[str, object]) -> Mapping[str, Any]: ...
    def stream_fetch(
        self, caller: Any, request: Mapping[str, object]
    ) -> Iterator[tuple[Mapping[str, Any] | None, Rows]]: ...
    def is_streamed(self, name: str) -> bool: ...
    def list_actions(self) -> list[tuple[str, str]]: ...
