"""Small case files, right and wrong, written without the code under test."""

import json
import struct

SIZE = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}


def tensor(dtype, shape, values=None):
    """(dtype, shape, bytes); zeroes unless values are given."""
    count = 1
    for extent in shape:
        count *= extent
    if values is None:
        return dtype, list(shape), bytes(count * SIZE[dtype])
    code = {"F32": "f", "F64": "d", "I32": "i", "I64": "q"}[dtype]
    return dtype, list(shape), struct.pack(f"<{count}{code}", *values)


def container(header, data):
    """A file from header text or object and data, whatever they say."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def header_of(tensors, metadata=None):
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    return header, data


def case(tensors, metadata=None):
    return container(*header_of(tensors, metadata))


def small_tensors(B=1, T=3, H=1, HV=1, K=2, V=2, io="F32"):
    """The inputs of a tiny valid forward."""
    numbers = {
        "q": tensor(io, [B, T, H, K]),
        "k": tensor(io, [B, T, H, K]),
        "v": tensor(io, [B, T, HV, V]),
        "g": tensor("F32", [B, T, HV, K]),
        "beta": tensor("F32", [B, T, HV]),
    }
    if io == "F32":
        for name in ("q", "k", "v"):
            _, shape, content = numbers[name]
            count = len(content) // 4
            numbers[name] = tensor(io, shape, [0.5 + 0.1 * i for i in range(count)])
        numbers["beta"] = tensor("F32", [B, T, HV], [0.5] * (B * T * HV))
    return numbers


def with_gradients(tensors):
    changed = dict(tensors)
    dtype, shape, _ = tensors["v"]
    changed["do"] = tensor(dtype, shape)
    return changed


def changed(**replacements):
    """A small case with tensors replaced, added, or (None) left out."""
    tensors = small_tensors()
    for name, value in replacements.items():
        if value is None:
            tensors.pop(name)
        else:
            tensors[name.replace("__", ".")] = value
    return case(tensors)


def with_header(change):
    """A small case whose header object went through `change`."""
    header, data = header_of(small_tensors())
    return container(change(header) or header, data)


def entry(**fields):
    """A small case whose entry of q has fields replaced."""

    def change(header):
        header["q"].update(fields)

    return with_header(change)


def text_entry(text):
    """A file of one tensor x whose entry is raw text."""
    return container(b'{"x":' + text + b"}", bytes(4))


def options(**metadata):
    return case(small_tensors(), metadata)


def bad_containers():
    """(name, content, part of the message) of files that are no safetensors files."""
    good = case(small_tensors())
    header, data = header_of(small_tensors())
    length = len(json.dumps(header))
    yield "empty", b"", "found 0 bytes"
    yield "seven_bytes", bytes(7), "found 7 bytes"
    yield "no_header", struct.pack("<Q", 0), "found 0 bytes"
    yield "header_past_the_end", struct.pack("<Q", 100) + b"{}", "length of 100 bytes"
    yield "header_of_2_64", struct.pack("<Q", 2**64 - 1) + b"{}", "18446744073709551615"
    yield "header_negative", struct.pack("<q", -8) + b"{}", "header: found a length"
    yield "not_json", container(b"not json", b""), "found byte 0x6e first"
    yield "header_cut", container(json.dumps(header).encode()[:-5] + b"}", data), "no valid JSON after key"
    yield "no_brace", container(json.dumps(header).encode()[:-1], data), "no valid JSON after key beta"
    yield "zero_byte_then_more", container(json.dumps(header).encode() + b"\0garbage}", data), "zero byte"
    yield "zero_bytes_pad", container(json.dumps(header).encode() + b"\0\0", data), "zero byte"
    yield "line_break_pads", container(json.dumps(header).encode() + b"\n", data), "byte 0x0a last"
    yield "text_after_header", container(json.dumps(header).encode() + b" x", data), "byte 0x78 last"
    yield "two_objects", container(json.dumps(header).encode() + b" {}", data), "no valid JSON"
    yield "byte_order_mark", container(b"\xef\xbb\xbf" + json.dumps(header).encode(), data), "byte 0xef first"
    yield "space_first", container(b" " + json.dumps(header).encode(), data), "byte 0x20 first"
    yield "zero_byte_first", container(b"\0", b""), "byte 0x00 first"
    yield "not_utf8", container(b'{"\xff\xfe":1}', b""), "no valid JSON"
    yield "an_array", container(b"[]", b""), "JSON object"
    yield "a_number", container(b"3", b""), "JSON object"
    yield "truncated_data", good[:-1], "beta"
    yield "truncated_header", good[: 8 + length // 2], "header"
    yield "oversized", good + b"\0", "file: found"
    yield "deep_arrays", container(b'{"a":' + b"[" * 100000 + b"}", b""), "nested deeper"
    yield "deep_objects", container(b'{"a":' * 100000 + b"}", b""), "nested deeper"
    yield "deep_in_metadata", container(b'{"__metadata__":{"a":[[[[]]]]}}', b""), "nested deeper"
    yield "tensor_twice", container(b'{"x":1,"x":2}', b""), "twice"
    yield "field_twice", text_entry(b'{"dtype":"F32","dtype":"F64"}'), "twice"
    yield "metadata_twice", container(b'{"__metadata__":{},"__metadata__":{}}', b""), "twice"
    yield "metadata_list", container(b'{"__metadata__":[]}', b""), "__metadata__"
    yield "metadata_number", container(b'{"__metadata__":{"scale":1}}', b""), "scale"
    yield "overlap", entry(data_offsets=[4, 28]), "q"
    yield "same_bytes_twice", entry(data_offsets=header["k"]["data_offsets"]), "expected"


def bad_entries():
    """Files whose header lies about a tensor."""
    yield "begin_after_end", entry(data_offsets=[24, 0]), "q: found data_offsets"
    yield "offset_negative", entry(data_offsets=[-1, 24]), "q: found data_offsets"
    yield "offset_past_the_end", entry(data_offsets=[0, 2**62]), "q: found data_offsets"
    yield "offset_of_2_64", entry(data_offsets=[0, 2**64]), "q: found data_offsets"
    yield "offset_fraction", entry(data_offsets=[0, 24.0]), "q: found data_offsets"
    yield "offset_text", entry(data_offsets=["0", "24"]), "q: found data_offsets"
    yield "three_offsets", entry(data_offsets=[0, 12, 24]), "q: found data_offsets"
    yield "size_negative", entry(shape=[1, -3, 1, 2]), "q: found size -3"
    yield "size_nan", text_entry(b'{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}'), "JSON after key x"
    yield "size_infinite", text_entry(b'{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}'), "JSON"
    yield "size_fraction", entry(shape=[1, 3.0, 1, 2]), "q: found size 3.0"
    yield "size_text", entry(shape=["1", 3, 1, 2]), "q: found size"
    yield "size_null", entry(shape=[None, 3, 1, 2]), "q: found size null"
    yield "size_nested", entry(shape=[[1], 3, 1, 2]), "found"
    yield "size_2_63", entry(shape=[2**63, 1, 1, 1]), "q: found size"
    yield "shape_overflow", entry(shape=[2**40, 2**40, 1, 2]), "more than 2^64"
    yield "shape_wraps", entry(shape=[2**62, 4, 1, 6]), "q: found 24 bytes"
    yield "shape_no_list", entry(shape=6), "q: found shape"
    yield "nine_dimensions", entry(shape=[1] * 8 + [6]), "q: found shape"
    yield "too_few_bytes", entry(shape=[1, 4, 1, 2]), "q: found 24 bytes of data, expected 32"
    yield "too_many_bytes", entry(shape=[1, 2, 1, 2]), "q: found 24 bytes of data, expected 16"
    yield "dtype_unknown", entry(dtype="U8"), 'q: found dtype "U8"'
    yield "dtype_lower", entry(dtype="f32"), 'q: found dtype "f32"'
    yield "dtype_number", entry(dtype=32), "q: found dtype 32"
    yield "field_missing", text_entry(b'{"dtype":"F32","shape":[1]}'), "x: found"
    yield "field_extra", entry(strides=[1]), "q: found"
    yield "entry_null", container(b'{"x":null}', bytes(4)), "x: found null"


def bad_cases():
    """Files that are no cases."""
    i64 = lambda *values: tensor("I64", [len(values)], values)
    yield "no_tensors", case({}), "q: absent"
    for name in ("q", "k", "v", "g", "beta"):
        yield f"no_{name}", changed(**{name: None}), f"{name}: absent"
    yield "q_rank", changed(q=tensor("F32", [3, 1, 2])), "q: found shape [3,1,2]"
    yield "v_scalar", changed(v=tensor("F32", [])), "v: found shape []"
    yield "beta_scalar", changed(beta=tensor("F32", [])), "beta: found shape []"
    yield "k_shape", changed(k=tensor("F32", [1, 3, 1, 4])), "k: found shape [1,3,1,4]"
    yield "k_dtype", changed(k=tensor("F64", [1, 3, 1, 2])), "k: found dtype fp64"
    yield "q_integer", changed(q=tensor("I32", [1, 3, 1, 2])), "q: found dtype int32"
    yield "g_shape", changed(g=tensor("F32", [1, 3, 2, 2])), "g: found shape [1,3,2,2]"
    yield "beta_shape", changed(beta=tensor("F32", [1, 4, 1])), "beta: found shape [1,4,1]"
    yield "heads_ragged", case(small_tensors(H=2, HV=3)), "v of shape [1,3,3,2]: size HV"
    yield "no_heads", case(small_tensors(H=0, HV=0)), "size H"
    yield "k_0", case(small_tensors(K=0)), "size K"
    yield "k_257", case(small_tensors(K=257)), "q of shape [1,3,1,257]: size K: found 257"
    yield "no_rows", case(small_tensors(B=0)), "size B"
    yield "state_shape", changed(initial_state=tensor("F32", [1, 1, 2, 3])), "expected [1,1,2,2] = [N,HV,K,V]"
    yield "state_rank", changed(initial_state=tensor("F32", [2, 2])), "expected [1,1,2,2] = [N,HV,K,V]"
    yield "bias_shape", changed(dt_bias=tensor("F32", [3])), "dt_bias: found shape [3], expected [2] = [HV*K]"
    yield "state_dtype", changed(initial_state=tensor("F64", [1, 1, 2, 2])), "initial_state: found"
    yield "do_dtype", changed(do=tensor("BF16", [1, 3, 1, 2])), "do: found dtype bf16"
    yield "do_shape", changed(do=tensor("F32", [1, 3, 1, 1])), "do: found shape"
    yield "dstate_alone", changed(dfinal_state=tensor("F32", [1, 1, 2, 2])), "dfinal_state"
    yield "A_log_without_gate", changed(A_log=tensor("F32", [1])), "A_log: given"
    yield "misspelt_tensor", changed(inital_state=tensor("F32", [1, 1, 2, 2])), "inital_state"
    yield "cu_decreases", changed(cu_seqlens=i64(0, 2, 1, 3)), "cu_seqlens: found 1 at index 2"
    yield "cu_past_T", changed(cu_seqlens=i64(0, 4)), "cu_seqlens: found 4 at index 1"
    yield "cu_negative", changed(cu_seqlens=i64(0, -1)), "cu_seqlens: found -1"
    yield "cu_starts_late", changed(cu_seqlens=i64(1, 3)), "cu_seqlens: found 1 at index 0"
    yield "cu_huge", changed(cu_seqlens=i64(0, 2**62)), "cu_seqlens: found 4611686018427387904"
    yield "cu_empty", changed(cu_seqlens=tensor("I64", [0])), "cu_seqlens: found shape [0]"
    yield "cu_float", changed(cu_seqlens=tensor("F32", [2])), "cu_seqlens: found dtype fp32"
    yield "cu_rank", changed(cu_seqlens=tensor("I64", [1, 2])), "cu_seqlens: found shape [1,2]"
    two_rows = dict(small_tensors(B=2), cu_seqlens=i64(0, 3))
    yield "cu_with_batch", case(two_rows), "q of shape [2,3,1,2]: size B: found 2"
    yield "expected_shape", changed(expected__o=tensor("F32", [1, 3, 1, 1])), "expected.o: found"
    yield "expected_dtype", changed(expected__o=tensor("BF16", [1, 3, 1, 2])), "expected.o: found"
    yield "expected_name", changed(expected__x=tensor("F32", [1])), "expected.x"
    yield "expected_dq_without_do", changed(expected__dq=tensor("F32", [1, 3, 1, 2])), "expected.dq"


def bad_options():
    """Cases whose metadata is wrong."""
    yield "key_unknown", options(scael="1"), "scael"
    yield "scale_text", options(scale="fast"), "metadata scale"
    yield "scale_nan", options(scale="nan"), "metadata scale"
    yield "scale_plus", options(scale="+1"), "expected a finite decimal number as in 0.125"
    yield "scale_space", options(scale=" 1"), "without + or spaces"
    yield "chunk_exponent", options(chunk_size="6.4e1"), "expected digits alone, as in 64"
    yield "scale_infinite", options(scale="inf"), "metadata scale"
    yield "scale_overflow", options(scale="1e999"), "metadata scale"
    yield "scale_tail", options(scale="1.0x"), "metadata scale"
    yield "gate_unknown", options(gate="tanh"), "metadata gate"
    yield "bool_yes", options(qk_l2norm="yes"), "metadata qk_l2norm"
    yield "bool_case", options(beta_sigmoid="True"), "metadata beta_sigmoid"
    yield "chunk_48", options(chunk_size="48"), "chunk_size: found 48"
    yield "chunk_fraction", options(chunk_size="64.5"), "metadata chunk_size"
    yield "chunk_overflow", options(chunk_size="99999999999"), "metadata chunk_size"
    yield "softplus_without_A_log", options(gate="softplus"), "A_log: absent"
    yield "bound_missing", options(gate="lower_bound"), "lower_bound: found 0"
    yield "bound_positive", options(gate="lower_bound", lower_bound="5"), "lower_bound: found 5"
    yield "bound_nan", options(gate="lower_bound", lower_bound="nan"), "metadata lower_bound"
    yield "bound_without_gate", options(lower_bound="-5"), "lower_bound: found -5"
    yield "neg_without_sigmoid", options(allow_neg_eigval="true"), "allow_neg_eigval"
    yield "line_break", options(scale="1\n2"), "metadata scale"


def bad_files():
    for group in (bad_containers, bad_entries, bad_cases, bad_options):
        yield from group()
