"""How a command ends: one line for people, one exit code for scripts.

0    done
1    a defect of ours, or something nobody foresaw
2    you: a wrong flag, a bad config, a taken port, a data folder in use, a full disk,
     a folder that holds no store, or one of another version
3    no bus answers, or it went away
4    the bus understood and refused
5    the other side does not speak the protocol
6    a service was called, and failed
130  Ctrl-C
"""

from __future__ import annotations

import os
import sys
import traceback

from polybus import errors

# First match wins, so the special cases stand before their parents.
EXIT_CODES: tuple[tuple[type[errors.PolybusError], int], ...] = (
    (errors.UsageError, 2),
    (errors.AddressInUse, 2),
    (errors.DataFolderInUse, 2),
    (errors.StoreFull, 2),
    (errors.WrongFormat, 2),
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
    """Say what went wrong on stderr, if it needs saying; the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else UNEXPECTED
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return _on_broken_pipe()
    if _wants_traceback():
        traceback.print_exception(error)
    if isinstance(error, errors.PolybusError):
        return _line(str(error), exit_code(error))
    message = getattr(error, "format_message", None)  # Typer's errors about the command line
    if message is not None:
        return _line(message(), USAGE)
    hint = "" if _wants_traceback() else " (POLYBUS_DEBUG=1 shows where)"
    return _line(f"unexpected {type(error).__name__}: {error}{hint}", UNEXPECTED)


def exit_code(error: errors.PolybusError) -> int:
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _line(text: str, code: int) -> int:
    """One line, whatever the text: a terminal shows it whole, a log keeps it together."""
    if sys.stderr is None:
        return code
    try:
        print("polybus:", " ".join(text.split()), file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody reads stderr; the exit code still tells
    return code


def _wants_traceback() -> bool:
    return bool(os.environ.get("POLYBUS_DEBUG"))


def _on_broken_pipe() -> int:
    """`polybus stats | head -1`: not an error, and Python must not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNEXPECTED
