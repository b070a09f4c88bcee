"""What importing each package loads, listed by a fresh interpreter and compared with an allow-list.

The lists name top-level modules; the standard library is always allowed. The loader and the kernels are allowed what
`import torch` loads by itself, to the module: that takes no model code, no tracing and no compiler.
"""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

LIST_LOADED = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# msgspec looks for typing_extensions when a struct is defined, and does without it where it isn't installed.
LIGHT = {"precast", "msgspec", "zstandard", "typing_extensions"}

# Parts of torch that cost seconds or trace programs; the loader has no business in them.
HEAVY_TORCH = ("torch.export", "torch._dynamo", "torch._inductor", "torch.onnx")


@cache
def loaded_by(*names: str) -> frozenset[str]:
    """The modules that a fresh interpreter has loaded after importing `names`, less those it started with.

    -I keeps the working directory and the caller's environment out: what is found is what is installed.
    """
    run = subprocess.run([sys.executable, "-I", "-c", LIST_LOADED, *names], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return frozenset(json.loads(run.stdout.splitlines()[-1]))


def tops(modules: Iterable[str]) -> set[str]:
    """Top-level names of `modules`, the standard library's left out."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names


def inside(modules: Iterable[str], *packages: str) -> list[str]:
    """Those of `modules` that are one of `packages` or lie below one."""
    return sorted(name for name in modules if any(name == p or name.startswith(p + ".") for p in packages))


def all_modules(package: str, root: Path, package_dirs: dict[str, str]) -> list[str]:
    """`package` and every module below it that is in the tree; __main__ modules run when imported, and are left out."""
    names = [package]
    for listed, folder in package_dirs.items():
        if listed == package or listed.startswith(package + "."):
            found = pkgutil.iter_modules([str(root / folder)], prefix=f"{listed}.")
            names += [module.name for module in found if not module.name.endswith(".__main__")]
    return sorted(set(names))


def test_ir_needs_no_more_than_msgspec_and_zstandard(root: Path, package_dirs: dict[str, str]) -> None:
    loaded = loaded_by(*all_modules("precast.ir", root, package_dirs))

    assert tops(loaded) <= LIGHT
    assert inside(loaded, "precast.kernels", "precast.builder", "precast.loader") == []


def test_front_door_opens_without_torch() -> None:
    loaded = loaded_by("precast")

    assert tops(loaded) <= LIGHT
    assert inside(loaded, "precast.kernels", "precast.builder", "precast.loader") == []


def test_command_line_starts_without_torch(root: Path, package_dirs: dict[str, str]) -> None:
    command_line = ("precast.cli.main", "precast.cli.commands")
    commands = [name for name in all_modules("precast", root, package_dirs) if name.startswith(command_line)]
    loaded = loaded_by("precast", *commands)

    assert inside(loaded, "torch", "transformers", "numpy", "triton", "tokenizers") == []
    assert inside(loaded, "precast.kernels", "precast.builder", "precast.loader") == []


def test_records_are_read_without_torch(root: Path) -> None:
    files = sorted((root / "kernels").glob("*/records.py"))
    names = [f"precast.kernels.{file.parent.name}.records" for file in files]
    loaded = loaded_by("precast.kernels.records", "precast.kernels.choices", "precast.kernels.step_memory", *names)

    assert len(names) > 10
    assert tops(loaded) <= LIGHT


# Whole for the loader, which must stay light in each of its modules. Of the kernels only the package: a module that
# holds Triton kernels imports triton, and is itself imported when the kernel is first wanted.
@pytest.mark.parametrize(("package", "whole"), [("precast.kernels", False), ("precast.loader", True)])
def test_target_side_adds_little_to_torch(package: str, whole: bool, root: Path, package_dirs: dict[str, str]) -> None:
    names = all_modules(package, root, package_dirs) if whole else [package]
    added = loaded_by(*names) - loaded_by("torch")

    assert tops(added) <= LIGHT | {"torch", "safetensors", "tokenizers"}
    assert inside(added, "precast.builder", *HEAVY_TORCH) == []


# What needs no tensor: a backend of devices without torch can use it. Each is imported alone with what it needs.
TENSORLESS = (
    *("precast.loader.device", "precast.loader.placement", "precast.loader.timeline"),
    *(f"precast.loader.weights.{name}" for name in ("views", "parts", "cuts", "read_plan", "files")),
    *(f"precast.loader.sources.{name}" for name in ("open", "remote", "http", "objects")),
    *("precast.bench.startup", "precast.bench.doctor", "precast.bench.floor", "precast.bench.page_cache"),
)
# The same, of what counts in arrays of numpy.
ARRAYS_ALONE = (
    *(f"precast.loader.cache.{name}" for name in ("arena", "pages", "prefixes", "rotation", "sequence", "tables")),
    *(f"precast.loader.schedule.{name}" for name in ("decoding", "requests", "scheduler")),
    *(f"precast.loader.engine.{name}" for name in ("answers", "metrics", "params", "prompts", "results", "tokenizer")),
    *(f"precast.loader.run.{name}" for name in ("batch", "capture", "draws", "places", "steps")),
    *("precast.loader.cache.memory", "precast.loader.engine.engine", "precast.loader.sizing"),
)


def test_what_needs_no_tensor_imports_no_torch() -> None:
    loaded = loaded_by(*TENSORLESS)

    assert inside(loaded, "torch") == []
    assert tops(loaded) <= LIGHT


def test_schedules_tables_and_requests_need_numpy_and_no_torch() -> None:
    loaded = loaded_by(*ARRAYS_ALONE)

    assert inside(loaded, "torch") == []
    assert tops(loaded) <= LIGHT | {"numpy"}


def test_a_load_and_the_driver_backend_import_no_torch(root: Path, package_dirs: dict[str, str]) -> None:
    loaded = loaded_by("precast.loader.load", *all_modules("precast.loader.driver", root, package_dirs))

    assert inside(loaded, "torch", "triton", "cuda", "precast.loader.torch_load", "precast.builder") == []
    assert tops(loaded) <= LIGHT | {"numpy"}


def test_a_context_is_begun_before_anything_else_is_imported() -> None:
    loaded = loaded_by("precast.loader.load", "precast.loader.sources.open", "precast.loader.driver.context")

    assert tops(loaded) <= {"precast"}
    assert inside(loaded, "precast.ir.artifact", "precast.ir.graph", "precast.kernels", "precast.loader.engine") == []


def test_one_rank_s_start_imports_nothing_of_other_ranks() -> None:
    loaded = loaded_by("precast.loader.driver.ready")

    assert inside(loaded, "precast.loader.world.lead", "precast.loader.world.follower", "subprocess", "difflib") == []
    assert inside(loaded, "precast.loader.driver.connection", "importlib.metadata") == []


def test_prompts_and_sampling_options_need_neither() -> None:
    loaded = loaded_by("precast.loader.engine.prompts", "precast.loader.engine.params")

    assert tops(loaded) <= LIGHT


def test_the_process_that_speaks_http_imports_no_torch() -> None:
    assert not inside(loaded_by("precast.serve.http_process"), "torch", "transformers", "triton", "pydantic")


def test_every_listed_package_is_importable(package_dirs: dict[str, str]) -> None:
    assert set(package_dirs) <= loaded_by(*package_dirs)
