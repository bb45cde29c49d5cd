"""Translation of errors of LMDB and the operating system to `polybus.errors`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import lmdb

from polybus.errors import (
    Damaged,
    DataFolderInUse,
    PolybusError,
    StoreFault,
    StoreFull,
    Unavailable,
    WrongFormat,
)

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_DAMAGED: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)
_FOREIGN: Final = (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.IncompatibleError)


def translate_error(error: lmdb.Error | OSError) -> PolybusError:
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    if not code:
        # py-lmdb sometimes puts the errno only into the text.
        texts = {os.strerror(number): number for number in (*_FULL, *_NO_DESCRIPTORS)}
        code = next((number for text, number in texts.items() if text in str(error)), 0)
    if isinstance(error, lmdb.MapFullError) or code in _FULL:
        return StoreFull(f"the store has no room: {error}")
    if code in _NO_DESCRIPTORS:
        return Unavailable(f"the process has too many open files for the store: {error}")
    if isinstance(error, lmdb.ReadersFullError):
        return Unavailable(f"the store has too many readers: {error}")
    if "already open in this process" in str(error):
        return DataFolderInUse(f"{error} A child of a fork cannot open what its parent has open.")
    if isinstance(error, _DAMAGED):
        return Damaged(f"pages of the store are damaged: {error}")
    if isinstance(error, _FOREIGN):
        return WrongFormat(f"not an LMDB file, or of another version: {error}")
    return StoreFault(f"the store failed: {error}")


@contextmanager
def translated_errors() -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise translate_error(error) from error
