"""The data file of an LMDB environment, checked before LMDB maps it.

LMDB does not compare the length of the file with its own records. A page after the end of the
file is found only when it is read, and the kernel then kills the process (SIGBUS). So the
meta pages are read here first.

The file may be shorter than the last page number says, if the transaction that took the last
pages also freed them: LMDB does not write such pages. They are on its list of free pages, which
is the only one that is read in this case. The layout is that of LMDB 0.9 (mdb.c, data version
1), whose files all later releases read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from struct import Struct, unpack_from
from typing import Final, NamedTuple

from polybus.errors import Damaged

NEXT_STEPS: Final = (
    "run `polybus store verify`, then restore a backup or run `polybus store salvage`"
)

MAGIC: Final = 0xBEEFC0DE
DATA_VERSION: Final = 1
MIN_PAGE_BYTES: Final = 256
MAX_PAGE_BYTES: Final = 65536
NO_PAGE: Final = (1 << 64) - 1
MAX_DEPTH: Final = 32  # of a tree; LMDB's own limit
MAX_RETRIES: Final = 10

_PAGE_HEAD = Struct("<QHHHH")  # number, padding, flags, end and start of the free space
_META = Struct("<II16x")  # magic and version; then an address and the size of the map
_TREE = Struct("<IHHQQQQQ")  # page size (in the first), flags, depth, counts of pages, root
_META_END = Struct("<QQ")  # last page, transaction
_META_BYTES: Final = _PAGE_HEAD.size + _META.size + 2 * _TREE.size + _META_END.size
_NODE = Struct("<HHHH")  # size (two parts) or page number (three parts), flags, bytes of the key
_PLACE = Struct("<H")  # of a node within its page
_NUMBER = Struct("<Q")

_BRANCH, _LEAF = 0x01, 0x02
_BIG_DATA = 0x01  # the value has pages of its own


class Meta(NamedTuple):
    """A meta page: the state of the file after one transaction."""

    transaction: int
    page_bytes: int
    last_page: int
    free_root: int


class _Unreadable(Exception):
    """The list of free pages is after the end of the file, or is not a list."""


def check_length(path: Path) -> None:
    """Raise `Damaged` if pages in use are missing at the end of the file.

    A file whose meta pages cannot be read passes: LMDB refuses it when it opens it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing; {NEXT_STEPS}") from None
    try:
        # LMDB takes an empty file for a new one.
        if os.fstat(descriptor).st_size < _META_BYTES:
            raise Damaged(f"{path} is cut off: it has no pages; {NEXT_STEPS}")
        for _ in range(MAX_RETRIES):
            meta = _newest_meta(descriptor)
            if meta is None:
                return
            # After the meta page: a writer extends the file before it writes that page.
            pages = os.fstat(descriptor).st_size // meta.page_bytes
            if pages > meta.last_page:
                return
            missing = range(pages, meta.last_page + 1)
            is_cut = not _are_free(descriptor, meta, missing)
            # The owner may have committed meanwhile and have used the pages again.
            if _newest_meta(descriptor) == meta:
                break
        else:
            return  # an owner that commits this often has all its pages
    finally:
        os.close(descriptor)
    if is_cut:
        raise Damaged(
            f"{path} is cut off: it has {pages} of {meta.last_page + 1} pages; {NEXT_STEPS}"
        )


def _newest_meta(descriptor: int) -> Meta | None:
    first = _read_meta(descriptor, 0)
    if first is None:
        return None
    second = _read_meta(descriptor, first.page_bytes)
    return first if second is None else max(first, second)


def _read_meta(descriptor: int, at: int) -> Meta | None:
    raw = os.pread(descriptor, _META_BYTES, at)
    if len(raw) < _META_BYTES:
        return None
    offset = _PAGE_HEAD.size
    magic, version = _META.unpack_from(raw, offset)
    if magic != MAGIC or version != DATA_VERSION:
        return None
    offset += _META.size
    page_bytes, *_, free_root = _TREE.unpack_from(raw, offset)
    if not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES:
        return None
    last_page, transaction = _META_END.unpack_from(raw, offset + 2 * _TREE.size)
    return Meta(transaction, page_bytes, last_page, free_root)


def _are_free(descriptor: int, meta: Meta, missing: range) -> bool:
    """Return True if the list of free pages is complete and has all missing ones."""
    pages = _PageReader(descriptor, meta.page_bytes)
    try:
        free = {page for page in pages.free_pages(meta.free_root) if page in missing}
    except (_Unreadable, struct.error):
        return False
    return len(free) == len(missing)


class _PageReader:
    """Reads pages of the file, and none after its end."""

    def __init__(self, descriptor: int, page_bytes: int) -> None:
        self._descriptor = descriptor
        self._page_bytes = page_bytes
        self._file_bytes = os.fstat(descriptor).st_size
        self._visited: set[int] = set()  # pages of the tree

    def free_pages(self, root: int, depth: int = 0) -> Iterator[int]:
        """Yield the pages of the tree of free pages: each value is a count and the numbers."""
        if root == NO_PAGE:
            return
        if root in self._visited:  # a damaged tree may refer to itself
            raise _Unreadable
        self._visited.add(root)
        page = self._read(root, self._page_bytes)
        _, _, flags, lower, _ = _PAGE_HEAD.unpack_from(page)
        if depth > MAX_DEPTH or not flags & (_BRANCH | _LEAF):
            raise _Unreadable
        for (at,) in _PLACE.iter_unpack(page[_PAGE_HEAD.size : lower]):
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
            if flags & _BRANCH:
                yield from self.free_pages(low | high << 16 | node_flags << 32, depth + 1)
                continue
            size, value_at = low | high << 16, at + _NODE.size + key_bytes
            if node_flags & _BIG_DATA:
                (number,) = _NUMBER.unpack_from(page, value_at)
                value = self._read(number, _PAGE_HEAD.size + size)[_PAGE_HEAD.size :]
            else:
                value = page[value_at : value_at + size]
            (count,) = _NUMBER.unpack_from(value)
            yield from unpack_from(f"<{count}Q", value, _NUMBER.size)

    def _read(self, number: int, size: int) -> bytes:
        at = number * self._page_bytes
        if at + size > self._file_bytes:
            raise _Unreadable
        return os.pread(self._descriptor, size, at)
