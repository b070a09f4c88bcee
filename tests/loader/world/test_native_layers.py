"""Ranks use the same native layer by the same rules, or none of them does: two processes, each with its own policy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tiny_world import write

from precast.ir.artifact import Bundle, write_bundle
from precast.ir.bundle.trust import MadeHere, folder_of_layers
from precast.ir.errors import TargetError
from precast.ir.native import NativeLayer
from precast.kernels.sources import file_digest
from precast.loader.native import Chosen, choose
from precast.loader.options import LoadOptions
from precast.loader.world.agree import Verdict
from precast.loader.world.channel import accept_ranks, listen, new_secret
from precast.loader.world.lead import Lead
from precast.loader.world.timeouts import Timeouts
from precast.loader.world.together import agreed

SOURCE = "precast.kernels.rms_norm.triton"
LAYER = NativeLayer("sm_90", 13000, {"triton": "3.7.1"}, {SOURCE: file_digest(SOURCE) or ""}, (), {})
TIMEOUTS = Timeouts(join=60, agree=60, end=20)
FOLLOWER = """
import json, os, sys
from functools import partial
from precast.ir.artifact import Bundle
from precast.ir.errors import TargetError
from precast.loader.native import choose
from precast.loader.options import LoadOptions
from precast.loader.world.agree import Verdict
from precast.loader.world.channel import connect
from precast.loader.world.follower import Follower
from precast.loader.world.timeouts import Timeouts
from precast.loader.world.together import agreed
path, port, secret, native, trust = json.loads(sys.argv[1])
channel = connect("127.0.0.1", port, bytes.fromhex(secret), 1, seconds=60)
side = Follower(1, 2, channel, Timeouts(join=60, agree=60, end=20))
bundle = Bundle.open(path)
options = LoadOptions(bundle, "w", None, 1, 1, None, None, True, True, None, None, native, trust)
try:
    found = choose(
        bundle, "sm_90", allowed=native, trust=options.rules(bundle), cuda=13000, world=(2, 1),
        agree=partial(agreed, side, rules=options.rules_text()),
    )
    said = [found.layer is not None, found.note]
except TargetError as error:
    said = [None, error.message]
print(json.dumps([said, "torch" in sys.modules]))
side.gather("the end", Verdict("", False, "", ""))
side.close()
"""


@pytest.fixture(autouse=True)
def _data_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def with_layer(path: Path, layer: NativeLayer = LAYER) -> Bundle:
    """The tiny model's bundle with a native layer."""
    plain = Bundle.open(write(path.with_suffix(".plain")))
    return write_bundle(
        path, manifest_without_blobs=msgspec.structs.replace(plain.manifest, blobs=()), graph=plain.graph,
        constants=plain.constants, files=plain.files("tokenizer"), provenance={}, native=[layer],
    )  # fmt: skip


def policy(path: Path, digest: str, name: str = "ours") -> str:
    """A trust policy that lets in what has this digest."""
    rule = {"name": name, "scope": "native", "digests": [digest]}
    path.write_text(json.dumps({"version": 1, "rules": [rule]}))
    return str(path)


Said = tuple[bool | None, str]


def two_ranks(
    mine: Bundle, theirs: Bundle, *, native: tuple[list[str], list[str]] = ([], []),
    trust: tuple[str | None, str | None] = (None, None),
) -> list[Said]:  # fmt: skip
    """What rank 0, here, and rank 1, a process, come to: whether a layer is used (None: an error), and what is said."""
    secret = new_secret()
    with closing(listen("127.0.0.1", None)) as listener:
        told = json.dumps([str(theirs.path), listener.getsockname()[1], secret.hex(), native[1], trust[1]])
        process = subprocess.Popen([sys.executable, "-P", "-c", FOLLOWER, told], stdout=subprocess.PIPE, text=True)
        lead = Lead(accept_ranks(listener, secret, [1], seconds=60), TIMEOUTS)
    try:
        found = _chosen(mine, native[0], trust[0], lead)
        lead.gather("the end", Verdict("", is_used=False, note="", rules=""))
        lead.close()
        out, _ = process.communicate(timeout=60)
    finally:
        lead.close()
        process.kill()
        process.communicate()
    theirs_said, has_torch = json.loads(out)
    assert not has_torch
    return [found, tuple(theirs_said)]


def _chosen(bundle: Bundle, native: list[str], trust: str | None, lead: Lead) -> Said:
    options = LoadOptions(bundle, "w", None, 1, 1, None, None, True, True, None, None, native, trust)
    agree: Callable[[Chosen], Chosen] = partial(agreed, lead, rules=options.rules_text())
    rules = options.rules(bundle)
    try:
        found = choose(bundle, "sm_90", allowed=native, trust=rules, cuda=13000, world=(2, 1), agree=agree)
    except TargetError as error:
        return None, error.message
    return found.layer is not None, found.note


def test_a_layer_that_all_ranks_let_in_is_used_by_all(tmp_path: Path) -> None:
    bundle = with_layer(tmp_path / "b")
    trusted = policy(tmp_path / "trust.json", bundle.digest)
    for options in ({"trust": (trusted, trusted)}, {"native": ([bundle.digest], [bundle.digest])}):
        found = two_ranks(bundle, bundle, **options)  # type: ignore[arg-type]

        assert [used for used, _ in found] == [True, True]
        assert found[0] == found[1]
        assert "kernels are those of native layer" in found[0][1]

    MadeHere(folder_of_layers()).record(bundle.native_digest("sm_90"))
    assert [used for used, _ in two_ranks(bundle, bundle)] == [True, True]


def test_a_policy_that_keeps_a_layer_out_on_one_rank_keeps_it_out_on_all(tmp_path: Path) -> None:
    bundle = with_layer(tmp_path / "b")
    lets_in, keeps_out = policy(tmp_path / "in", bundle.digest), policy(tmp_path / "out", "sha256:" + "0" * 64, "mine")

    found = two_ranks(bundle, bundle, trust=(lets_in, keeps_out))

    digest = bundle.native_digest("sm_90")
    assert found[0] == found[1]
    assert found[0][0] is False
    assert f"native layer {digest} is used by all ranks or by none, and rank 1 says: " in found[0][1]
    assert f"rule 'mine' of {keeps_out}: {bundle.digest} is none of its digests" in found[0][1]


def test_where_a_digest_is_allowed_the_rank_that_refuses_it_is_an_error_on_all(tmp_path: Path) -> None:
    bundle = with_layer(tmp_path / "b")

    found = two_ranks(bundle, bundle, native=([bundle.digest], ["sha256:" + "0" * 64]))

    assert [used for used, _ in found] == [None, None]
    assert found[0] == found[1]
    assert "--allow-native is given, and kernels are compiled here" in found[0][1]
    assert "rank 1 says: kernels are compiled here: native layer" in found[0][1]


def test_rules_that_differ_let_nothing_in_even_if_both_would(tmp_path: Path) -> None:
    bundle = with_layer(tmp_path / "b")
    one, other = policy(tmp_path / "one", bundle.digest), policy(tmp_path / "other", bundle.native_digest("sm_90"))

    found = two_ranks(bundle, bundle, trust=(one, other))

    assert [used for used, _ in found] == [False, False]
    assert "the ranks ask different rules for native layers: rank 0 policy " in found[0][1]


def test_layers_of_other_content_are_used_by_nobody(tmp_path: Path) -> None:
    mine, theirs = with_layer(tmp_path / "b"), with_layer(tmp_path / "c", msgspec.structs.replace(LAYER, driver=12000))
    allowed = [mine.digest, theirs.digest]

    found = two_ranks(mine, theirs, native=(allowed, allowed))

    assert [used for used, _ in found] == [None, None]
    expected = f"rank 0 {mine.native_digest('sm_90')}, rank 1 {theirs.native_digest('sm_90')}"
    assert f"the ranks have other native layers: {expected}" in found[1][1]
