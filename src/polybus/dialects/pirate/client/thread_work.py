"""Work for a thread that is finished once it was begun, also if whoever waits is cancelled.

A change of the journal that goes on behind a cancelled task would meet the next one there.
So the cancellation waits, as long as a disk needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Callable[..., T], *values: Any) -> T:
    """What it returns; `CancelledError` only after it is done."""
    doing = asyncio.ensure_future(asyncio.to_thread(work, *values))
    cancelled: asyncio.CancelledError | None = None
    while not doing.done():
        try:
            await asyncio.wait((doing,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        doing.exception()  # whoever was cancelled does not ask
        raise cancelled
    return doing.result()
