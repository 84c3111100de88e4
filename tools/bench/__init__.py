"""``teraio bench``: what teraio can do on this machine, measured beside the tools that people compare it with.

Covers the I/O benchmark: throughput and processor time of the posix store, fio, and other offload libraries.
Does not move teraio's bytes itself: ``io_backend`` does, in a worker process like everybody else's.
Must stay true: all contenders of a table ran in the same minutes, in turns; only then do their numbers compare.
"""
