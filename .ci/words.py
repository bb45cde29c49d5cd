"""The word linter: patterns of STYLE that make prose hard to search and to follow.

    .ci/words.py [path ...]         checks source, tests and docs; one line per finding
    .ci/words.py --commit FILE      checks the subject of a commit message

A line that needs a listed word says so in `.ci/words_allowed.txt`: path, tab, the words.
Exit code 1 if there is a finding.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from prose import ROOT, prose_of, tracked

ALLOWED = ROOT / ".ci" / "words_allowed.txt"
CHECKED = ("*.py", "*.pyi", "*.pyx", "*.pxd", "*.h", "*.c", "*.md")
SKIPPED = re.compile(r"^\.ci/words|_pb2\.pyi?$|^tests/golden/v|^docs/changed-texts\.md$")

# pattern -> what to write instead
PATTERNS = {
    r"whoever|whom": "the caller, the peer, the producer",
    r"nobody|somebody|everybody|anybody": "no consumer, a subscriber, every client",
    r"(?:is|are|was|were|be|been|being|gets?) told": "receives, is notified, the bus reports",
    r"what waits|what is on its way|on its way": "pending batches, in-flight bytes",
    r"anew|for ever|by now": "again, forever, already",
    r"under way": "in progress, running",
    r"those who|he who": "the clients that",
    r"is heard of|heard of": "is reported, was last seen",
    r"from \d+ on\b": ">= N",
}
FINDING = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): hint for words, hint in PATTERNS.items()}

SUBJECT = re.compile(r"^(?:[a-z0-9_.-]+(?:, [a-z0-9_.-]+)*: \S|Merge |Revert )")
MAX_SUBJECT = 72


def allowed() -> set[tuple[str, str]]:
    lines = (line for line in ALLOWED.read_text().splitlines() if line and line[0] != "#")
    return {(path, words.lower()) for path, words in (line.split("\t")[:2] for line in lines)}


def findings(paths: list[str]) -> Iterator[str]:
    exceptions = allowed()
    for path in paths:
        for piece in prose_of(path):
            for pattern, hint in FINDING.items():
                for match in pattern.finditer(piece.text):
                    if (path, match.group().lower()) in exceptions:
                        continue
                    line = piece.line + piece.text.count("\n", 0, match.start())
                    yield f"{path}:{line}: {match.group()!r}: write {hint}"


def check_commit(message: Path) -> list[str]:
    subject = message.read_text().partition("\n")[0]
    problems = []
    if len(subject) > MAX_SUBJECT:
        problems.append(f"the subject has {len(subject)} characters; the limit is {MAX_SUBJECT}")
    if not SUBJECT.match(subject):
        problems.append("the subject must be `area: imperative`, e.g. `fdq: retry failed acks`")
    return problems


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--commit"]:
        problems = check_commit(Path(arguments[1]))
    else:
        paths = arguments or [path for path in tracked(*CHECKED) if not SKIPPED.search(path)]
        problems = list(findings(paths))
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
