"""What a load asks the policy: may the bundle be used, and its native layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import signers

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples import write_tiny
from precast.ir.artifact import Bundle, attach
from precast.ir.bundle.trust import Admitted, Allowed, Refusal, Trust
from precast.ir.errors import BundleError, TrustError
from precast.ir.native import NativeLayer
from precast.ir.trust.loading import repository_of, rules_of
from precast.sign.private_keys import private_key
from precast.sign.signing import sign

KEY = signers.p256()
LAYER = NativeLayer("sm_90", 12000, {"triton": "3.7.1"}, {"precast.kernels.rms_norm.triton": "cd" * 32}, (), {})


@pytest.fixture(autouse=True)
def _nothing_was_compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A signed bundle with a native layer."""
    made = write_tiny(tmp_path / "tiny.bundle", native=[LAYER])
    return attach(made.path, sign(made, private_key(signers.private_pem(KEY))))


def policy(folder: Path, *, portable: str = "anyone", **rule: Any) -> Path:
    path = folder / "trust.json"
    rules = [{"name": "ci", "scope": "native", "key": signers.public_pem(KEY).decode(), **rule}]
    path.write_text(json.dumps({"version": 1, "portable": portable, "rules": rules}))
    return path


def answer(bundle: Bundle, trust: Trust | Path | None, repository: str | None = None) -> Admitted | Refusal:
    return rules_of(bundle, trust, repository).admits(bundle.digest, bundle.native_digest("sm_90"))


def test_without_a_policy_code_of_others_is_kept_out(bundle: Bundle) -> None:
    assert answer(bundle, None) == Refusal("it was not compiled here")


def test_a_rule_lets_the_layer_in_and_is_named(bundle: Bundle, tmp_path: Path) -> None:
    path = policy(tmp_path)

    assert answer(bundle, path) == Admitted(
        f"let in by rule 'ci' of {path}: signed by key {signers.public(KEY).fingerprint}"
    )


def test_a_rule_that_keeps_it_out_is_named_too(bundle: Bundle, tmp_path: Path) -> None:
    found = answer(bundle, policy(tmp_path, key=signers.public_pem(signers.p256()).decode()))

    assert isinstance(found, Refusal)
    assert "it was not compiled here and rule 'ci' of" in found.why


def test_the_layers_own_digest(bundle: Bundle, tmp_path: Path) -> None:
    digest = bundle.native_digest("sm_90")

    assert isinstance(answer(bundle, policy(tmp_path, key="", digests=[digest])), Admitted)


def test_where_it_came_from(bundle: Bundle, tmp_path: Path) -> None:
    path = policy(tmp_path, repositories=["ghcr.io/acme/*"])

    assert isinstance(answer(bundle, path, "ghcr.io/acme/llama"), Admitted)
    assert isinstance(answer(bundle, path, "ghcr.io/other/llama"), Refusal)
    assert isinstance(answer(bundle, path), Refusal)


def test_the_users_policy(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precast").mkdir()
    policy(tmp_path / "precast")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    assert isinstance(answer(bundle, None), Admitted)


def test_portable_layers_may_need_a_rule(bundle: Bundle, tmp_path: Path) -> None:
    assert rules_of(bundle, policy(tmp_path, portable="vouched", scope="any"))
    with pytest.raises(BundleError) as caught:
        rules_of(bundle, policy(tmp_path, portable="vouched", scope="native"))
    assert caught.value.code == "untrusted"


def test_rules_of_the_callers_own_are_asked_alone(bundle: Bundle) -> None:
    own = Allowed([bundle.digest])

    assert rules_of(bundle, own) is own


def test_a_policy_that_is_not_there(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(TrustError):
        rules_of(bundle, tmp_path / "none.json")


@pytest.mark.parametrize(
    ("address", "repository"),
    [
        ("oci://ghcr.io/acme/llama:v1", "ghcr.io/acme/llama"),
        ("oci://localhost:5000/acme/llama@sha256:" + "0" * 64, "localhost:5000/acme/llama"),
        ("oci://ghcr.io/acme/llama:v1@sha256:" + "0" * 64, "ghcr.io/acme/llama"),
        ("llama.bundle", None),
        (Path("oci:/ghcr.io/acme"), None),
    ],
)
def test_the_repository_in_an_address(address: object, repository: str | None) -> None:
    assert repository_of(address) == repository
