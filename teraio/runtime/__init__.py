"""Carrying a plan out: hooks, residency of storages, moves, admission of unknown iterations, the chunked step."""
