"""The units of the guides: systemd knows every line, and their limits fit those of the bus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from polybus.server.process_tuning import DescriptorLimit, DescriptorUse, fit_limits
from polybus.server.settings import Settings

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PROGRAM = "/opt/polybus/bin/polybus"


def read_unit(guide: str) -> str:
    (unit,) = re.findall(r"```ini\n(\[Service\]\n.*?)```", (GUIDES / guide).read_text(), re.DOTALL)
    return str(unit)


def value_of(unit: str, key: str) -> int:
    (value,) = re.findall(rf"^{key}=(\d+)$", unit, re.MULTILINE)
    return int(value)


@pytest.mark.parametrize("guide", ["hardening.md", "running.md"])
def test_systemd_accepts_the_unit(guide, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "polybus.service"
    unit.write_text(read_unit(guide).replace(PROGRAM, "/bin/true"))
    command = ["systemd-analyze", "verify", str(unit)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    # An unknown value is a warning, and systemd ignores the line.
    assert (checked.stdout + checked.stderr, checked.returncode) == ("", 0)


@pytest.mark.parametrize("guide", ["hardening.md", "running.md"])
def test_descriptors_of_the_unit_suffice_for_all_listeners(guide):
    limit = value_of(read_unit(guide), "LimitNOFILE")
    settings = Settings()
    use = DescriptorUse({"native": 5}, needs_reserve=True)  # with TLS, and beside pirate
    assert fit_limits(settings, DescriptorLimit(limit, limit), use) is settings


def test_tasks_of_the_unit_suffice_for_all_calls():
    assert value_of(read_unit("hardening.md"), "TasksMax") >= 2 * (
        Settings().section("native").max_calls
    )
