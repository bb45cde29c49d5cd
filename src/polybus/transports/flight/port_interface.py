"""What the port needs of the bus, by protocol: it moves batches and knows nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from polybus.model.block import Block
from polybus.model.commit import Committed
from polybus.model.identity import Identity
from polybus.model.rows import Rows
from polybus.model.stamp import Stamp


class Caller(Protocol):
    @property
    def identity(self) -> Identity: ...
    @property
    def is_gone(self) -> Callable[[], bool]: ...


class Stream(Protocol):
    """Batches of one caller for one topic."""

    def is_ready(self) -> bool: ...
    def produce(self, block: Block, stamp: Stamp | None) -> Future[Committed]: ...
    def stage(self, stage: str, block: Block) -> Future[None]: ...


class Reading(Protocol):
    """Rows, portion after portion. `columns` are those that were asked for; None: all."""

    @property
    def columns(self) -> Collection[str] | None: ...
    def __iter__(self) -> Iterator[Rows]: ...


class Described(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def meaning(self) -> str: ...


class Verbs(Protocol):
    """Each may be called from any thread, and blocks. Errors are those of `polybus.errors`."""

    def caller(self, identity: Identity, is_gone: Callable[[], bool]) -> Caller: ...
    def produce(self, caller: Any, topic: str, *, create: bool = True) -> Stream: ...
    def read(self, caller: Any, ticket: Mapping[str, object]) -> Reading: ...
    def act(self, caller: Any, name: str, request: Mapping[str, object]) -> dict[str, Any]: ...
    def follow(
        self, caller: Any, request: Mapping[str, object]
    ) -> Iterator[tuple[dict[str, Any] | None, Rows]]: ...
    def actions(self) -> Sequence[Described]: ...
