from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound="TaskFuture")

class TaskFuture:
    def __init__(
        self,
        task: Callable[[Any, Any, int], Any] | None = None,
        subject: object = None,
        size: int = 0,
        alone: bool = False,
    ) -> None: ...
    @property
    def task(self) -> Callable[[Any, Any, int], Any] | None: ...
    @property
    def subject(self) -> Any: ...
    @property
    def size(self) -> int: ...
    @property
    def alone(self) -> bool: ...

def run_tasks(
    futures: list[F], state: object, now_ns: int, refusal: type[Exception]
) -> list[F]: ...
def resolve_all(futures: list[F]) -> None: ...
def finish_all(futures: list[F], value: object, fault: BaseException | None) -> None: ...
