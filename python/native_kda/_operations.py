"""Any operation by its signature: the shapes of what is given tell those of the outputs."""

from __future__ import annotations

from typing import Any

from . import _checks, _problem
from ._problem import SPECS, ArgumentError, Frame, Options, Prepared, Sizes, Spec

_IN_FP32 = ("final_state", "dinitial_state", "dg", "dbeta")

Given = dict[str, Any]  # tensors by name, in the order of the signature


def inputs_of(operation: str) -> list[Spec]:
    specs = SPECS[_problem.OPERATIONS.index(operation)]
    return [spec for spec in specs if not spec.is_output]


def outputs_of(operation: str) -> list[Spec]:
    specs = SPECS[_problem.OPERATIONS.index(operation)]
    return [spec for spec in specs if spec.is_output]


def _letters(shape: str) -> list[str]:
    return shape.strip("[]").split(",")


def _bind(specs: list[Spec], given: Given) -> dict[str, int]:
    """What each letter of the shapes stands for, by the tensors at hand."""
    extents: dict[str, int] = {}
    for spec in specs:
        tensor = given.get(spec.name)
        if tensor is None or spec.shape.startswith(("[S", "[NC")):
            continue
        letters = _letters(spec.shape)
        if len(letters) == len(tensor.shape):
            for letter, extent in zip(letters, tensor.shape):
                extents.setdefault(letter, extent)
        elif spec.shape != "[HV,K]":  # a flat dt_bias
            raise ArgumentError(
                f"{spec.name}: found shape {list(tensor.shape)}, expected {spec.shape}"
            )
    return extents


def _sizes(extents: dict[str, int]) -> Sizes:
    HV = extents["HV"]
    return Sizes(
        extents["B"],
        extents["T"],
        extents.get("H", HV),
        HV,
        extents["K"],
        extents.get("V", 1),
        extents.get("N+1", 1) - 1,
    )


def _shape(spec: Spec, sizes: Sizes, options: Options, packed: bool) -> tuple[int, ...]:
    if spec.shape.startswith("[S"):
        return _checks.state_shape(sizes, options, packed)
    rows = _checks.chunk_rows(sizes, options, packed)
    extents = {**sizes._asdict(), "C": options.chunk_size, "NC": rows}
    return tuple(extents[letter] for letter in _letters(spec.shape))


def rows_of(
    frame: Frame, operation: str, outputs: tuple[str, ...], options: Options, given: Given
) -> tuple[Sizes, list[tuple[str, tuple[Any, ...], Any]]]:
    """The sizes, and name, shape and dtype of each output."""
    sizes = _sizes(_bind(inputs_of(operation), given))
    specs = {spec.name: spec for spec in outputs_of(operation)}
    leader = next(iter(given.values()))
    rows = []
    for name in outputs:
        accurate = name in _IN_FP32 or specs[name].dtypes.startswith("fp32")
        dtype = frame.state_dtype(leader) if accurate else leader.dtype
        rows.append((name, _shape(specs[name], sizes, options, "cu_seqlens" in given), dtype))
    return sizes, rows


def prepare(
    frame: Frame, operation: str, outputs: tuple[str, ...], options: Options, given: Given
) -> Prepared:
    sizes, rows = rows_of(frame, operation, outputs, options, given)
    number = _problem.OPERATIONS.index(operation)
    return _problem.prepare(frame, number, sizes, options, list(given.items()), rows)


def run(
    frame: Frame, operation: str, outputs: tuple[str, ...], options: Options, given: Given
) -> tuple[Any, ...]:
    """The outputs in the order of their names."""
    prepared = prepare(frame, operation, outputs, options, given)
    return tuple(_problem.execute(frame, prepared, tuple(given.values())))
