"""docs/spec/native.md says what the code does: every action, field, kind and code of errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from polybus import errors
from polybus.model.arrow import PRODUCE_SCHEMA, READ_SCHEMA
from polybus.native.port.actions import ACTIONS
from polybus.native.port.topic_reader import READ_TICKET
from polybus.native.protocol.fields import KINDS, ActionSchema, Field
from polybus.transports.flight.flight_status import INTERNAL

PAGE = (Path(__file__).parents[3] / "docs" / "spec" / "native.md").read_text()


def section(heading: str) -> str:
    """What is under a heading, up to the next one."""
    (found,) = re.findall(
        rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    return found


def row(field: Field) -> str:
    default = "none" if field.default is None else f"`{json.dumps(field.default, default=str)}`"
    shown = "required" if field.is_required else default
    return f"| `{field.name}` | {field.kind} | {shown} | {field.meaning} |"


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\| `\w+` \|", line)]


@pytest.mark.parametrize("action", [action for action, _ in ACTIONS.values()], ids=lambda a: a.name)
def test_every_action_is_on_the_page_as_it_is(action: ActionSchema):
    text = section(f"`{action.name}`")
    assert rows(text) == [row(field) for field in action.fields]
    assert f"{action.meaning}." in text
    assert f"Answers: {action.answers}." in text


def test_no_other_action_is_on_the_page():
    assert re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE) == list(ACTIONS)


def test_the_ticket():
    assert rows(section("Read: DoGet")) == [row(field) for field in READ_TICKET.fields]


def test_the_kinds():
    named = re.findall(r"^\| (\w+) \|", section("Kinds of fields"), re.MULTILINE)
    assert named[1:] == list(KINDS)


def test_the_codes_of_errors():
    kinds = [errors.PolybusError]
    for kind in kinds:  # grows while it is walked
        kinds += kind.__subclasses__()
    codes = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", section("Errors"), re.MULTILINE)
    expected = {kind.code: kind.__name__ for kind in kinds} | {INTERNAL: ""}
    assert dict(codes) == expected


def test_the_schemas():
    produced = rows(
        section('Produce: DoPut, path `["produce", TOPIC]` or `["produce", TOPIC, "existing"]`')
    )
    assert [line.split("`")[1] for line in produced] == PRODUCE_SCHEMA.names
    (columns,) = re.findall(r"Batches come with `(.+?)`", PAGE)
    wanted = [f"{field.name} {field.type}" for field in READ_SCHEMA]
    told = columns.replace("utf8", "string").replace("map<string, binary>", wanted[-1][8:])
    assert told == ", ".join(wanted)
