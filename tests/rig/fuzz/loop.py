"""The loop of the fuzz driver (driver.py), which runs in its child process.

Two runs with one seed take the same steps. Only the end may depend on the clock.
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.rig.fuzz.coverage import Coverage
from tests.rig.fuzz.mutation import Mutator, words_of

REPORT_EVERY_S = 5.0
FAVOUR_LATEST = 8  # half of the time, one of the inputs that found something last
HEADER = struct.Struct("<QQ")  # of the shared file: number of this run, size of its input

Keep = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    name: str
    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...]


def load_target(path: Path) -> Target:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = tuple(getattr(module, "WORDS", ()))
    return Target(path.stem, module.target, tuple(module.SEEDS), words)


class CurrentInput:
    """The shared file with the input that the child runs now."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        size = HEADER.size + max_bytes
        with path.open("r+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)

    def put(self, run: int, data: bytes) -> None:
        HEADER.pack_into(self._map, 0, run, len(data))
        self._map[HEADER.size : HEADER.size + len(data)] = data

    def run(self) -> int:
        return int(HEADER.unpack_from(self._map)[0])

    def data(self) -> bytes:
        size = HEADER.unpack_from(self._map)[1]
        return self._map[HEADER.size : HEADER.size + size]


@dataclass
class Fuzzer:
    """Runs one target; `corpus` holds every input that did something new."""

    target: Target
    current: CurrentInput
    max_bytes: int
    coverage: Coverage = field(default_factory=Coverage)
    corpus: list[bytes] = field(default_factory=list)
    words: list[bytes] = field(default_factory=list)
    learned: int = 0
    runs: int = 0

    def try_input(self, data: bytes) -> bool:
        """Run an input. Returns whether it did something new. Raises the target's exceptions."""
        self.runs += 1
        self.current.put(self.runs, data)
        self.coverage.start()
        try:
            self.target.run(data)
        finally:
            fresh = self.coverage.stop()
        if fresh:
            self.corpus.append(data)
            self.learn()
        return fresh > 0

    def learn(self) -> None:
        """Add new constants of comparisons to the words: a new branch may have brought some."""
        constants = self.coverage.constants(since=self.learned)
        self.learned += len(constants)
        self.words += [word for constant in constants for word in words_of(constant)]

    def start(self, saved: list[bytes]) -> None:
        self.words += self.target.words
        for data in [*self.target.seeds, *saved]:
            self.try_input(data[: self.max_bytes])
        if self.coverage.edges() == 0:
            raise NotInstrumented
        if not self.corpus:
            self.corpus.append(b"")

    def climb(self, chance: Random, may_go_on: Callable[[int], bool], keep: Keep) -> None:
        mutator = Mutator(self.corpus, self.words, self.max_bytes)
        while may_go_on(self.runs):
            data = mutator.mutate(self.choose(chance), chance)
            if self.try_input(data):
                keep(data)

    def choose(self, chance: Random) -> bytes:
        if chance.random() < 0.5:
            return chance.choice(self.corpus[-FAVOUR_LATEST:])
        return chance.choice(self.corpus)

    def summary(self) -> str:
        return f"runs={self.runs} edges={self.coverage.edges()} corpus={len(self.corpus)}"


class NotInstrumented(Exception):
    """The seeds took no branch that is watched."""


class Budget:
    """Decides when to stop, and prints the progress."""

    def __init__(self, max_runs: int, seconds: float, fuzzer: Fuzzer) -> None:
        self._max_runs = max_runs
        self._end_s = time.monotonic() + seconds
        self._report_s = time.monotonic() + REPORT_EVERY_S
        self._fuzzer = fuzzer

    def __call__(self, runs: int) -> bool:
        now_s = time.monotonic()
        if now_s >= self._report_s:
            print(f"{self._fuzzer.target.name}: {self._fuzzer.summary()}", flush=True)
            self._report_s = now_s + REPORT_EVERY_S
        return runs < self._max_runs and now_s < self._end_s


def keeper(folder: Path | None) -> Keep:
    def keep(data: bytes) -> None:
        if folder:
            (folder / digest(data)).write_bytes(data)

    return keep


def saved_inputs(folder: Path | None) -> list[bytes]:
    if folder is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def digest(data: bytes) -> str:
    """A name for an input's file."""
    return hashlib.sha256(data).hexdigest()[:16]
