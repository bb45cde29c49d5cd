# Memory for large columns; see slabs.pyx.

cdef object new_column(unsigned char** place, Py_ssize_t size)
