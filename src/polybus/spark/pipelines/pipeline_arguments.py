"""What several pipelines take, with one wording each."""

from __future__ import annotations

from typing import Annotated

import typer

# Of those that keep the order of keys, which is that of a shard: no shard's part of a batch is cut
# over several tasks. A batch has some seconds of work, and is published as one.
MOST_UNCUT = 2_000_000

Topics = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="One, several with commas between, or patterns with *."),
]
Bus = Annotated[
    str | None,
    typer.Option(
        "--bus", metavar="URL", help="The bus; else $POLYBUS_URL, else polybus://127.0.0.1:6570."
    ),
]
Once = Annotated[
    bool, typer.Option("--once", help="Do what there is to do now, and end. Else go on for ever.")
]
Every = Annotated[
    float,
    typer.Option("--every", metavar="SECONDS", min=0.0, help="How long between two batches."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="FOLDER", help="Where Spark keeps how far it has come."),
]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="SQL", help="Only messages for which this holds."),
]
Select = Annotated[
    str | None,
    typer.Option(
        "--select", metavar="SQL", help="What becomes of each. [default: body, shard_key, headers]"
    ),
]
Into = Annotated[
    str | None,
    typer.Option("--into", metavar="TOPIC", help="Where to; unless --select has a column topic."),
]
IntoBus = Annotated[
    str | None,
    typer.Option("--into-bus", metavar="URL", help="Another bus to write to."),
]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="Pass over what was trimmed before it was read.")
]
RowsPerBatch = Annotated[
    int, typer.Option("--rows-per-batch", metavar="N", min=1, help="The most of one batch.")
]
UncutRows = Annotated[
    int,
    typer.Option(
        "--rows-per-batch", metavar="N", min=1, max=MOST_UNCUT, help="The most of one batch."
    ),
]
