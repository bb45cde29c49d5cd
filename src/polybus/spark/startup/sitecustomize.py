"""Imported by Python at the start of each Spark worker.

Removes Spark's zip of PySpark from the path, so that the installed PySpark is imported. Both are
the same code, but modules in a zip have no compiled files: each worker would compile for a second,
and read the zip's directory again when its path changes. A query starts about six workers.

Mutes the traceback that Spark's daemon prints when its Java process closes the connection.
"""

import sys
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

ZIPS = {"pyspark": "pyspark.zip", "py4j": "py4j-"}  # module → prefix of its zip's name
HERE = str(Path(__file__).parent)
DAEMON = "daemon.py"


def _import_installed_modules() -> None:
    """Remove this folder and the zips of installed modules from the path.

    Then import the `sitecustomize` module that this one shadows, if there is one.
    """
    paths = [place for place in sys.path if place != HERE]
    for module, name in ZIPS.items():
        without_zip = [place for place in paths if not Path(place).name.startswith(name)]
        if PathFinder.find_spec(module, without_zip) is not None:
            paths = without_zip
    sys.path[:] = paths
    this = sys.modules.pop(__name__)
    with suppress(ImportError):
        import_module(__name__)
    sys.modules.setdefault(__name__, this)


def _mute_hangups() -> None:
    """Mute tracebacks of BrokenPipeError that are raised in Spark's daemon."""
    print_exc = traceback.print_exc

    def print_unless_hung_up(*args: object, **options: object) -> None:
        error = sys.exception()
        trace = error.__traceback__ if isinstance(error, BrokenPipeError) else None
        if trace is None or Path(trace.tb_frame.f_code.co_filename).name != DAEMON:
            print_exc(*args, **options)  # type: ignore[arg-type]

    traceback.print_exc = print_unless_hung_up


if __name__ == "sitecustomize":
    _import_installed_modules()
    _mute_hangups()
