"""Measures the tree: size, names and language. Prints a table.

.ci/measure.py                 this checkout
.ci/measure.py OTHER ...       other checkouts beside it, one column each
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import prose

SOURCE = (".py", ".pyx", ".pxd", ".pyi", ".h", ".java")
# Basenames and class names that may stand once for each dialect.
PARALLEL_MODULES = {"__init__", "__main__", "codec", "session", "client", "cli", "limits"}
PARALLEL_CLASSES = {"Client", "Session", "Message", "Producer", "Consumer", "Subscription"}
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
PRIVATE = re.compile(r"\b(?:who|whoever|whom|nobody|somebody|told|what)\b", re.IGNORECASE)
PRECISE = re.compile(r"\b(?:must|should|returns?|raises?|if)\b", re.IGNORECASE)
COMMENTED = re.compile(r"src/polybus/(?:kernel|store)/|/session\.py$|\.pyx$")


def lines_of(paths: list[str]) -> int:
    return sum((prose.ROOT / path).read_text(errors="replace").count("\n") for path in paths)


def source(*folders: str) -> list[str]:
    return [path for path in prose.tracked(*folders) if path.endswith(SOURCE)]


def shared_basenames(paths: list[str]) -> int:
    """Modules whose basename another module has, outside the fixed set."""
    modules = {path.rsplit(".", 1)[0] for path in paths if path.endswith((".py", ".pyx"))}
    names = Counter(module.rsplit("/", 1)[1] for module in modules)
    return sum(n for name, n in names.items() if n > 1 and name not in PARALLEL_MODULES)


def duplicate_classes(paths: list[str]) -> list[str]:
    places = defaultdict(set)
    for path in paths:
        text = (prose.ROOT / path).read_text()
        if path.endswith(".py"):
            names = [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        elif path.endswith(".pyx"):
            names = re.findall(r"^(?:cdef )?class (\w+)", text, re.MULTILINE)
        else:
            continue
        for name in names:
            if not name.startswith("_") and name not in PARALLEL_CLASSES:
                places[name].add(path)
    return sorted(name for name, found in places.items() if len(found) > 1)


def language(paths: list[str]) -> tuple[float, float]:
    """Private and precise words per 1000 words of comments and docstrings."""
    pieces = (piece for path in paths for piece in prose.prose_of(path))
    texts = [piece.text for piece in pieces if piece.kind in ("comment", "docstring")]
    words = sum(len(WORD.findall(text)) for text in texts)
    private = sum(len(PRIVATE.findall(text)) for text in texts)
    precise = sum(len(PRECISE.findall(text)) for text in texts)
    return 1000 * private / words, 1000 * precise / words


def comment_share(paths: list[str]) -> float:
    """Whole-line comments among the lines of kernel, store and session code, in percent."""
    lines = [
        line.strip()
        for path in paths
        if COMMENTED.search(path) and path.endswith((".py", ".pyx"))
        for line in (prose.ROOT / path).read_text().splitlines()
    ]
    return 100 * sum(line.startswith("#") for line in lines) / len(lines)


def function_lengths(paths: list[str]) -> list[int]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in paths
        if path.endswith(".py")
        for node in ast.walk(ast.parse((prose.ROOT / path).read_text()))
        if isinstance(node, functions)
    )


def measure(root: Path) -> dict[str, str]:
    prose.ROOT = root
    src = [path for path in source("src") if not path.endswith(("_pb2.py", "_pb2.pyi"))]
    product = [path for path in src if "/testing/" not in path]
    tests = source("tests", "bench", "examples")
    private, precise = language(product)
    test_private, _ = language(source("tests"))
    lengths = function_lengths(product)
    classes = duplicate_classes(product)
    return {
        "lines of src": f"{lines_of(src):,}",
        "lines of src without testing/": f"{lines_of(product):,}",
        "lines of tests, bench, examples": f"{lines_of(tests):,}",
        "files of src": str(len(src)),
        "modules that share a basename": str(shared_basenames(product)),
        "duplicate class names": f"{len(classes)} {' '.join(classes[:8])}".strip(),
        "function length p95": str(lengths[int(len(lengths) * 0.95)]),
        "who/nobody/told/what per 1000 words": f"{private:.1f}",
        "the same in tests": f"{test_private:.1f}",
        "must/should/returns/raises/if per 1000": f"{precise:.1f}",
        "whole-line comments, kernel store session": f"{comment_share(src):.1f} %",
    }


def print_private(folders: list[str]) -> None:
    """Print the lines of comments and docstrings that have private words."""
    paths = source(*folders)
    for piece in (piece for path in paths for piece in prose.prose_of(path)):
        if piece.kind not in ("comment", "docstring"):
            continue
        for offset, line in enumerate(piece.text.splitlines()):
            if PRIVATE.search(line):
                sys.stdout.write(f"{piece.path}:{piece.line + offset}: {line.strip()}\n")
    private, precise = language(paths)
    sys.stdout.write(f"{private:.1f} private and {precise:.1f} precise words per 1000\n")


def main(others: list[str]) -> None:
    if others[:1] == ["--lines"]:
        print_private(others[1:])
        return
    columns = [measure(root.resolve()) for root in map(Path, others or [prose.ROOT])]
    for row in columns[0]:
        sys.stdout.write(f"{row:<44}" + "".join(f"{one[row]:<28}" for one in columns) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
