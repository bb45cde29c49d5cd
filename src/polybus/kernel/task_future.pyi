from collections.abc import Callable
from typing import Any, TypeVar

A = TypeVar("A", bound="TaskFuture")

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
    answers: list[A], books: object, now_ns: int, refusal: type[Exception]
) -> list[A]: ...
def resolve_all(answers: list[A]) -> None: ...
