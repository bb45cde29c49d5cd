"""Name patterns: names in which `*` matches any characters, or none.

A pattern is split at its stars once. Matching looks for the first piece at the start, the
last at the end, and each of the others at its first place after the one before. The first
place is always right when stars are the only wildcards, so there is no backtracking: a
match costs a few `find` calls for any pattern.
"""

from __future__ import annotations

STAR = "*"


class Pattern:
    """A compiled pattern for names in bytes, as on the wire."""

    __slots__ = ("_inner", "_least_bytes", "is_exact", "prefix", "suffix")

    def __init__(self, text: str) -> None:
        first, *rest = text.encode().split(STAR.encode())
        self.is_exact = not rest
        self.prefix = first  # every matching name starts with it
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
        at, end = len(self.prefix), len(name) - len(self.suffix)
        for piece in self._inner:
            found = name.find(piece, at, end)
            if found < 0:
                return False
            at = found + len(piece)
        return True
