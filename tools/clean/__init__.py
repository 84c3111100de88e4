"""``teraio clean``: takes away what killed sessions left in spill directories.

Covers the options and the report. What may be removed is decided by ``io_backend.reclaim``, as for every new session.
Must stay true: nothing that is alive, or not ours, is touched.
"""
