"""Linear layers with weights in few bits, in Triton: each value is made in registers where it is multiplied.

1. `round_kernel` rounds the input to few bits, for a layer that wants that, and lays it side by side;
2. `product_kernel` multiplies tiles;
3. `sum_kernel` adds up the parts of a sum that several programs had, in their order.

A weight is read as the words that it is stored in: an int32 of four or eight values, or a value of eight bits. Value
`j` of all words of a tile is one operand, with every so-many-th input: so no value moves between threads. Products are
summed in float32. Where a scale belongs decides how often it is multiplied by: with each value, rounded to the input's
dtype afterwards, as the definition does; or, in groups as long as a tile, with their sum, and rounded never.
"""

# To pyright a kernel that is called by another returns nothing.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from precast.kernels.rounded.few_bits import divided_groups, in_few_bits, scales_of_groups
from precast.kernels.triton_chain import wait_for_previous

_INPUT_GROUP = tl.constexpr(128)
"""Inputs that have a scale together where the input has scales in `steps`: `INPUT_GROUP` of the launches."""
_BLOCK_ROWS = tl.constexpr(4)
"""What the rows of cuBLASLt's products in blocks are a multiple of: `BLOCK_ROWS` of `linear/cublaslt.py`."""


@triton.jit
def _place_by_groups(row, group, num_rows, count):  # type: ignore[no-untyped-def]
    """Where `ScaledProduct` wants the scale of a group of `count` of a row: [groups, rows] of a multiple of
    `_BLOCK_ROWS`, and then [groups, _BLOCK_ROWS] of the others."""
    whole = num_rows // _BLOCK_ROWS * _BLOCK_ROWS
    return tl.where(row < whole, group * whole + row, whole * count + group * _BLOCK_ROWS + (row - whole))


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    spread_ptr, scale_ptr, program, num_programs, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One scale for each of OUTPUTS, by all programs together."""
    of_all = tl.load(scale_ptr)
    for start in range(program * BLOCK, OUTPUTS, num_programs * BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(spread_ptr + n, tl.broadcast_to(of_all, n.shape), mask=n < OUTPUTS)


@triton.jit
def round_kernel(  # type: ignore[no-untyped-def]
    rounded_ptr,
    scales_ptr,
    x_ptr,
    scale_ptr,
    spread_ptr,
    weight_scale_ptr,
    inner,
    stride_o,
    stride_i,
    stride_k,
    inputs,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row, or a part of it of BLOCK inputs, divided by its scale and rounded, into rows without gaps.

    KIND: `fp8`, `int8`, or `none` for a copy. A scale for each GROUP inputs, any number or one of POWERS_OF_TWO, goes
    to `scales_ptr` [rows, groups], or BY_GROUPS, as `_place_by_groups` says. Without GROUP it is the one that
    `scale_ptr` has, which each row gets in `scales_ptr`, if that is given. `spread_ptr` [OUTPUTS] gets the one scale of
    the weight for each output.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row // inner * stride_o + row % inner * stride_i + k.to(tl.int64) * stride_k
    wait_for_previous(PDL)
    x = tl.load(x_ptr + place, mask=k < inputs, other=0.0)
    if KIND != "none":
        x = x.to(tl.float32)
        if GROUP:
            groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
            scale = scales_of_groups(groups, KIND, POWERS_OF_TWO)
            group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            count = (inputs + GROUP - 1) // GROUP
            if BY_GROUPS:
                place = _place_by_groups(row, group, tl.num_programs(0), count)
                tl.store(scales_ptr + place, scale, mask=group < count)
            else:
                tl.store(scales_ptr + row * count + group, scale, mask=group < count)
            x = tl.reshape(divided_groups(groups, scale), (BLOCK,))
        else:
            scale = tl.load(scale_ptr).to(tl.float32)
            if scales_ptr is not None:
                tl.store(scales_ptr + row, scale, mask=tl.program_id(1) == 0)
            x = tl.div_rn(x, tl.full((BLOCK,), 1.0, tl.float32) * tl.where(scale == 0, 1.0, scale))
        x = in_few_bits(x, KIND, rounded_ptr.dtype.element_ty)
    tl.store(rounded_ptr + row * inputs + k, x, mask=k < inputs)
    if OUTPUTS:
        _spread(spread_ptr, weight_scale_ptr, tl.program_id(0), tl.num_programs(0), OUTPUTS, BLOCK)


@triton.jit
def lay_input_kernel(  # type: ignore[no-untyped-def]
    laid_ptr,
    last_ptr,
    spread_ptr,
    scales_ptr,
    words_ptr,
    weight_scale_ptr,
    num_rows,
    GROUPS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`scales_ptr` [rows, GROUPS] as `round_kernel` lays them BY_GROUPS, and the last rows of `words_ptr`, int32, whose
    scales lie apart, to `last_ptr`; or, without GROUPS, what that kernel spreads."""
    wait_for_previous(PDL)
    if GROUPS:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row = i // GROUPS
        scales = tl.load(scales_ptr + i, mask=row < num_rows)
        tl.store(laid_ptr + _place_by_groups(row, i % GROUPS, num_rows, GROUPS), scales, mask=row < num_rows)
        WORDS: tl.constexpr = GROUPS * (_INPUT_GROUP // 4)
        count = num_rows % _BLOCK_ROWS * WORDS
        before = (num_rows - num_rows % _BLOCK_ROWS + tl.zeros((BLOCK,), tl.int64)) * WORDS
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            n = start + tl.arange(0, BLOCK)
            tl.store(last_ptr + n, tl.load(words_ptr + before + n, mask=n < count), mask=n < count)
    if OUTPUTS:
        _spread(spread_ptr, weight_scale_ptr, tl.program_id(0), tl.num_programs(0), OUTPUTS, BLOCK)


@triton.jit
def _halves(pair, j: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lower half of int32 words, or for `j` the upper one, as a number of 16 bits."""
    half = (pair >> 16).to(tl.int16) if j else pair.to(tl.int16)
    return half.to(dtype, bitcast=True)


@triton.jit
def _constant(value: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number of a dtype, for what is computed in half precision."""
    return tl.full((1, 1), value, tl.float32).to(dtype)


@triton.jit
def value_of(words, j: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Value `j` of each word, less OFFSET: exact in a half-precision dtype.

    Numbers of few bits are put where a number of 16 bits has them, for two values of a word at a time. What float8 and
    fp4 lack of an exponent is multiplied by then; NaN, which float8 weights have not, comes out as 480.
    """
    IS_HALF: tl.constexpr = dtype == tl.float16
    if FORMAT == "fp8":
        if words.dtype == tl.int32:
            MORE: tl.constexpr = 7 if IS_HALF else 4  # pyright: ignore[reportAssignmentType]
            pair = (words >> (8 * (j % 2))) & 0x00FF00FF
            pair = ((pair & 0x00800080) << 8) | ((pair & 0x007F007F) << MORE)
            value = _halves(pair, j // 2, dtype) * _constant(256.0 if IS_HALF else 2.0**120, dtype)
        else:
            value = words.to(dtype)
    elif FORMAT == "int8" or FORMAT == "packed8":
        # the byte as the last bits of a float32 from 2^23 on
        IS_SIGNED: tl.constexpr = FORMAT == "int8"
        byte = (words.to(tl.int32) >> (8 * j)) & 0xFF
        number = ((byte ^ 0x80 if IS_SIGNED else byte) | 0x4B000000).to(tl.float32, bitcast=True)
        value = (number - (8388608.0 + (128 if IS_SIGNED else OFFSET))).to(dtype)
    elif FORMAT == "packed4":
        # as the last bits of a number from 1024 on in float16, from 128 on in bfloat16
        pair = ((words >> (4 * (j % 4))) & 0x000F000F) | (0x64006400 if IS_HALF else 0x43004300)
        value = _halves(pair, j // 4, dtype) - _constant(OFFSET + (1024 if IS_HALF else 128), dtype)
    else:
        MANTISSA: tl.constexpr = 9 if IS_HALF else 6  # pyright: ignore[reportAssignmentType]
        pair = words >> (4 * (j % 4))
        pair = ((pair & 0x00080008) << 12) | ((pair & 0x00070007) << MANTISSA)
        value = _halves(pair, j // 4, dtype) * _constant(16384.0 if IS_HALF else 2.0**126, dtype)
    return value


@triton.jit
def scale_of(stored, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales as numbers, float32; those of mxfp4 are stored as exponents."""
    return (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True) if FORMAT == "mxfp4" else stored.to(tl.float32)


@triton.jit
def _input(x_ptr, row, i, has, num_words, j: tl.constexpr, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inputs `VALUES * i + j` of rows, read four at a time if words have several values."""
    if VALUES == 1:
        x = tl.load(x_ptr + row[:, None] * num_words + i[None, :], mask=has, other=0.0)
    else:
        EACH: tl.constexpr = VALUES // 4
        four = x_ptr.to(tl.pointer_type(tl.int64)) + row[:, None] * num_words * EACH + i[None, :] * EACH + j // 4
        x = (tl.load(four, mask=has, other=0) >> (16 * (j % 4))).to(tl.int16)
        x = x.to(x_ptr.dtype.element_ty, bitcast=True)
    return x


@triton.jit
def points_of(zeros_ptr, n, g, has, stride_n, stride_g, FORMAT: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What stands for 0 in outputs `n` and groups `g`, as stored, float32."""
    if FORMAT == "int8":
        points = tl.load(zeros_ptr + n // ROWS * stride_n + g * stride_g, mask=has, other=0)
    else:
        BITS: tl.constexpr = 32 // VALUES
        MOST: tl.constexpr = 15 if VALUES == 8 else 255  # pyright: ignore[reportAssignmentType]
        words = tl.load(zeros_ptr + n // VALUES * stride_n + g * stride_g, mask=has, other=0)
        points = (words >> (n % VALUES * BITS)) & MOST
    return points.to(tl.float32)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    y_ptr,
    parts_ptr,
    total,
    row,
    n,
    num_rows,
    outputs,
    global_ptr,
    row_scales_ptr,
    bias_ptr,
    GLOBAL: tl.constexpr,
    INPUT_SCALES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Multiplies by the scales of rows and of all, and adds the bias; or stores the part of a sum."""
    is_row, is_output = row < num_rows, n < outputs
    if INPUT_SCALES == "row" or INPUT_SCALES == "one":
        of = row_scales_ptr + (row if INPUT_SCALES == "row" else row * 0)
        total *= tl.load(of, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if GLOBAL != "none":
        of_all = global_ptr + (n if GLOBAL == "rows" or GLOBAL == "rows_divided" else n * 0)
        whole = tl.load(of_all, mask=is_output, other=1.0).to(tl.float32)[None, :]
        total = total / whole if GLOBAL == "one_divided" or GLOBAL == "rows_divided" else total * whole
    place = row.to(tl.int64)[:, None] * outputs + n[None, :]
    has = is_row[:, None] & is_output[None, :]
    if SPLIT > 1:
        tl.store(parts_ptr + tl.program_id(2).to(tl.int64) * num_rows * outputs + place, total, mask=has)
    else:
        if bias_ptr is not None:
            total += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=has)


@triton.jit
def _have_one_group_each(groups_ptr, first, end, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether each COUNT inputs from `first` to `end` are of one group."""
    others = tl.zeros((8, COUNT), tl.int32)
    for start in range(first, end, 8 * COUNT):
        step = start + tl.arange(0, 8)[:, None] * COUNT
        k = step + tl.arange(0, COUNT)[None, :]
        of_step = tl.load(groups_ptr + step, mask=step < end, other=0)
        others |= (tl.load(groups_ptr + k, mask=k < end, other=0) != of_step).to(tl.int32) & (k < end).to(tl.int32)
    return tl.max(tl.max(others, 1), 0) == 0


@triton.jit
def _sum_of_tile(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    groups_ptr,
    row_scales_ptr,
    row,
    n,
    first,
    end,
    num_rows,
    outputs,
    num_words,
    num_groups,
    word_stride_n,
    word_stride_k,
    scale_stride_n,
    scale_stride_g,
    zero_stride_n,
    zero_stride_g,
    FORMAT: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    INPUT_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of rows `row` and outputs `n`, of words `first` to `end`, summed in float32."""
    is_row, is_output = row < num_rows, n < outputs
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    IS_EXACT: tl.constexpr = dtype == tl.float8e4nv or dtype == tl.int8
    NOTHING: tl.constexpr = 0.0 if words_ptr.dtype.element_ty == tl.float8e4nv else 0  # pyright: ignore[reportAssignmentType]
    of_row = row.to(tl.int64)
    word_ptrs = words_ptr + n.to(tl.int64)[:, None] * word_stride_n
    scale_ptrs = scales_ptr + (n // ROWS).to(tl.int64) * scale_stride_n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SCALES == "end":
        scale = scale_of(tl.load(scale_ptrs, mask=is_output, other=0.0), FORMAT)

    # Where each value finds its scale, loads ahead of all these would take the shared memory of other programs.
    STAGES: tl.constexpr = 1 if SCALES == "values" and groups_ptr is not None else None  # pyright: ignore[reportAssignmentType]
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK_K)
        has_word = is_output[:, None] & (i < num_words)[None, :]
        has_input = is_row[:, None] & (i < num_words)[None, :]
        words = tl.load(word_ptrs + i.to(tl.int64)[None, :] * word_stride_k, mask=has_word, other=NOTHING)
        g = 0
        if SCALES == "steps":
            g = start * VALUES // GROUP if groups_ptr is None else tl.load(groups_ptr + start * VALUES)
            has_scale = is_output & (g >= 0) & (g < num_groups)
            scale = scale_of(tl.load(scale_ptrs + g * scale_stride_g, mask=has_scale, other=0.0), FORMAT)
        if SCALES == "values" and groups_ptr is None:
            of = (i * VALUES // GROUP)[None, :]
            stored = tl.load(scale_ptrs[:, None] + of * scale_stride_g, mask=has_word, other=0.0)
            scales = scale_of(stored, FORMAT)
            if zeros_ptr is not None:
                zeros = points_of(
                    zeros_ptr, n[:, None], of, has_word, zero_stride_n, zero_stride_g, FORMAT, VALUES, ROWS
                )
        if SCALES != "values" and zeros_ptr is not None:
            has_points = has_scale if SCALES == "steps" else is_output
            points = points_of(zeros_ptr, n, g, has_points, zero_stride_n, zero_stride_g, FORMAT, VALUES, ROWS)
            inputs = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        if INPUT_SCALES == "steps":
            # of several steps, where these are as short as a group of the weight
            count = tl.cdiv(num_words * VALUES, _INPUT_GROUP)
            group_of_input = start * VALUES // _INPUT_GROUP
            of_input = tl.load(row_scales_ptr + of_row * count + group_of_input, mask=is_row, other=0.0)
        if IS_EXACT:
            x = _input(x_ptr, of_row, i, has_input, num_words, 0, 1)
            if dtype == tl.int8:
                part = tl.dot(x, tl.trans(words), out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(x, tl.trans(words), out_dtype=tl.float32)
        else:
            IN_STEPS: tl.constexpr = SCALES == "steps" or INPUT_SCALES == "steps"
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) if IN_STEPS else total
            for j in tl.static_range(VALUES):
                x = _input(x_ptr, of_row, i, has_input, num_words, j, VALUES)
                value = value_of(words, j, FORMAT, OFFSET, dtype)
                if SCALES == "values":
                    if groups_ptr is not None:
                        group = tl.load(groups_ptr + i * VALUES + j, mask=i < num_words, other=-1)[None, :]
                        has_group = has_word & (group >= 0) & (group < num_groups)
                        stored = tl.load(scale_ptrs[:, None] + group * scale_stride_g, mask=has_group, other=0.0)
                        scales = scale_of(stored, FORMAT)
                        if zeros_ptr is not None:
                            zeros = points_of(
                                zeros_ptr, n[:, None], group, has_group, zero_stride_n, zero_stride_g, FORMAT, VALUES,
                                ROWS,
                            )  # fmt: skip
                    if FORMAT == "fp4" or FORMAT == "mxfp4":
                        # no digits are lost; a power of two that float16 has not is cut to its largest
                        value = value * tl.minimum(scales, 32768.0 if dtype == tl.float16 else 3e38).to(dtype)
                    else:
                        wide = value.to(tl.float32)
                        if zeros_ptr is not None:
                            wide -= zeros
                        value = (wide * scales).to(dtype)
                elif zeros_ptr is not None:
                    inputs += x.to(tl.float32)
                part = tl.dot(x, tl.trans(value), part)
        if SCALES != "values" and zeros_ptr is not None:
            # what stands for 0 is the same for all inputs of a group: it is multiplied with their sum
            part -= tl.sum(inputs, 1)[:, None] * points[None, :]
        if SCALES == "steps":
            part *= scale[None, :]
        if INPUT_SCALES == "steps":
            part *= of_input[:, None]
        if IS_EXACT or SCALES == "steps" or INPUT_SCALES == "steps":
            total += part
        else:
            total = part

    if SCALES == "end":
        total *= scale[None, :]
    return total


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    parts_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    groups_ptr,
    global_ptr,
    row_scales_ptr,
    bias_ptr,
    num_rows,
    outputs,
    num_words,
    num_groups,
    word_stride_n,
    word_stride_k,
    scale_stride_n,
    scale_stride_g,
    zero_stride_n,
    zero_stride_g,
    FORMAT: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    GLOBAL: tl.constexpr,
    INPUT_SCALES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of y = x w^T, or of the sum's part `program_id(2)` of SPLIT; BLOCK_K words of a row at a time.

    A word has VALUES inputs. GROUP inputs and ROWS outputs have a scale; SCALES says where it is multiplied by: with
    each value (`values`), with the sum of BLOCK_K words (`steps`), or at the end, if a row has one group (`end`).
    OFFSET and `zeros_ptr` are subtracted from values. `groups_ptr` has the group of each input (`listed`): if all that
    a program sums at a time are of one group, there is a scale for each sum, else for each value. INPUT_SCALES: the
    input has none, one of each row, of all (`one`), or of each 128 inputs, of which BLOCK_K words have all or a part
    (`steps`).
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(num_words, BLOCK_K), SPLIT)
    first = tl.program_id(2) * steps * BLOCK_K
    end = tl.minimum(first + steps * BLOCK_K, num_words)
    wait_for_previous(PDL)
    if SCALES != "listed":
        total = _sum_of_tile(
            x_ptr, words_ptr, scales_ptr, zeros_ptr, groups_ptr, row_scales_ptr, row, n, first, end, num_rows, outputs,
            num_words, num_groups, word_stride_n, word_stride_k, scale_stride_n, scale_stride_g, zero_stride_n,
            zero_stride_g, FORMAT, VALUES, GROUP, ROWS, OFFSET, SCALES, INPUT_SCALES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif _have_one_group_each(groups_ptr, first * VALUES, end * VALUES, BLOCK_K * VALUES):
        total = _sum_of_tile(
            x_ptr, words_ptr, scales_ptr, zeros_ptr, groups_ptr, row_scales_ptr, row, n, first, end, num_rows, outputs,
            num_words, num_groups, word_stride_n, word_stride_k, scale_stride_n, scale_stride_g, zero_stride_n,
            zero_stride_g, FORMAT, VALUES, GROUP, ROWS, OFFSET, "steps", INPUT_SCALES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        total = _sum_of_tile(
            x_ptr, words_ptr, scales_ptr, zeros_ptr, groups_ptr, row_scales_ptr, row, n, first, end, num_rows, outputs,
            num_words, num_groups, word_stride_n, word_stride_k, scale_stride_n, scale_stride_g, zero_stride_n,
            zero_stride_g, FORMAT, VALUES, GROUP, ROWS, OFFSET, "values", INPUT_SCALES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    _finish(
        y_ptr, parts_ptr, total, row, n, num_rows, outputs, global_ptr, row_scales_ptr, bias_ptr, GLOBAL, INPUT_SCALES,
        SPLIT,
    )  # fmt: skip


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    parts_ptr,
    bias_ptr,
    num_rows,
    outputs,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = the sum of SPLIT parts, in their order, + bias: BLOCK elements of a row a program."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * outputs + n
    is_output = n < outputs
    wait_for_previous(PDL)
    total = tl.load(parts_ptr + place, mask=is_output, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts_ptr + part * num_rows * outputs + place, mask=is_output, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=is_output)
