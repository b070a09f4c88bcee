"""Products by cuBLASLt, called through ctypes: addresses and a stream in, no torch.

Attributes and enumerations are those of NVIDIA's `cublasLt.h`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from fractions import Fraction
from functools import cache
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from precast.kernels.linear import scaled_tiles

VERSIONS = (13, 12)
"""Major versions of the library whose structures and attributes these are."""
WITH_SCALES = 120900
"""The version from which on it multiplies float8 with a scale for each row, and for blocks."""
ALIGNED = 16
"""Bytes to which all addresses are multiples in most products; others take what asks for an element's."""
CANDIDATES = 24
"""How many algorithms are measured at most, and how many the heuristic is asked for. It gives 8 or fewer a question."""
NEARBY = (Fraction(1), Fraction(1, 2), Fraction(2), Fraction(3, 4), Fraction(1, 4))
"""What is proposed for so many times the rows is tried too."""
KEPT_SIZES = 64
"""For so many numbers of rows a product keeps what it made."""
BLOCK, BLOCK_ROWS = 128, 4
"""Inputs and outputs that have a scale together in `blocks`, and what the rows of such a product are a multiple of."""

_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TYPES = {"float32": (0, 4), "float16": (2, 2), "bfloat16": (14, 2), "float8_e4m3fn": (28, 1)}
"""By element type what the library calls it, and its bytes. Sums and products are in float32: no TF32."""
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_ADDRESS = 3, 4, 7, 8
_TRANSPOSED, _PLUS_BIAS = 1, 4
_SCALES_ADDRESSES, _SCALES_MODES = (17, 18), (31, 32)
"""Of the weight and of the input, which are A and B."""
_MODES = {"one": (0, 0), "rows": (3, 3), "blocks": (5, 4)}
"""How the scales of weight and input lie. The library takes these pairs, and none of `one` and `rows`."""
_WORKSPACE_BYTES, _REDUCTIONS, _FIRST_ALIGNMENT = 1, 3, 5
_IN_FLOAT32 = 2
"""Sums of split products are kept in float32 and added in one order, not in the result's type or in place."""
_NO_REDUCTION = 0
_TILE, _OPTION = 1, 5
"""Of an algorithm: the tile that it computes at a time, and an option that has no meaning outside of the library."""
_OPTIONS = (4, 5)
"""Of these it takes one or the other, by the tile; with one scale for all it proposes the first. What it proposes with
scales of rows takes up to 3 % longer."""
_MORE_ROWS = (512, 1024, 2048)
"""What is proposed for so many is tried, where nothing is for the rows that there are."""
_ONE, _ZERO = c_float(1), c_float(0)
_STATUSES = {
    1: "not initialized", 3: "allocation failed", 7: "invalid value", 8: "architecture mismatch", 11: "mapping error",
    13: "execution failed", 14: "internal error", 15: "not supported",
}  # fmt: skip
"""The names of `cublasStatus_t`."""


class _Algorithm(ctypes.Structure):
    """`cublasLtMatmulAlgo_t`, which may be stored and used again with the same version of the library."""

    _fields_ = [("data", c_uint64 * 8)]


class _Found(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = [
        ("algorithm", _Algorithm), ("workspace_bytes", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    ]  # fmt: skip


class _Size(NamedTuple):
    """What a product is called with that decides how it runs: rows of the input, elements from one to the next, or
    `by_columns` from one element of a row to the next, and what divides all addresses."""

    rows: int
    stride: int
    by_columns: bool = False
    alignment: int = ALIGNED


class _Plan(NamedTuple):
    """What is kept for a size: the product's description, the matrices of input and result, and the algorithm."""

    product: c_void_p
    input: c_void_p
    out: c_void_p
    algorithm: _Algorithm


class Product:
    """`input` [rows, inputs] times `weight` [outputs, inputs] transposed, plus `bias` [outputs], into [rows, outputs].

    Sums are in float32, and rounded once to `dtype`. Weight, bias and result lie in row-major order; of the input
    either the elements of a row lie side by side, or the rows do. Rows in steps of one class (`class_of`) are computed
    by one algorithm, where it takes their number: the measured one, or else the library's first choice for the class.
    `algorithms` are those that were measured, as text (`text_of`). It belongs to the device that is current when it is
    made.
    """

    def __init__(
        self, *, dtype: str, outputs: int, inputs: int, bias: bool, workspace_bytes: int, algorithms: str = "0",
        factors: str | None = None, out_stride: int | None = None,
    ) -> None:  # fmt: skip
        """`factors`: the element type of input and weight; None: `dtype`, that of bias and result. `out_stride`:
        elements from a row of the result to the next; None: `outputs`, without gaps."""
        self._library, self._handle = _library(), _handle_here()
        self._dtypes = factors or dtype, dtype
        self._type, self._element_bytes = _TYPES[factors or dtype]
        self._out_type, self._out_bytes = _TYPES[dtype]
        self._outputs, self._inputs, self._has_bias = outputs, inputs, bias
        self._out_stride = out_stride or outputs
        self._workspace_bytes = workspace_bytes
        measured_with, *pairs = algorithms.split()
        of_classes = {int(rows): data for rows, _, data in (pair.partition(":") for pair in pairs)}
        self._measured = of_classes if int(measured_with) == version() else {}
        self._products = [self._described(by_columns) for by_columns in (False, True)]
        self._weight = self._matrix(self._type, inputs, outputs, inputs)
        self._plans: dict[_Size, _Plan] = {}
        self._first: dict[_Size, _Algorithm | None] = {}
        self._answer = 0

    def __call__(
        self, out: int, input: int, weight: int, bias: int | None, workspace: int, rows: int, row_stride: int,
        element_stride: int, *, stream: int,
    ) -> None:  # fmt: skip
        """Multiply on a stream, captured or not: addresses, how many rows, and elements from one to the next.

        Raises RuntimeError with the library's status if it refuses, as an input whose rows overlap.
        """
        by_columns = element_stride != 1
        if by_columns and row_stride != 1:
            raise RuntimeError(f"cuBLASLt takes no input whose strides are {row_stride} and {element_stride}: one is 1")
        alignment = self._element_bytes if (out | input | weight | (bias or 0)) % ALIGNED else ALIGNED
        plan = self.plan(_Size(rows, element_stride if by_columns else row_stride, by_columns, alignment))
        if bias is not None:
            _set("MatmulDesc", plan.product, _BIAS_ADDRESS, c_uint64(bias))
        self.run(plan, out, input, weight, workspace, stream)

    def plan(self, size: _Size) -> _Plan:
        """What such a size runs with, made when it is first asked for."""
        if size not in self._plans:
            if len(self._plans) == KEPT_SIZES:
                self._forget()
            self._plans[size] = self._planned(size)
        return self._plans[size]

    def run(self, plan: _Plan, out: int, input: int, weight: int, workspace: int, stream: int) -> None:
        """Multiply by a plan, whose bias is the last that was given."""
        status = self._library.cublasLtMatmul(
            self._handle, plan.product, byref(_ONE), weight, self._weight, input, plan.input, byref(_ZERO), out,
            plan.out, out, plan.out, byref(plan.algorithm), workspace, self._workspace_bytes, stream,
        )  # fmt: skip
        _check(status, "cublasLtMatmul")

    def candidates(self, rows: int) -> list[str]:
        """Up to `CANDIDATES` algorithms that compute so many rows, in hexadecimal, the library's first choice first.

        They are what it proposes for these rows and for some near, with the workspace and without: what it proposes for
        other sizes is often fast, and it says itself whether an algorithm takes these.
        """
        plan = self._unplanned(_Size(rows, self._inputs))
        found = dict.fromkeys(
            bytes(each).hex() for each in self._proposed_nearby(rows) if self._fits(plan._replace(algorithm=each))
        )
        _destroy("MatrixLayout", plan.input, plan.out)
        return list(found)[:CANDIDATES]

    def _proposed_nearby(self, rows: int) -> Iterator[_Algorithm]:
        for part in NEARBY:
            plan = self._unplanned(_Size(max(1, int(part * rows)), self._inputs))
            for num_bytes in (self._workspace_bytes, 0):
                for each in self._heuristic(plan, ALIGNED, CANDIDATES, num_bytes):
                    yield _Algorithm.from_buffer_copy(bytes(each.algorithm))
            _destroy("MatrixLayout", plan.input, plan.out)

    def planned_by(self, rows: int, algorithm: str, bias: int | None = None) -> _Plan:
        """A plan with a given algorithm, for rows without gaps. Raises RuntimeError where it doesn't fit."""
        plan = self._unplanned(_Size(rows, self._inputs))
        if bias is not None:
            _set("MatmulDesc", plan.product, _BIAS_ADDRESS, c_uint64(bias))
        plan = plan._replace(algorithm=_algorithm(algorithm))
        if not self._fits(plan):
            raise RuntimeError(f"cuBLASLt {version()} doesn't take this algorithm for {rows} rows")
        return plan

    def _planned(self, size: _Size) -> _Plan:
        plan = self._unplanned(size)
        for algorithm in self._wanted(size):
            chosen = plan._replace(algorithm=algorithm)
            if self._fits(chosen):
                return chosen
        if found := self._first_choice(plan, size.alignment):
            return plan._replace(algorithm=found)
        raise RuntimeError(
            f"cuBLASLt {version()} has no algorithm for this product: {size.rows} rows of {self._inputs} inputs, "
            f"{self._outputs} outputs, {self._described_in_words()}; the last answer was {_named(self._answer)}"
        )

    def _wanted(self, size: _Size) -> Iterator[_Algorithm]:
        """The class's algorithm: what was measured, and the first choice for the most rows of the class."""
        most = class_of(size.rows)[1]
        if size.alignment == ALIGNED and not size.by_columns and most in self._measured:
            yield _algorithm(self._measured[most])
        of_class = size._replace(rows=most, stride=max(size.stride, most) if size.by_columns else size.stride)
        if of_class not in self._first:
            plan = self._unplanned(of_class)
            self._first[of_class] = self._first_choice(plan, size.alignment)
            _destroy("MatrixLayout", plan.input, plan.out)
        if (first := self._first[of_class]) is not None:
            yield first

    def _first_choice(self, plan: _Plan, alignment: int) -> _Algorithm | None:
        found = self._heuristic(plan, alignment, 1, self._workspace_bytes)
        return _Algorithm.from_buffer_copy(bytes(found[0].algorithm)) if found else None

    def _heuristic(
        self, plan: _Plan, alignment: int, count: int, workspace_bytes: int, reductions: int = _IN_FLOAT32
    ) -> list[_Found]:
        """Up to so many algorithms that fit such a workspace and addresses, in the library's order."""
        found, num_found, preference = (_Found * count)(), c_int(), _made("MatmulPreference")
        _set("MatmulPreference", preference, _WORKSPACE_BYTES, c_uint64(workspace_bytes))
        _set("MatmulPreference", preference, _REDUCTIONS, c_uint32(reductions))
        for matrix in range(4):
            _set("MatmulPreference", preference, _FIRST_ALIGNMENT + matrix, c_uint32(alignment))
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, plan.product, self._weight, plan.input, plan.out, plan.out, preference, c_int(count), found,
            byref(num_found),
        )  # fmt: skip
        _destroy("MatmulPreference", preference)
        self._answer = status
        return [each for each in found[: num_found.value] if each.state == 0] if status == 0 else []

    def _fits(self, plan: _Plan) -> bool:
        """Whether its algorithm computes its matrices in the workspace that there is."""
        found = _Found()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, plan.product, self._weight, plan.input, plan.out, plan.out, byref(plan.algorithm),
            byref(found),
        )  # fmt: skip
        return status == 0 and found.workspace_bytes <= self._workspace_bytes

    def _unplanned(self, size: _Size) -> _Plan:
        """The plan of a size without an algorithm. The library has columns where input and result have rows."""
        shape = (size.rows, self._inputs) if size.by_columns else (self._inputs, size.rows)
        input = self._matrix(self._type, *shape, max(size.stride, shape[0]) if size.rows == 1 else size.stride)
        out = self._matrix(self._out_type, self._outputs, size.rows, self._out_stride)
        return _Plan(self._products[size.by_columns], input, out, _Algorithm())

    def _matrix(self, type: int, rows: int, columns: int, stride: int) -> c_void_p:
        return _made("MatrixLayout", c_int(type), c_uint64(rows), c_uint64(columns), c_int64(stride))

    def _described(self, by_columns: bool) -> c_void_p:
        made = _made("MatmulDesc", c_int(_COMPUTE_FLOAT32), c_int(_FLOAT32))
        _set("MatmulDesc", made, _TRANSA, c_int32(_TRANSPOSED))
        if by_columns:
            _set("MatmulDesc", made, _TRANSB, c_int32(_TRANSPOSED))
        if self._has_bias:
            _set("MatmulDesc", made, _EPILOGUE, c_uint32(_PLUS_BIAS))
            _set("MatmulDesc", made, _BIAS_ADDRESS, c_uint64(ALIGNED))  # any, so that what is checked has one
        return made

    def _described_in_words(self) -> str:
        factors, out = self._dtypes
        return f"{factors} into {out}{', with a bias' if self._has_bias else ''}, {self._workspace_bytes} bytes beside"

    def _forget(self) -> None:
        for plan in self._plans.values():
            _destroy("MatrixLayout", plan.input, plan.out)
        self._plans.clear()


class ScaledProduct(Product):
    """The same of float8_e4m3fn times scales, float32: y = (input * its scales) @ (weight * its scales).T + bias.

    With scales of rows, the tile is that of the number of rows, not of its class; the bits are the same.
    `dtype` is that of bias and result. The library's fast accumulation, which keeps sums in fewer digits, stays off.
    `scales` says what has one together:

    - `one`: all of the input, all of the weight;
    - `rows`: a row of the input, and one of the weight: [rows] and [outputs] scales;
    - `blocks`: `BLOCK` neighbours of a row of the input, whose scales are [inputs / BLOCK, whole] of the first `whole`
      rows, a multiple of `BLOCK_ROWS`, and behind these [inputs / BLOCK, BLOCK_ROWS] of the others, if there are some;
      and `BLOCK` x `BLOCK` of the weight, whose scales are [outputs / BLOCK rounded up, inputs / BLOCK], a multiple of
      4 in a row.

    Inputs and outputs are multiples of 16, all addresses too, and the input's rows have no gaps. Layouts are those of
    NVIDIA's documentation of cuBLAS ("Narrow Precision Data Types Usage").
    """

    def __init__(self, *, dtype: str, outputs: int, inputs: int, bias: bool, workspace_bytes: int, scales: str) -> None:
        self._scales = scales
        super().__init__(
            dtype=dtype, outputs=outputs, inputs=inputs, bias=bias, workspace_bytes=workspace_bytes,
            factors="float8_e4m3fn",
        )  # fmt: skip

    def __call__(  # type: ignore[override]
        self, out: int, input: int, weight: int, bias: int | None, weight_scales: int, input_scales: int,
        workspace: int, last: int | None, spare: int | None, rows: int, *, stream: int,
    ) -> None:  # fmt: skip
        """Multiply on a stream, captured or not. In `blocks`, the rows beyond a multiple of `BLOCK_ROWS` are a product
        of their own: of the input's rows at `last`, in memory for `BLOCK_ROWS`, into `spare`, memory for a result of as
        many, from where it is copied.

        Raises RuntimeError with the library's status if it refuses, and for addresses that are no multiples of 16.
        """
        given = {"result": out, "input": input, "weight": weight, "bias": bias or 0, "weight's scales": weight_scales,
                 "input's scales": input_scales, "input's last rows": last or 0, "spare": spare or 0}  # fmt: skip
        if odd := [f"{name} {address:#x}" for name, address in given.items() if address % self._aligned_to(name)]:
            raise RuntimeError(
                f"cuBLASLt multiplies float8 at multiples of {ALIGNED} bytes, and not at {', '.join(odd)}"
            )
        rest = rows % BLOCK_ROWS if self._scales == "blocks" else 0
        whole = rows - rest
        if whole:
            self._multiply(out, input, weight, bias, (weight_scales, input_scales), workspace, whole, stream)
        if rest:
            assert last is not None, "blocks say where the input's last rows are"
            assert spare is not None, "and have memory beside the result"
            scales = input_scales + 4 * whole * (self._inputs // BLOCK)
            self._multiply(spare, last, weight, bias, (weight_scales, scales), workspace, BLOCK_ROWS, stream)
            row_bytes = self._out_bytes * self._outputs
            _copy(out + whole * row_bytes, spare, rest * row_bytes, stream)

    def _aligned_to(self, name: str) -> int:
        return 4 if self._scales == "one" and name.endswith("scales") else ALIGNED

    def _multiply(
        self, out: int, input: int, weight: int, bias: int | None, scales: tuple[int, int], workspace: int, rows: int,
        stream: int,
    ) -> None:  # fmt: skip
        plan = self.plan(_Size(rows, self._inputs))
        for attribute, address in zip(_SCALES_ADDRESSES, scales, strict=True):
            _set("MatmulDesc", plan.product, attribute, c_uint64(address))
        if bias is not None:
            _set("MatmulDesc", plan.product, _BIAS_ADDRESS, c_uint64(bias))
        self.run(plan, out, input, weight, workspace, stream)

    def _wanted(self, size: _Size) -> Iterator[_Algorithm]:
        """What is proposed, with scales of rows in the best tiles at first (`scaled_tiles`)."""
        for proposed in self._proposed(size):
            if self._scales == "rows":
                yield from self._tiled(proposed, size.rows)
            yield proposed

    def _tiled(self, proposed: _Algorithm, rows: int) -> Iterator[_Algorithm]:
        """The same in other tiles. The library says whether it takes them."""
        tile = scaled_tiles.best_tile(rows, self._outputs)
        if tile is None or version() // 100 not in scaled_tiles.COMPARED:
            return
        for option in _OPTIONS:
            changed = _Algorithm.from_buffer_copy(bytes(proposed))
            if _configured(changed, _TILE, tile.number) and _configured(changed, _OPTION, option):
                yield changed

    def _proposed(self, size: _Size) -> Iterator[_Algorithm]:
        """As of other products; then what splits no sums, and what is proposed for more rows. With scales of rows, the
        library proposes none for up to 256 rows of many inputs (pytorch/ao#4582), and yet has some that take them."""
        yield from super()._wanted(size)
        for rows in (size.rows, *_MORE_ROWS):
            for num_bytes, reductions in ((self._workspace_bytes, _IN_FLOAT32), (0, _NO_REDUCTION)):
                plan = self._unplanned(size._replace(rows=rows))
                found = self._heuristic(plan, size.alignment, CANDIDATES, num_bytes, reductions)
                _destroy("MatrixLayout", plan.input, plan.out)
                yield from (_Algorithm.from_buffer_copy(bytes(each.algorithm)) for each in found)

    def _described(self, by_columns: bool) -> c_void_p:
        made = super()._described(by_columns)
        for address, attribute, mode in zip(_SCALES_ADDRESSES, _SCALES_MODES, _MODES[self._scales], strict=True):
            if mode:
                _set("MatmulDesc", made, attribute, c_int32(mode))
            _set("MatmulDesc", made, address, c_uint64(ALIGNED))  # any, so that what is checked has one
        return made

    def _described_in_words(self) -> str:
        return f"{super()._described_in_words()}, scales of {self._scales}"


def text_of(version: int, by_rows: Mapping[int, str]) -> str:
    """Algorithms as a constant of a launch: the library's version that has them, and by the most rows of a class
    (`class_of`) an algorithm's 64 bytes in hexadecimal."""
    return " ".join([str(version), *(f"{rows}:{data}" for rows, data in sorted(by_rows.items()))])


def class_of(rows: int) -> tuple[int, int]:
    """The numbers of rows that are computed alike: up to 16, to 32, to 64, to 128, to 256, and then of 256 each."""
    most = max(16, 1 << (rows - 1).bit_length()) if rows <= 256 else -(-rows // 256) * 256
    return (1 if most == 16 else most // 2 + 1 if most <= 256 else most - 255), most


def version() -> int:
    """The library's version, such as 130100 for 13.1.0."""
    return int(_library().cublasLtGetVersion())


@cache
def is_installed() -> bool:
    """Whether the library is there."""
    try:
        _library()
    except OSError:
        return False
    return True


@cache
def has_scales() -> bool:
    """Whether a library is there that takes the scales of `ScaledProduct`."""
    return is_installed() and version() >= WITH_SCALES


@cache
def _library() -> Any:
    """The library that the process has loaded, as torch does, or one that is installed. Raises OSError for none."""
    names = [f"libcublasLt.so.{major}" for major in VERSIONS]
    loaded = getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NOW", 0)
    tries = [
        *((name, loaded) for name in names if loaded),
        *((path, ctypes.DEFAULT_MODE) for path in _installed(names)),
    ]
    for name, mode in tries:
        with suppress(OSError):
            found = _opened(name, mode)
            found.cublasLtGetVersion.restype = c_size_t
            # Addresses are passed as integers, of which C would get 32 bits.
            found.cublasLtMatmul.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]
            return found
    raise OSError(f"none of {', '.join(names)} is installed; pip install nvidia-cublas brings it")


def _opened(name: str, mode: int) -> Any:
    """The library, by way of the system's own call at first, during which other threads run: it takes a while, and
    ctypes' keeps them waiting."""
    if mode == ctypes.DEFAULT_MODE:
        with suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).dlopen(os.fsencode(name), os.RTLD_NOW)
    return ctypes.CDLL(name, mode)


def _installed(names: list[str]) -> Iterator[str]:
    """Where it may be: in NVIDIA's packages, or anywhere that the system's loader looks."""
    package = find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        for name in names:
            yield from sorted(glob(str(Path(folder) / "*" / "lib" / name)))
    yield from names


def _algorithm(text: str) -> _Algorithm:
    return _Algorithm.from_buffer_copy(bytes.fromhex(text))


def _configured(algorithm: _Algorithm, attribute: int, value: int) -> bool:
    """Whether the library lets an algorithm have this."""
    given = c_uint32(value)
    status = _library().cublasLtMatmulAlgoConfigSetAttribute(
        byref(algorithm), c_int(attribute), byref(given), c_size_t(ctypes.sizeof(given))
    )
    return bool(status == 0)


@cache
def _handle_of(device: int) -> c_void_p:
    """One for the device, which is current, as long as the process lives."""
    return _made("")


def _handle_here() -> c_void_p:
    driver, device = ctypes.CDLL("libcuda.so.1"), c_int()
    _check(driver.cuCtxGetDevice(byref(device)), "cuCtxGetDevice")
    return _handle_of(device.value)


def _made(kind: str, *args: Any) -> c_void_p:
    """A new object of the library's."""
    made = c_void_p()
    _check(getattr(_library(), f"cublasLt{kind}Create")(byref(made), *args), f"cublasLt{kind}Create")
    return made


def _set(kind: str, of: c_void_p, attribute: int, value: Any) -> None:
    name = f"cublasLt{kind}SetAttribute"
    status = getattr(_library(), name)(of, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value)))
    _check(status, f"{name} of attribute {attribute}, value {value.value},")


def _destroy(kind: str, *objects: c_void_p) -> None:
    for each in objects:
        getattr(_library(), f"cublasLt{kind}Destroy")(each)


def _copy(to: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy memory of the device, on a stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemcpyDtoDAsync_v2(c_uint64(to), c_uint64(source), c_size_t(num_bytes), c_void_p(stream))
    if status:
        raise RuntimeError(f"cuMemcpyDtoDAsync fails with the driver's status {status}")


def _check(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name} fails with {_named(status)}")


def _named(status: int) -> str:
    return f"status {status} ({_STATUSES.get(status, 'success' if status == 0 else 'of another kind')})"
