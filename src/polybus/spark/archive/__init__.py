"""The archive: history of topics as Parquet files, in a folder that every task can reach.

    ARCHIVE/
      polybus-archive.json                      format and version of the archive
      topic=orders/date=2026-01-31/…parquet     rows; the date is the bus's timestamp, in UTC
      _polybus/topics/orders/00000017.json      a manifest of the topic: the list of its files
      _polybus/topics/orders/lock               held by the process that adds to the topic
      _polybus/checkpoints/orders               Spark's checkpoint of the archiving query

A file is part of the archive if and only if the newest manifest of its topic lists it. Manifests
are numbered and immutable. One atomic step creates a manifest, which adds the files of a batch and
the new positions of their shards together. A process that is killed leaves files that no manifest
lists; a later run removes them. If two processes add to one topic, only one can create the next
number.

    archive_folder.py       the folder, its version, and locks on topics
    manifest.py             the files of a topic, the archived offsets, and the newest manifest
    parquet_files.py        tasks: rows → files
    archive_source.py       the streaming source whose tasks write files, with one row per file
    archive_committer.py    driver: files → the next manifest
    file_compaction.py      small files → a large file
    archive_log_access.py   archive and log as one, for the source's option `archive`
"""
