"""trust.json: what it may say, and what it lets in."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import signers
from signers import DIGEST, NOW, OTHER, document

from precast.ir.errors import TrustError
from precast.ir.trust import signatures
from precast.ir.trust.policy import Decision, Policy

MINUTE = datetime.timedelta(minutes=1)
KEY, STRANGER = signers.p256(), signers.p256()
SIGNED = (signatures.read("sha256:" + "01" * 32, document(KEY)),)


def write(path: Path, *rules: dict[str, Any], **fields: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": 1, "rules": rules} | fields))
    return path


def rule(**changed: Any) -> dict[str, Any]:
    return {"name": "ci", "scope": "native", "key": signers.public_pem(KEY).decode()} | changed


def decide(place: Path, *rules: dict[str, Any], kind: Any = "native", repository: str | None = None) -> Decision:
    policy = Policy.read(write(place / "trust.json", *rules))
    return policy.admits(kind, DIGEST, SIGNED, repository=repository, now=NOW)


def refusal(path: Path) -> TrustError:
    with pytest.raises(TrustError) as caught:
        Policy.read(path)
    return caught.value


def test_by_default_data_comes_from_anyone_and_code_from_nobody() -> None:
    portable, native = (Policy().admits(kind, DIGEST, SIGNED) for kind in ("portable", "native"))

    assert (portable.admitted, portable.rule) == (True, None)
    assert (native.admitted, native.rule) == (False, None)
    assert "nobody" in native.why


def test_a_key_lets_in_what_it_signed(tmp_path: Path) -> None:
    decision = decide(tmp_path, rule())

    assert (decision.admitted, decision.rule) == (True, "ci")
    assert decision.why == (f"rule 'ci' of {tmp_path / 'trust.json'}: signed by key {signers.public(KEY).fingerprint}")


def test_another_key_lets_nothing_in_and_says_so(tmp_path: Path) -> None:
    decision = decide(tmp_path, rule(key=signers.public_pem(STRANGER).decode()))

    assert (decision.admitted, decision.rule) == (False, None)
    assert "rule 'ci' of" in decision.why
    assert "signed by a key, and not by one that is trusted here" in decision.why


def test_the_first_rule_that_lets_it_in_is_named(tmp_path: Path) -> None:
    stranger = rule(name="first", key=signers.public_pem(STRANGER).decode())

    assert decide(tmp_path, stranger, rule(name="second"), rule(name="third")).rule == "second"


@pytest.mark.parametrize(
    ("scope", "kind", "admitted"),
    [
        ("native", "native", True),
        ("any", "native", True),
        ("portable", "native", False),
        ("native", "portable", False),
        ("any", "portable", True),
        ("portable", "portable", True),
    ],
)
def test_scopes(tmp_path: Path, scope: str, kind: Any, admitted: bool) -> None:
    policy = Policy.read(write(tmp_path / "trust.json", rule(scope=scope), portable="vouched"))

    assert policy.admits(kind, DIGEST, SIGNED).admitted is admitted


def test_portable_layers_can_be_made_to_need_a_rule(tmp_path: Path) -> None:
    policy = Policy.read(write(tmp_path / "trust.json", portable="vouched"))

    assert not policy.admits("portable", DIGEST, SIGNED).admitted


def test_digests_vouch_for_themselves(tmp_path: Path) -> None:
    assert decide(tmp_path, {"name": "pinned", "scope": "native", "digests": [OTHER, DIGEST]}).rule == "pinned"
    assert not decide(tmp_path, {"name": "pinned", "scope": "native", "digests": [OTHER]}).admitted


def test_a_digest_may_be_that_of_the_layer_alone(tmp_path: Path) -> None:
    pinned = {"name": "pinned", "scope": "native", "digests": [OTHER]}
    policy = Policy.read(write(tmp_path / "trust.json", pinned))

    assert policy.admits("native", DIGEST, layer=OTHER).rule == "pinned"
    assert not policy.admits("native", DIGEST, layer=DIGEST).admitted


@pytest.mark.parametrize(
    ("repository", "admitted", "why"),
    [
        ("ghcr.io/acme/llama", True, "signed by"),
        ("ghcr.io/acme.evil/llama", False, "not from ghcr.io/acme.evil/llama"),
        ("evil/ghcr.io/acme/llama", False, "not from"),
        (None, False, "where this one is from isn't said"),
    ],
)
def test_repositories(tmp_path: Path, repository: str | None, admitted: bool, why: str) -> None:
    decision = decide(tmp_path, rule(repositories=["quay.io/*", "ghcr.io/acme/*"]), repository=repository)

    assert decision.admitted is admitted
    assert why in decision.why


def test_an_authority_and_its_identities(tmp_path: Path) -> None:
    root_key = signers.p256()
    root = signers.certificate("root", root_key, ca=True)
    leaf = signers.certificate("ci@acme.example", KEY, root, root_key)
    (tmp_path / "ca.pem").write_bytes(signers.certificates_pem(root))
    found = [signatures.read("sha256:0", document(KEY, certificate=leaf))]
    here = {"name": "acme", "scope": "any", "ca": "ca.pem"}

    def admitted(**changed: Any) -> bool:
        policy = Policy.read(write(tmp_path / "trust.json", here | changed))
        return policy.admits("native", DIGEST, found, now=NOW).admitted

    assert admitted()
    assert admitted(identities=["*@acme.example"])
    assert not admitted(identities=["*@other.example"])


# --- signed without a key of one's own: Fulcio's certificate of ten minutes, an entry of Rekor's log ---------------

FULCIO_KEY = signers.p256()
FULCIO = signers.certificate("fulcio", FULCIO_KEY, ca=True)
LOGGED_IN = signers.certificate(
    "https://github.com/acme/models/.github/workflows/release.yml@refs/tags/v1", KEY, FULCIO, FULCIO_KEY,
    start=NOW - 5 * MINUTE, end=NOW + 5 * MINUTE, logged_in_at="https://token.actions.githubusercontent.com",
)  # fmt: skip


def keyless() -> list[signatures.Found]:
    """A keyless signature, whose entry in a log and time stamp nobody has made."""
    found = signers.envelope(KEY, signers.claim(), LOGGED_IN)
    entry = {"logIndex": "1", "integratedTime": str(int(NOW.timestamp())), "inclusionPromise": {}}
    found["verificationMaterial"] |= {"tlogEntries": [entry], "timestampVerificationData": {}}
    return [signatures.read("sha256:0", json.dumps(found).encode())]


FULCIO_PEM = signers.certificates_pem(FULCIO).decode()
OTHER_PEM = signers.certificates_pem(signers.certificate("acme", signers.p256(), ca=True)).decode()
NAMED = {"ca": FULCIO_PEM, "identities": ["https://github.com/acme/*"]}


@pytest.mark.parametrize(
    ("rules", "later", "admitted", "why"),
    [
        ([], 0, False, "nobody"),
        ([{"key": signers.public_pem(STRANGER).decode()}], 0, False, "not by one that is trusted"),
        ([{"ca": OTHER_PEM}], 0, False, "doesn't lead to the authority"),
        ([{"ca": FULCIO_PEM}], 0, False, "logged in at https://token.actions.githubusercontent.com, as anybody may"),
        ([{"ca": FULCIO_PEM, "identities": ["https://github.com/other/*"]}], 0, False, "none of https"),
        ([NAMED], 0, True, "signed by https://github.com/acme/models"),
        ([NAMED], 6, False, "is valid from"),
    ],
    ids=["no rule", "a key", "another authority", "anybody", "somebody else", "named", "named, and over"],
)
def test_keyless_signatures(tmp_path: Path, rules: list[Any], later: int, admitted: bool, why: str) -> None:
    """They count by an authority that a rule names, for names that it names, while the certificate is valid."""
    named = [{"name": "ci", "scope": "native"} | each for each in rules]
    policy = Policy.read(write(tmp_path / "trust.json", *named))

    decision = policy.admits("native", DIGEST, keyless(), now=NOW + later * MINUTE)

    assert decision.admitted == admitted
    assert why in decision.why


def test_a_key_in_a_file_beside_the_policy(tmp_path: Path) -> None:
    (tmp_path / "ci.pub").write_bytes(signers.public_pem(KEY))

    assert decide(tmp_path, rule(key="ci.pub")).admitted


def test_a_missing_file_is_said_as_the_policy_is_read(tmp_path: Path) -> None:
    error = refusal(write(tmp_path / "trust.json", rule(key="ci.pub")))

    assert error.code == "key-invalid"
    assert str(tmp_path / "ci.pub") in str(error)
    assert "rule 'ci'" in str(error)


def test_all_mistakes_are_listed(tmp_path: Path) -> None:
    rules = (
        rule(), rule(), rule(name=""), rule(name="both", digests=[DIGEST]), {"name": "none", "scope": "any"},
        rule(name="who", identities=["x"]), {"name": "odd", "scope": "any", "digests": ["sha256:AB"]},
    )  # fmt: skip
    error = refusal(write(tmp_path / "trust.json", *rules, version=2))
    one = refusal(write(tmp_path / "one.json", version=2))

    assert one.message == "1 mistake: expected version 1, found 2"
    assert error.code == "trust-invalid"
    for mistake in (
        "7 mistakes", "expected version 1, found 2", "two rules are named 'ci'", "rule '': expected a name",
        "rule 'both': expected one of key, ca and digests, found key and digests", "rule 'none': expected one of",
        "rule 'who': identities", "rule 'odd': expected a digest, found 'sha256:AB'",
    ):  # fmt: skip
        assert mistake in error.message


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"rules": []}', '{"version": 1, "surprise": 1}', '{"version": 1, "version": 1}',
        '{"version": 1, "portable": "nobody"}', '{"version": 1, "rules": [{"name": "a", "scope": "all"}]}',
        '{"version": 1, "rules": [{"name": "a", "scope": "any", "keys": "x"}]}', '{"version": true}',
    ],
)  # fmt: skip
def test_a_policy_is_read_strictly(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trust.json"
    path.write_text(text)
    error = refusal(path)

    assert (error.code, error.where) == ("trust-invalid", str(path))


def test_a_policy_that_is_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path).code == "trust-invalid"
    assert refusal(tmp_path / "none.json").code == "trust-invalid"


def test_user_and_system_count_together(tmp_path: Path) -> None:
    system = write(tmp_path / "etc" / "trust.json", portable="vouched")
    write(tmp_path / "home" / ".config" / "precast" / "trust.json", rule(scope="any"))
    write(tmp_path / "xdg" / "precast" / "trust.json")

    home, xdg = (
        Policy.of_this_machine(environment, system)
        for environment in (
            {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": "not/absolute"},
            {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "xdg")},
        )
    )

    assert home.admits("portable", DIGEST, SIGNED).rule == "ci"
    assert not home.admits("portable", OTHER, SIGNED).admitted
    assert not xdg.admits("portable", DIGEST, SIGNED).admitted


def test_a_machine_without_policies(tmp_path: Path) -> None:
    assert Policy.of_this_machine({"HOME": str(tmp_path)}, tmp_path / "none.json") == Policy()
    assert Policy.of_this_machine({}, tmp_path / "none.json") == Policy()
    assert Policy.of_this_machine({"HOME": "/dev/null"}, tmp_path / "none.json") == Policy()


def test_a_policy_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "trust.json").symlink_to(tmp_path / "nowhere.json")

    with pytest.raises(TrustError):
        Policy.of_this_machine({}, tmp_path / "trust.json")


def test_a_policy_that_cannot_be_looked_for_is_not_taken_for_none(tmp_path: Path) -> None:
    """As where the folder may not be entered, which would not stop root here."""
    (tmp_path / "precast").symlink_to("precast")

    with pytest.raises(TrustError) as caught:
        Policy.of_this_machine({}, tmp_path / "precast" / "trust.json")

    assert caught.value.code == "trust-invalid"
    assert str(tmp_path / "precast" / "trust.json") in str(caught.value)


def test_a_damaged_key_is_said_with_its_rule(tmp_path: Path) -> None:
    with pytest.raises(TrustError) as caught:
        decide(tmp_path, rule(key="-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"))

    assert caught.value.code == "key-invalid"
    assert "rule 'ci'" in str(caught.value)
