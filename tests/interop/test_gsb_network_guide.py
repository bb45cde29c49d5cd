"""The commands of the guide to the network run as written, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.interop.test_hardening_guide import ROOT, TIMEOUT_S, free_port

GUIDE = ROOT / "docs" / "guides" / "gsb-network.md"
PORTS = ("7001", "7101", "7002", "7102", "7003")
PRELUDE = "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"
READY = "until polybus gsb id --at tcp://127.0.0.1:{} 2>/dev/null; do sleep 0.1; done\n"


def test_commands_of_the_guide_do_what_it_says():
    first, *blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    started = "".join(READY.format(port) for port in ("7001", "7002", "7003"))
    inverted = r"if \1; then echo 'must fail: \1'; exit 9; fi"
    script = re.sub(r"^! (.*)$", inverted, "".join(blocks), flags=re.MULTILINE)
    script = PRELUDE + first + started + script
    for port in PORTS:
        script = script.replace(port, str(free_port()))
    with tempfile.TemporaryDirectory(prefix="ng-", dir="/tmp") as folder:
        tools = Path(folder) / "bin"
        tools.mkdir()
        polybus = tools / "polybus"
        polybus.write_text(f'#!/bin/sh\nexec {sys.executable} -m polybus "$@"\n')
        polybus.chmod(0o700)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("POLYBUS_")}
        own = {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": folder}
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            env=kept | own,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    assert done.stdout.rstrip().endswith('"HELLO"'), done.stdout
