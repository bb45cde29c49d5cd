"""Fixtures of the tests that run commands against their own `bus`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polybus.cli import main
from tests.rig.native_bus import NativeBus


@pytest.fixture
def polybus(
    bus: NativeBus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command in this process. Returns its output, or its error if `code` is not 0."""
    monkeypatch.setenv("POLYBUS_URL", bus.url)

    def call(*args: str, code: int = 0) -> str:
        assert main.run(args) == code, capsys.readouterr()
        out, err = capsys.readouterr()
        assert err == "" if code == 0 else err.startswith("polybus: ")
        return out if code == 0 else err

    return call
