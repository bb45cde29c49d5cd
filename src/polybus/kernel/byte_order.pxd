# Integers at any address, independent of the host's byte order and alignment; little-endian
# unless the name ends in _be.
# Written byte by byte. The compiler turns each into one instruction where the host allows it.
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef inline uint32_t load_u32(const unsigned char* at) noexcept nogil:
    return <uint32_t>at[0] | <uint32_t>at[1] << 8 | <uint32_t>at[2] << 16 | <uint32_t>at[3] << 24


cdef inline int64_t load_length(const unsigned char* at) noexcept nogil:
    # int64, so that adding it to a size cannot wrap around on any host.
    return <int64_t>load_u32(at)


cdef inline uint64_t load_u64(const unsigned char* at) noexcept nogil:
    return load_u32(at) | <uint64_t>load_u32(at + 4) << 32


cdef inline unsigned char* store_u32(unsigned char* out, uint32_t value) noexcept nogil:
    out[0] = value & 0xFF
    out[1] = value >> 8 & 0xFF
    out[2] = value >> 16 & 0xFF
    out[3] = value >> 24 & 0xFF
    return out + 4


cdef inline unsigned char* store_u64(unsigned char* out, uint64_t value) noexcept nogil:
    return store_u32(store_u32(out, <uint32_t>value), <uint32_t>(value >> 32))


# Big-endian (network order), for the dialects whose wire has it.

cdef inline int load_u16_be(const unsigned char* at) noexcept nogil:
    return at[0] << 8 | at[1]


cdef inline uint32_t load_u32_be(const unsigned char* at) noexcept nogil:
    return <uint32_t>at[0] << 24 | <uint32_t>at[1] << 16 | <uint32_t>at[2] << 8 | <uint32_t>at[3]


cdef inline uint64_t load_u64_be(const unsigned char* at) noexcept nogil:
    return <uint64_t>load_u32_be(at) << 32 | load_u32_be(at + 4)


cdef inline unsigned char* store_u16_be(unsigned char* out, uint32_t value) noexcept nogil:
    out[0] = value >> 8 & 0xFF
    out[1] = value & 0xFF
    return out + 2


cdef inline unsigned char* store_u32_be(unsigned char* out, uint32_t value) noexcept nogil:
    return store_u16_be(store_u16_be(out, value >> 16), value & 0xFFFF)


cdef inline unsigned char* store_u64_be(unsigned char* out, uint64_t value) noexcept nogil:
    return store_u32_be(store_u32_be(out, <uint32_t>(value >> 32)), <uint32_t>value)
