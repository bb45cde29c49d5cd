"""docs/spec/native.md agrees with the code: actions, fields, kinds, error codes, schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from polybus import errors
from polybus.model.arrow import PRODUCE_SCHEMA, READ_SCHEMA
from polybus.native.port.actions import ACTIONS
from polybus.native.protocol.fields import KINDS, REQUIRED, Field, Request
from polybus.native.protocol.requests import ReadTicket
from polybus.transports.flight.flight_status import INTERNAL

PAGE = (Path(__file__).parents[3] / "docs" / "spec" / "native.md").read_text()


def section(heading: str) -> str:
    """Return the text below a heading, up to the next one."""
    (found,) = re.findall(
        rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    return found


def row(field: Field) -> str:
    default = "none" if field.default is None else f"`{json.dumps(field.default, default=str)}`"
    shown = "required" if field.default is REQUIRED else default
    return f"| `{field.name}` | {field.kind.name} | {shown} | {field.meaning} |"


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\| `\w+` \|", line)]


@pytest.mark.parametrize("request_class", ACTIONS, ids=lambda request: request.action_name)
def test_action_is_documented_as_declared(request_class: type[Request[Any]]):
    text = section(f"`{request_class.action_name}`")
    assert rows(text) == [row(field) for field in request_class.fields.values()]
    assert f"{request_class.meaning}." in text
    assert f"Answers: {request_class.answer}." in text


def test_no_other_action_is_documented():
    documented = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
    assert documented == [request.action_name for request in ACTIONS]


def test_fields_of_the_read_ticket_are_documented():
    assert rows(section("Read: DoGet")) == [row(field) for field in ReadTicket.fields.values()]


def test_kinds_of_fields_are_documented():
    named = re.findall(r"^\| (\w+) \|", section("Kinds of fields"), re.MULTILINE)
    assert named[1:] == list(KINDS)


def test_error_codes_are_documented():
    kinds = [errors.PolybusError]
    for kind in kinds:  # grows while it is walked
        kinds += kind.__subclasses__()
    codes = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", section("Errors"), re.MULTILINE)
    expected = {kind.code: kind.__name__ for kind in kinds} | {INTERNAL: ""}
    assert dict(codes) == expected


def test_arrow_schemas_are_documented():
    produced = rows(
        section('Produce: DoPut, path `["produce", TOPIC]` or `["produce", TOPIC, "existing"]`')
    )
    assert [line.split("`")[1] for line in produced] == PRODUCE_SCHEMA.names
    (columns,) = re.findall(r"Batches come with `(.+?)`", PAGE)
    wanted = [f"{field.name} {field.type}" for field in READ_SCHEMA]
    documented = columns.replace("utf8", "string").replace("map<string, binary>", wanted[-1][8:])
    assert documented == ", ".join(wanted)
