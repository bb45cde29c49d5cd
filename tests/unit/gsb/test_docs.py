"""The specification of GSB documents the kinds, codes, reasons and settings of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.limits import GsbLimits
from polybus.dialects.gsb.service_address import StatusCode
from tests.rig.gsb_wire import FROM_CLIENTS

SPEC = (Path(__file__).parents[3] / "docs" / "spec" / "gsb.md").read_text()


def rows() -> list[list[str]]:
    """Return the cells of every row of every table."""
    lines = re.findall(r"^\| (.+?) \|$", SPEC, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_every_kind_of_packet_is_documented():
    for kind in pb.Packet.DESCRIPTOR.fields:
        (row,) = [row for row in rows() if row[:2] == [str(kind.number), f"`{kind.name}`"]]
        assert kind.message_type is not None
        fields = ", ".join(field.name for field in kind.message_type.fields)
        assert row[3] == f"`{fields}`"
        assert row[2].startswith(("client", "both")) == (kind.name in FROM_CLIENTS)


def test_every_close_reason_is_documented():
    reasons = (
        sp.BAD_GREETING,
        sp.BAD_FRAME,
        codec.NO_PACKET,
        codec.WRONG_DIRECTION,
        codec.BAD_REPLY_TYPE,
        codec.SECOND_HELLO,
        sp.TOO_LARGE,
    )
    documented = [row[0].strip("`") for row in rows()]
    assert [name for name in documented if name in reasons] == list(reasons)


def test_every_status_code_is_documented():
    documented = {row[0] for row in rows()}
    assert {str(int(code)) for code in StatusCode if code is not StatusCode.FAILURE} <= documented


def test_every_setting_is_documented():
    documented = {row[0] for row in rows()}
    for field in dataclasses.fields(GsbLimits):
        assert f"`[gsb] {field.name}`" in documented


def test_greeting_is_documented():
    assert sp.GREETING.hex(" ").replace(" 00 10 ", " | 00 10 | ") in SPEC
