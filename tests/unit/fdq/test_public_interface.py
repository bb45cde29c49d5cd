"""The public interface of FDQ: a change here is a change of the interface."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from polybus import fdq
from polybus.dialects.fdq.client.producer import DeliveryOptions

NAMES = [
    "Consumer",
    "Envelope",
    "MessageRequest",
    "Producer",
    "Transaction",
    "aio",
    "replay",
    "reset",
    "reshard",
    "stats",
]
ASYNC_NAMES = ["Consumer", "Producer", "Replay", "replay", "reset", "reshard", "stats"]
FIELDS = {
    "insertion_time",
    "shard_key",
    "message",
    "shard_index",
    "executor_index",
    "topic",
    "id",
    "shard",
    "offset",
    "timestamp_ns",
    "headers",
    "delivery",
    "shard_epoch",
}


def test_exported_names() -> None:
    assert fdq.__all__ == NAMES
    assert set(NAMES) <= set(dir(fdq))
    assert all(getattr(fdq, name) is not None for name in NAMES)
    assert fdq.aio.__all__ == ASYNC_NAMES
    assert all(getattr(fdq.aio, name) is not None for name in ASYNC_NAMES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Broker'"):
        fdq.Broker  # noqa: B018


def test_fields_of_an_envelope() -> None:
    assert {name for name in fdq.Envelope.__slots__ if not name.startswith("_")} == FIELDS
    assert callable(fdq.Envelope.transaction)


def test_message_request_fields() -> None:
    assert fdq.MessageRequest._fields == ("shard_key", "message", "headers")
    assert fdq.MessageRequest("k", b"x").headers is None


def test_calls_of_the_specification() -> None:
    """Accept arguments by position and by name."""
    produce = inspect.signature(fdq.Producer.produce).parameters
    assert list(produce)[1:] == ["topic", "shard_key", "message", "headers", "wait", "options"]
    assert set(DeliveryOptions.__annotations__) == {"delay_s", "deliver_at", "ttl_s"}
    batch = inspect.signature(fdq.Producer.produce_batch).parameters
    assert list(batch)[1:3] == ["topic", "messages"]
    assert list(inspect.signature(fdq.Producer).parameters)[:2] == ["url", "name"]


@pytest.mark.parametrize("twin", ["produce", "produce_batch", "flush", "close"])
def test_async_producer_has_the_same_parameters(twin: str) -> None:
    plain = inspect.signature(getattr(fdq.Producer, twin)).parameters
    other = inspect.signature(getattr(fdq.aio.Producer, twin)).parameters
    assert list(plain.values()) == list(other.values())


def test_import_loads_no_heavy_module() -> None:
    program = (
        "import sys; from polybus import fdq; fdq.__all__;"
        "print([name for name in ('pyarrow', 'lmdb', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
