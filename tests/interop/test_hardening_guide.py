"""The commands of the hardening guide run as written, one after the other."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "hardening.md"
PORTS = ("6570", "6568")
TIMEOUT_S = 120.0
PRELUDE = "set -eum\ntrap 'kill %1 2>/dev/null || true' EXIT\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_commands_of_the_guide_succeed_or_fail_as_documented():
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    # `! command` does not end a shell with -e, so a command that must fail is put the other way.
    inverted = r"if \1; then echo 'must fail: \1'; exit 9; fi"
    script = re.sub(r"^! (.*)$", inverted, "".join(blocks), flags=re.MULTILINE)
    for port in PORTS:
        script = script.replace(port, str(free_port()))
    with tempfile.TemporaryDirectory(prefix="hg-", dir="/tmp") as folder:
        tools = Path(folder) / "bin"
        tools.mkdir()
        polybus = tools / "polybus"
        polybus.write_text(f'#!/bin/sh\nexec {sys.executable} -m polybus "$@"\n')
        polybus.chmod(0o700)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("POLYBUS_")}
        own = {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": folder}
        done = subprocess.run(
            ["bash", "-c", PRELUDE + script],
            cwd=folder,
            env=kept | own,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        log = Path(folder) / "serve.log"
        logged = log.read_text() if log.exists() else ""
        said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}{logged}"
        assert done.returncode == 0, said
