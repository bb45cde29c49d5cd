"""The prose of the tree: comments, docstrings and string literals, by file and line.

Shared by the word linter (`words.py`) and the measurements (`measure.py`).
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMPILED = (".pyx", ".pxd")
C_SOURCES = (".h", ".c")

# Cython is close enough to Python for a tokenizer, not for a parser: a docstring is a
# triple-quoted string that begins a line.
CYTHON_DOCSTRING = re.compile(r'^[ \t]*r?"""(.*?)"""', re.DOTALL | re.MULTILINE)
CYTHON_COMMENT = re.compile(r"#(.*)$", re.MULTILINE)
C_COMMENT = re.compile(r"/\*(.*?)\*/|//(.*)$", re.DOTALL | re.MULTILINE)


class Prose(NamedTuple):
    """A piece of text that a reader reads. `kind` is comment, docstring, string or page."""

    path: str
    line: int
    kind: str
    text: str


def tracked(*patterns: str) -> list[str]:
    """The files that git tracks and that are still there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if (ROOT / path).is_file()]


def prose_of(path: str) -> Iterator[Prose]:
    text = (ROOT / path).read_text(errors="replace")
    if path.endswith((".py", ".pyi")):
        yield from _python(path, text)
    elif path.endswith(COMPILED):
        yield from _by_pattern(path, text, CYTHON_DOCSTRING, "docstring")
        yield from _by_pattern(path, CYTHON_DOCSTRING.sub(_blank, text), CYTHON_COMMENT, "comment")
    elif path.endswith(C_SOURCES):
        yield from _by_pattern(path, text, C_COMMENT, "comment")
    elif path.endswith(".md"):
        for number, line in enumerate(text.splitlines(), 1):
            yield Prose(path, number, "page", line)


def _python(path: str, text: str) -> Iterator[Prose]:
    docstrings = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings[first.value.lineno] = first.value.value
    for line, docstring in docstrings.items():
        yield Prose(path, line, "docstring", docstring)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            yield Prose(path, line, "comment", token.string.lstrip("#"))
        elif token.type == tokenize.STRING and line not in docstrings:
            yield Prose(path, line, "string", token.string)


def _by_pattern(path: str, text: str, pattern: re.Pattern[str], kind: str) -> Iterator[Prose]:
    for match in pattern.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Prose(path, line, kind, next(group for group in match.groups() if group is not None))


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")
