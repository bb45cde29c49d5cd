"""Name patterns: plain names in which `*` stands for any run of characters, also none.

A pattern is cut at its stars once. Matching then looks for the first piece at
the start, the last at the end, and each of the others at the first place after
the one before. Taking the first place is never wrong when stars are the only
wildcards, so there is no going back: the cost is that of a few `find`s, whatever
the pattern.
"""

from __future__ import annotations

STAR = "*"


class Pattern:
    """A compiled pattern. Names are bytes, as they come off the wire."""

    __slots__ = ("_inner", "_least_bytes", "is_exact", "prefix", "suffix")

    def __init__(self, text: str) -> None:
        first, *rest = text.encode().split(STAR.encode())
        self.is_exact = not rest
        self.prefix = first  # what every matching name starts with
        self.suffix = rest.pop() if rest else b""
        self._inner = [piece for piece in rest if piece]
        self._least_bytes = len(first) + len(self.suffix) + sum(map(len, self._inner))

    def matches(self, name: bytes) -> bool:
        if self.is_exact:
            return name == self.prefix
        if len(name) < self._least_bytes:
            return False
        if not name.startswith(self.prefix) or not name.endswith(self.suffix):
            return False
        return self._finds_inner(name)

    def _finds_inner(self, name: bytes) -> bool:
        at, end = len(self.prefix), len(name) - len(self.suffix)
        for piece in self._inner:
            found = name.find(piece, at, end)
            if found < 0:
                return False
            at = found + len(piece)
        return True
