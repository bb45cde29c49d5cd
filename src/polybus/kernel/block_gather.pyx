"""Read messages of many blocks as columns, with ids, offsets and times.

A piece is a part of one block with its position: the offset of the block's message 0, the
shard, and a run table of int64 triples (first id, timestamp in ns, count) that gives ids and
times. Runs of several shards are sorted by id, unless the caller wants one piece after the
other. Neighbouring runs of one block are copied together, so the work is per run for
positions and per piece for bodies.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memset

from polybus.kernel.blocks cimport Columns, Layout, Sizes, Slice, Target, count_i64, get_i64, measure, measure_one, repeat_i32, repeat_i64, write_columns
from polybus.kernel.column_slab cimport new_column

cdef enum:
    RUN_BYTES = 24

# Offsets into a gathered column are int32, and the first message may exceed the limit.
MAX_GATHERED_BYTES = 1024 * 1024 * 1024
# Total size of the blocks. Below it, taking the GIL again takes longer than the copying, and a
# push reader reads a few messages at a time.
cdef enum:
    MIN_NOGIL_BYTES = 1 << 16


class BadPiece(ValueError):
    """A run table does not fit its block, or the bytes changed during the read."""


cdef struct Piece:
    const Columns* columns
    Py_buffer runs
    int64_t first_offset
    int32_t shard
    int64_t start
    int64_t end

cdef struct Run:  # messages `start` to `end` of a block, with their positions
    const Columns* columns
    int64_t start
    int64_t end
    int64_t first_id
    int64_t timestamp_ns
    int64_t first_offset
    int32_t shard

cdef struct Bounds:
    int64_t from_id
    int64_t below_id
    int64_t max_rows
    int64_t max_bytes


cdef class Plan:
    """The input and output of one gather. Holds the buffers of all blocks until its end."""

    cdef Bounds bounds
    cdef list layouts
    cdef Piece* pieces
    cdef int64_t piece_count
    cdef bint several_shards
    cdef bint by_piece
    cdef int64_t held_bytes  # of all blocks
    cdef Run* runs
    cdef int64_t run_count
    cdef Slice* slices
    cdef int64_t slice_count
    cdef Sizes sizes
    cdef unsigned char* ids
    cdef unsigned char* shards
    cdef unsigned char* offsets
    cdef unsigned char* timestamps
    cdef Target target

    def __dealloc__(self):
        cdef int64_t number
        for number in range(self.piece_count):
            PyBuffer_Release(&self.pieces[number].runs)
            (<Layout>self.layouts[number]).release()
        free(self.pieces)
        free(self.runs)
        free(self.slices)

    cdef int take(self, list pieces) except -1:
        """Hold all pieces and allocate space for their runs. Raises MemoryError."""
        cdef int64_t runs = 0
        self.layouts = []
        self.pieces = <Piece*>malloc(max(1, len(pieces)) * sizeof(Piece))
        if self.pieces is NULL:
            raise MemoryError
        for piece in pieces:
            runs += self.take_one(piece)
        self.runs = <Run*>malloc(max(1, runs) * sizeof(Run))
        self.slices = <Slice*>malloc(max(1, runs) * sizeof(Slice))
        if self.runs is NULL or self.slices is NULL:
            raise MemoryError
        return 0

    cdef int64_t take_one(self, given) except -1:
        cdef Layout layout
        cdef Piece* piece = &self.pieces[self.piece_count]
        layout, runs, piece.first_offset, piece.shard, piece.start, piece.end = given
        if layout is None:
            raise TypeError("piece must have a layout, got None")
        if not 0 <= piece.start <= piece.end <= layout.columns.count:
            raise IndexError(
                f"piece must lie within its block, got messages {piece.start} to {piece.end}"
                f" of {layout.columns.count}"
            )
        if not 0 <= piece.first_offset <= INT64_MAX - layout.columns.count:
            raise BadPiece(f"first offset must be >= 0 and fit int64, got {piece.first_offset}")
        # In this order: __dealloc__ releases `piece_count` pieces, which this one joins last.
        self.layouts.append(layout)
        PyObject_GetBuffer(runs, &piece.runs, PyBUF_SIMPLE)
        try:
            layout.hold(True)
        except BaseException:
            PyBuffer_Release(&piece.runs)
            raise
        piece.columns = &layout.columns
        self.held_bytes += layout.size_bytes
        if self.piece_count and piece.shard != self.pieces[0].shard:
            self.several_shards = True
        self.piece_count += 1
        return piece.runs.len // RUN_BYTES

    cdef const char* choose(self) noexcept nogil:
        """Select the runs and slices to read. Returns NULL, or the reason of a BadPiece."""
        cdef int64_t number
        for number in range(self.piece_count):
            if not self.choose_of(&self.pieces[number]):
                return "a run table does not fit its block"
        # Pieces of one shard are in order already.
        if self.several_shards and not self.by_piece:
            self.sort()
        if not self.limit():
            return "changed while read"
        self.merge()
        if not measure(self.slices, self.slice_count, &self.sizes):
            return "changed while read"
        return NULL

    cdef bint choose_of(self, const Piece* piece) noexcept nogil:
        """Add the runs of one piece. Returns False if the run table does not fit the block."""
        cdef const unsigned char* table = <const unsigned char*>piece.runs.buf
        cdef int64_t number, first_id, count, place = 0
        if piece.runs.len % RUN_BYTES:
            return False
        for number in range(piece.runs.len // RUN_BYTES):
            first_id = get_i64(table, number * 3)
            count = get_i64(table, number * 3 + 2)
            # The table comes from disk: counts must add up to the block before any is used.
            if first_id < 0 or count < 1 or count > piece.columns.count - place:
                return False
            # Otherwise first_id + count would overflow below.
            if first_id > INT64_MAX - count:
                return False
            self.choose_run(piece, place, count, first_id, get_i64(table, number * 3 + 1))
            place += count
        return place == piece.columns.count

    cdef void choose_run(
        self, const Piece* piece, int64_t place, int64_t count, int64_t first_id, int64_t time
    ) noexcept nogil:
        """Add the messages of a run at `place` that lie in the piece and in the id bounds."""
        cdef int64_t start = max(place, piece.start)
        cdef int64_t end = min(place + count, piece.end)
        cdef Run* run
        if self.bounds.from_id > first_id:
            start = max(start, place + min(self.bounds.from_id - first_id, count))
        if self.bounds.below_id < first_id + count:
            end = min(end, place + max(self.bounds.below_id - first_id, 0))
        if start >= end:
            return
        run = &self.runs[self.run_count]
        run.columns = piece.columns
        run.start = start
        run.end = end
        run.first_id = first_id + start - place
        run.timestamp_ns = time
        run.first_offset = piece.first_offset + start
        run.shard = piece.shard
        self.run_count += 1

    cdef void sort(self) noexcept nogil:
        # Often sorted already: a commit to one shard appends in the order of ids.
        cdef int64_t number
        for number in range(1, self.run_count):
            if self.runs[number].first_id < self.runs[number - 1].first_id:
                qsort(self.runs, self.run_count, sizeof(Run), by_id)
                return

    cdef bint limit(self) noexcept nogil:
        """Drop messages beyond max_rows and max_bytes, but never the first message."""
        cdef int64_t number, rows = 0, weight = 0, entries = 0, fits
        cdef Run* run
        for number in range(self.run_count):
            run = &self.runs[number]
            fits = self.fitting(run, rows, &weight, &entries)
            if fits < 0:
                return False
            if fits < run.end - run.start:
                run.end = run.start + fits
                self.run_count = number + (fits > 0)
                return True
            rows += fits
        return True

    cdef int64_t fitting(
        self, const Run* run, int64_t rows, int64_t* weight, int64_t* entries
    ) noexcept nogil:
        """Return how many messages of a run fit, or -1 if its offsets are invalid."""
        cdef int64_t least = 0 if rows else 1
        cdef int64_t most = min(run.end - run.start, max(self.bounds.max_rows - rows, least))
        cdef int64_t middle
        cdef Sizes sizes
        if self.weigh(run, most, &sizes) < 0:
            return -1
        # Usually the whole run fits. If not, a binary search finds how many messages do: sizes
        # come from offsets, so each probe costs the same for any number of messages.
        if self.is_over(&sizes, weight[0], entries[0]):
            while least < most:  # `least` messages fit (or are the first); more than `most` do not
                middle = (least + most + 1) // 2
                if self.weigh(run, middle, &sizes) < 0:
                    return -1
                if self.is_over(&sizes, weight[0], entries[0]):
                    most = middle - 1
                else:
                    least = middle
            # A first message larger than max_bytes is read all the same. Its weight counts, or
            # the next run would be filled up to max_bytes once more.
            most = least
            if self.weigh(run, most, &sizes) < 0:
                return -1
        weight[0] += sizes.bodies + sizes.keys + sizes.names + sizes.values
        entries[0] += sizes.entries
        return most

    cdef int weigh(self, const Run* run, int64_t count, Sizes* sizes) noexcept nogil:
        cdef Slice slice
        slice.columns = run.columns
        slice.start = run.start
        slice.end = run.start + count
        memset(sizes, 0, sizeof(Sizes))
        return 0 if measure_one(&slice, sizes) else -1

    cdef bint is_over(self, const Sizes* sizes, int64_t weight, int64_t entries) noexcept nogil:
        weight += sizes.bodies + sizes.keys + sizes.names + sizes.values
        return weight > self.bounds.max_bytes or entries + sizes.entries > INT32_MAX

    cdef void merge(self) noexcept nogil:
        """Join neighbouring runs of one block into one slice."""
        cdef int64_t number
        cdef Run* run
        cdef Slice* last = NULL
        for number in range(self.run_count):
            run = &self.runs[number]
            if last is not NULL and last.columns == run.columns and last.end == run.start:
                last.end = run.end
                continue
            last = &self.slices[self.slice_count]
            last.columns = run.columns
            last.start = run.start
            last.end = run.end
            self.slice_count += 1

    cdef tuple columns(self):
        """Allocate all columns, in the order of polybus.model.rows.Rows."""
        cdef Target* target = &self.target
        cdef const Sizes* sizes = &self.sizes
        cdef int64_t count = sizes.count, offsets = (sizes.count + 1) * 4
        cdef bint keys = sizes.with_key > 0, headers = sizes.with_headers > 0
        cdef int64_t bits = (count + 7) // 8, entries = (sizes.entries + 1) * 4
        return (
            count,
            column(&self.ids, count * 8, True),
            column(&self.shards, count * 4, True),
            column(&self.offsets, count * 8, True),
            column(&self.timestamps, count * 8, True),
            column(&target.insertion, count * 8, True),
            column(&target.body_offsets, offsets, True),
            column(&target.bodies, sizes.bodies, True),
            zeroes(&target.key_bits, bits, keys and sizes.with_key < count),
            column(&target.key_offsets, offsets, keys),
            column(&target.keys, sizes.keys, keys),
            zeroes(&target.header_bits, bits, headers and sizes.with_headers < count),
            column(&target.header_offsets, offsets, headers),
            column(&target.name_offsets, entries, headers),
            column(&target.names, sizes.names, headers),
            column(&target.value_offsets, entries, headers),
            column(&target.values, sizes.values, headers),
        )

    cdef void write(self) noexcept nogil:
        cdef int64_t number, count, at = 0
        cdef Run* run
        for number in range(self.run_count):
            run = &self.runs[number]
            count = run.end - run.start
            count_i64(self.ids + at * 8, count, run.first_id)
            repeat_i32(self.shards + at * 4, count, run.shard)
            count_i64(self.offsets + at * 8, count, run.first_offset)
            repeat_i64(self.timestamps + at * 8, count, run.timestamp_ns)
            at += count
        write_columns(self.slices, self.slice_count, &self.target)

    cdef bint is_damaged(self) noexcept nogil:
        """Return whether a checksum that was verified during the copy did not match."""
        cdef int64_t number
        for number in range(self.piece_count):
            if self.pieces[number].columns.is_damaged:
                return True
        return False


cdef int by_id(const void* one, const void* other) noexcept nogil:
    cdef int64_t first = (<const Run*>one).first_id, second = (<const Run*>other).first_id
    return (first > second) - (first < second)


cdef object column(unsigned char** place, int64_t size, bint wanted):
    return new_column(place, size) if wanted else None


cdef object zeroes(unsigned char** place, int64_t size, bint wanted):
    cdef object data = column(place, size, wanted)
    if wanted:
        memset(place[0], 0, size)
    return data


def gather(
    pieces,
    int64_t from_id,
    int64_t below_id,
    int64_t max_rows,
    int64_t max_bytes,
    bint by_piece=False,
) -> tuple:
    """Read messages into new columns, in the order of polybus.model.rows.Rows.

    A piece is (layout, runs, first offset, shard, start, end); pieces of one shard must be in
    the order of offsets. Returns messages with from_id <= id < below_id, at most `max_rows`
    with `max_bytes` of bodies, keys and headers, but at least one; sorted by id, or with
    `by_piece` in the order of the pieces. A column that no message needs is None. Verifies
    the checksums that the layouts have not verified yet.

    Raises BadPiece if a run table does not fit its block or a checksum does not match.
    """
    cdef Plan plan = Plan.__new__(Plan)
    cdef const char* reason
    cdef bint is_large
    plan.bounds = Bounds(from_id, below_id, max(1, max_rows), min(max_bytes, MAX_GATHERED_BYTES))
    plan.by_piece = by_piece
    plan.take(list(pieces))
    is_large = plan.held_bytes >= MIN_NOGIL_BYTES
    if is_large:
        with nogil:
            reason = plan.choose()
    else:
        reason = plan.choose()
    if reason is not NULL:
        raise BadPiece(reason.decode())
    columns = plan.columns()
    if is_large:
        with nogil:
            plan.write()
    else:
        plan.write()
    if plan.is_damaged():
        raise BadPiece("a block does not match its checksum")
    return columns
