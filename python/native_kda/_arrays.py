"""The route of NumPy, CuPy, JAX and other arrays that speak DLPack.

Outputs are arrays of the package of q. CuPy allocates its own; all others are computed into memory
of NumPy and handed over by from_dlpack of the package, if it has that: JAX arrays cannot be
written, and how others are allocated each package says differently.
"""

from __future__ import annotations

import sys
from typing import Any

from . import _native, _problem
from ._problem import ArgumentError

# By their numbers, as NumPy calls them: each package has its own names.
_DTYPES = ("none", "bfloat16", "float16", "float32", "float64", "int32", "int64")
# kDLCPU, kDLCUDAHost; kDLCUDA, kDLCUDAManaged
_DEVICES = {1: _problem.CPU, 3: _problem.CPU, 2: _problem.CUDA, 13: _problem.CUDA}
_BYTES = (0, 2, 2, 4, 8, 4, 8)  # of an element, by the number of its dtype
_PACKAGES = ("numpy", "cupy", "jax", "torch")
_EXPECTED = "expected a tensor of torch or an array that speaks DLPack (NumPy, CuPy, JAX)"


class Array:
    """An array and the numbers that describe it."""

    __slots__ = ("address", "array", "code", "device", "dtype", "shape", "strides")

    def __init__(self, name: str, array: Any) -> None:
        self.array = array
        self.address, self.code, self.shape, self.strides, kind, index = _describe(name, array)
        self.dtype = _DTYPES[self.code] if self.code else array.dtype
        if kind not in _DEVICES:
            raise _problem.nowhere(name, f"device type {kind} of DLPack")
        device = _DEVICES[kind]
        self.device = (device, index if device == _problem.CUDA else 0)
        if any(stride < 0 for stride in self.strides):
            raise ArgumentError(
                f"{name}: found strides {self.strides}, expected none below 0; copy it first"
            )
        size = _BYTES[self.code]
        if size and self.address % size and 0 not in self.shape:
            raise ArgumentError(
                f"{name}: found its memory at {self.address:#x}, expected a multiple of {size}, "
                f"the size of {_problem.DTYPE_NAMES[self.code]}; copy it first"
            )


def check(name: str, array: Any, first: str, leader: Any) -> None:
    """What an array must be before its memory is looked at. What torch knows of its tensors, that
    one requires grad, say, nothing here asks: no package stands beside another."""
    if not all(hasattr(array, what) for what in ("dtype", "shape", "__dlpack__")):
        raise ArgumentError(f"{name}: found {type(array).__name__}, {_EXPECTED}")
    package = package_of(array)
    if package != package_of(leader):
        raise ArgumentError(
            f"{name}: found {type(array).__name__} of {package}, expected an array of "
            f"{package_of(leader)}, as {first} is"
        )
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise ArgumentError(
            f"{name}: found a masked array, expected one whose every element counts; "
            f"{name}.filled(0) makes one"
        )


def _unreadable(name: str, array: Any) -> ArgumentError:
    """With the words of the array itself, if it has any."""
    found = f"{name}: found {type(array).__name__} of dtype {array.dtype}"
    try:
        array.__dlpack__()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        failure = ArgumentError(f"{found}, which does not give its memory ({reason}), {_EXPECTED}")
        failure.__cause__ = error
        return failure
    return ArgumentError(f"{found}, which cannot be read, {_EXPECTED}")


def _describe(name: str, array: Any) -> tuple[Any, ...]:
    # NumPy exports bfloat16 (of package ml_dtypes) neither by DLPack nor as a buffer.
    if str(getattr(array, "dtype", "")) == "bfloat16" and package_of(array) == "numpy":
        address, _, *rest = _native.describe(array.view("uint16"))
        return (address, _problem.BF16, *rest)
    try:
        return _native.describe(array)
    except TypeError:
        failure = _unreadable(name, array)
    raise failure


def wrap(name: str, array: Any) -> Array | None:
    return None if array is None else Array(name, array)


def place(array: Array) -> str:
    """Of its device, as torch writes it."""
    kind, index = array.device
    return f"cuda:{index}" if kind == _problem.CUDA else "cpu"


def unwrap(array: Any) -> Any:
    return array.array if isinstance(array, Array) else array


def package_of(array: Any) -> str:
    """Where the class of an array comes from, or the one that it is derived from."""
    for kind in type(array).__mro__:
        name = kind.__module__.partition(".")[0]
        name = "jax" if name == "jaxlib" else name
        if name in _PACKAGES:
            return name
    return type(array).__module__.partition(".")[0]


def describe(rows: list[tuple[str, Array]]) -> tuple[tuple[Any, ...], tuple[int, int]]:
    layouts = []
    first, device = rows[0][0], rows[0][1].device
    for name, array in rows:
        if array.code == 0 or not 1 <= len(array.shape) <= 4:
            raise _problem.not_a_tensor(name, array)
        if array.device != device:
            raise _problem.elsewhere(name, place(array), first, place(rows[0][1]))
        layouts.append((_problem.ID[name], array.code, array.shape, array.strides))
    return tuple(layouts), device


def code(dtype: str) -> int:
    return _DTYPES.index(dtype)


def run(
    plan: _native.Plan, tensors: tuple[Any, ...], workspace: int, size: int, stream: int
) -> None:
    plan.run(tuple(array.address for array in tensors), workspace, size, stream)


def stream(device: tuple[int, int]) -> int:
    cupy = sys.modules.get("cupy")
    return 0 if cupy is None else cupy.cuda.get_current_stream(device[1]).ptr


def _numpys(dtype: str) -> Any:
    """NumPy has bfloat16 by package ml_dtypes alone, which JAX brings along."""
    if dtype != "bfloat16":
        return dtype
    try:
        import ml_dtypes
    except ImportError as missing:
        raise _problem.UnsupportedError(
            f"arrays of bfloat16: results cannot be allocated without package ml_dtypes ({missing})"
        ) from None
    return ml_dtypes.bfloat16


def _cupy_empty(shape: Any, dtype: Any, like: Array) -> Any:
    name = package_of(like.array)
    if name != "cupy":
        raise _problem.UnsupportedError(
            f"arrays of {name} on a GPU: outputs cannot be allocated; use torch or CuPy"
        )
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(like.device[1]):
        return cupy.empty(shape, dtype)


def workspace(size: int, like: Array) -> tuple[Any, int]:
    if like.device[0] == _problem.CUDA:
        memory = _cupy_empty(size, "uint8", like)
        return memory, memory.data.ptr
    import numpy

    # NumPy promises 16 bytes only; the library asks for 64.
    memory = numpy.empty(size + 63, numpy.uint8)
    return memory, (memory.ctypes.data + 63) // 64 * 64


def empty(shape: tuple[Any, ...], dtype: str, like: Array) -> Array:
    if like.device[0] == _problem.CUDA:
        return Array("result", _cupy_empty(shape, _numpys(dtype), like))
    import numpy

    return Array("result", numpy.empty(shape, _numpys(dtype)))


def empty_like(tensor: Array) -> Array:
    return empty(tuple(tensor.shape), tensor.dtype, tensor)


def state_dtype(q: Array) -> str:
    return "float64" if q.dtype == "float64" else "float32"


def hand_over(result: Any, like: Array) -> Any:
    """An Array or what is in one for the caller, of the package of `like`."""
    if result is None:
        return None
    result = unwrap(result)
    package = package_of(like.array)
    if package == "jax":
        return sys.modules["jax"].numpy.asarray(result)
    if package in _PACKAGES or str(result.dtype) == "bfloat16":  # NumPy does not export that
        return result
    take = getattr(_namespace(like.array), "from_dlpack", None)
    return result if take is None else take(result)


def _namespace(array: Any) -> Any:
    """The functions of an array's package, as the array API standard has them, or the package."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules.get(package_of(array))


def reshape(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    """The standard has it as a function; not all arrays have it as a method."""
    if hasattr(array, "reshape"):
        return array.reshape(shape)
    function = getattr(_namespace(array), "reshape", None)
    if function is None:
        raise ArgumentError(f"{name}: found shape {list(array.shape)}, expected {list(shape)}")
    return function(array, shape)


def values(array: Any) -> Any:
    """Of one on the host, or with a method that brings them there."""
    if hasattr(array, "tolist"):
        return array.tolist()
    import numpy

    return numpy.from_dlpack(array).tolist()


def check_writable(name: str, array: Any) -> None:
    """For arrays that are updated in place."""
    flags = getattr(array, "flags", None)
    if package_of(array) == "jax" or not getattr(flags, "writeable", True):
        raise ArgumentError(f"{name}: found a read-only array, expected one that can be updated")
