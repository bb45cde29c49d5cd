"""Interned subscriber sets: topics with the same subscribers share one set.

The fan-out gathers runs of messages by set number, so messages of two topics with the same
readers form one run. Sets are immutable: a subscription moves its topic from one set to
another. Number 0 is the empty set and is never stored.

Reading a set is an array access. Changes are rare and use a Python dict.
"""
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from libc.string cimport memcpy


cdef inline uint32_t position(const uint32_t* members, uint32_t size, uint32_t member) noexcept nogil:
    """Return the index of `member` in the ascending array, or where it must be inserted."""
    cdef uint32_t low = 0
    cdef uint32_t high = size
    cdef uint32_t middle
    while low < high:
        middle = (low + high) // 2
        if members[middle] < member:
            low = middle + 1
        else:
            high = middle
    return low


cdef class SubscriberSetTable:
    def __cinit__(self):
        self.capacity = 64
        self.used = 1  # number 0 is the empty set
        self.free = []
        self.numbers = {}
        self.sets = <SubscriberSet*>PyMem_Malloc(self.capacity * sizeof(SubscriberSet))
        if self.sets is NULL:
            raise MemoryError
        self.sets[0] = SubscriberSet(1, 0, 0, NULL)

    def __dealloc__(self):
        cdef uint32_t number
        if self.sets is NULL:
            return
        for number in range(self.used):
            PyMem_Free(self.sets[number].members)
        PyMem_Free(self.sets)

    def __len__(self):
        return len(self.numbers)

    cdef int contains(self, uint32_t number, uint32_t member) noexcept nogil:
        cdef SubscriberSet* found = &self.sets[number]
        cdef uint32_t at = position(found.members, found.size, member)
        return at < found.size and found.members[at] == member

    cdef uint32_t with_member(self, uint32_t number, uint32_t member, uint32_t encoding) except 0:
        """Return the number of the set with `member` added. Takes one reference."""
        cdef SubscriberSet* old = &self.sets[number]
        cdef uint32_t size = old.size
        cdef uint32_t at = position(old.members, size, member)
        cdef uint32_t* grown = <uint32_t*>PyMem_Malloc((size + 1) * sizeof(uint32_t))
        if grown is NULL:
            raise MemoryError
        try:
            if size:
                memcpy(grown, old.members, at * sizeof(uint32_t))
                memcpy(grown + at + 1, old.members + at, (size - at) * sizeof(uint32_t))
            grown[at] = member
            return self.intern(grown, size + 1, old.encodings | (<uint32_t>1 << encoding))
        finally:
            PyMem_Free(grown)

    cdef long without_member(self, uint32_t number, uint32_t member, uint32_t encodings) except -1:
        """Return the number of the set without `member`. Takes one reference."""
        cdef SubscriberSet* old = &self.sets[number]
        cdef uint32_t size = old.size
        cdef uint32_t at = position(old.members, size, member)
        cdef uint32_t* shrunk
        if size == 1:
            return 0
        shrunk = <uint32_t*>PyMem_Malloc((size - 1) * sizeof(uint32_t))
        if shrunk is NULL:
            raise MemoryError
        try:
            memcpy(shrunk, old.members, at * sizeof(uint32_t))
            memcpy(shrunk + at, old.members + at + 1, (size - at - 1) * sizeof(uint32_t))
            return self.intern(shrunk, size - 1, encodings)
        finally:
            PyMem_Free(shrunk)

    cdef uint32_t intern(self, const uint32_t* members, uint32_t size, uint32_t encodings) except 0:
        # The member array itself is the key: equal sets have equal bytes because it is sorted.
        cdef bytes key = PyBytes_FromStringAndSize(<const char*>members, size * sizeof(uint32_t))
        cdef object known = self.numbers.get(key)
        cdef uint32_t number
        cdef uint32_t* copy
        if known is not None:
            number = known
            self.sets[number].references += 1
            return number
        copy = <uint32_t*>PyMem_Malloc(size * sizeof(uint32_t))
        if copy is NULL:
            raise MemoryError
        memcpy(copy, members, size * sizeof(uint32_t))
        try:
            number = self.allocate_number()
            self.numbers[key] = number
        except BaseException:
            PyMem_Free(copy)
            raise
        self.sets[number] = SubscriberSet(1, size, encodings, copy)
        return number

    cdef uint32_t allocate_number(self) except 0:
        """Return a free number; grows the array if there is none."""
        cdef SubscriberSet* grown
        if self.free:
            return self.free.pop()
        if self.used == self.capacity:
            grown = <SubscriberSet*>PyMem_Realloc(
                self.sets, 2 * <size_t>self.capacity * sizeof(SubscriberSet)
            )
            if grown is NULL:
                raise MemoryError
            self.sets = grown
            self.capacity *= 2
        self.sets[self.used] = SubscriberSet(0, 0, 0, NULL)
        self.used += 1
        return self.used - 1

    cdef int release(self, uint32_t number) except -1:
        """Drop one reference; the last one frees the set."""
        cdef SubscriberSet* old = &self.sets[number]
        if number == 0:
            return 0
        old.references -= 1
        if old.references:
            return 0
        key = PyBytes_FromStringAndSize(<const char*>old.members, old.size * sizeof(uint32_t))
        del self.numbers[key]
        PyMem_Free(old.members)
        self.sets[number] = SubscriberSet(0, 0, 0, NULL)
        self.free.append(number)
        return 0
