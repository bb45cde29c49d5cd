"""SP's greeting and frames, compared with bytes that nng wrote."""

from __future__ import annotations

import pytest

from polybus.dialects.gsb import sp
from polybus.errors import BadFrame
from tests.rig.gsb_wire import StreamFrames
from tests.vectors import gsb as golden

FORMS = {"tcp": sp.Form.TCP, "ipc": sp.Form.IPC}


@pytest.mark.parametrize("form", FORMS)
def test_greeting_equals_that_of_nng(form):
    assert golden.GREETINGS[form] == sp.GREETING


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vector", golden.VECTORS, ids=str)
def test_frames_are_written_as_nng_writes_them(vector, form):
    assert sp.frame(vector.payload, FORMS[form]) == getattr(vector, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_stream_of_nng_is_read_in_any_pieces(form, step):
    stream = golden.GREETINGS[form] + b"".join(getattr(vector, form) for vector in golden.VECTORS)
    frames = StreamFrames(FORMS[form], 1024)
    payloads = [
        payload
        for at in range(0, len(stream), step)
        for payload in frames.feed(stream[at : at + step])
    ]
    assert payloads == [vector.payload for vector in golden.VECTORS]


@pytest.mark.parametrize(
    "greeting",
    [
        b"\0SP\1\0\x10\0\0",  # another version
        b"\0SP\0\0\x11\0\0",  # PAIR version 1
        b"\0SP\0\0\x30\0\0",  # REQ
        b"\0SP\0\0\x10\0\1",  # reserved bytes
        b"GET / HT",
        b"G",
    ],
)
def test_wrong_greeting_is_refused_at_its_first_wrong_byte(greeting):
    with pytest.raises(BadFrame) as caught:
        StreamFrames(sp.Form.TCP, 1024).feed(greeting)
    assert caught.value.reason == sp.BAD_GREETING


def test_oversized_frame_is_refused_from_its_head():
    frames = StreamFrames(sp.Form.TCP, 10)
    assert frames.feed(sp.GREETING + sp.frame(b"x" * 10, sp.Form.TCP)) == [b"x" * 10]
    with pytest.raises(BadFrame) as caught:
        frames.feed((11).to_bytes(8, "big"))
    assert caught.value.reason == sp.TOO_LARGE


def test_ipc_frame_without_mark_is_refused():
    with pytest.raises(BadFrame) as caught:
        StreamFrames(sp.Form.IPC, 10).feed(sp.GREETING + b"\0")
    assert caught.value.reason == sp.BAD_FRAME
