"""The public interface, written out: a change here is a change of the interface.

Names may be added, with an entry in CHANGELOG.md. Renaming or removing one, or
changing a code, breaks programs that exist.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import polybus
from polybus import errors

PUBLIC_NAMES = ["PolybusError", "__version__", "fdq", "freud", "gsb", "native", "pirate", "rqueue"]

# Name → (stable code, base class). The base shows whose fault the error is.
ERRORS = {
    "PolybusError": ("error", "Exception"),
    "UsageError": ("usage", "PolybusError"),
    "ConfigError": ("config", "UsageError"),
    "AddressError": ("address", "UsageError"),
    "InvalidTopic": ("invalid_topic", "UsageError"),
    "InvalidRule": ("invalid_rule", "UsageError"),
    "TooLarge": ("too_large", "UsageError"),
    "MalformedRequest": ("malformed_request", "UsageError"),
    "MissingExtra": ("missing_extra", "UsageError"),
    "PeerError": ("peer", "PolybusError"),
    "BadFrame": ("bad_frame", "PeerError"),
    "Refused": ("refused", "PolybusError"),
    "Denied": ("denied", "Refused"),
    "DoesNotExist": ("does_not_exist", "Refused"),
    "TopicDeleted": ("topic_deleted", "DoesNotExist"),
    "UnknownProducer": ("unknown_producer", "DoesNotExist"),
    "StageGone": ("stage_gone", "DoesNotExist"),
    "Trimmed": ("trimmed", "DoesNotExist"),
    "NotSupported": ("not_supported", "Refused"),
    "AlreadyExists": ("already_exists", "Refused"),
    "WrongKind": ("wrong_kind", "Refused"),
    "Conflict": ("conflict", "Refused"),
    "ShardSealed": ("shard_sealed", "Refused"),
    "Fenced": ("fenced", "Refused"),
    "Expired": ("expired", "Fenced"),
    "OutOfSequence": ("out_of_sequence", "Refused"),
    "Stale": ("stale", "Refused"),
    "CallCancelled": ("call_cancelled", "Refused"),
    "Paused": ("paused", "Refused"),
    "LimitReached": ("limit_reached", "Refused"),
    "ServiceFailed": ("service_failed", "PolybusError"),
    "StoreFault": ("store_fault", "PolybusError"),
    "Damaged": ("damaged", "StoreFault"),
    "WrongFormat": ("wrong_format", "StoreFault"),
    "Unavailable": ("unavailable", "PolybusError"),
    "AddressInUse": ("address_in_use", "Unavailable"),
    "DataFolderInUse": ("data_folder_in_use", "Unavailable"),
    "StoreFull": ("store_full", "Unavailable"),
    "StoreClosed": ("store_closed", "Unavailable"),
    "ServiceGone": ("service_gone", "Unavailable"),
    "DeadlinePassed": ("deadline_passed", "Unavailable"),
    "NotConnected": ("not_connected", "Unavailable"),
    "ConnectionLost": ("connection_lost", "Unavailable"),
    "OutcomeUnknown": ("outcome_unknown", "Unavailable"),
}

# A program that only wants the version, or an error to catch, must not pay for these.
HEAVY = ["asyncio", "uvloop", "pyarrow", "zmq", "lmdb", "google.protobuf", "typer", "rich"]


def error_classes() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }


def test_public_names() -> None:
    assert polybus.__all__ == PUBLIC_NAMES


def test_every_public_name_is_there() -> None:
    for name in PUBLIC_NAMES:
        assert getattr(polybus, name) is not None, name
        assert name in dir(polybus)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'kafka'"):
        polybus.kafka  # noqa: B018


def test_errors_and_their_codes() -> None:
    found = {
        name: (vars(error).get("code"), error.__base__.__name__ if error.__base__ else "")
        for name, error in error_classes().items()
    }
    assert found == ERRORS


def test_codes_are_unique() -> None:
    codes = [code for code, _ in ERRORS.values()]
    assert sorted(codes) == sorted(set(codes))


def drawn_tree() -> dict[str, str]:
    """Name → parent, read from the drawing on top of errors.py: four columns a level."""
    parents: dict[str, str] = {}
    path = ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"    ((?:[│├└ ][─ ]{2} )*)([A-Z]\w+)(?:  .*)?$", line)
        if drawn:
            depth = 1 + len(drawn[1]) // 4
            parents[drawn[2]] = path[depth - 1]
            path[depth:] = [drawn[2]]
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    assert drawn_tree() == {name: parent for name, (_, parent) in ERRORS.items()}


def test_import_is_light() -> None:
    program = f"import sys, polybus; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
