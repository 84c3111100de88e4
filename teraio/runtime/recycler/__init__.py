"""Memory of dead tensors handed to new ones, within a limit: torch's CPU allocator while sessions are open."""

from teraio.runtime.recycler.lease import RecyclerLease, lease_recycler
from teraio.runtime.recycler.library import RecyclerUnavailableError

__all__ = ["RecyclerLease", "RecyclerUnavailableError", "lease_recycler"]
