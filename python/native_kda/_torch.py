"""The torch route: addresses of tensors, memory from torch's allocator, torch's current stream."""

from __future__ import annotations

from typing import Any

import torch

from . import _problem
from ._problem import ArgumentError

_DTYPES = {
    torch.bfloat16: _problem.BF16,
    torch.float16: _problem.F16,
    torch.float32: _problem.F32,
    torch.float64: _problem.F64,
    torch.int32: _problem.I32,
    torch.int64: _problem.I64,
}
_CPU = (_problem.CPU, 0)
# The Stream object of torch.cuda.current_stream() costs microseconds; this is its number alone.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def view(tensor: torch.Tensor) -> tuple[int, int, tuple, tuple]:
    return tensor.data_ptr(), _DTYPES.get(tensor.dtype, 0), tensor.shape, tensor.stride()


def device(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_cuda:
        return (_problem.CUDA, tensor.get_device())
    if tensor.is_cpu:
        return _CPU
    raise ArgumentError(f"found a tensor on {tensor.device}, expected cuda or cpu")


def stream(device: tuple[int, int]) -> int:
    return _current_stream(device[1])


def _torch_device(device: tuple[int, int]) -> torch.device:
    return torch.device("cuda", device[1]) if device[0] == _problem.CUDA else torch.device("cpu")


def workspace(size: int, device: tuple[int, int]) -> tuple[Any, int]:
    memory = torch.empty(size, dtype=torch.uint8, device=_torch_device(device))
    return memory, memory.data_ptr()


def empty(shape: tuple, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def state_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
