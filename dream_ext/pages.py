"""Memory pages that are not needed for now."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_MADV_PAGEOUT = 21  # Linux 5.4; an older kernel refuses the advice, and nothing is lost


def page_out(tensor: Tensor) -> None:
    """Advise the system to take back the whole pages inside a CPU tensor; whoever reads them gets them back.

    Meant for weights in a mapped file: their pages stay resident after the tensor is gone, as long as any other tensor
    of the file is there.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_PAGEOUT)
