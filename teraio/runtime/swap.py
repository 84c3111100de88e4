"""Giving the memory of a long-lived tensor back in place: the tensor stays, its bytes move.

Covers the exchange of memory under a tensor that the program goes on holding, and the substitute that lies there
meanwhile. When to do it is decided elsewhere. The rules: every view stays valid, no version counter moves, and touching
a tensor whose memory is away is never garbage and never a crash: the substitute is the file itself, mapped, so that an
unplanned access is slow and right.
"""

import torch

_swap_data_ptr = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def can_exchange() -> bool:
    """Whether this torch can exchange the memory of two storages; torch 2.13 was the first."""
    return _swap_data_ptr is not None


def exchange_memory(tensor: torch.Tensor, memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """Put `tensor` onto `memory`; gives the storage that holds its former memory now.

    Args:
        tensor: Fills its storage, see `can_be_exchanged`.
        memory: Of the same size in bytes.
    """
    assert _swap_data_ptr is not None
    _swap_data_ptr(tensor.untyped_storage(), memory)
    return memory


def can_be_exchanged(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a plain tensor that fills a storage of its own."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    fills = tensor.storage_offset() == 0 and storage.nbytes() == tensor.numel() * tensor.element_size()
    return fills and not storage.is_shared()
