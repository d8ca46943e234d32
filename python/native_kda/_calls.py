"""The calls of the public functions, checked and brought to the route of their tensors.

A call is a dictionary of arguments, complete but for q, k, v, g and beta with the defaults below.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from . import _arrays, _checks, _kda, _lengths, _log, _operations, _problem
from ._problem import ArgumentError, Options, Sizes, UnsupportedError

CHUNK_DEFAULTS: dict[str, Any] = dict(
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    use_graph=False,
    max_num_seqs=None,
    A_log=None,
    dt_bias=None,
    chunk_size=64,
)
RECURRENT_DEFAULTS: dict[str, Any] = dict(
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
    state_indices=None,
    num_accepted=None,
    in_place=False,
)
_TENSORS = ("q", "k", "v", "g", "beta")
_OPTIONAL = ("initial_state", "cu_seqlens", "state_indices", "num_accepted")
# Of calls without unknown arguments.
_CHUNK_LENGTH = len(_TENSORS) + len(CHUNK_DEFAULTS)
_RECURRENT_LENGTH = len(_TENSORS) + len(RECURRENT_DEFAULTS)

# Set by load_torch, at import if torch is there already: tracing must not meet an import.
_torch_tensor: Any = None
_autograd: Any = None
_torch_frame: Any = None


def load_torch() -> None:
    """Takes up the torch route and registers its operators."""
    global _torch_tensor, _autograd, _torch_frame
    import torch

    from . import _autograd as autograd
    from . import _torch as frame

    _torch_tensor, _autograd, _torch_frame = torch.Tensor, autograd, frame


def is_torch(tensor: Any) -> bool:
    if _torch_tensor is None:
        if not hasattr(sys.modules.get("torch"), "Tensor"):
            return False
        load_torch()
    return isinstance(tensor, _torch_tensor)


if sys.modules.get("torch") is not None:
    load_torch()


def is_tracing() -> bool:
    """Inside torch.compile."""
    return _autograd is not None and _autograd.is_compiling()


def break_graph(why: str) -> None:
    """Ends what torch.compile has traced. With fullgraph=True that is an error, which says why."""
    import torch

    torch._dynamo.graph_break(msg=why)


def torch_frame() -> Any:
    return _torch_frame


def needs_operators(tensors: tuple[Any, ...]) -> bool:
    """Of tensors of torch: whether calls go through its dispatcher."""
    return _autograd.needs_operators(tensors)


def check_enabled(function: str) -> None:
    """NATIVE_KDA_DISABLE is heeded where flash-linear-attention has no such function, too."""
    if _log.disabled(is_tracing()):
        raise UnsupportedError(
            f"{function}: NATIVE_KDA_DISABLE is set, and flash-linear-attention has no such "
            "function"
        )


def torch_operation(
    operation: str, outputs: tuple[str, ...], options: Options, given: dict[str, Any]
) -> tuple[Any, ...]:
    """An operation on tensors of torch by its signature."""
    leader = next(iter(given.values()))
    _check_on_meta(leader, _operations.prepare, operation, outputs, options, given)
    return _autograd.operation(operation, outputs, options, given)


def check_tensors(tensors: dict[str, Any], required: tuple[str, ...] = _TENSORS) -> None:
    """What stands where a tensor is expected: all of the kind of the first, and where that is."""
    first, leader = next(iter(tensors.items()))
    check = _torch_frame.check if is_torch(leader) else _arrays.check
    for name, tensor in tensors.items():
        if tensor is not None:
            check(name, tensor, first, leader)
        elif name in required:
            raise ArgumentError(f"{name}: absent, expected a tensor")


def _tensors_in(call: dict[str, Any]) -> dict[str, Any]:
    """Without a gate its parameters do not take part, whatever they are."""
    gate = ("A_log", "dt_bias") if call["use_gate_in_kernel"] else ()
    return {name: call.get(name) for name in (*_TENSORS, *gate, *_OPTIONAL)}


def device_type(q: Any) -> str:
    check_tensors({"q": q})
    if is_torch(q):
        return q.device.type
    return _problem.DEVICE_TYPES[_arrays.Array("q", q).device[0]]


def _align_dtypes(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Under autocast q, k and v may come in different dtypes: then all take autocast's, if they are
    of what torch casts there, which are neither integers nor fp64."""
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    import torch

    kind = q.device.type
    # Devices without autocast may not be asked, and torch.compile cannot ask which those are.
    if kind not in _problem.DEVICE_TYPES or not torch.is_autocast_enabled(kind):
        return q, k, v
    if not all(x.is_floating_point() and x.dtype != torch.float64 for x in (q, k, v)):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _is_fp64(tensor: Any) -> bool:
    return str(tensor.dtype).endswith("float64")


def _flat(A_log: Any, dt_bias: Any, sizes: Sizes) -> tuple[Any, Any]:
    """A_log as [HV], whatever dimensions of 1 it has; dt_bias as [HV*K] or [HV,K]."""
    if A_log is not None and len(A_log.shape) != 1:
        if math.prod(A_log.shape) != sizes.HV:
            raise ArgumentError(
                f"A_log: found shape {list(A_log.shape)}, expected [HV] with HV = {sizes.HV}"
            )
        A_log = _arrays.reshape("A_log", A_log, (sizes.HV,))
    if dt_bias is not None and math.prod(dt_bias.shape) != sizes.HV * sizes.K:
        raise ArgumentError(
            f"dt_bias: found shape {list(dt_bias.shape)}, expected [HV*K] or [HV, K] with "
            f"HV, K = {sizes.HV}, {sizes.K}"
        )
    if dt_bias is not None and len(dt_bias.shape) not in (1, 2):
        dt_bias = _arrays.reshape("dt_bias", dt_bias, (sizes.HV, sizes.K))
    return A_log, dt_bias


def _options(call: dict[str, Any], defaults: dict[str, Any]) -> Options:
    """The options of a call that _checks.natively returned; unknown arguments are refused."""
    extra = {name: call[name] for name in call if name not in defaults and name not in _TENSORS}
    state_v_first = _checks.take_state_layout(call["state_v_first"], extra)
    _checks.refuse_unknown(extra)
    return _checks.options_of(call, state_v_first)


def _inputs(call: dict[str, Any], options: Options, states: Any) -> tuple[Any, ...]:
    """q, k, v, g, beta, A_log, dt_bias, initial_state; `states` has one row a sequence."""
    tensors = tuple(call[name] for name in _TENSORS)
    q, k, v, g, beta = tensors
    if call["initial_state"] is not None:
        _checks.check_rank("initial_state", call["initial_state"], 4)
    sizes = _checks.sizes_of(q, k, v, g, beta, states, call["cu_seqlens"])
    A_log, dt_bias = call["A_log"], call["dt_bias"]
    if options.gate == _problem.GATE_NONE:
        A_log = dt_bias = None
    A_log, dt_bias = _flat(A_log, dt_bias, sizes)
    if is_torch(tensors[0]):
        tensors = (*_align_dtypes(q, k, v), g, beta)
    return (*tensors, A_log, dt_bias, call["initial_state"])


def _check_intermediate_states(call: dict[str, Any]) -> None:
    if is_torch(call["q"]):
        _torch_frame.check_no_gradient_of_states()
    host, cu_seqlens = call["cu_seqlens_cpu"], call["cu_seqlens"]
    if host is not None and cu_seqlens is not None:
        check_tensors({"cu_seqlens_cpu": host})
        _lengths.check_on_host(host, is_torch(host), is_torch(call["q"]), cu_seqlens)


def chunk_problem(call: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...], Options]:
    """A call of chunk_kda with its options as values of Python, its inputs and its options."""
    call = _checks.natively(call)
    check_tensors(_tensors_in(call))
    options = _options(call, CHUNK_DEFAULTS)
    if call["cp_context"] is not None:
        raise UnsupportedError("cp_context: context parallelism is not implemented")
    _checks.check_safe_gate(call["safe_gate"], call["use_gate_in_kernel"], call["lower_bound"])
    states = call["initial_state"]
    inputs = _inputs(call, options, states)
    if states is not None:
        found = str(states.dtype)
        accepted = ("float32", "float64") if _is_fp64(inputs[0]) else ("float32",)
        if not found.endswith(accepted):
            raise ArgumentError(
                f"initial_state: found dtype {found}, initial_state must be in float32"
            )
    if call["return_intermediate_states"]:
        _check_intermediate_states(call)
    return call, inputs, options


def wrap(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of chunk_problem that are arrays."""
    return tuple(map(_arrays.wrap, _kda.INPUTS, inputs))


def chunk_again(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The result of chunk_kda if a call like this was made before: most of what calls cost the
    host is saved. The arguments are in the order of _autograd.CHUNK_TENSORS and CHUNK_OPTIONS."""
    if not is_torch(tensors[0]) or is_tracing():
        return None
    return _autograd.chunk_again(tensors, options)


def recurrent_again(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """As chunk_again, of fused_recurrent_kda."""
    if not is_torch(tensors[0]) or is_tracing():
        return None
    return _autograd.recurrent_again(tensors, options)


def _may_be_seen(call: dict[str, Any], length: int) -> bool:
    """Whether the call is one of those that are remembered."""
    return is_torch(call["q"]) and not is_tracing() and len(call) == length


def was_seen(call: dict[str, Any]) -> bool:
    """Whether a call of chunk_kda like this was made before, so that it needs no checks."""
    return _may_be_seen(call, _CHUNK_LENGTH) and _autograd.chunk_was_seen(call)


def needs_a_backward(call: dict[str, Any]) -> bool:
    """Whether a call of chunk_kda is refused for want of a backward alone, as _autograd has it."""
    return is_torch(call["q"]) and _autograd.needs_a_backward(_autograd.CHUNK_TENSORS(call))


def _check_on_meta(leader: Any, prepare: Callable[..., Any], *how: Any) -> None:
    """On meta the operators tell shapes and dtypes, whatever they are given: what the library
    checks is checked as on the CPU. Inside a trace extents need not be numbers."""
    if not leader.is_meta or is_tracing() or _autograd.is_watched():
        return
    try:
        prepare(_torch_frame.OnMeta, *how)
    except UnsupportedError:  # there; somewhere else it may be supported
        pass


def chunk(call: dict[str, Any]) -> tuple[Any, ...]:
    """chunk_kda."""
    result = key = None
    if _may_be_seen(call, _CHUNK_LENGTH):
        result, key = _autograd.chunk_seen(call)
        if result is not None:
            return result
    call, inputs, options = chunk_problem(call)
    cu_seqlens, with_state = call["cu_seqlens"], call["output_final_state"]
    if call["return_intermediate_states"]:
        return _chunk_with_states(inputs, cu_seqlens, call["cu_seqlens_cpu"], options, with_state)
    if is_torch(inputs[0]):
        how = (inputs, cu_seqlens, options, with_state)
        _check_on_meta(inputs[0], _kda.prepare_forward, *how)
        return _autograd.chunk_kda(call, key, inputs, cu_seqlens, options, with_state)
    arrays, cu = wrap(inputs), _arrays.wrap("cu_seqlens", cu_seqlens)
    o, final_state, _ = _kda.forward(_arrays, arrays, cu, options, with_state)
    return _arrays.hand_over(o, arrays[0]), _arrays.hand_over(final_state, arrays[0])


def _chunk_with_states(
    inputs: tuple[Any, ...],
    cu_seqlens: Any,
    cu_seqlens_cpu: Any,
    options: Options,
    with_state: bool,
) -> tuple[Any, Any, Any]:
    ends = arrays = None
    if cu_seqlens is not None:
        if is_torch(inputs[0]) and (_autograd.is_watched() or cu_seqlens.is_meta):
            raise ArgumentError(
                "cu_seqlens: found with return_intermediate_states while the call is traced or "
                "transformed, or on meta; expected none, since there are as many states as its "
                "values say. Leave either out, or call eagerly"
            )
        of_torch = is_torch(inputs[0])
        ends = _lengths.ends_of(cu_seqlens, cu_seqlens_cpu, of_torch, inputs[0].shape[1])
    if is_torch(inputs[0]):
        inputs = _torch_frame.laid_out(inputs, _torch_frame.scattered(inputs))
        outputs = ("o", "final_state", "h") if with_state else ("o", "h")
        given = dict(_kda.taking_part(inputs, cu_seqlens, options))
        o, *states, h = torch_operation("chunk_fwd", outputs, options, given)
        final_state = states[0] if states else None
    else:
        arrays, cu = wrap(inputs), _arrays.wrap("cu_seqlens", cu_seqlens)
        results = _kda.forward(_arrays, arrays, cu, options, with_state, with_h=True)
        o, final_state = (_arrays.hand_over(x, arrays[0]) for x in results[:2])
        h = results[2].array  # shaped before it is handed over: not all arrays have the methods
    B = inputs[0].shape[0]
    if ends is not None:
        # Rows past the last chunk are there only because the plan does not know how many there are.
        h = h[: _lengths.chunks_in(ends, options.chunk_size)]
    h = h.reshape(B, h.shape[0] // B, *h.shape[1:])
    h = h.swapaxes(-1, -2) if options.state_v_first else h
    return o, final_state, h if arrays is None else _arrays.hand_over(h, arrays[0])


def chunk_backward(
    do: Any, dfinal_state: Any, call: dict[str, Any], wanted: tuple[str, ...]
) -> dict[str, Any]:
    """The gradients of chunk_kda by name."""
    call["return_intermediate_states"] = False  # of the forward alone
    call, inputs, options = chunk_problem(call)
    check_tensors({"q": call["q"], "do": do, "dfinal_state": dfinal_state}, ("do",))
    needs = tuple(n in wanted and x is not None for n, x in zip(_kda.GRADIENTS, inputs))
    cu_seqlens = call["cu_seqlens"]
    if is_torch(inputs[0]):
        how = (do, dfinal_state, inputs, cu_seqlens, options, needs)
        _check_on_meta(do, _kda.prepare_backward, *how)
        gradients = _autograd.chunk_backward(*how)
    else:
        arrays, cu = wrap(inputs), _arrays.wrap("cu_seqlens", cu_seqlens)
        do, dfinal_state = _arrays.wrap("do", do), _arrays.wrap("dfinal_state", dfinal_state)
        gradients = [
            _arrays.hand_over(x, arrays[0])
            for x in _kda.backward(_arrays, do, dfinal_state, arrays, cu, options, needs)
        ]
    given = map(call.get, _kda.INPUTS)
    return {
        name: _like(name, given_input, x)
        for name, given_input, x in zip(_kda.GRADIENTS, given, gradients)
        if x is not None
    }


def _like(name: str, given: Any, gradient: Any) -> Any:
    """The gradient of an input that the call may have cast or reshaped, as it was given."""
    if tuple(gradient.shape) != tuple(given.shape):
        gradient = _arrays.reshape(name, gradient, tuple(given.shape))
    return gradient.to(given.dtype) if is_torch(given) else gradient


def _check_states_in_place(states: Any, indices: Any) -> None:
    if states is None:
        raise ArgumentError(
            "initial_state: absent, expected the states that are updated in place"
        )
    if not is_tracing():
        frame = _torch_frame if is_torch(states) else _arrays
        frame.check_writable("initial_state", states)
    if indices is not None and states.shape[0] == 0:
        raise ArgumentError("initial_state: found a pool of 0 states, expected one at least")


def recurrent(call: dict[str, Any]) -> tuple[Any, Any]:
    """fused_recurrent_kda."""
    result = key = None
    if _may_be_seen(call, _RECURRENT_LENGTH):
        result, key = _autograd.recurrent_seen(call)
        if result is not None:
            return result
    call = _checks.natively(call)
    check_tensors(_tensors_in(call))
    options = _options(call, RECURRENT_DEFAULTS)
    states, indices = call["initial_state"], call["state_indices"]
    accepted, cu_seqlens = call["num_accepted"], call["cu_seqlens"]
    in_place = call["in_place"] or indices is not None or accepted is not None
    inputs = _inputs(call, options, None if indices is not None else states)
    # 16 bits halve what a step moves, so that pools may have them; 64 would be cut to 32.
    if states is not None and str(states.dtype).endswith("float64") and not _is_fp64(inputs[0]):
        raise ArgumentError(
            f"initial_state: found dtype {states.dtype} beside q of {inputs[0].dtype}, expected "
            "float32 or 16 bits: states in float64 take q in float64"
        )
    if in_place:
        _check_states_in_place(states, indices)
    with_state = call["output_final_state"]
    if is_torch(inputs[0]):
        more = (options, with_state, indices, accepted, in_place)
        _check_on_meta(inputs[0], _kda.prepare_recurrent, inputs, cu_seqlens, *more)
        return _autograd.recurrent_kda(call, key, inputs, cu_seqlens, *more)
    arrays, cu = wrap(inputs), _arrays.wrap("cu_seqlens", cu_seqlens)
    indices = _arrays.wrap("state_indices", indices)
    accepted = _arrays.wrap("num_accepted", accepted)
    o, final_state = _kda.recurrent(
        _arrays, arrays, cu, options, with_state, indices, accepted, in_place
    )
    state = states if in_place else _arrays.hand_over(final_state, arrays[0])
    return _arrays.hand_over(o, arrays[0]), state
