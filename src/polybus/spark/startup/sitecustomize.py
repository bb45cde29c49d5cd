"""Run by Python in each worker of Spark, before anything else.

PySpark as it is installed takes the place of Spark's zip of it. Both are the same, but nothing in
a zip is kept compiled, so each worker would begin with a second of compiling, and would read the
zip's directory once more when its path changes; a query that is started needs half a dozen.

A worker whose Java has hung up has nobody to tell: Spark's daemon would print how it came to know.
"""

import sys
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

ZIPS = {"pyspark": "pyspark.zip", "py4j": "py4j-"}  # module → how the name of its zip begins
HERE = str(Path(__file__).parent)
DAEMON = "daemon.py"


def installed_first(path: list[str]) -> list[str]:
    """Without the zips of what is installed. This folder has done its work."""
    rest = [place for place in path if place != HERE]
    for module, name in ZIPS.items():
        others = [place for place in rest if not Path(place).name.startswith(name)]
        if PathFinder.find_spec(module, others) is not None:
            rest = others
    return rest


def _import_shadowed_module() -> None:
    """There may be another module of this name, which Python would have found."""
    sys.path[:] = installed_first(sys.path)
    this = sys.modules.pop(__name__)
    with suppress(ImportError):
        import_module(__name__)
    sys.modules.setdefault(__name__, this)


def _mute_hangups() -> None:
    """Of Spark's daemon, not of whoever else prints what went wrong."""
    print_exc = traceback.print_exc

    def unless_hung_up(*args: object, **options: object) -> None:
        error = sys.exception()
        trace = error.__traceback__ if isinstance(error, BrokenPipeError) else None
        if trace is None or Path(trace.tb_frame.f_code.co_filename).name != DAEMON:
            print_exc(*args, **options)  # type: ignore[arg-type]

    traceback.print_exc = unless_hung_up


if __name__ == "sitecustomize":
    _import_shadowed_module()
    _mute_hangups()
