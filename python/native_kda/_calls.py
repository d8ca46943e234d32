"""The calls of the public functions, checked and brought to the route of their tensors.

A call is a dictionary of arguments, complete but for q, k, v, g and beta with the defaults below.
"""

from __future__ import annotations

import sys
from typing import Any

from . import _arrays, _checks, _kda, _problem
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


def torch_frame() -> Any:
    return _torch_frame


def device_type(tensor: Any) -> str:
    if is_torch(tensor):
        return tensor.device.type
    return _problem.DEVICE_TYPES[_arrays.Array(tensor).device[0]]


def _align_dtypes(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Under autocast q, k and v may come in different dtypes: then all take autocast's."""
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    import torch

    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _flat(A_log: Any, dt_bias: Any, sizes: Sizes) -> tuple[Any, Any]:
    """A_log as [HV], whatever dimensions of 1 it has; dt_bias as [HV*K] or [HV,K]."""
    if A_log is not None and len(A_log.shape) != 1:
        A_log = A_log.reshape(-1)
    if dt_bias is not None and len(dt_bias.shape) not in (1, 2):
        dt_bias = dt_bias.reshape(sizes.HV, sizes.K)
    return A_log, dt_bias


def _options(call: dict[str, Any], defaults: dict[str, Any]) -> Options:
    """The options of a call; unknown arguments are refused."""
    extra = {name: call[name] for name in call if name not in defaults and name not in _TENSORS}
    state_v_first = _checks.take_state_layout(call["state_v_first"], extra)
    _checks.refuse_unknown(extra)
    return _checks.options_of(
        scale=call["scale"],
        use_qk_l2norm_in_kernel=call["use_qk_l2norm_in_kernel"],
        use_gate_in_kernel=call["use_gate_in_kernel"],
        use_beta_sigmoid_in_kernel=call["use_beta_sigmoid_in_kernel"],
        allow_neg_eigval=call["allow_neg_eigval"],
        lower_bound=call["lower_bound"],
        state_v_first=state_v_first,
        A_log=call["A_log"],
        chunk_size=call.get("chunk_size", 64),
    )


def _inputs(call: dict[str, Any], options: Options, states: Any) -> tuple:
    """q, k, v, g, beta, A_log, dt_bias, initial_state; `states` has one row a sequence."""
    tensors = tuple(call[name] for name in _TENSORS)
    q, k, v, g, beta = tensors
    sizes = _checks.sizes_of(q, k, v, g, beta, states, call["cu_seqlens"])
    A_log, dt_bias = call["A_log"], call["dt_bias"]
    if options.gate == _problem.GATE_NONE:
        A_log = dt_bias = None
    A_log, dt_bias = _flat(A_log, dt_bias, sizes)
    if is_torch(tensors[0]):
        tensors = (*_align_dtypes(q, k, v), g, beta)
    return (*tensors, A_log, dt_bias, call["initial_state"])


def chunk_problem(call: dict[str, Any]) -> tuple[tuple, Options]:
    """The inputs and options of a call of chunk_kda."""
    options = _options(call, CHUNK_DEFAULTS)
    if call["cp_context"] is not None:
        raise UnsupportedError("cp_context: context parallelism is not implemented")
    _checks.check_safe_gate(call["safe_gate"], call["use_gate_in_kernel"], call["lower_bound"])
    states = call["initial_state"]
    inputs = _inputs(call, options, states)
    if states is not None:
        found = str(states.dtype)
        accepted = ("float32", "float64") if str(inputs[0].dtype).endswith("64") else ("float32",)
        if not found.endswith(accepted):
            raise ArgumentError(
                f"initial_state: found dtype {found}, initial_state must be in float32"
            )
    return inputs, options


def chunk_again(tensors: tuple, options: tuple) -> tuple | None:
    """The result of chunk_kda if a call like this was made before: most of what calls cost the
    host is saved. The arguments are in the order of _autograd.CHUNK_TENSORS and CHUNK_OPTIONS."""
    if not is_torch(tensors[0]) or is_tracing():
        return None
    return _autograd.chunk_again(tensors, options)


def recurrent_again(tensors: tuple, options: tuple) -> tuple | None:
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


def chunk(call: dict[str, Any]) -> tuple[Any, ...]:
    """chunk_kda."""
    result = key = None
    if _may_be_seen(call, _CHUNK_LENGTH):
        result, key = _autograd.chunk_seen(call)
        if result is not None:
            return result
    inputs, options = chunk_problem(call)
    cu_seqlens, with_state = call["cu_seqlens"], bool(call["output_final_state"])
    if call["return_intermediate_states"]:
        return _chunk_with_states(inputs, cu_seqlens, call["cu_seqlens_cpu"], options, with_state)
    if is_torch(inputs[0]):
        return _autograd.chunk_kda(call, key, inputs, cu_seqlens, options, with_state)
    arrays = tuple(_arrays.wrap(array) for array in inputs)
    cu = _arrays.wrap(cu_seqlens)
    o, final_state, _ = _kda.forward(_arrays, arrays, cu, options, with_state)
    return _arrays.hand_over(o, arrays[0]), _arrays.hand_over(final_state, arrays[0])


def _chunks_in(cu: Any, chunk_size: int) -> int:
    ends = [int(end) for end in cu]
    return sum(
        (end - begin + chunk_size - 1) // chunk_size for begin, end in zip(ends, ends[1:])
    )


def _chunk_with_states(
    inputs: tuple, cu_seqlens: Any, cu_seqlens_cpu: Any, options: Options, with_state: bool
) -> tuple[Any, Any, Any]:
    if is_torch(inputs[0]):
        import torch

        if not torch.is_inference_mode_enabled():
            raise ArgumentError(
                "return_intermediate_states: found True outside torch.inference_mode(), where "
                "alone it is allowed: h has no gradient"
            )
        o, final_state, h = _kda.forward(
            _torch_frame, inputs, cu_seqlens, options, with_state, with_h=True
        )
    else:
        arrays = tuple(_arrays.wrap(array) for array in inputs)
        results = _kda.forward(
            _arrays, arrays, _arrays.wrap(cu_seqlens), options, with_state, with_h=True
        )
        o, final_state, h = (_arrays.hand_over(x, arrays[0]) for x in results)
    B = o.shape[0]
    if cu_seqlens is not None:
        # Rows past the last chunk are there only because the host does not know how many there are.
        host = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        h = h[: _chunks_in(host, options.chunk_size)]
    h = h.reshape(B, h.shape[0] // B, *h.shape[1:])
    return o, final_state, h.swapaxes(-1, -2) if options.state_v_first else h


def chunk_backward(
    do: Any, dfinal_state: Any, call: dict[str, Any], wanted: tuple[str, ...]
) -> dict[str, Any]:
    """The gradients of chunk_kda by name."""
    inputs, options = chunk_problem(call)
    needs = tuple(name in wanted for name in _kda.GRADIENTS)
    cu_seqlens = call["cu_seqlens"]
    if is_torch(do):
        gradients = _kda.backward(
            _torch_frame, do, dfinal_state, inputs, cu_seqlens, options, needs
        )
    else:
        arrays = tuple(_arrays.wrap(array) for array in inputs)
        do, dfinal_state, cu = (_arrays.wrap(x) for x in (do, dfinal_state, cu_seqlens))
        gradients = [
            _arrays.hand_over(x, arrays[0])
            for x in _kda.backward(_arrays, do, dfinal_state, arrays, cu, options, needs)
        ]
    return {name: x for name, x in zip(_kda.GRADIENTS, gradients) if x is not None}


def recurrent(call: dict[str, Any]) -> tuple[Any, Any]:
    """fused_recurrent_kda."""
    result = key = None
    if _may_be_seen(call, _RECURRENT_LENGTH):
        result, key = _autograd.recurrent_seen(call)
        if result is not None:
            return result
    options = _options(call, RECURRENT_DEFAULTS)
    states, indices = call["initial_state"], call["state_indices"]
    accepted, cu_seqlens = call["num_accepted"], call["cu_seqlens"]
    in_place = bool(call["in_place"]) or indices is not None or accepted is not None
    if in_place and states is None:
        raise ArgumentError(
            "initial_state: absent, expected the states that are updated in place"
        )
    inputs = _inputs(call, options, None if indices is not None else states)
    with_state = bool(call["output_final_state"])
    if is_torch(inputs[0]):
        return _autograd.recurrent_kda(
            call, key, inputs, cu_seqlens, options, with_state, indices, accepted, in_place
        )
    arrays = tuple(_arrays.wrap(array) for array in inputs)
    if in_place:
        _arrays.check_writable("initial_state", states)
    cu, indices, accepted = (_arrays.wrap(x) for x in (cu_seqlens, indices, accepted))
    o, final_state = _kda.recurrent(
        _arrays, arrays, cu, options, with_state, indices, accepted, in_place
    )
    state = states if in_place else _arrays.hand_over(final_state, arrays[0])
    return _arrays.hand_over(o, arrays[0]), state
