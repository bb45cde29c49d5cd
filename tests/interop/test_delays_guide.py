"""The snippets of the guide on delays run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.rig.native_bus import NativeBus

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "delays.md"
TIMEOUT_S = 120.0


def test_snippets_of_the_guide_run(tmp_path):
    page = GUIDE.read_text()
    tool = tmp_path / "polybus"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m polybus "$@"\n')
    tool.chmod(0o700)
    with NativeBus() as bus:
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "POLYBUS_URL": bus.url}
        snippets = [
            *(
                ("bash", "-ec", script)
                for script in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
            ),
            *(
                (sys.executable, "-c", program)
                for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
            ),
        ]
        assert len(snippets) == 4
        for command in snippets:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
            )
            assert done.returncode == 0, f"{command[-1]}\n{done.stderr}"
        with bus.client() as client:
            assert client.topic("alerts")["settings"]["expired"] == "dead-letter"
            assert client.topic("reminders")["delayed"]["messages"] >= 2
