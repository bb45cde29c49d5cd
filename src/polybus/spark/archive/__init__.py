"""The archive: history of topics as Parquet, in a folder that every task can reach.

    ARCHIVE/
      polybus-archive.json                      what this is, and its version
      topic=orders/date=2026-01-31/…parquet     rows; the date is the bus's, in UTC
      _polybus/topics/orders/00000017.json      the manifest of a topic: which files count
      _polybus/topics/orders/lock               held by the one that adds to it
      _polybus/checkpoints/orders               Spark's, of the query that archives

A file is part of the archive if the newest manifest of its topic names it, and only then.
Manifests are numbered, never changed, and made by one atomic step, which brings the files of
a batch and the new positions of their shards together: whatever is killed meanwhile leaves
files that nobody reads, and that a later run removes. Two that add to one topic at once
cannot both make the next number.

    folder.py       the folder, and its version
    manifest.py     what counts: files, and how far each shard is archived
    versions.py     the newest manifest, and the next
    lock.py         one at a time
    writing.py      what a task does: rows → files
    source.py       the stream that does it, one row a file
    adding.py       what the driver does: files → the next manifest
    compaction.py   small files → a large one
    reading.py      archive and log as one, for the source's option `archive`
"""
