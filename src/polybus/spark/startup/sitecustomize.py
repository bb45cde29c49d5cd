"""Run by Python in each worker, before anything else: PySpark as it is installed comes before
Spark's zip of it.

Both are the same. But nothing in a zip is kept compiled, so each worker would begin with a
second of compiling, and a query that is started needs half a dozen of them.
"""

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

ZIP = "pyspark.zip"
HERE = str(Path(__file__).parent)


def installed_first(path: list[str]) -> list[str]:
    """The zip last: it is used if nothing is installed. This folder has done its work."""
    rest = [place for place in path if place != HERE]
    return sorted(rest, key=lambda place: place.endswith(ZIP))


def _make_way() -> None:
    """There may be another module of this name, which Python would have found."""
    sys.path[:] = installed_first(sys.path)
    this = sys.modules.pop(__name__)
    with suppress(ImportError):
        import_module(__name__)
    sys.modules.setdefault(__name__, this)


if __name__ == "sitecustomize":
    _make_way()
