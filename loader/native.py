"""Which native layer of a bundle a load uses, and by what rule; or why none, and kernels are compiled. No torch."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from precast.ir.artifact import Bundle
from precast.ir.bundle.trust import Allowed, AnyOf, MadeHere, Refusal, Trust, folder_of_layers
from precast.ir.errors import TargetError, some
from precast.ir.native import NativeLayer, world_text
from precast.kernels.sources import file_digest
from precast.loader.driver import library


class Chosen(NamedTuple):
    """The layer, None for none, and a sentence on it for whoever asks why. `digest` is that of the bundle's layer for
    the target, used or not; `lacks` says for which world the layer wasn't made, or nothing."""

    layer: NativeLayer | None
    note: str
    digest: str = ""
    lacks: str = ""


def choose(
    bundle: Bundle, target: str, *, allowed: Sequence[str] = (), trust: Trust | None = None, cuda: int | None = None,
    world: tuple[int, int] = (1, 1), dp: int = 1, agree: Callable[[Chosen], Chosen] | None = None,
) -> Chosen:  # fmt: skip
    """The native layer of an opened bundle for a target such as sm_90, where it is admitted and fits this machine.

    `allowed`: digests of layers or bundles that may be used whoever made them. `trust`: what else lets a layer in;
    None: a record of what was compiled here. `cuda`: the version of CUDA that the driver has, `cuda_version`. `world`:
    how many ranks share a layer, and in how many parts experts are; a layer that wasn't made for so many, or for ranks
    with sequences of their own (`dp`), is used for the kernels that it has. `agree`: what ranks make of it together.

    Raises TargetError `native-refused` where a digest is allowed and no layer is used.
    """
    rules = AnyOf([Allowed(allowed), trust or MadeHere(folder_of_layers())])
    if not bundle.native:
        found = Chosen(None, "kernels are compiled here: the bundle has no native layer")
    else:
        found = _of_target(bundle, target, rules, cuda_version() if cuda is None else cuda, world, dp)
    if agree is not None:
        found = agree(found)
    if allowed and found.layer is None:
        raise TargetError(
            "native-refused", f"--allow-native is given, and {found.note}", where=str(bundle.path),
            fix="leave it out, to have kernels compiled here, or add a layer with `precast build --target`",
        )  # fmt: skip
    logging.getLogger("precast").info(found.note)
    return found


def _of_target(bundle: Bundle, target: str, rules: Trust, cuda: int, world: tuple[int, int], dp: int) -> Chosen:
    if target not in bundle.native:
        listed = ", ".join(sorted(bundle.native))
        return Chosen(None, f"kernels are compiled here: the bundle's native layers are for {listed}, not {target}")
    digest = bundle.native_digest(target)
    answer = rules.admits(bundle.digest, digest)
    if isinstance(answer, Refusal):
        said = f"kernels are compiled here: native layer {digest} is not trusted, as {answer.why}"
        return Chosen(None, said, digest)
    layer = bundle.native[target]  # read now: one that is not trusted isn't even decoded
    unfit = _unfit(layer, cuda)
    if unfit is not None:
        return Chosen(None, f"kernels are compiled here: native layer {digest} {unfit}", digest)
    note = f"kernels are those of native layer {digest}: it is {answer.rule}"
    if layer.covers(*world) and dp == 1:
        return Chosen(layer, note, digest)
    lacks = f"it was compiled for {layer.worlds_text}, not for {world_text(*world)}{'' if dp == 1 else f',dp={dp}'}"
    return Chosen(layer, f"{note}; {lacks}, so what it lacks is compiled here", digest, lacks)


def _unfit(layer: NativeLayer, cuda: int) -> str | None:
    """Why a layer can't be used on this machine, or by this release; None if it can."""
    if cuda < layer.driver:
        return f"wants a driver with CUDA {_text(layer.driver)} or newer, and this one has {_text(cuda)}"
    digests = {name: file_digest(name) for name in layer.sources}
    unknown = sorted(name for name, digest in digests.items() if digest is None)
    if unknown:
        return f"is made from kernels that this Precast does not have: {', '.join(some(unknown))}"
    changed = sorted(name for name, digest in digests.items() if digest != layer.sources[name])
    if changed:
        return f"is made from other sources than this Precast has of {', '.join(some(changed))}"
    return None


def cuda_version() -> int:
    """The version of CUDA that the driver has, 12040 for 12.4; 0 where there is no driver."""
    try:
        found: int = library.made("cuDriverGetVersion", ctypes.c_int)
    except (TargetError, library.DriverError):
        return 0
    return found


def _text(version: int) -> str:
    """The version as NVIDIA writes it."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"
