"""Users and groups of the host; and a database that takes its time does not stop the loop."""

from __future__ import annotations

import grp
import os
import pwd
import threading
import time

import pytest

from polybus.model.identity import ANONYMOUS, Identity
from polybus.server.user_directory import (
    FRESH_S,
    UserAccount,
    UserDirectory,
    account_of,
    gid_of,
    uid_of,
)
from tests.rig.observer import until

SEVEN, EIGHT = frozenset({7}), frozenset({8})
NO_SUCH = "no-such-name-anywhere"


class Database:
    """One that a test can stop, and that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.groups = SEVEN

    def look_up(self, uid: int) -> UserAccount:
        self.asked.append(uid)
        self.open.wait(20)
        if uid == 13:
            raise OSError("the server is down")
        return UserAccount(f"user{uid}", self.groups)


@pytest.fixture
def database() -> Database:
    return Database()


def test_uid_and_gid_of_known_names():
    me = pwd.getpwuid(os.getuid())
    assert uid_of(me.pw_name) == os.getuid()
    assert gid_of(grp.getgrgid(me.pw_gid).gr_name) == me.pw_gid
    assert account_of(os.getuid()) == UserAccount(
        me.pw_name, frozenset(os.getgrouplist(me.pw_name, me.pw_gid))
    )


@pytest.mark.parametrize("name", [NO_SUCH, "", "a\0b", "a:b", "é" * 300])
def test_unknown_names(name: str):
    assert uid_of(name) is None
    assert gid_of(name) is None


@pytest.mark.parametrize("uid", [54321, 2**32 - 2])
def test_uid_without_an_entry_has_no_groups(uid: int):
    assert account_of(uid) == UserAccount(None, frozenset())


def test_lookups_are_cached_for_a_minute(database):
    now = 0.0
    directory = UserDirectory(lambda: now, database.look_up)
    assert directory.groups_of(5) == SEVEN
    database.groups = EIGHT
    now = FRESH_S
    assert directory.groups_of(5) == SEVEN
    now = FRESH_S + 1
    assert directory.groups_of(5) == EIGHT
    assert database.asked == [5, 5]


def test_hanging_database_does_not_block_the_loop(database):
    directory = UserDirectory(time.monotonic, database.look_up)
    database.open.clear()
    begun = time.monotonic()
    for uid in range(100, 200):
        assert directory.groups_of(uid) is None
    assert time.monotonic() - begun < 5  # a hundred waits would be more
    database.open.set()
    until(lambda: directory.groups_of(150) == SEVEN, "the answer")
    assert len(database.asked) == len(set(database.asked))


def test_expired_answer_is_used_during_a_lookup(database):
    now = 0.0
    directory = UserDirectory(lambda: now, database.look_up)
    directory.groups_of(5)
    database.open.clear()
    now = 2 * FRESH_S
    assert directory.groups_of(5) == SEVEN
    database.open.set()


def test_failed_lookup_is_repeated(database):
    directory = UserDirectory(time.monotonic, database.look_up)
    assert directory.groups_of(13) is None
    assert directory.groups_of(13) is None
    assert database.asked == [13, 13]
    assert directory.groups_of(5) == SEVEN


def test_names_for_the_log(database):
    directory = UserDirectory(time.monotonic, database.look_up)
    assert directory.describe(Identity(5)) == "user5(5)"
    assert directory.describe(Identity(13)) == "uid:13"
    assert directory.describe(ANONYMOUS) == "anonymous"
    assert directory.describe(Identity(5, key="k")) == "key:k"
