"""The pages name files and functions that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "bench", "examples", ".ci")
# Lists of what was renamed.
HISTORY = ("changed-texts.md",)
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = [
    ARCHITECTURE,
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in HISTORY),
]
# A path of a source file, without placeholders such as <name>.
FILE = re.compile(r"(?<![\w<>*{}./-])\.?\w[\w/-]*\.(?:pyx|pxd|py|h)\b")
# `bus/delivery.py` (`_check_rate`), with the class before a dot if there is one
FUNCTION = re.compile(r"`([\w/]+\.(?:pyx|py))` \(`(?:[A-Z]\w*\.)?(\w+)`[),]")


@cache
def sources() -> list[str]:
    inner = [str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    return [*inner, str(ROOT / "setup.py")]


def files_named(name: str) -> list[Path]:
    """Return the files with this name; a page may leave out outer folders."""
    return [Path(path) for path in sources() if path.endswith(f"/{name}")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    names = {
        name for code in re.findall(r"`([^`]+)`", page.read_text()) for name in FILE.findall(code)
    }
    gone = {name for name in names if "NAME" not in name and not files_named(name)}
    assert not gone


@pytest.mark.parametrize(("name", "function"), FUNCTION.findall(ARCHITECTURE.read_text()))
def test_named_function_exists(name: str, function: str) -> None:
    texts = [path.read_text() for path in files_named(name)]
    defined = re.compile(rf"^ *(?:async )?c?p?def .*\b{function}\(", re.MULTILINE)
    assert any(defined.search(text) for text in texts)


def test_architecture_names_files_and_functions() -> None:
    assert len(set(FILE.findall(ARCHITECTURE.read_text()))) > 40
    assert len(FUNCTION.findall(ARCHITECTURE.read_text())) > 7
