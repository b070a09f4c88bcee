"""Checkpoints in the folders that publishers have, of random models whose weights are quantised by hand."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import families
import pytest
import quantised
import torch
from quantised import Stored, Tensors
from safetensors.torch import load_file, save_file

import precast
from precast.builder.source.shrink import random_model
from precast.ir.artifact import Bundle

Quantise = Callable[[str, torch.Tensor], Stored]

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "moe_intermediate_size": 64}
"""Multiples of what formats store together, for each of four ranks."""


class Case(NamedTuple):
    """A checkpoint: its model, the file that says how it is quantised, what it says, and what weights become."""

    family: str
    entries: dict[str, Any]
    quantise: Quantise
    file: str = "config.json"
    changes: dict[str, Any] = SIZES
    dtype: str = "bfloat16"
    """What the config says: that of scales, too."""
    which: str = r".*\.layers\..*_proj\.weight"

    @property
    def worlds(self) -> list[tuple[int, int]]:
        """Ranks, and parts of the experts, beside one rank alone; what lies in a block is never parted."""
        if not self.changes:
            return [(2, 1)]
        if self.family == "gpt_oss":
            return [(2, 1), (2, 2), (4, 2), (4, 4)]
        return [(2, 1), (4, 1)] if self.family == "llama" else [(2, 1), (2, 2), (4, 1), (4, 2)]


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def compressed_fp8(strategy: str, **weights: Any) -> dict[str, Any]:
    return compressed("float-quantized", num_bits=8, type="float", strategy=strategy, symmetric=True, **weights)


def integers(bits: int, strategy: str, *, symmetric: bool, actorder: str | None = None) -> dict[str, Any]:
    size = {"group_size": 16} if strategy == "group" else {}
    order = {} if actorder is None else {"actorder": actorder}
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **size, **order}


def float8(suffix: str, block: tuple[int, int] | None, shape: Callable[[int, int], tuple[int, ...]]) -> Quantise:
    return lambda name, weight: quantised.float8(name, weight, block, suffix, shape(*weight.shape))


def stored_integers(bits: int, size: int | None, *, zeros: bool, order: bool = False, packed: bool = True) -> Quantise:
    return lambda name, weight: quantised.integers(name, weight, bits, size, zeros=zeros, order=order, packed=packed)


def in_groups(quantise: Callable[..., Stored], **options: Any) -> Quantise:
    return lambda name, weight: quantise(name.removesuffix(".weight"), weight, 16, **options)


def blocks(rows: int, columns: int) -> tuple[int, ...]:
    return -(-rows // 32), -(-columns // 32)


def finer(rows: int, columns: int) -> tuple[int, ...]:
    return -(-rows // 16), -(-columns // 16)


def rows(rows: int, columns: int) -> tuple[int, ...]:
    return rows, 1


class Checkpoints(NamedTuple):
    """Folders of one model: its values in float32, and the quantised ones."""

    plain: Path
    stored: Path


def write(case: Case, folder: Path) -> Checkpoints:
    """A random model, of which each weight that `case.which` describes is quantised."""
    plain, stored = folder / "plain", folder / "stored"
    config = families.make_config(case.family)
    for name, value in case.changes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(1)
    random_model(config).save_pretrained(plain)
    dense = load_file(plain / "model.safetensors")
    files: Tensors = {}
    for name, tensor in dense.items():
        if re.fullmatch(case.which, name):
            made, dense[name] = case.quantise(name, tensor)
            files |= made
        else:
            files[name] = tensor
    save_file({name: each.contiguous() for name, each in dense.items()}, plain / "model.safetensors", {"format": "pt"})
    stored.mkdir()
    save_file(files, stored / "model.safetensors")
    written = json.loads((plain / "config.json").read_text()) | {"dtype": case.dtype}
    (stored / case.file).write_text(json.dumps(case.entries))
    both = written | {"quantization_config": case.entries} if case.file == "config.json" else written
    (stored / "config.json").write_text(json.dumps(both))
    return Checkpoints(plain, stored)


class Made(NamedTuple):
    """A case's checkpoints, and its bundle."""

    checkpoints: Checkpoints
    bundle: Bundle


def maker(cases: Mapping[str, Case], folders: pytest.TempPathFactory, **options: Any) -> Callable[[str], Made]:
    """Makes a case by its name, once; `options` are those of the build."""

    @functools.cache
    def make(name: str) -> Made:
        folder = folders.mktemp("case")
        checkpoints = write(cases[name], folder)
        return Made(checkpoints, precast.build(checkpoints.stored, folder / "b", dtype="float32", **options))

    return make
