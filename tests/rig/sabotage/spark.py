"""Sabotages of the Spark source, sink and pipelines."""

from __future__ import annotations

from tests.rig.patching import Edit, Patch

SINK = "spark/sink/sink_writers.py"
SOURCE = "spark/archive/archive_source.py"
PARTS = "spark/pipelines/stats/partial_sums.py"
CHECK_PARTS = (
    "def _check_parts(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:\n"
)
PUBLISH_ALONE = """def _publish_alone(client, done):
    context = TaskContext.get()
    if done.stage is not None and context is not None:
        stamp = {
            "producer": f"{done.query}/{context.partitionId()}",
            "counter": int(context.getLocalProperty("streaming.sql.batchId") or 0) + 1,
        }
        _publish(client, [done.stage], stamp=stamp, run={"id": done.query})
    return StagedRows(None, done.query, done.rows)


"""
STAGED = "StagedRows(stage.finish(), query, stage.rows)"

SABOTAGES = [
    # Each task publishes its own stage; the driver publishes nothing.
    Patch(
        "tasks-publish",
        SINK,
        f"            return {STAGED}\n",
        f"            return _publish_alone(get_client(self._settings.bus), {STAGED})\n",
        (Edit(SINK, CHECK_PARTS, PUBLISH_ALONE + CHECK_PARTS),),
    ),
    # A first batch that is planned again begins where "latest" is then.
    Patch(
        "latest-again",
        "spark/source/query_position.py",
        "        is_first_batch = self.is_initial and end.since\n",
        "        is_first_batch = False\n",
    ),
    # A task that finds messages missing goes on without an error.
    Patch(
        "losses-unseen",
        "spark/source/partition_reader.py",
        "        if self.strict:\n",
        "        if False:\n",
    ),
    # The archive adds all rows of a batch, whatever it has already.
    Patch(
        "archive-positions-off",
        SOURCE,
        "        return {shard: manifest.end(shard) or start for shard, start in shards.items()}\n",
        "        return shards\n",
        (
            Edit(
                SOURCE,
                "            if wanted.start > end and self._strict:\n",
                "            if False:\n",
            ),
            Edit(
                "spark/archive/manifest.py",
                "                if start != end and not (gaps and start > end):\n",
                "                if False:\n",
            ),
        ),
    ),
    # Dead letters that were re-queued are not known as such.
    Patch(
        "marks-off",
        "spark/pipelines/requeue.py",
        "        if self._marked:\n",
        "        if False:\n",
    ),
    # The counts of a batch that is counted again are added to its former counts.
    Patch(
        "parts-add",
        PARTS,
        "            replace_table(self._path(kind, number, number), table)\n",
        "            path = self._path(kind, number, number)\n"
        '            name = path.name.replace(".", f"~{os.urandom(8).hex()}.", 1)\n'
        "            replace_table(path.with_name(name), table)\n",
        (
            Edit(
                PARTS,
                'path.name.partition(".")[0].partition("-")',
                'path.name.partition(".")[0].partition("~")[0].partition("-")',
            ),
        ),
    ),
]
