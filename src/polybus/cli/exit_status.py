"""Exit codes and the error line of a command.

0    success
1    internal error
2    usage: invalid flag or config, port or data folder in use, full disk, a folder without
     a store, with a damaged one or with one of another version
3    no bus answers, or the connection was lost
4    the bus refused the request
5    the peer does not speak the protocol
6    the called service failed
130  interrupted (Ctrl-C)
"""

from __future__ import annotations

import os
import sys
import traceback

from polybus import errors

# The first match wins, so special cases come before their parents.
EXIT_CODES: tuple[tuple[type[errors.PolybusError], int], ...] = (
    (errors.UsageError, 2),
    (errors.AddressInUse, 2),
    (errors.DataFolderInUse, 2),
    (errors.StoreFull, 2),
    (errors.WrongFormat, 2),
    (errors.Damaged, 2),
    (errors.Unavailable, 3),
    (errors.Refused, 4),
    (errors.PeerError, 5),
    (errors.ServiceFailed, 6),
    (errors.PolybusError, 1),
)
USAGE = 2
UNEXPECTED = 1
INTERRUPTED = 130


def report_error(error: BaseException) -> int:
    """Print an error to stderr, unless it is an interrupt. Returns the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else UNEXPECTED
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # `polybus stats | head -1`: Python flushes stdout at exit and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    wants_traceback = bool(os.environ.get("POLYBUS_DEBUG"))
    if wants_traceback:
        traceback.print_exception(error)
    if isinstance(error, errors.PolybusError):
        return _line(str(error), exit_code(error))
    message = getattr(error, "format_message", None)  # Typer's errors about the command line
    if message is not None:
        return _line(message(), USAGE)
    hint = "" if wants_traceback else " (set POLYBUS_DEBUG=1 for a traceback)"
    return _line(f"unexpected {type(error).__name__}: {error}{hint}", UNEXPECTED)


def exit_code(error: errors.PolybusError) -> int:
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _line(text: str, code: int) -> int:
    """Print the text as one line, so that a log keeps it together. Returns the exit code."""
    if sys.stderr is None:
        return code
    try:
        print("polybus:", " ".join(text.split()), file=sys.stderr, flush=True)
    except OSError:
        pass  # stderr is closed; the exit code still reports the error
    return code
