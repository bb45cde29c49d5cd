"""pyproject.toml declares exactly the packages that polybus imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Packages whose modules have another name.
MODULES = {"pyzmq": "zmq", "protobuf": "google", "typing-extensions": "typing_extensions"}
OWN = {"polybus", "pyspark_polybus"}
SPARK = {"pyspark", "py4j"}  # py4j comes with PySpark, which exposes its objects


def declared(requirements: list[str]) -> set[str]:
    names = (re.split(r"[<>=~! ]", one, maxsplit=1)[0] for one in requirements)
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def imported() -> set[str]:
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - OWN - set(sys.stdlib_module_names)


def test_dependencies_are_the_imported_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert declared(project["dependencies"]) == imported() - SPARK
    extras = project["optional-dependencies"]
    assert set(extras) == {"dev", "spark"}
    assert declared(extras["spark"]) <= imported()
