"""A server on the event loop of a test; a function of the test serves each connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(serve: Serve, folder: Path | None = None) -> AsyncIterator[str]:
    """Start a server, on a Unix socket if there is a folder for it. Yields its address."""
    served: set[asyncio.Task[None]] = set()

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            served.discard(task)

    if folder is None:
        server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(serve_and_close, folder / "fake.sock")
        address = f"unix:{folder}/fake.sock"
    try:
        yield address
    finally:
        server.close()
        while served:
            await asyncio.wait(served)
        await asyncio.sleep(0)  # an aborted transport closes its socket in the next turn
