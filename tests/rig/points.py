"""Kill points: a copy of the package whose code calls the rig at named places.

    env = points.SPARK.environment | orders.environment

The patches insert the calls. `tests.rig.spark.kill_points` and `tests.rig.pirate.kill_points`
list the points, and decide whether a process dies at one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from tests.rig.patching import Edit, Patch, import_path, patched_copy

FUTURE = "from __future__ import annotations\n"


class Points:
    """Points of one area; the copy that has them is made when it is first needed."""

    def __init__(self, name: str, module: str, files: dict[str, tuple[tuple[str, str], ...]]):
        """`files` maps a file to replacements, which call `passing` of `module`."""
        first, *more = _edits(module, files)
        self.patch = Patch(name, *first, tuple(more))

    @cached_property
    def environment(self) -> dict[str, str]:
        """Return the variables of a process that shall import the copy, with its children."""
        return {"PYTHONPATH": import_path(patched_copy([self.patch]))}


def _edits(module: str, files: dict[str, tuple[tuple[str, str], ...]]) -> Iterator[Edit]:
    for file, changes in files.items():
        yield Edit(file, FUTURE, f"{FUTURE}\nfrom {module} import passing\n")
        for old, new in changes:
            yield Edit(file, old, new)


def before(lines: str, point: str) -> tuple[str, str]:
    return lines, f"{_indent(lines)}passing({point!r})\n{lines}"


def after(line: str, point: str) -> tuple[str, str]:
    return line, f"{line}{_indent(line)}passing({point!r})\n"


def _indent(lines: str) -> str:
    return lines[: len(lines) - len(lines.lstrip())]


SPARK = Points(
    "spark-points",
    "tests.rig.spark.kill_points",
    {
        "spark/sink/sink_writers.py": (
            (
                "class StreamWriter(SinkWriter, DataSourceStreamArrowWriter):\n",
                "class StreamWriter(SinkWriter, DataSourceStreamArrowWriter):\n"
                "    def __getstate__(self):\n"  # Spark pickles the writer when it plans an epoch
                "        passing('planned')\n"
                "        return self.__dict__\n\n",
            ),
            before(
                "    try:\n        client.call(request)\n",
                "publishing",
            ),
            (
                'check whether its rows were published"\n        ) from None\n',
                'check whether its rows were published"\n        ) from None\n'
                "    passing('published')\n",
            ),
        ),
        "spark/sink/task_stage.py": (
            after("        self.rows += rows.num_rows\n", "mid-stage"),
            (
                "        self._stage.close()\n        return self._stage.name\n",
                "        self._stage.close()\n"
                "        passing('staged', self._stage.name)\n"
                "        return self._stage.name\n",
            ),
            before("            self._stage = self._client.stage(self._lease_s)\n", "begun"),
        ),
        "spark/source/partition_reader.py": (
            after(
                "                    yield builder.build_batch(wanted.topic, batch)\n", "reading"
            ),
        ),
        "spark/archive/parquet_files.py": (
            after("        self._pending, self._bytes, self._rows = [], 0, 0\n", "mid-file"),
        ),
        "spark/archive/archive_source.py": (
            (
                "                writer.discard()\n                raise\n",
                "                writer.discard()\n                raise\n"
                "        passing('written')\n",
            ),
        ),
        "spark/archive/archive_committer.py": (
            after("            files = [new.file for new in of_topic]\n", "archiving"),
            before("            self.rows += sum(file.rows for file in files)\n", "archived"),
        ),
        "spark/archive/file_compaction.py": (
            before(
                "        with explain_write_errors(folder.path):\n"
                "            newest = read_manifest(folder, merge.topic)\n",
                "compacted",
            ),
        ),
        "spark/pipelines/retain.py": (
            after("        self._check(manifest, spans)\n", "trimming"),
            before("        self.topics.add(topic)\n", "trimmed"),
        ),
        "spark/pipelines/stats/stats_pipeline.py": (
            before("        measured = batch.selectExpr(\n", "counting"),
            (
                "            measured.unpersist()\n",
                "            measured.unpersist()\n        passing('counted')\n",
            ),
        ),
    },
)

PIRATE = Points(
    "pirate-points",
    "tests.rig.pirate.kill_points",
    {
        "dialects/pirate/client/client_journal.py": (
            after("        self._end += len(data)\n", "kept"),
            (
                "            _write(self._descriptor, data, self._end)\n",
                "            _write(self._descriptor, data[: len(data) // 2], self._end)\n"
                "            passing('torn')\n"
                "            _write(self._descriptor, data, self._end)\n"
                "            passing('written')\n",
            ),
            (
                "            new.rename(folder / NAME)\n",
                "            passing('rewritten')\n"
                "            new.rename(folder / NAME)\n"
                "            passing('renamed')\n",
            ),
        ),
        "dialects/pirate/client/requester.py": (
            before("            value = await self._send_counted(request)\n", "asked"),
            before("            if record:\n", "fetched"),
            after(
                "        await run_to_completion(self._folder.record_read, message.topic, message.id)\n",
                "recorded",
            ),
            before("        if isinstance(reply, OkReply):\n", "answered"),
            before("            return reply.second\n", "settled"),
        ),
    },
)

ALL = [SPARK.patch, PIRATE.patch]
