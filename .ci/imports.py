"""Check the import contracts of pyproject.toml, compiled modules included.

import-linter reads Python files only: a compiled module is invisible to it, both as
importer and as imported. So it is given a shadow of the package in build/imports, in
which each .pyx with its .pxd is a .py that holds just their imports.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+c?import|c?import\s+([\w.]+))\b", re.MULTILINE)


def imports_of(source: Path) -> str:
    """The imports of a .pyx and its .pxd, as lines of Python."""
    texts = [path.read_text() for path in (source, source.with_suffix(".pxd")) if path.exists()]
    names = [first or second for text in texts for first, second in IMPORT.findall(text)]
    return "".join(f"import {name}\n" for name in names)


def build_shadow(shadow: Path) -> None:
    shutil.rmtree(shadow, ignore_errors=True)
    unread = shutil.ignore_patterns("__pycache__", "*.so", "*.pyi", "*.c", "*.h", "*.egg-info")
    shutil.copytree(ROOT / "src", shadow, ignore=unread)
    for source in shadow.rglob("*.pyx"):
        source.with_suffix(".py").write_text(imports_of(source))


def lint(shadow: Path) -> subprocess.CompletedProcess[str]:
    command = [ROOT / ".venv/bin/lint-imports", "--no-cache", "--no-logo"]
    environment = {**os.environ, "PYTHONPATH": str(shadow), "NO_COLOR": "1", "COLUMNS": "400"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def main() -> int:
    shadow = ROOT / "build" / "imports"
    build_shadow(shadow)
    done = lint(shadow)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
    else:
        sys.stdout.write(done.stdout.strip().splitlines()[-1] + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
