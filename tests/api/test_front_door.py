"""`import precast`: every name is there, and costs nothing before it is used."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import precast

HOMES = {
    "build": "precast.builder.build",
    "load": "precast.loader.load",
    "Bundle": "precast.ir.artifact",
    "Engine": "precast.loader.engine.engine",
    "SamplingParams": "precast.loader.engine.params",
    **dict.fromkeys(
        ("PrecastError", "BuildError", "BundleError", "RegistryError", "WeightsError", "RequestError", "TargetError"),
        "precast.ir.errors",
    ),
}

ABSENT_TRANSFORMERS = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import precast
"""


def after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `import precast` and `code`."""
    listing = f"import json, sys, precast\n{code}\nprint(json.dumps(list(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout))


@pytest.mark.parametrize("name", HOMES)
def test_names_are_those_of_their_homes(name: str) -> None:
    assert getattr(precast, name) is getattr(importlib.import_module(HOMES[name]), name)


def test_all_names_are_listed() -> None:
    assert set(precast.__all__) == {*HOMES, "__version__"}
    assert set(precast.__all__) <= set(dir(precast))
    assert sorted(dir(precast)) == dir(precast)


def test_star_gives_all_names() -> None:
    names: dict[str, object] = {}
    exec("from precast import *", names)  # noqa: S102 - a star import is a statement of modules only
    assert set(HOMES) <= set(names)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'precast' has no attribute 'Builder'"):
        precast.Builder  # noqa: B018
    with pytest.raises(ImportError, match="Builder"):
        from precast import Builder  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(precast, "engine")


def test_listing_the_names_loads_nothing() -> None:
    loaded = after("assert 'build' in dir(precast) and precast.__version__ == '0.1.0'")

    assert loaded & {"torch", "msgspec", "precast.builder", "precast.loader", "precast.ir.artifact"} == set()


def test_bundle_needs_no_torch() -> None:
    assert "torch" not in after("assert precast.Bundle.open and issubclass(precast.RequestError, ValueError)")


def test_load_does_without_the_builder_and_chooses_before_it_imports_torch() -> None:
    loaded = after("precast.load, precast.SamplingParams(max_tokens=1)")

    assert "precast.loader.load" in loaded
    assert loaded & {"torch", "transformers", "precast.builder", "precast.builder.build"} == set()


def test_build_without_transformers_says_what_to_install() -> None:
    code = f"{ABSENT_TRANSFORMERS}\nassert precast.load\nprecast.build"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: precast.build needs transformers, which serving images do without: "
        "pip install 'precast[build]'"
    )


def test_other_missing_modules_are_not_taken_for_transformers() -> None:
    code = ABSENT_TRANSFORMERS.replace('"transformers"', '"torch"') + "\nprecast.build"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert ran.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch'"
