"""A guide of the documentation, whose snippets run as written.

page = GuidePage("resharding.md")
done = page.run("".join(page.snippets("sh")), ports=["6570"])
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.rig.free_port import free_port

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TIMEOUT_S = 120.0
# Programs in the PATH of the commands, and the words that each has before its arguments.
TOOLS = {"polybus": "-m polybus", "polybus-python": ""}
# Each command must succeed, and background processes end with the shell.
PRELUDE = "set -eum\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"


class GuideRun(NamedTuple):
    stdout: str
    stderr: str
    log: str  # of a bus that writes it to serve.log


class GuidePage:
    def __init__(self, name: str) -> None:
        self.text = (GUIDES / name).read_text()

    def snippets(self, language: str) -> list[str]:
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)

    def run(
        self,
        script: str,
        ports: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> GuideRun:
        """Run a script in a folder with these files. Each of `ports` is replaced by a free one."""
        # `! command` does not end a shell with -e, so a command that must fail is put the other
        # way.
        inverted = r"if \1; then echo 'must fail: \1'; exit 9; fi"
        script = re.sub(r"^! (.*)$", inverted, script, flags=re.MULTILINE)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("POLYBUS_")}
        for port in ports:
            free = str(free_port())
            script = script.replace(port, free)
            env = {key: value.replace(port, free) for key, value in (env or {}).items()}
        with tempfile.TemporaryDirectory(prefix="pb-guide-", dir="/tmp") as folder:
            tools = Path(folder, "bin")
            tools.mkdir()
            for name, words in TOOLS.items():
                tool = tools / name
                tool.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
                tool.chmod(0o700)
            for name, text in (files or {}).items():
                Path(folder, name).write_text(text)
            own = {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": folder}
            done = subprocess.run(
                ["bash", "-c", PRELUDE + script],
                cwd=folder,
                env={**kept, **own, **(env or {})},
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )
            log = Path(folder, "serve.log")
            run = GuideRun(done.stdout, done.stderr, log.read_text() if log.exists() else "")
        assert done.returncode == 0, f"{run.stdout[-2000:]}{run.stderr[-3000:]}{run.log}"
        return run
