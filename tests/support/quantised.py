"""Quantised tensors for tests: packed by hand, value by value, and read again in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from precast.ir.graph.schema import Dequantise

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each half byte of an int32 holds, from the lowest on."""
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def pack(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """[a, 8 b] of 0 to 15 -> [a, b] int32."""
    rows, columns = values.shape
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place, neighbour in enumerate(order):
        packed |= values[:, neighbour::8].long() << 4 * place
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def unpack(packed: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The reverse of `pack`."""
    values = torch.zeros(packed.shape[0], packed.shape[1] * 8, dtype=torch.int64)
    for place, neighbour in enumerate(order):
        values[:, neighbour::8] = (packed.long() % 2**32 >> 4 * place) % 16
    return values


def dequantised(recipe: Dequantise, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the recipe makes of its parts (values, scales, zeros, groups, a global scale, biases, as far as it has
    them)."""
    values, scales = parts[0], parts[1]
    if recipe.format in ("fp8", "int8"):
        assert recipe.block is not None
        zeros = parts[2].float() if recipe.zeros is not None else torch.zeros_like(scales.float())
        return _fp8(values.float(), scales.float(), recipe.block, zeros)
    if recipe.format == "mxfp4":
        return _mxfp4(values, scales)
    if recipe.format in ("nvfp4", "nvfp4_divided"):
        return _nvfp4(values, scales, parts[2], divided=recipe.format == "nvfp4_divided")
    if recipe.format in ("packed4", "packed8"):
        found = list(parts[2:])
        zeros = found.pop(0) if recipe.zeros is not None else None
        groups = found.pop(0) if recipe.groups is not None else None
        made = _packed(values, scales, zeros, groups, recipe.format, recipe.zero_offset)
        if recipe.biases is not None:
            made += found[0].float().repeat_interleave(made.shape[1] // scales.shape[1], 1)
        return made
    if recipe.format == "awq":
        whole, zeros = unpack(values, AWQ_ORDER), unpack(parts[2], AWQ_ORDER)
        groups = torch.arange(len(whole)) // (len(whole) // len(scales))
    else:
        whole, zeros = unpack(values.t(), IN_ORDER).t(), unpack(parts[2], IN_ORDER)
        groups = parts[3] if recipe.groups is not None else torch.arange(len(whole)) // (len(whole) // len(scales))
    rows = [
        (row - zeros[group] - recipe.zero_offset).float() * scales[group].float()
        for row, group in zip(whole, groups.tolist(), strict=True)
    ]
    return torch.stack(rows)


def repacked(words: torch.Tensor, part: str) -> torch.Tensor:
    """AWQ's words in the order of `packed4`."""
    if part == "groups":
        return pack_bits(unpack(words, IN_ORDER).t(), 4).t()
    values = unpack(words, AWQ_ORDER).t()
    return pack_bits(values, 4) if part == "values" else pack_bits(values.t(), 4).t()


def part_of_fp8(x: torch.Tensor, part: str, block: tuple[int, int]) -> torch.Tensor:
    """What a `Quantise` makes of matrices `x`, block by block."""
    if x.dim() > 2:
        return torch.stack([part_of_fp8(each, part, block) for each in x])
    values = torch.zeros(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = max(x[at].float().abs().max().item() / 448, 2.0**-126)
            values[at] = (x[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return values if part == "values" else scales


def _fp8(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], zeros: torch.Tensor | None = None
) -> torch.Tensor:
    zeros = torch.zeros_like(scales) if zeros is None else zeros
    if values.dim() > 2:
        return torch.stack([_fp8(*each, block, zero) for *each, zero in zip(values, scales, zeros, strict=True)])
    made = values.clone()
    for row, column in _places(scales):
        area = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
        made[area] = (values[area] - zeros[row, column]) * scales[row, column]
    return made


def _places(matrix: torch.Tensor) -> Iterator[tuple[int, int]]:
    return ((row, column) for row in range(matrix.shape[0]) for column in range(matrix.shape[1]))


def _mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    flat, exponents = blocks.reshape(-1, blocks.shape[-1]).tolist(), scales.flatten().tolist()
    made = [
        [FP4[half] * 2.0 ** (exponent - 127) for byte in block for half in (byte % 16, byte // 16)]
        for block, exponent in zip(flat, exponents, strict=True)
    ]
    return torch.tensor(made).reshape(*blocks.shape[:-2], -1)


def _nvfp4(values: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor, *, divided: bool) -> torch.Tensor:
    """Sixteen neighbours have one scale of float8, and all of a matrix another of float32.

    The definitions: ModelOpt's `NVFP4QTensor.dequantize`, where both scales are multiplied first (`weight_scale` and
    `weight_scale_2`), and compressed-tensors' `dequantize`, which divides the one by the other (`weight_global_scale`).
    """
    if values.dim() > 2:
        each = zip(values, scales, whole, strict=True)
        return torch.stack([_nvfp4(*one, divided=divided) for one in each])
    scales = scales.float() / whole if divided else scales.float() * whole
    rows = [
        [FP4[half] for byte in row for half in (byte % 16, byte // 16)] for row in values.tolist()
    ]  # the lower half is first
    return torch.tensor(rows) * scales.repeat_interleave(16, 1)


def _packed(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, groups: torch.Tensor | None, format: str,
    offset: int,
) -> torch.Tensor:  # fmt: skip
    """compressed-tensors' `unpack_from_int32` and `dequantize`: four values of eight bits in an int32 or eight of four,
    in order from the lowest on, of inputs in the values and of outputs in the zeros.
    """
    bits = 4 if format == "packed4" else 8
    whole = unpack_bits(values, bits)
    if groups is None:
        groups = torch.arange(whole.shape[1]) // (whole.shape[1] // scales.shape[1])
    given = torch.zeros(scales.shape, dtype=torch.int64)
    if zeros is not None:
        given = unpack_bits(zeros.t(), bits).t()[: len(whole)]
    columns = [
        (column - given[:, group] - offset).float() * scales[:, group].float()
        for column, group in zip(whole.t(), groups.tolist(), strict=True)
    ]
    return torch.stack(columns, 1)


def pack_bits(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[a, b] of 0 to 2 ** bits - 1 -> [a, b * bits / 32, rounded up] int32, filled up with zeros."""
    each = 32 // bits
    values = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % each))
    packed = sum(values[:, place::each] << bits * place for place in range(each))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse of `pack_bits`, with what was filled up."""
    values = [packed.long() % 2**32 >> bits * place & 2**bits - 1 for place in range(32 // bits)]
    return torch.stack(values, -1).flatten(1)


# --- checkpoints -------------------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]
Stored = tuple[Tensors, torch.Tensor]
"""What a checkpoint holds for a weight, and the values that this means, float32."""


def float8(name: str, weight: torch.Tensor, block: tuple[int, int] | None, suffix: str, scale: Sequence[int]) -> Stored:
    """Float8 values and a scale for each block, each row (a block of one), or all (None); `scale`: their shape."""
    rows, columns = weight.shape[-2:]
    block = block or (rows, columns)
    scales = torch.rand(*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1])) + 0.5
    values = (weight * 100).to(torch.float8_e4m3fn)
    return {name: values, name + suffix: scales.reshape(tuple(scale))}, _fp8(values.float(), scales, block)


def fp4_e8m0(name: str, weight: torch.Tensor) -> Stored:
    """DeepSeek-V4's experts: two values of four bits in an int8, and a power of two for 32 of a row."""
    rows, columns = weight.shape
    values = torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8)
    exponents = torch.randint(118, 124, (rows, columns // 32)).to(torch.uint8)
    dense = _mxfp4(values.reshape(rows, columns // 32, 16), exponents)
    scale = name.removesuffix("weight") + "scale"
    return {name: values.view(torch.int8), scale: exponents.view(torch.float8_e8m0fnu)}, dense


def float8_e8m0(name: str, weight: torch.Tensor, block: tuple[int, int]) -> Stored:
    """Float8 values, and for each block a power of two from 2^-8 to 2^-5."""
    rows, columns = weight.shape[-2:]
    exponents = torch.randint(119, 123, (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1])))
    values = (weight * 100).to(torch.float8_e4m3fn)
    scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return {name: values, name + "_scale_inv": scales}, _fp8(values.float(), 2.0 ** (exponents - 127), block)


def mxfp8(name: str, weight: torch.Tensor, suffix: str = "_scale") -> Stored:
    """Float8 values, and for 32 neighbours of a row a power of two, stored as uint8."""
    stored, dense = float8_e8m0(name, weight, (1, 32))
    return {name: stored[name], name + suffix: stored[name + "_scale_inv"].view(torch.uint8)}, dense


def nvfp4(name: str, weight: torch.Tensor, *, divided: bool = False) -> Stored:
    """ModelOpt's tensors, or (`divided`) those of compressed-tensors, whose scale of the whole is the reciprocal."""
    rows, columns = weight.shape
    values = torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8)
    scales = (torch.rand(rows, columns // 16) * 400 + 1).to(torch.float8_e4m3fn)
    whole = torch.rand(1) * 1e-4 + 1e-5
    whole = 1 / whole if divided else whole
    dense = _nvfp4(values, scales, whole, divided=divided)
    if divided:
        return {name + "_packed": values, name + "_scale": scales, name + "_global_scale": whole}, dense
    return {
        name: values, name + "_scale": scales, name + "_scale_2": whole.reshape(()),
        name.removesuffix("weight") + "input_scale": torch.rand(()),
    }, dense  # fmt: skip


def integers(
    name: str, weight: torch.Tensor, bits: int, size: int | None, *, zeros: bool, order: bool, packed: bool,
    scales: torch.dtype = torch.bfloat16,
) -> Stored:  # fmt: skip
    """What compressed-tensors stores of signed integers in groups of `size` inputs; None: of all inputs.

    `order`: groups are of inputs anywhere. `packed`: as `pack-quantized`, of `int-quantized` otherwise.
    """
    (outputs, inputs), half = weight.shape, 1 << bits - 1
    groups = torch.arange(inputs) // (size or inputs)
    groups = groups[torch.randperm(inputs)] if order else groups
    values = torch.randint(-half, half, (outputs, inputs))
    points = torch.randint(-half, half, (outputs, int(groups.max()) + 1))
    factors = (torch.rand(points.shape) * 0.1 / half).to(scales)
    dense = (values - (points[:, groups] if zeros else 0)).float() * factors.float()[:, groups]
    stored = {"_scale": factors}
    if packed:
        stored |= {"_packed": pack_bits(values + half, bits), "_shape": torch.tensor([outputs, inputs])}
    else:
        stored |= {"": values.to(torch.int8)}
    if zeros:
        stored["_zero_point"] = pack_bits((points + half).t(), bits).t() if packed else points.to(torch.int8)
    if order:
        stored["_g_idx"] = groups.int()
    return {name + suffix: tensor.contiguous() for suffix, tensor in stored.items()}, dense


def packed_mxfp4(name: str, weight: torch.Tensor, packed: str = "_packed") -> Stored:
    """compressed-tensors' MXFP4: blocks of 32 columns have an exponent."""
    rows, columns = weight.shape
    values = torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8)
    scales = torch.randint(118, 124, (rows, columns // 32)).to(torch.uint8)
    dense = _mxfp4(values.reshape(rows, columns // 32, 16), scales)
    return {name + packed: values, name + "_scale": scales}, dense


def mlx(name: str, weight: torch.Tensor, bits: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Stored:
    """MLX's `quantize`: unsigned integers in groups of `size` inputs, which `dequantize` multiplies with their group's
    scale, and adds its bias to. The words are uint32."""
    outputs, inputs = weight.shape
    values = torch.randint(0, 1 << bits, (outputs, inputs))
    scales, biases = ((torch.rand(outputs, inputs // size) * 0.1 / (1 << bits)).to(dtype) for _ in range(2))
    biases -= 0.05
    stem = name.removesuffix(".weight")
    words = pack_bits(values, bits).view(torch.uint32)
    dense = values * scales.float().repeat_interleave(size, 1) + biases.float().repeat_interleave(size, 1)
    return {name: words, f"{stem}.scales": scales, f"{stem}.biases": biases}, dense


def one_by_one(name: str, weight: torch.Tensor, quantise: Callable[[str, torch.Tensor], Stored]) -> Stored:
    """Stacked experts as quantisers store them: each of its linear layers for itself, gate and up apart."""
    stem, _, leaf = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    stored: Tensors = {}
    experts = []
    for index, matrix in enumerate(weight):
        halves = zip(parts, matrix.chunk(len(parts)), strict=True)
        found = [quantise(f"{stem}.{index}.{part}.weight", half) for part, half in halves]
        experts.append(torch.cat([dense for _, dense in found]))
        for tensors, _ in found:
            stored |= tensors
    return stored, torch.stack(experts)


def awq(stem: str, weight: torch.Tensor, group_size: int) -> Stored:
    """[outputs, inputs] -> what AutoAWQ's `gemm` version stores."""
    outputs, inputs = weight.shape
    values, zeros, scales = _unsigned(outputs, inputs, group_size)
    dense = ((values - zeros[_groups(inputs, group_size)]).float() * scales.float()[_groups(inputs, group_size)]).t()
    stored = {".qweight": pack(values, AWQ_ORDER), ".qzeros": pack(zeros, AWQ_ORDER), ".scales": scales}
    return {stem + suffix: tensor for suffix, tensor in stored.items()}, dense


def awq_gemv(stem: str, weight: torch.Tensor, group_size: int) -> Stored:
    """[outputs, inputs] -> what AutoAWQ's `gemv` version stores. What fills up zeros and scales, as it does for 128
    inputs in groups of 32, 1,024 in groups of 128 or more, is 0 there; here it would be noticed."""
    outputs, inputs = weight.shape
    values, zeros, scales = _unsigned(outputs, inputs, group_size)
    dense = ((values - zeros[_groups(inputs, group_size)]).float() * scales.float()[_groups(inputs, group_size)]).t()
    together = 8 * max(1, 128 // group_size)
    more = (0, -len(scales) % together)
    filled = [torch.nn.functional.pad(each.t(), more, value=7) for each in (zeros, scales)]
    stored = {
        ".qweight": pack(values.t(), IN_ORDER), ".qzeros": pack(filled[0], IN_ORDER), ".scales": filled[1],
    }  # fmt: skip
    return {stem + suffix: tensor for suffix, tensor in stored.items()}, dense


def gptq(stem: str, weight: torch.Tensor, group_size: int, *, order: bool, offset: int = 1, bits: int = 4) -> Stored:
    """[outputs, inputs] -> what AutoGPTQ stores, whose zeros are one less than what they mean; `order`: act-order."""
    outputs, inputs = weight.shape
    values, zeros, scales = _unsigned(outputs, inputs, group_size, bits)
    groups = _groups(inputs, group_size)
    groups = groups[torch.randperm(inputs)] if order else groups
    dense = ((values - zeros[groups] - offset).float() * scales.float()[groups]).t()
    stored = {
        ".qweight": pack_bits(values.t(), bits).t().contiguous(), ".qzeros": pack_bits(zeros, bits), ".scales": scales,
        ".g_idx": groups.int(),
    }  # fmt: skip
    return {stem + suffix: tensor for suffix, tensor in stored.items()}, dense


def _unsigned(
    outputs: int, inputs: int, group_size: int, bits: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, end = -(-inputs // group_size), 1 << bits
    scales = (torch.rand(groups, outputs) * 1.6 / end).half()
    return torch.randint(0, end, (inputs, outputs)), torch.randint(0, end, (groups, outputs)), scales


def _groups(inputs: int, group_size: int) -> torch.Tensor:
    return torch.arange(inputs) // group_size


def mxfp4(name: str, weight: torch.Tensor) -> Stored:
    """GPT-OSS's experts [experts, columns, rows], stored as rows of blocks of 32 columns."""
    experts, columns, rows = weight.shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16)).to(torch.uint8)
    scales = torch.randint(118, 124, (experts, rows, columns // 32)).to(torch.uint8)
    return {name + "_blocks": blocks, name + "_scales": scales}, _mxfp4(blocks, scales).transpose(1, 2)
