"""Lengths of packed sequences as numbers on the host: how many chunks, hence states, there are."""

from __future__ import annotations

from typing import Any

from . import _arrays
from ._problem import ArgumentError


def _place(name: str, ends: Any, of_torch: bool) -> str:
    return str(ends.device) if of_torch else _arrays.place(_arrays.Array(name, ends))


def _values(ends: Any, of_torch: bool) -> list[int]:
    found: list[int] = ends.tolist() if of_torch else _arrays.values(ends)
    return found


def check_on_host(host: Any, host_of_torch: bool, of_torch: bool, cu_seqlens: Any) -> None:
    """What can be said of cu_seqlens_cpu without reading it. Beside arrays it is of any package:
    CuPy has no arrays on the host."""
    name = "cu_seqlens_cpu"
    if host_of_torch != of_torch:
        expected = "a tensor of torch" if of_torch else "an array"
        raise ArgumentError(f"{name}: found {type(host).__name__}, expected {expected}, as q is")
    place = _place(name, host, of_torch)
    if place != "cpu":
        raise ArgumentError(f"{name}: found on {place}, expected cpu")
    if str(host.dtype).rpartition(".")[2] not in ("int32", "int64"):
        raise ArgumentError(f"{name}: found dtype {host.dtype}, expected int64 or int32")
    if tuple(host.shape) != tuple(cu_seqlens.shape):
        raise ArgumentError(
            f"{name}: found shape {list(host.shape)}, expected that of cu_seqlens, "
            f"{list(cu_seqlens.shape)}"
        )


def ends_of(cu_seqlens: Any, host: Any, of_torch: bool, T: int) -> list[int]:
    """The values of cu_seqlens; those of a tensor on a GPU come from cu_seqlens_cpu if it is there,
    which then must be possible at least. Where cu_seqlens can be read for nothing both must agree.
    """
    if host is None:
        return _values(cu_seqlens, of_torch)
    ends = _values(host, of_torch)
    if ends[0] != 0 or ends[-1] > T or ends != sorted(ends):
        raise ArgumentError(
            f"cu_seqlens_cpu: found {ends}, expected 0 first, then ends that do not decrease, at "
            f"most T = {T}"
        )
    if _place("cu_seqlens", cu_seqlens, of_torch) == "cpu":
        expected = _values(cu_seqlens, of_torch)
        if ends != expected:
            raise ArgumentError(
                f"cu_seqlens_cpu: found {ends}, expected the values of cu_seqlens, {expected}"
            )
    return ends


def chunks_in(ends: list[int], chunk_size: int) -> int:
    return sum(
        (end - begin + chunk_size - 1) // chunk_size for begin, end in zip(ends, ends[1:])
    )
