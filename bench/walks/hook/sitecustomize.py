"""Start the recorder in a process under test, before any of its own code runs.

Python imports this file because its folder is on PYTHONPATH. The product has no switch for it.
"""

import os

import walk_recorder  # type: ignore[import-not-found]  # compiled by bench.walks.run

walk_recorder.start(
    os.environ["WALK_FOLDER"], os.environ["WALK_PACKAGE"], os.environ.get("WALK_ROLE", "client")
)
