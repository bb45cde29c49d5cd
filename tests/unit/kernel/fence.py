"""A page between two that may not be touched: a read past its ends is a SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap

PAGE = mmap.PAGESIZE
PROT_NONE = 0


def fenced() -> memoryview:
    """One page; the ones before and after it are forbidden."""
    pages = mmap.mmap(-1, 3 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    for at in (start, start + 2 * PAGE):
        if mprotect(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    return memoryview(pages)[PAGE : 2 * PAGE]
