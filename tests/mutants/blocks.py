"""Breaks the kernel of blocks on purpose, and demands that its tests notice each change.

    python tests/mutants/blocks.py [part of a mutant's name ...]

The same procedure as in run.py, on a copy that holds only this part of the kernel:
each mutant is compiled again.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants import run  # noqa: E402
from tests.mutants.kernel import mutants  # noqa: E402

PARTS = ("blocks", "block_gather", "column_slab")
TESTS = (
    *(f"tests/unit/model/test_{name}.py" for name in ("block", "arrow")),
    *(f"tests/unit/kernel/test_{name}.py" for name in ("blocks", "blocks_later", "slabs")),
    *(f"tests/property/kernel/test_{name}.py" for name in ("blocks", "gathering")),
)

OPENING = mutants(
    "kernel/blocks.pyx",
    ("owed checksums are forgotten", "columns.is_damaged = found != wanted", ""),
    (
        "owed checksums can be done without",
        "if self.columns.owed is not NULL and not compares:",
        "if False:",
    ),
    ("any magic", "if memcmp(header.magic, MAGIC_BYTES, 8):", "if False:"),
    (
        "a short magic",
        "if memcmp(header.magic, MAGIC_BYTES, 8):",
        "if memcmp(data, MAGIC_BYTES, 7):",
    ),
    ("header not whole", "if size < HEADER or", "if size < HEADER - 1 or"),
    ("larger than the limit", "size < HEADER or size > LARGEST:", "size < HEADER:"),
    ("any size", "if header.size != size:", "if header.size > size:"),
    ("no checksum", "if checksum and header.checksum !=", "if False and header.checksum !="),
    ("always a checksum", "if checksum and header.checksum !=", "if header.checksum !="),
    (
        "part of the checksum",
        "!= hash_of(data + CHECKED_FROM, size - CHECKED_FROM, 0):",
        "!= hash_of(data + CHECKED_FROM, size - CHECKED_FROM - 1, 0):",
    ),
    ("any version", "if header.version != VERSION:", "if False:"),
    ("unused flags", '    if flags & ~ALL_FLAGS:\n        return "flags"\n', ""),
    ("null keys without keys", "if flags & NULL_KEYS and not flags & KEYS or", "if"),
    ("null headers without headers", " or flags & NULL_HEADERS and not flags & HEADERS:", ":"),
    ("sizes of absent keys", "if not flags & KEYS and header.keys:", "if False:"),
    ("sizes of absent headers", "header.entries or header.names or header.values", "header.names"),
    ("no messages", "if header.count == 0:", "if False:"),
    (
        "sizes need not add up",
        "header.flags, &sizes, &places) != size:",
        "header.flags, &sizes, &places) > size:",
    ),
    ("padding of offsets", "if not is_clear(strings.offsets, (count + 1) * 4) or", "if"),
    ("padding of data", " or not is_clear(strings.data, strings.size):", ":"),
    ("padding of bits", "if not is_clear(bits, size) or bits_set", "if bits_set"),
    (
        "bits behind the last message",
        " or bits_set(bits, count, size * 8 - count):",
        ":",
    ),
    ("a bitmap that says all", "found == 0 or found == count or", "found == 0 or"),
    ("a bitmap that says none", "found == 0 or found == count or", "found == count or"),
    ("nulls with bytes", " or not nulls_are_empty(offsets, bits, 0, count):", ":"),
    ("offsets begin anywhere", "if get_i32(strings.offsets, 0) != 0 or", "if"),
    (
        "offsets end anywhere",
        " or get_i32(strings.offsets, count) != strings.size:",
        " or get_i32(strings.offsets, count) > strings.size:",
    ),
    (
        "offsets go back",
        '    if not is_ordered(strings.offsets, count):\n        return "offsets"\n',
        "",
    ),
    (
        "header offsets go back",
        '    if not is_ordered(columns.header_offsets, count):\n        return "offsets"\n',
        "",
    ),
    (
        "entries that no peer has",
        "get_i32(columns.header_offsets, count) != columns.entries",
        "get_i32(columns.header_offsets, count) > columns.entries",
    ),
    (
        "any text",
        "    if not is_utf8(strings.data, 0, strings.size,",
        "    if False and is_utf8(strings.data, 0, strings.size,",
    ),
)

MAKING = mutants(
    "kernel/blocks.pyx",
    (
        "keys are not counted by their bits",
        "columns.key_bits, columns.key_bit + start, count\n        )\n    if columns.header",
        "columns.key_bits, columns.key_bit, count\n        )\n    if columns.header",
    ),
    (
        "one body too many",
        "cdef int32_t shift = <int32_t>(at - stretch.start)",
        "cdef int32_t shift = <int32_t>at",
    ),
    ("data from the start", "strings.data + stretch.start, stretch", "strings.data, stretch"),
    ("keys are not advanced", "    done.keys += slice.keys.end - slice.keys.start\n\n\n", "\n\n"),
    ("entries are not advanced", "    done.entries += entries.end - entries.start\n", ""),
    (
        "bits at the wrong place",
        "target.key_bits, done.count, columns.key_bits",
        "target.key_bits, 0, columns.key_bits",
    ),
    (
        "map bits of the slice's start",
        "columns.header_bits, columns.header_bit + slice.start, count,\n        )\n    write",
        "columns.header_bits, columns.header_bit, count,\n        )\n    write",
    ),
    (
        "absent keys end at 0",
        "count, <int32_t>done.keys)\n        return",
        "count, 0)\n        return",
    ),
    (
        "absent headers end at 0",
        "count, <int32_t>done.entries)\n        return",
        "count, 0)\n        return",
    ),
    ("bitmaps without nulls", "KEYS if sizes.with_key == sizes.count else", ""),
    (
        "last key offset",
        "        set_i32(target.key_offsets, done.count, <int32_t>done.keys)\n",
        "        pass\n",
    ),
    ("padding is not cleared", "    clear_padding(sizes, &places)\n", ""),
    ("times from the start", "columns.insertion + slice.start * 8", "columns.insertion"),
    (
        "too large",
        "    if size > LARGEST:\n        raise Over",
        "    if size > LARGEST + 8:\n        raise Over",
    ),
    ("cuts may be empty", "if not 0 <= start < end <=", "if not 0 <= start <= end <="),
    ("cuts go beyond", "start < end <= layout.columns.count:", "start < end:"),
    (
        "caller's offsets go beyond",
        "        and get_i32(strings.offsets, count) <= strings.size\n",
        "",
    ),
    ("caller's offsets go back", "        and is_ordered(strings.offsets, count)\n", ""),
    (
        "caller's offsets are negative",
        "        get_i32(strings.offsets, 0) >= 0\n        and",
        "       ",
    ),
    (
        "caller's text",
        "is_utf8(strings.data, start, end, strings",
        "True or is_utf8(strings.data, start, end, strings",
    ),
    ("caller's bits go beyond", "first > bits.view.len * 8 - count:", "first > bits.view.len * 8:"),
    (
        "caller's nulls have bytes",
        "        sound = nulls_are_empty(",
        "        sound = True or nulls_are_empty(",
    ),
    ("caller's times are short", "if held_insertion.view.len != columns.count * 8:", "if False:"),
    ("caller's maps go beyond", " or get_i32(at, count) > columns.entries or", " or"),
    (
        "closed layouts are read",
        "        if not self.is_open:\n            raise",
        "        if False:\n            raise",
    ),
    ("layouts close under a reader", "        if self.users:\n", "        if False:\n"),
    ("layouts are never let go", "        self.users -= 1\n", "        pass\n"),
    (
        "the buffer is kept",
        "            self.is_open = False\n            PyBuffer_Release(&self.view)\n",
        "            self.is_open = False\n",
    ),
)

READING = mutants(
    "kernel/block_gather.pyx",
    (
        "not sorted",
        "        if self.several_shards and not self.by_piece:\n            self.sort()\n",
        "",
    ),
    ("always sorted", "self.several_shards and not self.by_piece", "self.several_shards"),
    ("one shard is enough", "piece.shard != self.pieces[0].shard", "False"),
    (
        "ids from the start of the run",
        "run.first_id = first_id + start - place",
        "run.first_id = first_id",
    ),
    (
        "offsets of the block",
        "run.first_offset = piece.first_offset + start",
        "run.first_offset = piece.first_offset",
    ),
    (
        "the first id is left out",
        "place + min(self.bounds.from_id - first_id, count))",
        "place + min(self.bounds.from_id - first_id + 1, count))",
    ),
    (
        "one id too many",
        "place + max(self.bounds.below_id - first_id, 0)",
        "place + max(self.bounds.below_id - first_id + 1, 0)",
    ),
    (
        "one row too many",
        "max(self.bounds.max_rows - rows, least)",
        "max(self.bounds.max_rows - rows + 1, least)",
    ),
    (
        "one byte too many",
        "return weight > self.bounds.max_bytes or",
        "return weight > self.bounds.max_bytes + 1 or",
    ),
    (
        "keys weigh nothing",
        "        weight += sizes.bodies + sizes.keys + sizes.names + sizes.values\n        return",
        "        weight += sizes.bodies + sizes.names + sizes.values\n        return",
    ),
    (
        "weight is not summed",
        "        weight[0] += sizes.bodies + sizes.keys + sizes.names + sizes.values\n",
        "",
    ),
    ("no first message", "cdef int64_t least = 0 if rows else 1", "cdef int64_t least = 0"),
    (
        "what is beyond a cut comes too",
        "                self.run_count = number + (fits > 0)\n                return True\n",
        "",
    ),
    (
        "other blocks' neighbours",
        "last.columns == run.columns and last.end == run.start",
        "last.end == run.start",
    ),
    (
        "distant neighbours",
        "last.columns == run.columns and last.end == run.start",
        "last.columns == run.columns",
    ),
    ("short tables", "return place == piece.columns.count", "return True"),
    ("long tables", "or count < 1 or count > piece.columns.count - place:", "or count < 1:"),
    ("torn tables", "        if piece.runs.len % RUN_BYTES:\n            return False\n", ""),
    (
        "ids wrap round",
        "            if first_id > INT64_MAX - count:\n                return False\n",
        "",
    ),
    ("pieces go beyond", "piece.end <= layout.columns.count:", "piece.end:"),
    (
        "bitmaps are not cleared",
        "        memset(place[0], 0, size)\n",
        "        memset(place[0], 255, size)\n",
    ),
    (
        "run tables are held",
        "            PyBuffer_Release(&self.pieces[number].runs)\n            (<Layout",
        "            (<Layout",
    ),
)

LOOPS = [
    *mutants(
        "kernel/column_loops.h",
        (
            "tail of a bit count",
            "for (; place < end; place++) found +=",
            "for (; place + 1 < end; place++) found +=",
        ),
        ("words of a bit count", "found += __builtin_popcountll(word);", "found += 64;"),
        ("tail of copied bits", "for (; out_bit < end; out_bit++, in_bit++) {", "for (; 0;) {"),
        ("head of copied bits", "out_bit < end && out_bit & 7;", "0;"),
        ("shifted bits", "| in[(in_bit >> 3) + 1] << (8 - (in_bit & 7))", ""),
        ("surrogates", "if (first == 0xED && at[1] > 0x9F) return 0;", ""),
        ("long spellings of three", "if (first == 0xE0 && at[1] < 0xA0) return 0;", ""),
        ("long spellings of four", "if (first == 0xF0 && at[1] < 0x90) return 0;", ""),
        ("past the last character", "if (first == 0xF4 && at[1] > 0x8F) return 0;", ""),
        ("cuts inside a character", "polybus_continues(data[at])) return 0;", "0) return 0;"),
    ),
    *mutants(
        "kernel/xxh64.h",
        (
            "the tail's order",
            "hash = polybus_rotate(hash ^ *at * POLYBUS_P5, 11)",
            "hash = polybus_rotate(hash ^ *at * POLYBUS_P5, 12)",
        ),
        (
            "without the size",
            "return polybus_xxh64_tail(hash + size, at, size % 32);",
            "return polybus_xxh64_tail(hash, at, size % 32);",
        ),
        (
            "copies less at the end",
            "copied_end, start + to - copied_end);",
            "copied_end, 0);",
        ),
        (
            "copies less at the beginning",
            "memcpy(out, start + from, copied - (start + from));",
            "",
        ),
    ),
]

SLABS = mutants(
    "kernel/column_slab.pyx",
    (
        "memory is given away twice",
        "            waiting_count -= 1\n            waiting[number] = waiting[waiting_count]\n",
        "",
    ),
    ("any larger slab will do", "<= found.room <= room[0] + room[0] // 2:", "<= found.room:"),
    ("smaller slabs will do", "if room[0] <= found.room <=", "if found.room <="),
    ("nothing is kept", "if waiting_count == MAX_KEPT or", "if True or"),
    ("all is kept", " or room > most - waiting_bytes:", ":"),
    (
        "columns can be written to",
        "self.data, self.size, 1, flags)",
        "self.data, self.size, 0, flags)",
    ),
)

ALL = [*OPENING, *MAKING, *READING, *SLABS, *LOOPS]


def main() -> int:
    run.TREE = ROOT / "build" / "mutants-blocks"
    run.PACKAGE = run.TREE / "src" / "polybus"
    run.TESTS = TESTS
    run.copy_tree = copy_parts
    return run.main(ALL)


copy_whole_tree = run.copy_tree


def copy_parts() -> None:
    copy_whole_tree()
    for source in (run.PACKAGE / "kernel").glob("*.pyx"):
        if source.stem not in PARTS:
            source.unlink()


if __name__ == "__main__":
    sys.exit(main())
