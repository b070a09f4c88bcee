"""Precast casts a language model once, offline, into a small bundle, and sets it up on the target in seconds.

    bundle = precast.build("Qwen/Qwen3-8B", "qwen.bundle")
    engine = precast.load("qwen.bundle", weights="/ckpt", device="cuda")
    outputs = engine.generate(["Hello"], precast.SamplingParams(max_tokens=64))

Each name is imported when it is first used: `import precast` costs nothing, `precast.load` never imports the
builder, and `precast.Bundle` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precast.builder.build import build as build
    from precast.ir.artifact import Bundle as Bundle
    from precast.ir.errors import BuildError as BuildError
    from precast.ir.errors import BundleError as BundleError
    from precast.ir.errors import PrecastError as PrecastError
    from precast.ir.errors import RegistryError as RegistryError
    from precast.ir.errors import RequestError as RequestError
    from precast.ir.errors import TargetError as TargetError
    from precast.ir.errors import WeightsError as WeightsError
    from precast.loader.engine.engine import Engine as Engine
    from precast.loader.engine.params import SamplingParams as SamplingParams
    from precast.loader.load import load as load

__version__ = "0.1.0"

_ERRORS = ("PrecastError", "BuildError", "BundleError", "RegistryError", "WeightsError", "RequestError", "TargetError")
_HOMES = {
    "build": "precast.builder.build",
    "load": "precast.loader.load",
    "Engine": "precast.loader.engine.engine",
    "SamplingParams": "precast.loader.engine.params",
    "Bundle": "precast.ir.artifact",
    **dict.fromkeys(_ERRORS, "precast.ir.errors"),
}

__all__ = [  # noqa: RUF022 - in the order in which they are met
    "build", "load", "Bundle", "Engine", "SamplingParams",
    "PrecastError", "BuildError", "BundleError", "RegistryError", "WeightsError", "RequestError", "TargetError",
    "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'precast' has no attribute {name!r}")
    import importlib

    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if name == "build" and error.name == "transformers":
            raise ModuleNotFoundError(
                "precast.build needs transformers, which serving images do without: pip install 'precast[build]'",
                name="transformers",
            ) from error
        raise
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
