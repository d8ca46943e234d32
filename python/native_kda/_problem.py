"""Problems and plans: what every route (torch, DLPack arrays) shares."""

from __future__ import annotations

import re
import time
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from . import _log, _native

OPERATIONS = (
    "chunk_fwd",
    "chunk_bwd",
    "recurrent",
    "gate_cumsum",
    "intra",
    "wu",
    "state_scan",
    "output",
    "reverse_scan",
    "wy_bwd",
    "intra_bwd",
)
CHUNK_FWD, CHUNK_BWD, RECURRENT = 0, 1, 2

CPU, CUDA = 0, 1
DEVICE_TYPES = ("cpu", "cuda")

BF16, F16, F32, F64, I32, I64 = range(1, 7)
DTYPE_NAMES = ("none", "bf16", "fp16", "fp32", "fp64", "int32", "int64")

GATE_NONE, GATE_SOFTPLUS, GATE_LOWER_BOUND = 0, 1, 2

UnsupportedError = _native.UnsupportedError


class ArgumentError(ValueError, AssertionError):
    """A malformed call. flash-linear-attention raises ValueError for some and AssertionError for
    others; this is both, so that callers may go on catching either."""


class Spec(NamedTuple):
    """One row of an operation's signature."""

    id: int
    name: str
    is_output: bool
    required: bool
    shape: str
    dtypes: str
    about: str


SPECS = tuple(
    tuple(Spec(*row) for row in _native.tensor_specs(i)) for i in range(len(OPERATIONS))
)
ID = {spec.name: spec.id for specs in SPECS for spec in specs}


class Sizes(NamedTuple):
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int = 0
    P: int = 0


class Options(NamedTuple):
    gate: int = GATE_NONE
    lower_bound: float = 0.0
    scale: float | None = None
    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    chunk_size: int = 64


class Frame(Protocol):
    """What a route must know of its tensors."""

    def check(self, name: str, tensor: Any, first: str, leader: Any) -> None:
        """ArgumentError unless this is a tensor of the route's kind that may stand beside
        `leader`, the tensor called `first`."""

    def describe(
        self, rows: list[tuple[str, Any]]
    ) -> tuple[tuple[tuple[Any, ...], ...], tuple[int, int]]:
        """The rows of a problem, (id, dtype, shape, stride in elements), and the device that all
        tensors share; ArgumentError names the one that does not fit."""

    def code(self, dtype: Any) -> int:
        """The number of a dtype."""

    def empty(self, shape: tuple[Any, ...], dtype: Any, like: Any) -> Any:
        """A new contiguous tensor where `like` is."""

    def empty_like(self, tensor: Any) -> Any:
        """A new contiguous tensor of the shape and dtype of this one, where it is."""

    def state_dtype(self, q: Any) -> Any:
        """The dtype of states beside this q."""

    def workspace(self, size: int, like: Any) -> tuple[Any, int]:
        """Scratch memory where `like` is, kept alive by the first item, and its address."""

    def stream(self, device: tuple[int, int]) -> int:
        """The current stream of a CUDA device."""

    def run(
        self, plan: Any, tensors: tuple[Any, ...], workspace: int, size: int, stream: int
    ) -> None:
        """Runs a plan; the tensors are in the order of its problem."""


_hits: Counter[str] = Counter()


def hits() -> dict[str, int]:
    """How often each implementation has run since the start or reset_hits(). Runs inside a CUDA
    graph count once, when they are captured."""
    return dict(_hits)


def reset_hits() -> None:
    """Sets all counters of hits() to zero."""
    _hits.clear()


# Bounded, so that training on ever changing lengths does not grow; a plan holds no tensor.
@lru_cache(maxsize=1024)
def _plan(
    operation: int,
    sizes: Sizes,
    options: Options,
    layouts: tuple[Any, ...],
    device: tuple[int, int],
    environment: tuple[str, str],
) -> _native.Plan:
    plan = _native.Plan(operation, sizes, options, layouts, device[0], device[1])
    if _log.dispatch:
        _log.logger.info(
            "%s -> %s, %s, %s", OPERATIONS[operation], plan.implementation, sizes, options
        )
    return plan


def environment() -> tuple[str, str]:
    """The variables that the library reads itself for a plan: other values, another plan."""
    return _native.environment("KDA_IMPL"), _native.environment("KDA_WORKSPACE_LIMIT")


def plan_of(
    operation: int,
    sizes: Sizes,
    options: Options,
    layouts: tuple[Any, ...],
    device: tuple[int, int],
) -> _native.Plan:
    """The plan of a problem; ValueError or UnsupportedError if there is none."""
    return _plan(operation, sizes, options, layouts, device, environment())


def not_a_tensor(name: str, tensor: Any) -> ArgumentError:
    """For Frame.describe."""
    lists = ("cu_seqlens", "state_indices", "num_accepted")
    dtypes = "int32 or int64" if name in lists else "bf16, fp16, fp32 or fp64"
    return ArgumentError(
        f"{name}: found dtype {tensor.dtype} and shape {tuple(tensor.shape)}, expected an array of "
        f"{dtypes} with 1 to 4 dimensions"
    )


def elsewhere(name: str, found: Any, first: str, device: Any) -> ArgumentError:
    """For Frame.check and Frame.describe."""
    return ArgumentError(f"{name}: found on {found}, expected {device}, where {first} is; move it")


def nowhere(name: str, found: Any) -> UnsupportedError:
    """As elsewhere, for a device that nothing here serves."""
    return UnsupportedError(f"{name}: found on {found}, expected one of {', '.join(DEVICE_TYPES)}")


class Prepared(NamedTuple):
    """All about a call that does not depend on what its tensors contain or where they lie."""

    plan: _native.Plan
    implementation: str
    workspace_bytes: int
    sizes: Sizes
    options: Options
    device: tuple[int, int]
    outputs: tuple[tuple[str, tuple[Any, ...], Any], ...]  # name, shape, dtype
    models: tuple[int | None, ...]  # for each output a tensor of its shape and dtype, if any
    copies: tuple[int, ...] = ()  # inputs that are laid out anew first: torch's route alone


def _model(tensors: list[tuple[str, Any]], shape: tuple[Any, ...], dtype: Any) -> int | None:
    for i, (_, tensor) in enumerate(tensors):
        if tensor.dtype == dtype and tuple(tensor.shape) == shape:
            return i
    return None


def _with_the_tensor(
    error: ValueError, operation: int, tensors: list[tuple[str, Any]]
) -> ValueError:
    """The library may name a size that is out of range; callers know the shape of a tensor."""
    text, given = str(error), dict(tensors)
    size = re.match(r"size (\w+): found (-?\d+)", text)
    if size is None:
        # S is what operations on sequences and on pools share.
        letter = "P" if "state_indices" in given else "N"
        return _as_callers_name_it(text.replace("= [S,", f"= [{letter},"), "final_state" in given)
    for spec in SPECS[operation]:
        letters = spec.shape.strip("[]").replace("+1", "").split(",")
        if spec.name in given and size[1] in letters:
            found = f"{spec.name}: found shape {list(given[spec.name].shape)}"
            if size[1] == "N" and int(size[2]) < 1:
                return ArgumentError(
                    f"{found}, expected two entries at least: where each sequence starts, and "
                    "where the last one ends; [0, T] for one sequence of T tokens"
                )
            if size[2] == "0":
                text = f"{size[1]} of 1 at least"
            return ArgumentError(f"{found}, expected {spec.shape} with {text}")
    return error


def without_memory(name: str) -> ArgumentError:
    """For zeros that torch keeps as such, say."""
    return ArgumentError(
        f"{name}: found a tensor without memory (address 0), expected one that has its values "
        f"there; {name}.clone() makes one of what torch keeps as mere zeros"
    )


def _as_callers_name_it(text: str, in_place: bool) -> ArgumentError:
    """States that are updated in place came as initial_state."""
    text = re.sub(r"\bfinal_state\b", "initial_state", text) if in_place else text
    missing = re.match(r"(\w+): null address", text)
    return without_memory(missing[1]) if missing else ArgumentError(text)


def prepare(
    frame: Frame,
    operation: int,
    sizes: Sizes,
    options: Options,
    tensors: list[tuple[str, Any]],
    outputs: list[tuple[str, tuple[Any, ...], Any]],
) -> Prepared:
    """The plan of an operation on these tensors, and the outputs that it allocates."""
    layouts, device = frame.describe(tensors)
    # An empty shape: the one that the sizes give, contiguous.
    layouts += tuple((ID[name], frame.code(dtype), (), ()) for name, _, dtype in outputs)
    try:
        plan = plan_of(operation, sizes, options, layouts, device)
    except ValueError as error:
        raise _with_the_tensor(error, operation, tensors) from None
    models = tuple(_model(tensors, shape, dtype) for _, shape, dtype in outputs)
    about = (plan.implementation, plan.workspace_bytes, sizes, options, device)
    return Prepared(plan, *about, tuple(outputs), models)


def execute(frame: Frame, prepared: Prepared, tensors: tuple[Any, ...]) -> list[Any]:
    """Runs on the tensors that took part in prepare, in their order; returns the outputs."""
    like, empty_like = tensors[0], frame.empty_like
    # Most outputs are like an input: that takes torch half the time of a shape and a dtype.
    results = [
        frame.empty(shape, dtype, like) if model is None else empty_like(tensors[model])
        for (_, shape, dtype), model in zip(prepared.outputs, prepared.models)
    ]
    size, device = prepared.workspace_bytes, prepared.device
    keep, workspace = frame.workspace(size, like) if size else (None, 0)
    stream = frame.stream(device) if device[0] == CUDA else 0
    start = time.perf_counter() if _log.execution else 0.0
    try:
        frame.run(prepared.plan, (*tensors, *results), workspace, size, stream)
    except ValueError as error:
        given = all(name != "final_state" for name, _, _ in prepared.outputs)
        raise _as_callers_name_it(str(error), given) from None
    if _log.execution:
        host = " (host)" if device[0] == CUDA else ""
        elapsed = (time.perf_counter() - start) * 1e3
        text = "%s on %s: %.3f ms%s"
        _log.logger.info(text, prepared.implementation, prepared.sizes, elapsed, host)
    _hits[prepared.implementation] += 1
    del keep
    return results
