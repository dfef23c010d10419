"""Operations on 64 elements at once, for `kernels`: comparisons that yield one bit per element, and bit counts.

With numba each is a vector comparison and a few instructions (LLVM lowers it to whatever the processor has). Without
numba the same functions are slow plain Python, which lets tests run the kernels anywhere; nothing else does.
"""

# ruff: noqa: ANN401  -- what numba hands to an intrinsic has no public types

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    _numba: Any = importlib.import_module("numba")
except ImportError:
    _numba = None

HAS_NUMBA = _numba is not None
LANES = 64
# Masks stay unsigned; the counts and indices made of them do not.
as_mask = np.uint64


def _differing_python(left: Any, right: Any, start: int) -> np.uint64:
    return np.uint64(sum(int(left[start + lane] != right[start + lane]) << lane for lane in range(LANES)))


def _at_least_python(values: Any, start: int, bound: int) -> np.uint64:
    return np.uint64(sum(int(values[start + lane] >= bound) << lane for lane in range(LANES)))


def _fill_contexts_python(bits: Any, start: int, contexts: Any) -> None:
    shift = 8 * bits.dtype.itemsize - 9
    for lane in range(LANES):
        value = int(bits[start + lane])
        contexts[lane] = (value >> shift if shift >= 0 else value << 1) & 255


def _count_ones_python(bits: int) -> int:
    return int(bits).bit_count()


def _lowest_one_python(bits: int) -> int:
    return (int(bits) & -int(bits)).bit_length() - 1


def _intrinsics() -> tuple[Any, ...]:
    """Return the five operations as LLVM instructions."""
    ir = importlib.import_module("llvmlite.ir")
    extending = importlib.import_module("numba.extending")
    types = _numba.types
    i64, flag, index = ir.IntType(64), ir.IntType(1), ir.IntType(32)

    def load(context: Any, builder: Any, signature: Any, arguments: Any, array: int, start: int) -> Any:
        kind = signature.args[array]
        data = context.make_array(kind)(context, builder, arguments[array]).data
        first = builder.gep(data, [arguments[start]])
        lanes = ir.VectorType(ir.IntType(kind.dtype.bitwidth), LANES)
        return builder.load(builder.bitcast(first, lanes.as_pointer()), align=1)

    @extending.intrinsic  # type: ignore[untyped-decorator]
    def differing(typing: Any, left: Any, right: Any, start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            one = load(context, builder, signature, arguments, 0, 2)
            other = load(context, builder, signature, arguments, 1, 2)
            return builder.bitcast(builder.icmp_unsigned("!=", one, other), i64)

        return types.uint64(left, right, types.int64), generate

    @extending.intrinsic  # type: ignore[untyped-decorator]
    def at_least(typing: Any, values: Any, start: Any, bound: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes = load(context, builder, signature, arguments, 0, 1)
            empty = ir.Constant(lanes.type, ir.Undefined)
            first = builder.insert_element(empty, arguments[2], ir.Constant(index, 0))
            everywhere = ir.Constant(ir.VectorType(index, LANES), [0] * LANES)
            bounds = builder.shuffle_vector(first, first, everywhere)
            return builder.bitcast(builder.icmp_unsigned(">=", lanes, bounds), i64)

        return types.uint64(values, types.int64, types.uint8), generate

    @extending.intrinsic  # type: ignore[untyped-decorator]
    def fill_contexts(typing: Any, bits: Any, start: Any, contexts: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes = load(context, builder, signature, arguments, 0, 1)
            width = lanes.type.element.width
            if width == 8:
                found = builder.shl(lanes, ir.Constant(lanes.type, [1] * LANES))
            else:
                moved = builder.lshr(lanes, ir.Constant(lanes.type, [width - 9] * LANES))
                found = builder.trunc(moved, ir.VectorType(ir.IntType(8), LANES))
            data = context.make_array(signature.args[2])(context, builder, arguments[2]).data
            builder.store(found, builder.bitcast(data, found.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.none(bits, types.int64, contexts), generate

    @extending.intrinsic  # type: ignore[untyped-decorator]
    def count_ones(typing: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.ctpop(arguments[0])

        return types.int64(types.uint64), generate

    @extending.intrinsic  # type: ignore[untyped-decorator]
    def lowest_one(typing: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(flag, 0))

        return types.int64(types.uint64), generate

    return differing, at_least, fill_contexts, count_ones, lowest_one


if HAS_NUMBA:
    differing, at_least, fill_contexts, count_ones, lowest_one = _intrinsics()
else:
    differing, at_least, fill_contexts, count_ones, lowest_one = (
        _differing_python,
        _at_least_python,
        _fill_contexts_python,
        _count_ones_python,
        _lowest_one_python,
    )


def compile_inline(function: Function) -> Function:
    """Compile `function` into each of its callers: a call with many arrays would cost more than it does."""
    if not HAS_NUMBA:
        return function
    compiled: Function = _numba.njit(nogil=True, inline="always")(function)
    return compiled


def compile_loop(function: Function) -> Function:
    """Compile `function` where numba is installed, keeping the result on disk where a folder for it is writable."""
    if not HAS_NUMBA:
        return function
    try:
        compiled: Function = _numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder to keep compiled code in
        compiled = _numba.njit(nogil=True)(function)
    return compiled
