"""``teraio doctor``: whether a machine and its directories are fit for offload, how fast they are, and what to mend.

Covers examining directories and the machine, judging what was found, and showing it.
Does not measure by itself: ``io_backend.calibrate`` does, and keeps the result for later sessions.
Must stay true: each problem comes with a remedy, and nothing that is unknown is shown as a fact.
"""
