"""What one user holds of each quota, and may hold: the sums behind bus/quotas.py.

A quota is a place in a short row. A charge fits whole or changes nothing, and what
was never charged cannot be released.
"""
cimport cython
from libc.stdint cimport int64_t

PLACES = QUOTA_COUNT
MAX_AMOUNT = 0x7FFFFFFFFFFFFFFF


@cython.final
cdef class QuotaAccount:
    """`key` is the user's uid, or what else stands for it; limits are 0 until they are set."""

    def __init__(self, key):
        self.key = key

    def limit(self, int quota):
        return self.limits[checked(quota)]

    def set_limit(self, int quota, int64_t limit):
        self.limits[checked(quota)] = limit

    def held(self, int quota):
        return self.used[checked(quota)]

    def charge(self, int quota, int64_t amount):
        """False, with nothing charged, if that would be over the limit."""
        check_amount(amount)
        return self.try_charge(checked(quota), amount)

    def release(self, int quota, int64_t amount):
        check_amount(amount)
        self.refund(checked(quota), amount)

    @property
    def is_empty(self):
        cdef int quota
        for quota in range(QUOTA_COUNT):
            if self.used[quota]:
                return False
        return True

    cdef bint has_room(self, int quota, int64_t amount) noexcept:
        # Spelt as a difference: a sum could leave 64 bits.
        return amount <= self.limits[quota] - self.used[quota]

    cdef bint try_charge(self, int quota, int64_t amount) noexcept:
        if not self.has_room(quota, amount):
            return False
        self.used[quota] += amount
        return True

    cdef int refund(self, int quota, int64_t amount) except -1:
        if amount > self.used[quota]:
            raise ValueError(f"{self.key} releases {amount}: more than it holds")
        self.used[quota] -= amount
        return 0


cdef int checked(int quota) except -1:
    if not 0 <= quota < QUOTA_COUNT:
        raise IndexError(quota)
    return quota


cdef int check_amount(int64_t amount) except -1:
    if amount < 0:
        raise ValueError(f"an amount is at least 0, not {amount}")
    return 0
