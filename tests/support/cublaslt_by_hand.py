"""cuBLASLt as its documentation describes it, for tests without a GPU: products of float16 in column-major order."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np


class CublasLt:
    """The calls that `precast.kernels.linear.cublaslt` makes, on addresses of this process.

    `algorithms` are the first bytes of those that the heuristic proposes, in its order; `takes` says whether one takes
    a number of rows, `proposed` whether it is proposed for these rows and a workspace. `ran` are the first bytes of
    those that ran, `asked` what was preferred.
    """

    def __init__(
        self,
        *algorithms: int,
        takes: Callable[[int, int], bool] = lambda algorithm, rows: True,
        proposed: Callable[[int, int, int], bool] = lambda algorithm, rows, workspace: True,
    ) -> None:
        self.algorithms, self.takes, self.proposed = algorithms, takes, proposed
        self.ran: list[int] = []
        self.asked: list[dict[int, int]] = []
        self._objects: dict[int, dict[Any, Any]] = {}
        self._numbers = itertools.count(1)

    @property
    def num_matrices(self) -> int:
        """How many descriptions of matrices there are."""
        return sum("rows" in each for each in self._objects.values())

    def cublasLtGetVersion(self) -> int:
        return 130100

    def cublasLtCreate(self, made: Any) -> int:
        return self._make(made)

    def cublasLtMatmulDescCreate(self, made: Any, compute: Any, scale: Any) -> int:
        assert (compute.value, scale.value) == (68, 0), "sums in float32"
        return self._make(made)

    def cublasLtMatmulPreferenceCreate(self, made: Any) -> int:
        return self._make(made)

    def cublasLtMatrixLayoutCreate(self, made: Any, kind: Any, rows: Any, columns: Any, stride: Any) -> int:
        assert kind.value == 2, "float16"
        assert stride.value >= rows.value, "columns overlap"
        return self._make(made, rows=rows.value, columns=columns.value, stride=stride.value)

    def cublasLtMatmulDescSetAttribute(self, of: Any, attribute: Any, value: Any, size: Any) -> int:
        self._objects[of.value][attribute.value] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

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
        return 0 if self.takes(algorithm._obj.data[0], self._objects[d.value]["columns"]) else 15

    def cublasLtMatmul(
        self, handle: Any, product: Any, alpha: Any, a: int, a_matrix: Any, b: int, b_matrix: Any, beta: Any, c: int,
        c_matrix: Any, d: int, d_matrix: Any, algorithm: Any, workspace: int, workspace_bytes: int, stream: int,
    ) -> int:  # fmt: skip
        assert (alpha._obj.value, beta._obj.value) == (1, 0)
        described = self._objects[product.value]
        left, right = (self._matrix(at, matrix) for at, matrix in ((a, a_matrix), (b, b_matrix)))
        left, right = (each.T if described.get(way) else each for each, way in ((left, 3), (right, 4)))
        result = left.astype(np.float32) @ right.astype(np.float32)
        if described.get(7):
            assert described[7] == 4, "plus a bias"
            result += _array(described[8], len(result))[:, None]
        self._matrix(d, d_matrix)[:] = result
        self.ran.append(algorithm._obj.data[0])
        return 0

    def _matrix(self, address: int, matrix: Any) -> Any:
        """A view of memory: rows lie side by side."""
        found = self._objects[matrix.value]
        flat = _array(address, found["stride"] * (found["columns"] - 1) + found["rows"])
        return np.lib.stride_tricks.as_strided(flat, (found["rows"], found["columns"]), (2, 2 * found["stride"]))

    def _make(self, made: Any, **fields: int) -> int:
        made._obj.value = number = next(self._numbers)
        self._objects[number] = dict(fields)
        return 0


def _array(address: int, count: int) -> Any:
    return np.frombuffer((ctypes.c_uint16 * count).from_address(address), np.float16)
