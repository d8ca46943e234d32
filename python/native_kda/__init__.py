"""Kimi Delta Attention: forward, backward and decode, for torch, NumPy and other arrays.

    import native_kda
    o, final_state = native_kda.chunk_kda(q, k, v, g, beta, output_final_state=True)

Where torch is imported first, its operators are registered at import.
"""

from . import fla, stages
from ._native import version as _version
from ._problem import ArgumentError, UnsupportedError, hits, reset_hits
from .ops import chunk_kda, chunk_kda_backward, fused_recurrent_kda
from .support import is_supported, support_matrix, warmup

__version__ = _version()

__all__ = [
    "ArgumentError",
    "UnsupportedError",
    "chunk_kda",
    "chunk_kda_backward",
    "fla",
    "fused_recurrent_kda",
    "hits",
    "is_supported",
    "reset_hits",
    "stages",
    "support_matrix",
    "warmup",
]
