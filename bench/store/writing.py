"""Contenders at durable commits: ours, the disk itself, LMDB by hand, and servers."""

import json
import subprocess
import time
from pathlib import Path

import lmdb

from bench.harness.load import LoadFailed, run
from bench.harness.places import compiled
from bench.harness.results import RATE, Values
from bench.harness.rounds import GROWTH, TRIAL_S
from bench.store.contract import RunningLog, bodies
from bench.store.producers import Batch, Crowd, Groups
from polybus.model.topic import Topic
from polybus.store.contract import Store

OURS, APPEND, LMDB = "polybus", "append + fdatasync", "LMDB, one each"
PER_GROUP = "messages_per_group"
TRIAL_TURNS = 4
MAP_BYTES = 1 << 36


def turns_for(took_s: float, turns: int, wanted_s: float) -> int:
    return max(TRIAL_TURNS, round(turns * wanted_s / max(took_s, 1e-6)))


class Ours:
    """Our engine. It passes the sizes of its groups to the disk's contender."""

    pid = None

    def __init__(self, store: Store, topic: Topic, producers: int, messages: int) -> None:
        self.name = OURS
        self._store, self._topic = store, topic
        batch = Batch(messages)
        self._crowd = Crowd(store, topic, producers, batch)
        self._turns = TRIAL_TURNS
        self.groups: list[int] = []
        self.bytes_per_message = batch.block(0).size_bytes / messages

    def calibrate(self, wanted_s: float) -> None:
        while (took_s := self._crowd.run(self._turns)) < TRIAL_S:
            self._turns *= 4
        self._turns = turns_for(took_s, self._turns, wanted_s)

    def measure(self) -> Values:
        with Groups(self._store, self._topic.number) as groups:
            seconds = self._crowd.run(self._turns)
        self.groups = groups.sizes
        messages = self._crowd.messages_per_turn * self._turns
        if sum(self.groups) != messages:
            raise LoadFailed(f"{sum(self.groups)} messages became visible of {messages}")
        return {RATE.key: messages / seconds, PER_GROUP: messages / len(self.groups)}


class RawAppend:
    """A C program that appends the bytes of our groups and syncs after each."""

    name = APPEND
    pid = None

    def __init__(self, folder: Path, ours: Ours) -> None:
        self._path, self._ours = folder / "append", ours
        self._program = compiled("append", "append.c", "party.c")

    def calibrate(self, wanted_s: float) -> None:
        """Repeat the groups of our last run."""

    def measure(self) -> Values:
        groups = self._ours.groups
        sizes = "\n".join(str(round(one * self._ours.bytes_per_message)) for one in groups)
        done = subprocess.run(
            [self._program, self._path], input=sizes, capture_output=True, text=True, check=False
        )
        self._path.unlink(missing_ok=True)
        if done.returncode:
            raise LoadFailed(done.stderr.strip())
        return {RATE.key: sum(groups) / json.loads(done.stdout)["seconds"]}


class OneEach:
    """LMDB with one transaction for each message, and nothing but the message in it."""

    name = LMDB
    pid = None

    def __init__(self, folder: Path) -> None:
        (folder / "lmdb").mkdir()
        self._env = lmdb.open(str(folder / "lmdb"), map_size=MAP_BYTES)
        self._body = bodies(1)[0]
        self._next = 0
        self._count = 50

    def _run(self) -> float:
        started_s = time.perf_counter()
        for number in range(self._next, self._next + self._count):
            with self._env.begin(write=True) as transaction:
                transaction.put(number.to_bytes(8, "big"), self._body, append=True)
        self._next += self._count
        return time.perf_counter() - started_s

    def calibrate(self, wanted_s: float) -> None:
        self._count = turns_for(self._run(), self._count, wanted_s)

    def measure(self) -> Values:
        return {RATE.key: self._count / self._run()}


class Server:
    """A server with a log of its own, driven by the load generator."""

    def __init__(self, name: str, running: RunningLog, producers: int, messages: int) -> None:
        self.name, self.pid = name, running.pid
        self._plan = running.plan(producers, bodies(messages))
        self._per_turn = producers * messages
        self._turns = 1

    def _run(self) -> float:
        return float(run(self._plan, self._turns)["seconds"])

    def calibrate(self, wanted_s: float) -> None:
        while (took_s := self._run()) < TRIAL_S:
            growth = min(GROWTH, 1.5 * TRIAL_S / max(took_s, 1e-6))
            self._turns = max(self._turns + 1, int(self._turns * growth))
        self._turns = max(1, round(self._turns * wanted_s / took_s))

    def measure(self) -> Values:
        return {RATE.key: self._per_turn * self._turns / self._run()}
