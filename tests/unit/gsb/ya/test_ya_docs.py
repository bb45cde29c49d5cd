"""The specification documents the packets, close reasons and codes of the deployed framing."""

from __future__ import annotations

import re
from pathlib import Path

from polybus.dialects.gsb.ya import codec, session
from polybus.dialects.gsb.ya import ya_pb2 as pb

SPEC = (Path(__file__).parents[4] / "docs" / "spec" / "gsb.md").read_text()
SECTION = SPEC.partition("## The deployed framing\n")[2].partition("\n## ")[0]


def test_every_kind_of_packet_is_documented():
    for kind in pb.Packet.DESCRIPTOR.fields:
        message = kind.message_type
        assert message is not None
        names = ", ".join(field.name for field in message.fields)
        fields = f"`{names}`" if names else "none"
        row = rf"^\| `{message.name}` \| {kind.number} \| [^|]+ \| {re.escape(fields)} \|$"
        assert re.search(row, SECTION, re.MULTILINE), message.name


def test_every_close_reason_is_documented():
    for reason in (codec.NO_HELLO, codec.BAD_HELLO, session.REPLACED):
        assert f"| `{reason}` |" in SECTION


def test_codes_of_failures_are_documented():
    listed = [int(code) for code in sorted(codec.REFUSALS)]
    assert f"of the bus: {', '.join(map(str, listed))} | 400 |" in SECTION
