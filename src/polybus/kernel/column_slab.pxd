# Memory for large columns; see column_slab.pyx.

cdef object new_column(unsigned char** place, Py_ssize_t size)
