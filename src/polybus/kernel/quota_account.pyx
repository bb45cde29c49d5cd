"""The quota sums of one user: held amounts and limits, for bus/quotas.py.

A quota is an index into a short array. A charge is applied completely or not at all, and
a release must not exceed the charged amount.
"""
cimport cython
from libc.stdint cimport int64_t

PLACES = QUOTA_COUNT
MAX_AMOUNT = 0x7FFFFFFFFFFFFFFF


@cython.final
cdef class QuotaAccount:
    """`key` is the uid of the user, or its name in another namespace. Limits start at 0."""

    def __init__(self, key):
        self.key = key

    def limit(self, int quota):
        return self.limits[checked(quota)]

    def set_limit(self, int quota, int64_t limit):
        self.limits[checked(quota)] = limit

    def held(self, int quota):
        return self.used[checked(quota)]

    def charge(self, int quota, int64_t amount):
        """Charge an amount. Returns False, and charges nothing, if it exceeds the limit."""
        check_amount(amount)
        return self.try_charge(checked(quota), amount)

    def release(self, int quota, int64_t amount):
        """Release a charged amount. Raises ValueError if it exceeds the held amount."""
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
        # A difference, because the sum of two int64 values could overflow.
        return amount <= self.limits[quota] - self.used[quota]

    cdef bint try_charge(self, int quota, int64_t amount) noexcept:
        if not self.has_room(quota, amount):
            return False
        self.used[quota] += amount
        return True

    cdef int refund(self, int quota, int64_t amount) except -1:
        if amount > self.used[quota]:
            raise ValueError(
                f"released amount must be at most {self.used[quota]}, got {amount} (account {self.key})"
            )
        self.used[quota] -= amount
        return 0


cdef int checked(int quota) except -1:
    if not 0 <= quota < QUOTA_COUNT:
        raise IndexError(quota)
    return quota


cdef int check_amount(int64_t amount) except -1:
    if amount < 0:
        raise ValueError(f"amount must be >= 0, got {amount}")
    return 0
