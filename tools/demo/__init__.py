"""``teraio demo``: the same training twice, plain and under a memory budget, compared number by number and bit by bit.

Covers the model and text to train on, the processes that train, what is measured, and the table at the end.
Does not offload anything itself: ``teraio`` does, in the worker process.
Must stay true: both modes run the same code, steps, seed and environment; only ``with teraio.offload(...)`` differs.
"""
