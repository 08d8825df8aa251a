"""An independent truth: float64 loops over rows and tokens, in numpy, with Python's own indexing."""

import numpy as np


def _f64(value):
    return None if value is None else np.asarray(value, np.float32).astype(np.float64)


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def silu(x):
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def loop(step, tokens, pool, layer, rows):
    """`state, y = step(state, t)` along each row, under the contract of a packed call."""
    offsets, reads, writes, points, positions = (np.asarray(v) for v in rows)
    source = np.asarray(pool, np.float32)
    out = source.astype(np.float64)
    outputs = [None] * tokens
    for row, write in enumerate(writes):
        start, stop = offsets[row], offsets[row + 1]
        if write == 0 or start == stop:
            continue
        state = np.zeros(source.shape[2:]) if reads[row] == 0 else _f64(source[layer, reads[row]])
        for t in range(start, stop):
            state, outputs[t] = step(state, t)
            for point, position in zip(points[row], positions[row], strict=True):
                if point and position == t - start + 1:
                    out[layer, point] = state
        out[layer, write] = state
    shape = next(y.shape for y in outputs if y is not None)
    return np.stack([np.zeros(shape) if y is None else y for y in outputs]), out


def causal_conv(x, weight, bias, windows, layer, rows, activation=None):
    x, weight, bias = _f64(x), _f64(weight), _f64(bias)

    def step(window, t):
        seen = np.vstack([window, x[t : t + 1]])
        y = (seen * weight).sum(0) + (0 if bias is None else bias)
        return seen[1:], silu(y) if activation == "silu" else y

    return loop(step, len(x), windows, layer, rows)


def selective_scan(x, dt, A, B, C, skip, z, dt_bias, states, layer, rows):
    x, dt, A, B, C, skip, z, dt_bias = map(_f64, (x, dt, A, B, C, skip, z, dt_bias))
    dt = softplus(dt if dt_bias is None else dt + dt_bias)

    def step(h, t):
        h = h.copy()
        for n in range(A.shape[1]):
            h[n] = np.exp(dt[t] * A[:, n]) * h[n] + dt[t] * B[t, n] * x[t]
        y = C[t] @ h
        y = y if skip is None else y + skip * x[t]
        return h, y if z is None else y * silu(z[t])

    return loop(step, len(x), states, layer, rows)


def ssd(x, dt, A, B, C, skip, dt_bias, states, layer, rows, dt_limit=(0.0, np.inf), chunk=None):
    x, dt, A, B, C, skip, dt_bias = map(_f64, (x, dt, A, B, C, skip, dt_bias))
    dt = np.clip(softplus(dt if dt_bias is None else dt + dt_bias), *dt_limit)
    heads, per_group = x.shape[1], x.shape[1] // B.shape[1]

    def step(h, t):
        h, y = h.copy(), np.zeros(x.shape[1:])
        for head in range(heads):
            group = head // per_group
            h[head] *= np.exp(dt[t, head] * A[head])
            h[head] += dt[t, head] * np.outer(x[t, head], B[t, group])
            y[head] = h[head] @ C[t, group] + (0 if skip is None else skip[head] * x[t, head])
        return h, y

    return loop(step, len(x), states, layer, rows)


def _one_token(read_ids, write_ids):
    none = np.zeros((len(read_ids), 0), int)
    return np.arange(len(read_ids) + 1), read_ids, write_ids, none, none


def conv_step(read_ids, write_ids, **operands):
    return causal_conv(**operands, rows=_one_token(read_ids, write_ids))


def selective_step(read_ids, write_ids, dt_weight=None, **operands):
    if dt_weight is not None:
        dt, dtype = operands["dt"], operands["dt"].dtype
        operands["dt"] = (_f64(dt) @ _f64(dt_weight).T).astype(dtype)
    return selective_scan(**operands, rows=_one_token(read_ids, write_ids))


def ssd_step(read_ids, write_ids, gate=None, **operands):
    y, states = ssd(**operands, rows=_one_token(read_ids, write_ids))
    if gate is not None:
        live = np.asarray(write_ids)[:, None] != 0
        y = y * np.where(live, silu(_f64(gate)), 0).reshape(y.shape)
    return y, states


def projected_conv_step(
    x, weight, conv_weight, conv_bias, windows, layer, read_ids, write_ids, first, activation=None
):
    y = _f64(x) @ _f64(weight).T
    # What is convolved has the dtype of the input.
    inner = y[:, first : first + conv_weight.shape[1]].astype(np.float32).astype(x.dtype)
    rows = _one_token(read_ids, write_ids)
    inner, windows = causal_conv(inner, conv_weight, conv_bias, windows, layer, rows, activation)
    y[:, first : first + inner.shape[1]] = inner
    return y, windows
