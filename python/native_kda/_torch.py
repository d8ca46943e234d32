"""The torch route: addresses of tensors, memory from torch's allocator, torch's current stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import _native, _problem

_DTYPES = {
    torch.bfloat16: _problem.BF16,
    torch.float16: _problem.F16,
    torch.float32: _problem.F32,
    torch.float64: _problem.F64,
    torch.int32: _problem.I32,
    torch.int64: _problem.I64,
}
_ID = _problem.ID
# On meta tensors the operators tell shapes and dtypes.
_PLACES = (*_problem.DEVICE_TYPES, "meta")
_CPU = (_problem.CPU, 0)
# The Stream object of torch.cuda.current_stream() costs microseconds; this is its number alone.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _device(index: int) -> tuple[int, int]:
    """Of a tensor's get_device(), which is -1 on the CPU."""
    return (_problem.CUDA, index) if index >= 0 else _CPU


def check(name: str, tensor: Any, first: str, leader: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise _problem.ArgumentError(
            f"{name}: found {type(tensor).__name__}, expected a tensor of torch, as {first} is; "
            f"torch.as_tensor({name}, device={first}.device) makes one"
        )
    if tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantised"
        raise _problem.ArgumentError(f"{name}: found a {kind} tensor, expected a plain one")
    if tensor.layout is not torch.strided:
        raise _problem.ArgumentError(
            f"{name}: found layout {tensor.layout}, expected a dense tensor with strides"
        )
    if tensor.device != leader.device:
        raise _problem.elsewhere(name, tensor.device, first, leader.device)
    if tensor.device.type not in _PLACES:
        raise _problem.nowhere(name, tensor.device)


def check_no_gradient_of_states() -> None:
    # torch.compile cannot ask; there a gradient of h is an error when it is asked for.
    if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
        raise _problem.ArgumentError(
            "return_intermediate_states: found True outside torch.inference_mode(), where alone it "
            "is allowed: h has no gradient"
        )


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """For tensors that are updated in place."""
    if tensor.is_neg():
        raise _problem.ArgumentError(
            f"{name}: found the imaginary part of a conjugate, expected a tensor with its own "
            "values, which can be updated in place; resolve_neg() makes one"
        )


def describe(rows: list[tuple[str, torch.Tensor]]) -> tuple[tuple[Any, ...], tuple[int, int]]:
    first, tensor = rows[0]
    if tensor.device.type not in _problem.DEVICE_TYPES:
        raise _problem.nowhere(first, tensor.device)
    return _layouts(rows), _device(tensor.get_device())


def _layouts(rows: list[tuple[str, torch.Tensor]]) -> tuple[tuple[Any, ...], ...]:
    layouts = []
    first, device = rows[0][0], rows[0][1].device
    for name, tensor in rows:
        dtype = _DTYPES.get(tensor.dtype, 0)
        shape = tensor.shape
        if not dtype or not 1 <= len(shape) <= 4:
            raise _problem.not_a_tensor(name, tensor)
        if tensor.is_neg():  # memory holds the negative of what the tensor means
            raise _problem.ArgumentError(
                f"{name}: found the imaginary part of a conjugate, expected a tensor with its own "
                "values; resolve_neg() makes one"
            )
        if tensor.device != device:
            raise _problem.elsewhere(name, tensor.device, first, device)
        layouts.append((_ID[name], dtype, shape, tensor.stride()))
    return tuple(layouts)


def check_address(name: str, tensor: torch.Tensor) -> None:
    """What the library refuses at the run, for is_supported."""
    address, size = tensor.data_ptr(), tensor.element_size()
    if tensor.numel() and address == 0:
        raise _problem.without_memory(name)
    if tensor.numel() and address % size:
        raise _problem.ArgumentError(
            f"{name}: found its memory at {address:#x}, expected a multiple of {size}, the size of "
            "an element"
        )


code = _DTYPES.__getitem__


def stream(device: tuple[int, int]) -> int:
    return _current_stream(device[1])


def workspace(size: int, like: torch.Tensor) -> tuple[torch.Tensor, int]:
    memory = like.new_empty(size, dtype=torch.uint8)
    return memory, memory.data_ptr()


def empty(shape: tuple[Any, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype)


empty_like = partial(torch.empty_like, memory_format=torch.contiguous_format)


# Where channels that do not lie together are laid out anew, because kernels refuse them or read
# them slowly.
COPIES_ON = {"cuda"}


def scattered(tensors: tuple[Any, ...]) -> tuple[int, ...]:
    """Which of q, k, v and g have channels that do not lie together, as those of a convolution."""
    if tensors[0].device.type not in COPIES_ON:
        return ()
    return tuple(i for i, t in enumerate(tensors[:4]) if t.stride(-1) != 1 and t.shape[-1] != 1)


def laid_out(tensors: tuple[Any, ...], which: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(t.contiguous() if i in which else t for i, t in enumerate(tensors))


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients of sums come expanded. The Hopper kernels refuse strides of 0 and channels that do
    not lie together, and beside a backward a copy costs nothing."""
    strides = gradient.stride()
    if 0 in strides or strides[-1] != 1 and gradient.device.type in COPIES_ON:
        return gradient.contiguous()
    return gradient


# Subclasses may mean anything by their memory.
PLAIN = (torch.Tensor, torch.nn.Parameter)
# Reads plain tensors in a tenth of a microsecond each; None before torch 2.10.
reader: _native.Reader | None = None
_table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
if _table is not None:
    try:
        reader = _native.Reader(_table, PLAIN)
    except ValueError:  # of a later version of DLPack
        pass


def run(
    plan: _native.Plan, tensors: tuple[Any, ...], workspace: int, size: int, stream: int
) -> None:
    if reader is not None:
        reader.run(plan, tensors, workspace, size, stream)
    else:
        plan.run(tuple(t.data_ptr() for t in tensors), workspace, size, stream)


def state_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


class OnMeta:
    """As much of a frame as a plan needs: one for the CPU tells whether a call is well formed."""

    code = staticmethod(code)
    state_dtype = staticmethod(state_dtype)

    @staticmethod
    def describe(rows: list[tuple[str, torch.Tensor]]) -> tuple[tuple[Any, ...], tuple[int, int]]:
        return _layouts(rows), _CPU
