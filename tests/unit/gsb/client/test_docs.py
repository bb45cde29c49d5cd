"""The guide documents the client's API, errors, defaults and commands."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from polybus import errors, gsb
from polybus.dialects.gsb import cli
from polybus.dialects.gsb.client.client import Client
from polybus.dialects.gsb.client.gsb_options import ClientOptions
from polybus.dialects.gsb.codec import BUS_ERRORS

GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "gsb.md").read_text()
PROPERTIES = ("reconnects", "last_loss")


def test_every_method_is_documented():
    methods = [name for name, _ in inspect.getmembers(Client, inspect.isfunction)]
    for name in methods:
        if not name.startswith("_") and name != "open":
            assert f"`{name}(" in GUIDE, name
    for name in PROPERTIES:
        assert f"`{name}`" in GUIDE


def test_every_failure_of_the_bus_is_documented():
    for code, kind in BUS_ERRORS.items():
        if kind is not errors.CallCancelled:  # the caller that cancels gets no other error
            assert re.search(rf"^\| `{kind.__name__}` \| {int(code)}:", GUIDE, re.MULTILINE), code


@pytest.mark.parametrize(
    ("option", "shown"),
    [("stream_connections", "16"), ("threads", "16"), ("max_calls", "10 000")],
)
def test_documented_defaults_match(option, shown):
    assert f"`{option}` ({shown})" in GUIDE or f"(`{option}`, {shown})" in GUIDE
    assert getattr(ClientOptions(), option) == int(shown.replace(" ", ""))


def test_every_command_is_documented():
    for command in cli.group().registered_commands:
        assert f"polybus gsb {command.name} " in GUIDE


def test_public_names_can_be_imported():
    for name in gsb.__all__:
        assert getattr(gsb, name) is not None
    assert set(gsb.__all__) <= set(dir(gsb))
    with pytest.raises(AttributeError):
        gsb.nothing  # noqa: B018
