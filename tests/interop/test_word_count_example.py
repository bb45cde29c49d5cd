"""The example counts correctly while its consumers are killed at random."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from polybus.errors import DoesNotExist
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "word_count.py"
WORDS = ("a", "rose", "is", "the", "sea")
LINES = 800
KILLS = 3
PATIENCE_S = 120.0


def acked(bus: NativeBus) -> int:
    with bus.client() as client:
        try:
            return int(client.topic_stats("example.lines")["all"]["acked"])
        except DoesNotExist:
            return 0


def wait_for(bus: NativeBus, example: psutil.Process, lines: int) -> None:
    def are_there() -> bool:
        assert example.status() != psutil.STATUS_ZOMBIE, "it has ended"
        return acked(bus) >= lines

    until(are_there, "they count", PATIENCE_S)


def kill_some(bus: NativeBus, example: psutil.Process, choices: random.Random) -> None:
    """Kill one consumer after some progress, then another, and in the end all at once."""
    for kill in range(1, KILLS + 1):
        wait_for(bus, example, kill * LINES // (2 * KILLS))
        consumers = example.children()
        for consumer in consumers if kill == KILLS else [choices.choice(consumers)]:
            consumer.kill()


@pytest.mark.timeout(170)
def test_every_word_is_counted_once_after_kills(tmp_path):
    seed = random.randrange(1 << 32)
    choices = random.Random(seed)
    lines = [" ".join(choices.choices(WORDS, k=choices.randint(0, 9))) for _ in range(LINES)]
    text, output = tmp_path / "text", tmp_path / "output"
    text.write_text("\n".join(lines))
    with NativeBus() as bus, output.open("w") as said:
        command = [sys.executable, str(EXAMPLE), bus.url, str(text)]
        example = subprocess.Popen(command, stdout=said)
        try:
            kill_some(bus, psutil.Process(example.pid), choices)
            assert example.wait(PATIENCE_S) == 0
        finally:
            example.kill()
            example.wait()
    printed = output.read_text()
    found = re.findall(r"^ +(\d+) (\w+)$", printed, re.MULTILINE)
    counted = {word: int(times) for times, word in found}
    assert counted == Counter(word for line in lines for word in line.split()), f"seed {seed}"
    assert printed.count("has died") >= KILLS - 1
