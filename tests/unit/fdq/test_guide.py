"""The FDQ guide agrees with the code and contains the definition of exactly-once."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from polybus import fdq
from polybus.cli.main import all_commands
from polybus.dialects.fdq import limits

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "fdq.md").read_text()


def rows() -> dict[str, str]:
    """Return the first two cells of each table row that begins with a name in code."""
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", GUIDE, re.MULTILINE))


def test_guide_lists_every_keyword_of_consume_with_its_default():
    parameters = list(inspect.signature(fdq.Consumer.consume).parameters.values())[4:]
    documented = rows()
    for one in parameters:
        assert documented[one.name] == f"`{one.default!r}`".replace("'", '"'), one.name


def test_guide_lists_the_consumer_settings():
    for name in ("heartbeat_s", "dead_s"):
        default = inspect.signature(fdq.Consumer).parameters[name].default
        assert f"{name}={default!r}" in GUIDE


def test_guide_lists_the_limits():
    assert f"{limits.MAX_KEY_BYTES} bytes of UTF-8" in GUIDE
    assert f"up to {limits.MAX_MESSAGE_BYTES >> 20} MiB" in GUIDE
    assert f"headers up to {limits.MAX_HEADER_BYTES >> 20} MiB" in GUIDE


def test_guide_lists_every_envelope_field():
    for name in fdq.Envelope.__slots__:
        if not name.startswith("_") and name != "shard_epoch":
            assert f"`{name}`" in GUIDE, name


def test_guide_defines_exactly_once():
    assert (
        "Exactly once, said precisely: `with envelope.transaction() as tx: tx.produce(...)` makes "
        "the ack and everything produced one atomic step. Effects outside the bus are "
        "at-least-once, with `id` and `delivery` to deduplicate by."
    ) in GUIDE


def test_commands_and_names_of_the_guide_exist():
    commands = all_commands()
    for noun in re.findall(r"polybus (\w+)", GUIDE):
        assert noun in commands or noun == "import", noun
    for name in re.findall(r"fdq\.(\w+)\(", GUIDE):
        assert name in fdq.__all__, name


def test_files_of_the_guide_exist():
    for path in re.findall(r"\]\(((?:\.\./)+[\w./]+)\)", GUIDE):
        assert (ROOT / "docs" / "guides" / path).exists(), path
