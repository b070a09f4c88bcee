"""cuBLASLt as its documentation describes it, for tests without a GPU: products of float16 in column-major order, and
of float8_e4m3fn with scales, into float16."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch

_BYTES = {2: 2, 28: 1}
"""Of float16 and float8_e4m3fn, by their numbers."""


class CublasLt:
    """The calls that `precast.kernels.linear.cublaslt` makes, on addresses of this process.

    `algorithms` are the first bytes of those that the heuristic proposes, in its order; `takes` says whether one takes
    a number of rows, `proposed` whether it is proposed for these rows and a workspace. `takes_options` are the options
    that are taken with a tile. `ran` are the first bytes of those that ran, `asked` what was preferred.
    """

    def __init__(
        self,
        *algorithms: int,
        takes: Callable[[int, int], bool] = lambda algorithm, rows: True,
        proposed: Callable[[int, int, int], bool] = lambda algorithm, rows, workspace: True,
        takes_options: Container[int] = (4,),
        version: int = 130100,
    ) -> None:
        self.algorithms, self.takes, self.proposed = algorithms, takes, proposed
        self.takes_options, self.version = takes_options, version
        self.ran: list[int] = []
        self.asked: list[dict[int, int]] = []
        self._objects: dict[int, dict[Any, Any]] = {}
        self._numbers = itertools.count(1)

    @property
    def num_matrices(self) -> int:
        """How many descriptions of matrices there are."""
        return sum("rows" in each for each in self._objects.values())

    def cublasLtGetVersion(self) -> int:
        return self.version

    def cublasLtCreate(self, made: Any) -> int:
        return self._make(made)

    def cublasLtMatmulDescCreate(self, made: Any, compute: Any, scale: Any) -> int:
        assert (compute.value, scale.value) == (68, 0), "sums in float32"
        return self._make(made)

    def cublasLtMatmulPreferenceCreate(self, made: Any) -> int:
        return self._make(made)

    def cublasLtMatrixLayoutCreate(self, made: Any, kind: Any, rows: Any, columns: Any, stride: Any) -> int:
        assert kind.value in _BYTES, "float16 or float8_e4m3fn"
        assert stride.value >= rows.value, "columns overlap"
        return self._make(made, kind=kind.value, rows=rows.value, columns=columns.value, stride=stride.value)

    def cublasLtMatmulDescSetAttribute(self, of: Any, attribute: Any, value: Any, size: Any) -> int:
        assert size.value == _SIZES[attribute.value], "as many bytes as the attribute has"
        return self.cublasLtMatmulPreferenceSetAttribute(of, attribute, value, size)

    def cublasLtMatmulPreferenceSetAttribute(self, of: Any, attribute: Any, value: Any, size: Any) -> int:
        self._objects[of.value][attribute.value] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, of: Any) -> int:
        self.asked.append(self._objects.pop(of.value))
        return 0

    def cublasLtMatrixLayoutDestroy(self, of: Any) -> int:
        del self._objects[of.value]
        return 0

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, product: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, count: Any, found: Any,
        num_found: Any,
    ) -> int:  # fmt: skip
        rows, workspace = self._objects[d.value]["columns"], self._objects[preference.value][1]
        fitting = [each for each in self.algorithms if self.takes(each, rows) and self.proposed(each, rows, workspace)]
        for place, each in zip(found, fitting, strict=False):
            place.algorithm.data[0] = each
        num_found._obj.value = min(count.value, len(fitting))
        return 0

    def cublasLtMatmulAlgoCheck(
        self, handle: Any, product: Any, a: Any, b: Any, c: Any, d: Any, algorithm: Any, found: Any
    ) -> int:
        found._obj.workspace_bytes = 0
        name, tile, option = (algorithm._obj.data[place] for place in (0, 1, 5))
        is_taken = self.takes(name, self._objects[d.value]["columns"])
        return 0 if is_taken and (not tile or option in self.takes_options) else 15

    def cublasLtMatmulAlgoConfigSetAttribute(self, algorithm: Any, attribute: Any, value: Any, size: Any) -> int:
        """Changes are kept in the words of the attributes' numbers, 1 and 5."""
        assert attribute.value in (1, 5), "a tile or an option"
        assert size.value == 4, "as many bytes as these have"
        algorithm._obj.data[attribute.value] = value._obj.value
        return 0

    def cublasLtMatmul(
        self, handle: Any, product: Any, alpha: Any, a: int, a_matrix: Any, b: int, b_matrix: Any, beta: Any, c: int,
        c_matrix: Any, d: int, d_matrix: Any, algorithm: Any, workspace: int, workspace_bytes: int, stream: int,
    ) -> int:  # fmt: skip
        assert (alpha._obj.value, beta._obj.value) == (1, 0)
        described = self._objects[product.value]
        left, right = (self._matrix(at, matrix) for at, matrix in ((a, a_matrix), (b, b_matrix)))
        left, right = (each.T if described.get(way) else each for each, way in ((left, 3), (right, 4)))
        left, right = (each.astype(np.float32) for each in (left, right))
        if self._objects[a_matrix.value]["kind"] == 28:
            modes = described.get(31, 0), described.get(32, 0)
            assert modes in ((0, 0), (3, 3), (5, 4)), "scales that go together"
            left = left * _scales(described[17], modes[0], *left.shape)
            right = right * _scales(described[18], modes[1], *right.shape[::-1]).T
        result = left @ right
        if described.get(7):
            assert described[7] == 4, "plus a bias"
            result += _array(described[8], len(result))[:, None]
        self._matrix(d, d_matrix)[:] = result
        self.ran.append(algorithm._obj.data[0])
        return 0

    def _matrix(self, address: int, matrix: Any) -> Any:
        """A view of memory: rows lie side by side. What is float8 is read, as float32."""
        found = self._objects[matrix.value]
        count = found["stride"] * (found["columns"] - 1) + found["rows"]
        flat = _array(address, count) if found["kind"] == 2 else _float8(address, count)
        step = flat.itemsize
        shape, strides = (found["rows"], found["columns"]), (step, step * found["stride"])
        return np.lib.stride_tricks.as_strided(flat, shape, strides)

    def _make(self, made: Any, **fields: int) -> int:
        made._obj.value = number = next(self._numbers)
        self._objects[number] = dict(fields)
        return 0


_SIZES = {3: 4, 4: 4, 7: 4, 8: 8, 17: 8, 18: 8, 31: 4, 32: 4}
"""Bytes of a product's attributes."""


def _scales(address: int, mode: int, outer: int, inner: int) -> Any:
    """Those of a matrix [outer, inner], of which `inner` is summed over, for each element: for all (0), for each row
    (3), for 128 of a row (4) and for 128 x 128 (5). In (4) those of one block of 128 lie together, of all rows; in (5)
    those of a row of blocks, as many as are a multiple of 4."""
    blocks, rows = -(-inner // 128), -(-outer // 128)
    if mode == 0:
        return _float32(address, 1)
    if mode == 3:
        return _float32(address, outer)[:, None]
    assert address % 16 == 0, "scales begin at a multiple of 16 bytes"
    if mode == 4:
        assert outer % 4 == 0, "rows are a multiple of 4"
        found = _float32(address, blocks * outer).reshape(blocks, outer).T
    else:
        stride = -(-blocks // 4) * 4
        found = _float32(address, rows * stride).reshape(rows, stride)[:, :blocks].repeat(128, 0)[:outer]
    return found.repeat(128, 1)[:, :inner]


def _float32(address: int, count: int) -> Any:
    return np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)


def _float8(address: int, count: int) -> Any:
    stored = np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8).copy()
    return torch.from_numpy(stored).view(torch.float8_e4m3fn).float().numpy()


def _array(address: int, count: int) -> Any:
    return np.frombuffer((ctypes.c_uint16 * count).from_address(address), np.float16)
