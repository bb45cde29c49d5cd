"""Packets, values and failures of the codec; gsb.proto and its compiled module agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polybus.dialects.gsb import codec
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.errors import BadFrame, DeadlinePassed, ServiceFailed
from tests.rig.gsb_wire import FROM_CLIENTS
from tests.vectors import gsb as golden

ROOT = Path(__file__).parents[3]


def test_compiled_module_matches_the_proto_file():
    subprocess.run([sys.executable, ".ci/proto.py", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize("vector", golden.PACKETS, ids=str)
def test_packets_survive_a_round_trip(vector):
    packet = codec.decode_packet(vector.payload)
    assert packet.WhichOneof("kind") == vector.kind
    assert packet.SerializeToString() == vector.payload


def test_kinds_have_the_numbers_of_the_spec():
    kinds = {field.name: field.number for field in pb.Packet.DESCRIPTOR.fields}
    assert list(kinds.values()) == list(range(1, 24))
    assert kinds["service_call_request"] == 6
    assert kinds["credit"] == 18
    assert set(kinds) > FROM_CLIENTS


@pytest.mark.parametrize("payload", [b"", b"\xff\xff", b"\x0a\x05x", b"\x98\x06\x01"])
def test_payload_that_is_not_a_packet_is_refused(payload):
    """Empty, noise, truncated, and of an unknown kind."""
    with pytest.raises(BadFrame) as caught:
        codec.decode_packet(payload)
    assert caught.value.reason == codec.NO_PACKET


def test_unknown_fields_are_ignored():
    known = pb.Packet(ping=pb.Ping(token=b"x")).SerializeToString()
    later = known + b"\x98\x06\x01"  # field 99 = 1
    assert codec.decode_packet(later).ping.token == b"x"


@pytest.mark.parametrize("value", [None, 0, "", "text", b"bytes", [1, {"a": None}], {1: 2.5}])
def test_values_survive_a_round_trip(value):
    assert codec.unpack(codec.pack(value)) == value


def test_none_is_packed_as_empty_data():
    assert codec.pack(None) == b""


def test_failure_of_the_bus_has_its_own_error_type():
    data = codec.pack_failure(codec.StatusCode.DEADLINE, "too late", codec.Origin.BUS)
    error = codec.error_from_reply(data, "a/b")
    assert type(error) is DeadlinePassed
    assert str(error) == "a/b: too late"


def test_failure_of_a_service_keeps_its_number():
    data = codec.pack_failure(codec.StatusCode.DEADLINE, "too late", codec.Origin.SERVICE)
    error = codec.error_from_reply(data, "a/b")
    assert isinstance(error, ServiceFailed)
    assert (error.status, str(error)) == (504, "a/b: too late")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\xa1x", b"\x81\xa4code\xa1x"])
def test_failure_data_of_any_other_form_is_a_service_failure(data):
    error = codec.error_from_reply(data, "a")
    assert isinstance(error, ServiceFailed)
    assert error.status == codec.StatusCode.FAILURE
