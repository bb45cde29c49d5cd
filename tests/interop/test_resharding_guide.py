"""The commands and the code of the resharding guide run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.interop.test_hardening_guide import PRELUDE, ROOT, TIMEOUT_S, free_port

GUIDE = ROOT / "docs" / "guides" / "resharding.md"


def test_snippets_of_the_guide_do_what_it_says():
    text, port = GUIDE.read_text(), str(free_port())
    commands = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # `! command` does not end a shell with -e, so a command that must fail is put the other way.
    inverted = r"if \1; then echo 'must fail: \1'; exit 9; fi"
    script = re.sub(r"^! (.*)$", inverted, commands, flags=re.MULTILINE)
    script += f"polybus-python guide.py polybus://127.0.0.1:{port}\n"
    script += "polybus topic info orders --json | grep '\"generation\": 4'\n"
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as folder:
        tools = Path(folder, "bin")
        tools.mkdir()
        Path(folder, "guide.py").write_text(f"import sys\n\nurl = sys.argv[1]\n{code}")
        for name, words in (("polybus", "-m polybus"), ("polybus-python", "")):
            tool = tools / name
            tool.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            tool.chmod(0o700)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("POLYBUS_")}
        own = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": folder,
            "POLYBUS_URL": f"polybus://127.0.0.1:{port}",
        }
        done = subprocess.run(
            ["bash", "-c", PRELUDE + script.replace("6570", port)],
            cwd=folder,
            env=kept | own,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert done.returncode == 0, said
        assert "draining: group billing has 1 shard (" in done.stdout
        assert "is still draining: group billing has 1 shard (" in done.stderr
