"""Mutants of the reference engine, each of which the conformance suite must detect.

    python tests/mutants/store.py [part of a mutant's name ...]

New engines are judged by the suite alone, so it must detect each of these mistakes. Each
mutant runs in a forked child, which runs the checks on the changed module until one fails; no
file is written. A mutant that survives shows a missing check. That one, and one that was not
tested at all (verdicts.py), fail the run. The unchanged engine is tested first.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.bus import mutants, say  # noqa: E402
from tests.mutants.verdicts import GREEN, STALE, UNTRIED, is_caught  # noqa: E402
from tests.rig.patching import DoesNotApply, Patch  # noqa: E402

PACKAGE = ROOT / "src" / "polybus"
HANG_S = 60
MAX_WORDS = 200

LOG = mutants(
    "store/memory/memory_log.py",
    ("trims one too few", "max(self.start, min(before, self.end))", "min(before, self.end)"),
    ("trims beyond the end", "max(self.start, min(before, self.end))", "max(self.start, before)"),
    ("trims whole blocks", "bisect_right(self.entries, self.start, key=_end)", "len(self.entries)"),
    ("keeps the size", "self.size_bytes -= sum(", "sum("),
    (
        "find returns trimmed messages",
        "return max(self.start, entry.first_offset + place)",
        "return entry.first_offset + place",
    ),
    (
        "finds one block late",
        "bisect_left(self.entries, timestamp_ns, key=_last_time)",
        "bisect_right(self.entries, timestamp_ns, key=_last_time)",
    ),
    (
        "a read of all shards returns trimmed messages",
        "return max(self.start, entry.first_offset + run_table.place_of_id(entry.table, wanted))",
        "return entry.first_offset + run_table.place_of_id(entry.table, wanted)",
    ),
    (
        "reads one block early",
        "at = bisect_right(self.entries, offset, key=_end)",
        "at = bisect_left(self.entries, offset, key=_end)",
    ),
    ("ignores the end", "end = min(end, self.end, start + max_rows)", "end = self.end"),
    ("sizes are forgotten", "self.size_bytes += block.size_bytes", "pass"),
    ("ids leave gaps", "self.next_id += block.count", "self.next_id += block.count + 1"),
    ("ids are offsets", "append(block, self.next_id,", "append(block, self.shards[shard].end + 1,"),
    ("the newest time is forgotten", "        self.timestamp_ns = timestamp_ns\n", ""),
    ("the first id stays 1", "default=self.next_id)\n        shards", "default=1)\n        shards"),
    (
        "find without a match returns id 1",
        "for first in ids if first is not None), default=self.next_id",
        "for first in ids if first is not None), default=1",
    ),
)

PRODUCERS = mutants(
    "store/memory/memory_producers.py",
    (
        "stamps off",
        "digest, result = producer.results.get",
        "return None; digest, result = producer.results.get",
    ),
    ("epochs do not rise", "producer.epoch += 1", "producer.epoch = 1"),
    ("old epochs may write", "if epoch != producer.epoch:", "if epoch > producer.epoch:"),
    ("future epochs may write", "if epoch != producer.epoch:", "if epoch < producer.epoch:"),
    ("digests do not matter", "if result is None or digest != stamp.digest:", "if result is None:"),
    (
        "gaps of dense producers are allowed",
        "if producer.options.dense and stamp.counter",
        "if False and stamp",
    ),
    (
        "gaps of other producers are refused",
        "if producer.options.dense and stamp.counter",
        "if stamp.counter",
    ),
    (
        "one result too many",
        "len(self.results) > self.options",
        "len(self.results) - 1 > self.options",
    ),
    ("one result too few", "len(self.results) > self.options", "len(self.results) >= self.options"),
    ("a repeat looks new", "versions=(), duplicate=True", "versions=(), duplicate=False"),
    ("a repeat has versions", "_replace(versions=(), ", "_replace("),
    ("options stay", "        producer.options = options\n", ""),
    (
        "less is kept only later",
        "        producer.epoch += 1\n        producer.forget_old_results()",
        "        producer.epoch += 1",
    ),
    ("closing forgets nothing", "del self._producers[name]", "pass"),
    (
        "any epoch may close a producer",
        "        self._of_epoch(name, epoch)\n        del",
        "        self._of_epoch(name, getattr(self._producers.get(name), 'epoch', 0))\n        del",
    ),
    ("counters fall", "producer.last_counter = stamp.counter", "producer.last_counter = 0"),
)

JUDGE_CHANGES = """        for change in commit.changes:
            record = self._records.get(change.key)
            version = record.version if record else 0
            if change.expected not in (None, version):
                raise Conflict(
                    f"record {change.key!r} has version {version}, expected {change.expected}"
                )
"""
APPEND = """        # Ids run by topic and shard, within a shard in the order of the commit.
        appends.sort(key=lambda append: (append.topic, append.shard))
        spans, timestamp_ns = self._append(appends)
"""

NAMESPACE = mutants(
    "store/memory/namespace.py",
    ("topics are made again", "if name in self._names:", "if False:"),
    ("numbers are used again", "self._last_number += 1", "self._last_number = len(self._logs) + 1"),
    ("ids restart", "log = MemoryLog(topic, [], tombstone.next_id)", "log = MemoryLog(topic, [])"),
    ("offsets restart", "tombstone.end_of(number), tombstone.end_of(number)", "0, 0"),
    (
        "dropped offsets seem to be there",
        "Shard(number, tombstone.end_of(number), tombstone",
        "Shard(number, 0, tombstone",
    ),
    ("narrow incarnations forget", "ends += before.ends[len(ends) :]", "pass"),
    ("topics by age", "for name in sorted(self._names)]", "for name in self._names]"),
    ("settings stay", "replace(log.topic, settings=settings, ", "replace(log.topic, "),
    (
        "shards are not sealed",
        "request_checks.added_generation(log.topic, add_shards)",
        "(sum(log.topic.generations) + add_shards,)",
    ),
    (
        "dropped topics can be read",
        "del self._names[name], self._logs[log.topic.number]",
        "del self._names[name]",
    ),
    (
        "stamps come last",
        "first = self.producers.check_stamp(commit.stamp) if commit.stamp else None",
        "[self.log(append.topic) for append in commit.appends]\n        "
        "first = self.producers.check_stamp(commit.stamp) if commit.stamp else None",
    ),
    (
        "changes are judged too late",
        JUDGE_CHANGES + APPEND,
        APPEND + JUDGE_CHANGES,
    ),
    (
        "stages can be published again",
        "            del self._stages[stage]\n        versions",
        "            pass\n        versions",
    ),
    (
        "stages come first",
        "            appends.append(append)\n",
        "            appends.insert(0, append)\n",
    ),
    (
        "ids in the order of the appends",
        "        appends.sort(key=lambda append: (append.topic, append.shard))\n",
        "",
    ),
    (
        "stages of sealed shards are published",
        "request_checks.open_shard(self.log(append.topic).topic, append.shard)\n",
        "pass\n",
    ),
    ("sealed shards take more", "appends += open_appends(topic, append)", "appends.append(append)"),
    (
        "rerouted stages forget blocks",
        "stage.appends = list(chain.from_iterable(parts))",
        "stage.appends = list(chain.from_iterable(parts[1:]))",
    ),
    (
        "anything may be staged",
        "            request_checks.single_shard(topic, append.shard)\n            routed",
        "            routed",
    ),
    ("conflicts are not seen", "if change.expected not in (None, version):", "if False:"),
    ("0 means any version", "not in (None, version)", "not in (None, 0, version)"),
    (
        "time goes back",
        "max([self._wall_ns(), *(log.timestamp_ns for log in logs)])",
        "max([self._wall_ns(), 0 * len(logs)])",
    ),
    (
        "time is shared by all",
        "*(log.timestamp_ns for log in logs)",
        "*(log.timestamp_ns for log in self._logs.values())",
    ),
    (
        "a span for each append",
        "spans[topic, shard] = span._replace",
        "spans[topic, shard + 10**6 * len(spans)] = span._replace",
    ),
    ("removing removes nothing", "self._records.pop(change.key, None)", "pass"),
    (
        "versions restart",
        "self._last_version += 1",
        "self._last_version = getattr(self._records.get(change.key), 'version', 0) + 1",
    ),
    (
        "removing a missing record fails",
        "self._records.pop(change.key, None)",
        "self._records.pop(change.key)",
    ),
    (
        "a trim is not whole",
        "checks.trims(log.topic, before).items():",
        "before.items():\n            checks.trims(log.topic, {shard: offset})",
    ),
    ("leases do not matter", "if stage.deadline_s <= now_s]", "if False]"),
    ("renewing does nothing", "self._stage(name).deadline_s = self._clock_s() + lease_s", "pass"),
    ("discarding does nothing", "self._stages.pop(name, None)", "pass"),
    ("discarding twice fails", "self._stages.pop(name, None)", "self._stages.pop(name)"),
    ("staging replaces", "stage.appends += routed", "stage.appends = routed"),
    ("empty reads may be trimmed", "        if end <= start:\n            return EMPTY\n", ""),
    ("a read before the start skips trimmed messages", "if start < source.start:", "if False:"),
    ("a read of all shards ignores the end", "below_id=end,", ""),
    (
        "a read of all shards ignores the start",
        "source.pieces(source.offset_of_id(start), ",
        "source.pieces(source.start, ",
    ),
    ("rows without end", "below_id=end, max_rows=max_rows", "below_id=end, max_rows=10**6"),
    (
        "bytes without end",
        "pieces, max_rows=max_rows, max_bytes=max_bytes)\n        pieces",
        "pieces, max_rows=max_rows, max_bytes=1 << 30)\n        pieces",
    ),
    ("scans from after", "and key > after)", "and key >= after)"),
    ("scans unsorted", "keys = sorted(key for", "keys = list(key for"),
    ("scans without limit", "for key in keys[:limit]]", "for key in keys]"),
)

ENGINE = mutants(
    "store/memory/memory_store.py",
    (
        "listeners are never called",
        "        if done.spans and not done.duplicate:",
        "        if False:",
    ),
    ("repeats call listeners", "if done.spans and not done.duplicate:", "if done.spans:"),
    (
        "a failing listener breaks a commit",
        "            except Exception:\n",
        "            except ZeroDivisionError:\n",
    ),
    (
        "listeners are called before the commit",
        "        done = self.locked(self.namespace.commit, commit)\n",
        "        self._notify([ShardEnd(a.topic, a.shard, 0) for a in commit.appends])\n"
        "        done = self.locked(self.namespace.commit, commit)\n",
    ),
    (
        "watching never ends",
        "        def end() -> None:\n            self._space.listeners.pop(token, None)",
        "        def end() -> None:\n            pass",
    ),
    (
        "errors are raised at once",
        "            return self._submit(self._space.commit, request_checks.commit(commit))\n"
        "        except PolybusError as error:",
        "            return self._submit(self._space.commit, request_checks.commit(commit))\n"
        "        except ZeroDivisionError as error:",
    ),
    (
        "works when closed",
        "        if self._closed:\n            raise",
        "        if False:\n            raise",
    ),
    ("closing does not wait", "self._space.leave()", "pass"),
    (
        "works in a fork",
        "        if self._pid != os.getpid():\n            raise",
        "        if False:\n            raise",
    ),
    ("closing twice fails", "if self._closed or self._pid != os.getpid():", "if False:"),
    ("two write at once", "ThreadPoolExecutor(1, ", "ThreadPoolExecutor(4, "),
)

CHECKS = mutants(
    "store/request_checks.py",
    ("any name will do", "    topic_name.check_topic_name(name)\n", ""),
    ("settings are shared", "return {name: copy[name] for name in copy}", "return dict(settings)"),
    ("a key twice", '_check_unique([change.key for change in changes], "a commit', 'str("a commit'),
    (
        "a stage twice",
        '_check_unique(published, "a commit must not publish a stage twice")',
        "pass",
    ),
    ("no rows are asked for", "if max_rows < 1:", "if max_rows < 0:"),
    ("long keys", "_at_most(key, MAX_KEY_BYTES,", "_at_most(key, MAX_KEY_BYTES + 1,"),
    ("long prefixes", "_at_most(part, MAX_KEY_BYTES,", "_at_most(part, MAX_KEY_BYTES + 1,"),
    ("long records", 'MAX_RECORD_BYTES, "record"', 'MAX_RECORD_BYTES + 1, "a record"'),
    ("long notes", 'MAX_NOTE_BYTES, "note"', 'MAX_NOTE_BYTES + 1, "a note"'),
    ("any lease", "math.isfinite(lease_s) and lease_s >= 0", "True"),
)

ALL = [*LOG, *PRODUCERS, *NAMESPACE, *ENGINE, *CHECKS]


def trial(mutant: Patch | None) -> str:
    """Return GREEN, or the name of the first check that failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_S)
        verdict = until_caught(mutant)
        os.write(writing, verdict.encode()[:MAX_WORDS])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        verdict = answer.read()
    os.waitpid(child, 0)
    return verdict or f"hung for {HANG_S} s, or died"


def until_caught(mutant: Patch | None) -> str:
    logging.disable()
    try:
        if mutant:
            plant(mutant)
        engine_module = importlib.import_module("polybus.store.memory.memory_store")
        suite = importlib.import_module("polybus.testing.conformance")
    except DoesNotApply as error:
        return f"{STALE}: {error}"
    except Exception as error:
        return f"{UNTRIED}: cannot be imported: {error!r}"
    engine = suite.Engine(lambda wall_ns: engine_module.MemoryStore(wall_ns=wall_ns))
    for check in suite.checks(engine):
        try:
            check(engine)
        except BaseException as error:
            return f"{suite.name_of(check)}: {type(error).__name__}"
    return GREEN


def plant(mutant: Patch) -> None:
    """Put the changed module into `sys.modules`."""
    path = PACKAGE / mutant.file
    name = "polybus." + mutant.file.removesuffix(".py").replace("/", ".")
    package = importlib.import_module(name.rpartition(".")[0])
    module = sys.modules[name] = ModuleType(name)
    source = mutant.texts(PACKAGE)[mutant.file]
    exec(compile(source, str(path), "exec"), module.__dict__)
    setattr(package, name.rpartition(".")[2], module)


def main() -> int:
    words = sys.argv[1:]
    chosen = [mutant for mutant in ALL if not words or any(word in mutant.name for word in words)]
    if (verdict := trial(None)) != GREEN:
        sys.exit(f"the suite fails without any mutant: {verdict}")
    missed = 0
    for mutant in chosen:
        start_s = time.monotonic()
        verdict = trial(mutant)
        caught = is_caught(verdict)
        missed += not caught
        mark = "" if caught else "MISSED"
        took_s = time.monotonic() - start_s
        say(f"{mutant.file:<28} {mutant.name:<36} {took_s:5.1f} s {mark:6} {verdict}")
    say(f"{len(chosen) - missed} of {len(chosen)} mutants caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
