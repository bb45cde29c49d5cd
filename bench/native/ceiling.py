"""`python -m bench.native.ceiling ARGS`: `polybus serve ARGS` whose commits are answered at once.

The port without a store behind it: everything is as in a bus, up to the batch that would be handed
to the store, and from its answer on.
"""

import sys
from concurrent.futures import Future
from itertools import count
from typing import Any

from polybus.cli.main import main
from polybus.durable.topic_registry import DurableTopics
from polybus.model.commit import Commit, CommitResult, Span

_ids = count(1)


def _at_once(_durable: Any, commit: Commit) -> Future[CommitResult]:
    future: Future[CommitResult] = Future()
    first = next(_ids)
    spans = [Span(one.topic, one.shard, 0, first, one.block.count) for one in commit.appends]
    future.set_result(CommitResult(spans=tuple(spans)))
    return future


setattr(DurableTopics, "commit", _at_once)  # noqa: B010

if __name__ == "__main__":
    sys.argv[1:] = ["serve", *sys.argv[1:]]
    sys.exit(main())
