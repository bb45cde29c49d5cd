"""The host's users and groups: uids and gids of names, and groups of users.

The user database may be a file or a remote server, and a lookup may take long. So names in
rules and settings are looked up on other threads than the loop (`uid_of`, `gid_of`). Lookups
for the loop go through a `UserDirectory`: one thread asks, the loop waits a moment at most,
and results are valid for a minute.
"""

from __future__ import annotations

import grp
import os
import pwd
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from polybus.model.identity import Identity
from polybus.transports.descriptor_reserve import descriptor_reserve

# A local file answers within 0.1 ms. After this time the loop continues without the answer.
LOOKUP_TIMEOUT_S = 0.05
FRESH_S = 60.0
MAX_KNOWN = 65_536
LOOKUP_DESCRIPTORS = 4  # for a file and a socket of each of two databases
MAX_ASKED = 1024  # pending lookups behind one that hangs


class UserAccount(NamedTuple):
    """The database entry of a uid; empty if there is none."""

    name: str | None
    groups: frozenset[int]


def uid_of(name: str) -> int | None:
    """Return the uid of a user, None if the host has none.

    Blocks during the lookup. Raises OSError if the database cannot be read.
    """
    try:
        with _lookup():
            return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def gid_of(name: str) -> int | None:
    """Return the gid of a group, as `uid_of` does that of a user."""
    try:
        with _lookup():
            return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        return None


def account_of(uid: int) -> UserAccount:
    """Return the entry of a uid. Blocks and raises as `uid_of`."""
    with _lookup():
        return _look_up_account(uid)


@contextmanager
def _lookup() -> Iterator[None]:
    """Raise OSError after a lookup in the block for which no descriptor was free.

    The C library then reports that there is no such user, or a user without groups. A rule that
    denies a group would not apply.
    """
    with descriptor_reserve.borrow(LOOKUP_DESCRIPTORS):
        try:
            yield
        finally:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _look_up_account(uid: int) -> UserAccount:
    try:
        entry = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return UserAccount(None, frozenset())
    return UserAccount(entry.pw_name, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid)))


class UserDirectory:
    """Cached entries of uids, for the event loop."""

    def __init__(
        self, clock: Callable[[], float], look_up: Callable[[int], UserAccount] = account_of
    ) -> None:
        self._clock = clock
        self._look_up = look_up
        self._known: dict[int, tuple[UserAccount, float]] = {}
        self._asked: dict[int, threading.Event] = {}
        self._questions: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def groups_of(self, uid: int) -> frozenset[int] | None:
        """Return the groups of a user; None if the database has not answered yet."""
        account = self._account(uid)
        return None if account is None else account.groups

    def describe(self, identity: Identity) -> str:
        """Return a caller for the log, with the user's name if it is known."""
        if identity.key or identity.uid is None:
            return identity.name
        account = self._account(identity.uid)
        return f"{account.name}({identity.uid})" if account and account.name else identity.name

    def _account(self, uid: int) -> UserAccount | None:
        account, at_s = self._known.get(uid, (None, 0.0))
        if account is None or self._clock() - at_s > FRESH_S:
            self._request_lookup(uid)
            account, _ = self._known.get(uid, (account, 0.0))
        return account

    def _request_lookup(self, uid: int) -> None:
        if uid in self._asked or len(self._asked) >= MAX_ASKED:
            return
        is_first = not self._asked
        answered = self._asked[uid] = threading.Event()
        self._questions.put(uid)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="directory", daemon=True)
            self._thread.start()
        if is_first:  # else an earlier lookup hangs, and this one would wait behind it
            answered.wait(LOOKUP_TIMEOUT_S)

    def _work(self) -> None:
        while True:
            uid = self._questions.get()
            try:
                account = self._look_up(uid)
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[uid] = (account, self._clock())
            except OSError:
                pass  # the database failed; the next request asks again
            self._asked.pop(uid).set()
