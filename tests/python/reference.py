"""The token recurrence, written twice: for NumPy and, with automatic differentiation, for torch.

Everything is float64. Equation numbers are those of docs/semantics.md.
"""

import numpy as np


def numpy_inputs(seed=0, B=2, T=70, H=2, HV=4, K=16, V=8, dtype=np.float32, gate=None):
    """Random inputs; with a gate, raw ones and its parameters."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    inputs = dict(q=draw(B, T, H, K), k=draw(B, T, H, K), v=draw(B, T, HV, V))
    inputs["g"] = draw(B, T, HV, K) if gate else -np.abs(draw(B, T, HV, K)) * dtype(0.2)
    inputs["beta"] = (1 / (1 + np.exp(-draw(B, T, HV)))).astype(dtype)
    inputs["initial_state"] = draw(B, HV, K, V)
    if gate:
        inputs["A_log"] = (draw(HV) * dtype(0.3)).astype(dtype)
        inputs["dt_bias"] = (draw(HV * K) * dtype(0.3)).astype(dtype)
    return inputs


def _normalise(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # (3.1)


def _decay(g, A_log, dt_bias, gate, lower_bound):
    if gate is None:
        return g
    a = np.exp(A_log)[:, None] if A_log is not None else 1.0
    z = g if dt_bias is None else g + dt_bias.reshape(g.shape[-2:])
    if gate == "softplus":
        return -a * np.logaddexp(0, z)  # (3.4)
    return lower_bound / (1 + np.exp(-a * z))  # (3.8)


def recurrence(q, k, v, g, beta, initial_state=None, A_log=None, dt_bias=None, *, scale=None,
               gate=None, lower_bound=None, l2norm=False):
    """o and the final state, K first."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if l2norm:
        q, k = _normalise(q), _normalise(k)
    q, k = (np.repeat(x, HV // H, axis=2) for x in (q, k))
    g = _decay(g, A_log, dt_bias, gate, lower_bound)
    S = np.zeros((B, HV, K, V)) if initial_state is None else np.array(initial_state, np.float64)
    o = np.zeros((B, T, HV, V))
    for t in range(T):
        S = S * np.exp(g[:, t])[..., None]  # (2.1)
        e = v[:, t] - np.einsum("bhkv,bhk->bhv", S, k[:, t])  # (2.2)
        u = beta[:, t, :, None] * e  # (2.3)
        S = S + k[:, t, :, :, None] * u[:, :, None, :]  # (2.4)
        o[:, t] = np.einsum("bhkv,bhk->bhv", S, q[:, t])  # (2.5)
    return o * (K**-0.5 if scale is None else scale), S


def torch_recurrence(q, k, v, g, beta, initial_state=None, A_log=None, dt_bias=None, *, scale=None,
                     gate=None, lower_bound=None, l2norm=False, beta_sigmoid=False, double=False):
    """The same, differentiable. `double` means beta = 2 sigmoid."""
    import torch

    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    if beta_sigmoid:
        beta = beta.sigmoid() * (2 if double else 1)
    if gate is not None:
        a = 1.0 if A_log is None else A_log.double().exp()[:, None]
        z = g if dt_bias is None else g + dt_bias.double().reshape(HV, K)
        g = -a * torch.nn.functional.softplus(z) if gate == "softplus" else (
            lower_bound * torch.sigmoid(a * z))
    S = q.new_zeros(B, HV, K, V) if initial_state is None else initial_state.double()
    o = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None]
        e = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * e)[:, :, None, :]
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    o = torch.stack(o, 1) if o else v
    return o * (K**-0.5 if scale is None else scale), S


def ratio(expected, found, floor=0.0):
    """RMS of the difference over RMS of what is expected, or over `floor` if that is more: (7.1)."""
    expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    assert expected.shape == found.shape, (expected.shape, found.shape)
    assert np.isfinite(found).all()
    error = np.sqrt(np.mean((expected - found) ** 2)) if expected.size else 0.0
    size = max(np.sqrt(np.mean(expected**2)), floor) if expected.size else 1.0
    return error / (size + 1e-8)


# Section 7.3: fp32 on the CPU.
FP32 = dict(o=1e-5, final_state=1e-5, dq=1e-5, dk=1e-5, dv=1e-5, dg=3e-5, dbeta=1e-5,
            dinitial_state=1e-5, dA_log=2e-4, ddt_bias=3e-4)
BF16 = dict(o=5e-3, final_state=5e-3, dq=6e-3, dk=6e-3, dv=6e-3, dg=1e-2, dbeta=8e-3,
            dinitial_state=5e-3, dA_log=1e-2, ddt_bias=8e-3)
