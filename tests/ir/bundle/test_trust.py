"""Which rule lets a native layer in."""

from __future__ import annotations

from pathlib import Path

from precast.ir.bundle.trust import Admitted, Allowed, AnyOf, MadeHere, Refusal, folder_of_layers

BUNDLE, LAYER, OTHER = (f"sha256:{letter * 64}" for letter in "abc")


def test_digests_of_layers_and_bundles_can_be_allowed() -> None:
    assert Allowed([LAYER]).admits(BUNDLE, LAYER) == Admitted("allowed by its digest")
    assert Allowed([BUNDLE]).admits(BUNDLE, LAYER) == Admitted("allowed by the bundle's digest")
    assert Allowed([OTHER]).admits(BUNDLE, LAYER) == Refusal("its digest is not allowed")


def test_what_was_compiled_here_is_let_in(tmp_path: Path) -> None:
    here = MadeHere(tmp_path / "native")
    assert isinstance(here.admits(BUNDLE, LAYER), Refusal)

    here.record(LAYER)
    here.record(LAYER)  # again, after another build

    assert here.admits(BUNDLE, LAYER) == Admitted("compiled by this user on this machine")
    assert isinstance(here.admits(LAYER, OTHER), Refusal)


def test_a_record_that_others_may_have_written_counts_for_nothing(tmp_path: Path) -> None:
    here = MadeHere(tmp_path)
    here.record(LAYER)
    (file,) = tmp_path.iterdir()

    file.chmod(0o666)
    assert isinstance(here.admits(BUNDLE, LAYER), Refusal)

    file.chmod(0o600)
    file.write_text("another machine\n")
    assert isinstance(here.admits(BUNDLE, LAYER), Refusal)


def test_a_record_in_a_folder_that_others_may_write_to_counts_for_nothing(tmp_path: Path) -> None:
    """They could give the record of one layer the name of another."""
    here = MadeHere(tmp_path)
    here.record(LAYER)

    tmp_path.chmod(0o777)
    assert isinstance(here.admits(BUNDLE, LAYER), Refusal)

    tmp_path.chmod(0o755)
    assert isinstance(here.admits(BUNDLE, LAYER), Admitted)


def test_a_link_in_place_of_a_record_counts_for_nothing(tmp_path: Path) -> None:
    here = MadeHere(tmp_path)
    here.record(LAYER)
    (file,) = tmp_path.iterdir()
    (tmp_path / file.name.replace("b" * 64, "c" * 64)).symlink_to("missing")

    assert isinstance(here.admits(BUNDLE, OTHER), Refusal)


def test_one_rule_is_enough_and_all_refusals_are_said() -> None:
    nobody, somebody = Allowed([]), Allowed([LAYER])

    assert AnyOf([nobody, somebody]).admits(BUNDLE, LAYER) == Admitted("allowed by its digest")
    refusal = AnyOf([nobody, nobody]).admits(BUNDLE, LAYER)
    assert refusal == Refusal("its digest is not allowed and its digest is not allowed")
    assert AnyOf([]).admits(BUNDLE, LAYER) == Refusal("nothing is trusted")


def test_records_are_kept_in_the_data_directory(tmp_path: Path) -> None:
    assert folder_of_layers({"XDG_DATA_HOME": str(tmp_path)}) == tmp_path / "precast" / "native"
    assert folder_of_layers({"XDG_DATA_HOME": "relative"}) == Path.home() / ".local" / "share" / "precast" / "native"
