"""The state folder of a client: used by one process at a time, every change synced to disk.

    lock       held while a client has the folder; it contains the pid of its owner
    journal    the client's state (client_journal.py)

Each method records one event, and any thread may call it. `run_to_completion` calls it for a
task: a started change is finished even if the task is cancelled.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from polybus.dialects.pirate import client_id as identity
from polybus.dialects.pirate.client import client_journal
from polybus.dialects.pirate.client.journal_state import (
    Event,
    JournalState,
    MessageRead,
    Pending,
    RequestAnswered,
    RequestForgotten,
    RequestRecorded,
)
from polybus.errors import ConfigError, DataFolderInUse, LimitReached, NotConnected, UsageError

T = TypeVar("T")


async def run_to_completion(work: Callable[..., T], *values: Any) -> T:
    """Run `work` in a thread and return its result. A cancellation waits until it is done.

    Otherwise a change of the journal could still run when the next one starts.
    """
    doing = asyncio.ensure_future(asyncio.to_thread(work, *values))
    cancelled: asyncio.CancelledError | None = None
    while not doing.done():
        try:
            await asyncio.wait((doing,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        doing.exception()  # marks it as retrieved: the caller is cancelled
        raise cancelled
    return doing.result()


LOCK: Final = "lock"
MAX_COUNTER: Final = 2**64 - 1  # 8 bytes on the wire


def default_folder(server: str, client_id: bytes | None, environ: Mapping[str, str]) -> Path:
    """Return the default folder of a client: one per bus and id."""
    home = environ.get("XDG_STATE_HOME")
    if not home and not environ.get("HOME"):
        raise ConfigError("no state folder: neither $HOME nor $XDG_STATE_HOME is set; pass one")
    states = Path(home) if home else Path(environ["HOME"]) / ".local" / "state"
    suffix = "" if client_id is None else "@" + identity.format_client_id(client_id)
    return states / "polybus-pirate" / quote(server + suffix, safe="@:")


class ClientFolder:
    """A locked state folder. Created if it does not exist, with this id or a random one.

    Raises `DataFolderInUse` if another client has it, `UsageError` if it has another id.
    """

    def __init__(self, path: Path, client_id: bytes | None = None) -> None:
        self.path = path
        self._guard = threading.Lock()
        self._lock = _lock_folder(path)
        self._closed = False
        try:
            journal = client_journal.open_journal(path)
            if journal is None:
                new_id = client_id or identity.random_id()
                journal = client_journal.create_journal(path, new_id)
            elif client_id is not None and journal.state.id != client_id:
                journal.close()
                owner, given = map(identity.format_client_id, (journal.state.id, client_id))
                raise UsageError(
                    f"state folder {path} belongs to client {owner}, not to {given};"
                    " pass another folder or omit the id"
                )
        except OSError as error:
            self._unlock()
            raise ConfigError(f"state folder {path}: {error.strerror}") from None
        except BaseException:
            self._unlock()
            raise
        self._journal = journal

    @property
    def state(self) -> JournalState:
        """The current state. Must not be changed by the caller."""
        return self._journal.state

    def record(self, event: Event) -> None:
        """Record an event that needs no check. Requests and their ends have their own methods."""
        with self._guard:
            self._append(event)

    def record_request(self, op: str, topic: str, body: bytes) -> Pending:
        """Record a request with the next counter. It may then be sent."""
        with self._guard:
            if self.state.counter >= MAX_COUNTER:
                raise LimitReached(
                    "counter", "this id has used all its counters; choose another id"
                )
            assert self.state.pending is None
            request = Pending(self.state.counter + 1, op, topic, body)
            self._append(RequestRecorded(*request))
            return request

    def settle(self, event: RequestAnswered | RequestForgotten) -> None:
        """Record the end of the pending request."""
        with self._guard:
            # An end without a request would make the journal unreadable.
            pending = self.state.pending
            assert pending is not None
            assert pending.counter == event.counter
            self._append(event)

    def record_read(self, topic: str, last: int) -> None:
        """Record the position of a topic. A lower one than before changes nothing."""
        with self._guard:
            if last > self.state.lasts.get(topic, 0):
                self._append(MessageRead(topic, last))

    def close(self) -> None:
        with self._guard:
            if not self._closed:
                self._closed = True
                self._journal.close()
                self._unlock()

    def _append(self, event: Event) -> None:
        if self._closed:
            raise NotConnected("the client is closed")
        self._journal.append(event)

    def _unlock(self) -> None:
        # Explicitly, because forked children share the descriptor.
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)


def _make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their names."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        client_journal.sync_folder(path.parent)


def _lock_folder(path: Path) -> int:
    """Lock the folder. Returns the descriptor. The kernel releases it with the process."""
    try:
        _make_folder(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path / LOCK, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"state folder {path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 20, 0).strip().decode("ascii", "replace") or "unknown"
        os.close(descriptor)
        raise DataFolderInUse(
            f"state folder {path} is in use by the client with pid {owner};"
            " stop that client or pass another folder"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
