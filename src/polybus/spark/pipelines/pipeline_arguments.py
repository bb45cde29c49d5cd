"""Arguments that several pipelines take."""

from __future__ import annotations

from typing import Annotated

import typer

# The most rows per batch of pipelines that keep the order of keys. They do not split a shard's part
# of a batch over tasks, so this bounds a task to some seconds.
MOST_UNCUT = 2_000_000

Topics = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="Topics, separated by commas; * matches any characters."),
]
Bus = Annotated[
    str | None,
    typer.Option(
        "--bus", metavar="URL", help="The bus. [default: $POLYBUS_URL, or polybus://127.0.0.1:6570]"
    ),
]
Once = Annotated[
    bool,
    typer.Option(
        "--once", help="Process the messages that exist now, then exit. [default: run forever]"
    ),
]
Every = Annotated[
    float,
    typer.Option("--every", metavar="SECONDS", min=0.0, help="Time between two batches."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="FOLDER", help="Where Spark stores the position."),
]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="SQL", help="Only messages that match this condition."),
]
Select = Annotated[
    str | None,
    typer.Option(
        "--select", metavar="SQL", help="Columns to write. [default: body, shard_key, headers]"
    ),
]
Into = Annotated[
    str | None,
    typer.Option(
        "--into", metavar="TOPIC", help="Target topic, unless --select has a column topic."
    ),
]
IntoBus = Annotated[
    str | None,
    typer.Option("--into-bus", metavar="URL", help="Write to this bus instead of --bus."),
]
AcceptLoss = Annotated[
    bool,
    typer.Option("--accept-loss", help="Skip messages that were trimmed before they were read."),
]
RowsPerBatch = Annotated[
    int, typer.Option("--rows-per-batch", metavar="N", min=1, help="The most rows of a batch.")
]
UncutRows = Annotated[
    int,
    typer.Option(
        "--rows-per-batch", metavar="N", min=1, max=MOST_UNCUT, help="The most rows of a batch."
    ),
]
