"""A bundle's path leads to a complete bundle or to what was there before, whatever happens to the writer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from forge import blob_of
from writer import LONG, SHORT, write

from examples import TINY_FILES, tiny_constants, tiny_graph, write_tiny
from precast.ir.artifact import Bundle
from precast.ir.bundle import oci
from precast.ir.bundle.publish import check_place
from precast.ir.errors import BuildError, BundleError

SCRIPT = str(Path(__file__).parents[1] / "writer.py")


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The writer script in a process of its own."""
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


def names(directory: Path) -> list[str]:
    """What is in a directory."""
    return sorted(os.listdir(directory))


def content(path: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# --- what is written -------------------------------------------------------------------------------------------


def test_written_bundle_opens_with_what_was_given(tmp_path: Path) -> None:
    written = write_tiny(tmp_path / "x.bundle", provenance={"when": "now", "seconds": 1.5})

    opened = Bundle.open(tmp_path / "x.bundle")

    assert opened.graph == tiny_graph()
    assert {name: (dtype, shape, bytes(data)) for name, (dtype, shape, data) in opened.constants.items()} == (
        tiny_constants()
    )
    assert opened.files("tokenizer") == TINY_FILES
    assert opened.provenance == {"when": "now", "seconds": 1.5}
    assert (opened.digest, opened.path) == (written.digest, written.path)
    assert [blob.role for blob in opened.manifest.blobs] == ["graph", "constants", "tokenizer", "tokenizer"]
    assert names(tmp_path) == ["x.bundle"]


def test_layout_is_an_oci_image_layout(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    bundle = write_tiny(path)

    assert json.loads((path / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((path / "index.json").read_bytes())
    image = json.loads(blob_of(path, "image").read_bytes())
    assert index["manifests"][0]["digest"] == bundle.digest
    assert index["manifests"][0]["artifactType"] == image["artifactType"] == "application/vnd.precast.bundle.v1"
    assert image["config"]["mediaType"] == "application/vnd.precast.manifest.v1+json"
    assert [layer["mediaType"] for layer in image["layers"]] == [
        "application/vnd.precast.graph.v1.msgpack+zstd",
        "application/vnd.precast.constants.v1.safetensors",
        "application/vnd.precast.tokenizer.v1",
        "application/vnd.precast.tokenizer.v1",
    ]
    assert image["layers"][3]["annotations"] == {"org.opencontainers.image.title": "tokenizer.json"}
    attached = json.loads((path / "blobs" / index["manifests"][1]["digest"].replace(":", "/")).read_bytes())
    assert attached["subject"]["digest"] == bundle.digest


def test_bundle_without_tokenizer_and_constants_in_common(tmp_path: Path) -> None:
    # Two files of equal content are one blob.
    files = {"a.json": b"{}", "b.json": b"{}"}

    bundle = write_tiny(tmp_path / "x.bundle", files=files)

    assert Bundle.open(tmp_path / "x.bundle").files("tokenizer") == files
    assert write_tiny(tmp_path / "y.bundle", files={}).files("tokenizer") == {}
    assert bundle.manifest.blobs[2].digest == bundle.manifest.blobs[3].digest


def test_fresh_processes_write_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for index, seed in enumerate(("0", "1", "4242")):
        where = tmp_path / f"place-{index}"
        where.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": ("UTC", "Asia/Tokyo", "")[index], "LC_ALL": "C"}
        done = run("write", "x.bundle", cwd=where, env=environment, umask=(0o022, 0o077, 0)[index])
        assert done.returncode == 0, done.stderr
        found.append((done.stdout, content(where / "x.bundle")))

    assert found[0][0].startswith("sha256:")
    assert found[0] == found[1] == found[2]


# --- replacing -------------------------------------------------------------------------------------------------


def test_bundle_is_replaced(tmp_path: Path) -> None:
    old, new = write(tmp_path / "x.bundle", SHORT), write(tmp_path / "x.bundle", LONG)

    assert old.digest != new.digest
    assert Bundle.open(tmp_path / "x.bundle").digest == new.digest
    assert names(tmp_path) == ["x.bundle"]


def test_damaged_bundle_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write_tiny(path)
    blob_of(path, "graph").unlink()

    write_tiny(path)

    Bundle.open(path)


def test_empty_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.bundle").mkdir()

    write_tiny(tmp_path / "x.bundle")

    assert names(tmp_path) == ["x.bundle"]


def test_index_that_names_the_type_of_the_config(tmp_path: Path) -> None:
    """As crane writes it."""
    path = tmp_path / "x.bundle"
    digest = write_tiny(path).digest
    index = json.loads((path / "index.json").read_bytes())
    index["manifests"][0]["artifactType"] = oci.MANIFEST
    (path / "index.json").write_text(json.dumps(index))

    assert Bundle.open(path).digest == digest
    assert write_tiny(path).digest == digest


def other_image(path: Path) -> None:
    """An OCI layout of something else."""
    write_tiny(path)
    index = json.loads((path / "index.json").read_bytes())
    index["manifests"][0]["artifactType"] = "application/vnd.example.v1"
    (path / "index.json").write_text(json.dumps(index))


def shared_store(path: Path) -> None:
    """An OCI layout of a bundle and of something else."""
    write_tiny(path)
    index = json.loads((path / "index.json").read_bytes())
    index["manifests"].append({**index["manifests"][0], "artifactType": "application/vnd.example.v1"})
    (path / "index.json").write_text(json.dumps(index))


def bundle_with_notes(path: Path) -> None:
    write_tiny(path)
    (path / "notes.txt").write_text("mine")


def directory_of_files(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


def link_to_a_bundle(path: Path) -> None:
    write_tiny(path.with_name("target.bundle"))
    path.symlink_to("target.bundle")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("mine"),
        lambda path: path.symlink_to("nowhere"),
        directory_of_files,
        link_to_a_bundle,
        other_image,
        shared_store,
        bundle_with_notes,
    ],
    ids=["file", "dangling link", "directory", "link", "other image", "shared store", "bundle with notes"],
)
def test_what_is_not_a_bundle_is_left_alone(make: object, tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    make(path)  # type: ignore[operator]
    before = (names(tmp_path), content(tmp_path))

    with pytest.raises(BuildError) as caught:
        write_tiny(path)

    assert caught.value.code == "output-not-a-bundle"
    assert (names(tmp_path), content(tmp_path)) == before


def test_directory_above_must_exist(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        write_tiny(tmp_path / "none" / "x.bundle")

    assert caught.value.code == "write-failed"
    assert names(tmp_path) == []


def test_reader_meets_complete_bundles_only(tmp_path: Path) -> None:
    """It reads until it has met both, and often; the writer has an end in case that never comes."""
    path = tmp_path / "x.bundle"
    known = {write(path, LONG).digest, write(path, SHORT).digest}
    found = Counter[str]()
    with subprocess.Popen([sys.executable, SCRIPT, "repeat", str(path), "2000"]) as writer:
        try:
            while writer.poll() is None and (found.keys() < known or found.total() < 50):
                found[Bundle.open(path).digest] += 1
        finally:
            writer.kill()

    assert found.keys() == known
    assert writer.returncode in (0, -signal.SIGKILL)


def test_bundle_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    # The last reader is done before its bundle would be replaced.
    done = run("read", str(tmp_path / "x.bundle"))

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"True [{LONG}, {SHORT}]"


# --- what goes wrong -------------------------------------------------------------------------------------------


def test_contents_that_would_be_refused_leave_nothing(tmp_path: Path) -> None:
    old = write_tiny(tmp_path / "x.bundle")

    with pytest.raises(BundleError) as caught:
        write_tiny(tmp_path / "x.bundle", constants={})

    assert caught.value.code == "constants-mismatch"
    assert Bundle.open(tmp_path / "x.bundle").digest == old.digest
    assert names(tmp_path) == ["x.bundle"]


@pytest.mark.parametrize("name", ["../x", ".hidden", "a/b", ""])
def test_file_names_are_checked_before_anything_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError) as caught:
        write_tiny(tmp_path / "x.bundle", files={name: b"x"})

    assert caught.value.code == "name-invalid"
    assert names(tmp_path) == []


def test_another_build_is_in_progress(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    old = write(path, SHORT)
    with subprocess.Popen([sys.executable, SCRIPT, "stop", str(path)]) as other:
        assert os.WIFSTOPPED(os.waitpid(other.pid, os.WUNTRACED)[1])
        try:
            with pytest.raises(BuildError) as caught:
                write(path, SHORT)
            during = Bundle.open(path)
        finally:  # else it would be waited for
            other.send_signal(signal.SIGCONT)

    assert caught.value.code == "build-in-progress"
    assert during.digest == old.digest
    assert other.returncode == 0
    assert Bundle.open(path).manifest.model.max_seq_len == LONG
    assert names(tmp_path) == ["x.bundle"]


def test_a_bundle_that_is_replaced_while_it_is_looked_at_is_one(tmp_path: Path) -> None:
    """What was opened first is on its way out, and half of it may be gone."""
    path = tmp_path / "x.bundle"
    write(path, SHORT)
    looks = []

    def may_replace(place: Path) -> bool:
        looks.append(Bundle.open(place).manifest.model.max_seq_len)
        if len(looks) == 1:
            write(path, LONG)
            return False
        return True

    check_place(path, may_replace)

    assert looks == [SHORT, LONG]


def test_a_bundle_that_is_removed_while_it_is_looked_at_is_in_nobody_s_way(tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write(path, SHORT)

    def may_replace(place: Path) -> bool:
        shutil.rmtree(place)
        return False

    check_place(path, may_replace)


def test_lock_file_that_nobody_holds_is_no_lock(tmp_path: Path) -> None:
    lock = tmp_path / "x.bundle.lock"
    lock.write_bytes(b"")

    write_tiny(tmp_path / "x.bundle")

    assert names(tmp_path) == ["x.bundle"]


def test_lock_is_kept_by_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "x.bundle.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BuildError) as caught:
            write_tiny(tmp_path / "x.bundle")

    assert caught.value.code == "build-in-progress"
    assert names(tmp_path) == ["x.bundle.lock"]


@pytest.mark.parametrize("max_bytes", [0, 1, 100, 700, 1500])
def test_file_size_limit(max_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    old = write(path, SHORT)

    done = run("limited", str(path), str(max_bytes))

    assert (done.returncode, done.stdout) == (1, "disk-full ['x.bundle']"), done.stderr
    assert Bundle.open(path).digest == old.digest


@pytest.mark.parametrize("kilobytes", [8, 24, 36, 48])
def test_full_file_system(kilobytes: int, tmp_path: Path) -> None:
    # A file system of its own, in a mount namespace that ends with the process.
    probe = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("this system lets tests mount nothing")
    command = (
        f"mount -t tmpfs -o size={kilobytes}k none {tmp_path} && exec {sys.executable} {SCRIPT} write {tmp_path}/x"
    )

    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", command], capture_output=True, text=True
    )

    if kilobytes < 48:
        assert (done.returncode, done.stdout) == (1, "disk-full []"), done.stderr
    else:
        assert done.stdout.startswith("sha256:"), done.stderr


# --- killed ----------------------------------------------------------------------------------------------------


def test_writer_killed_at_random_moments(tmp_path: Path) -> None:
    done = run("moments", str(tmp_path / "x.bundle"), "50")

    assert done.returncode == 0, done.stderr
    assert done.stdout == "True ['x.bundle']"


@pytest.mark.parametrize(("first", "states"), [("none", ["none", "128"]), ("bundle", ["64", "128"])])
def test_writer_killed_before_each_step(first: str, states: list[str], tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()

    done = run("steps", str(place / "x.bundle"), first)

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"True {states} ['x.bundle']"


def test_unfinished_directory_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    write_tiny(tmp_path / ".x.bundle.building")

    write_tiny(tmp_path / "x.bundle")

    assert names(tmp_path) == ["x.bundle"]


def test_link_in_place_of_the_unfinished_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (tmp_path / ".x.bundle.building").symlink_to("mine")

    write_tiny(tmp_path / "x.bundle")

    assert names(tmp_path) == ["mine", "x.bundle"]
    assert names(tmp_path / "mine") == ["file"]


def test_bundle_set_aside_by_a_killed_writer_comes_back(tmp_path: Path) -> None:
    # Where two directories can't be exchanged in one step, a killed writer can leave the old bundle set aside.
    old = write(tmp_path / "x.bundle", SHORT)
    (tmp_path / "x.bundle").rename(tmp_path / ".x.bundle.replaced")

    with pytest.raises(BundleError):
        write_tiny(tmp_path / "x.bundle", constants={})

    assert Bundle.open(tmp_path / "x.bundle").digest == old.digest
    assert names(tmp_path) == ["x.bundle"]


def test_media_types_are_those_of_the_format() -> None:
    assert oci.describe(b"{}", oci.EMPTY_TYPE).digest == (
        "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )
