"""What this machine can do, measured: the ceilings that attention is compared with.

Machines are shared and clocks vary, so a share of a ceiling means something only if both were measured
in the same minutes, with the same threads.

>>> from longspan import limits
>>> limits.best_isa() in ("portable", "avx2", "avx512", "amx", "neon")
True
>>> limits.fma_peak(threads=1) > 0
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

from longspan import _longspan
from longspan._longspan import amx_peak, best_isa, fma_peak

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["amx_peak", "best_isa", "fma_peak", "read_bandwidth"]


def read_bandwidth(data: NDArray[Any], threads: int = 1) -> float:
    """Billions of bytes per second at which ``threads`` threads together read ``data``, contiguous
    f32 of any shape: the ceiling of decoding. Data that fits a cache measures the cache.

    >>> import numpy
    >>> from longspan import limits
    >>> limits.read_bandwidth(numpy.zeros(1 << 20, dtype="float32")) > 0
    True
    """
    return _longspan.read_bandwidth(numpy.asarray(data).reshape(1, 1, -1), threads)
