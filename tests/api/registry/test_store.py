"""The store: what is listed is whole, whoever is killed; processes share it, and read it where they can't write it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_registry import FakeRegistry

from examples import write_tiny
from precast.ir.artifact import Bundle
from precast.ir.bundle import oci
from precast.ir.errors import BundleError, PrecastError
from precast.registry.pull import pull, write_out
from precast.registry.push import push
from precast.registry.store import Store, default_path

SCRIPT = str(Path(__file__).with_name("transfers.py"))
LONG = 300.0
"""Seconds after which a test gives up on a process, or a thread."""


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The script of transfers in a process of its own."""
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, **options)


@pytest.fixture
def reference(registry: FakeRegistry, tiny: Bundle) -> str:
    """The tiny bundle, pushed."""
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    return f"{registry.host}/org/tiny:v1"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/h"}, "/h/.cache/precast/store"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/c"}, "/c/precast/store"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "c"}, "/h/.cache/precast/store"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/c", "PRECAST_STORE": "/s"}, "/s"),
    ],
)
def test_place(environment: dict[str, str], expected: str) -> None:
    assert default_path(environment) == Path(expected)


def test_listing(reference: str, registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    other = write_tiny(tiny.path.with_name("other.bundle"), num_layers=1)
    push(other.path, f"{registry.host}/org/tiny:other")
    pull(f"{registry.host}/org/tiny:other", store=store)
    pull(reference, store=store)
    os.utime(store.path / "bundles" / f"{other.digest[7:]}.json", (0, 0))

    first, second = store.listing()

    assert (first.digest, first.reference) == (tiny.digest, reference)
    assert (second.digest, second.used) == (other.digest, 0)
    shared = {x.digest: x.size for x in tiny.layers if x.digest in {y.digest for y in other.layers}}
    empty = 2  # the config of what is attached
    assert first.bytes - first.own_bytes == second.bytes - second.own_bytes == sum(shared.values()) + empty + _record()


def _record() -> int:
    return len(b'{"host":"example"}')


def test_bundle_that_the_store_does_not_have(store: Store) -> None:
    with pytest.raises(BundleError) as caught:
        store.open("sha256:" + "0" * 64)

    assert caught.value.code == "bundle-missing"
    assert "precast pull" in str(caught.value)
    assert store.listing() == []
    assert store.collect().blobs == 0
    assert not store.path.exists()


def test_path_that_is_no_directory_is_no_empty_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")

    for name in ("file", "link"):
        store = Store(tmp_path / name)
        for act in (store.listing, store.verify, store.collect):
            with pytest.raises(BundleError, match="PRECAST_STORE") as caught:
                act()
            assert (caught.value.code, caught.value.where) == ("bundle-unreadable", str(store.path))


def test_gc_makes_nothing_in_a_directory_that_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")

    found = Store(tmp_path).collect(unused_days=0)

    assert (found.bundles, found.blobs, os.listdir(tmp_path)) == ((), 0, ["notes.txt"])


def test_gc_keeps_what_bundles_have(reference: str, tiny: Bundle, store: Store) -> None:
    pull(reference, store=store)
    with store.writing():
        unwanted = store.blob(store.put(b"nobody's"))
        (store.path / "incoming" / ("0" * 64)).write_bytes(b"unfinished")

    found = store.collect()

    assert (found.bundles, found.blobs, found.bytes) == ((), 2, 18)
    assert not unwanted.exists()
    assert store.open(tiny.digest).attached == tiny.attached


def test_gc_removes_nothing_where_a_list_can_t_be_read(reference: str, tiny: Bundle, store: Store) -> None:
    """It would take the bundle's blobs for nobody's."""
    pull(reference, store=store)
    (file,) = (store.path / "bundles").iterdir()
    moved = file.rename(file.with_suffix(".moved"))
    file.symlink_to(file)  # what the system refuses to read, to root as well

    for act in (store.collect, store.listing):
        with pytest.raises(BundleError, match="the store can't be read") as error:
            act()
        assert (error.value.code, error.value.where) == ("bundle-unreadable", str(file))

    moved.replace(file)
    assert store.open(tiny.digest).digest == tiny.digest


def test_gc_of_bundles_that_are_not_used(reference: str, registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    other = write_tiny(tiny.path.with_name("other.bundle"), num_layers=1)
    push(other.path, f"{registry.host}/org/tiny:other")
    pull(f"{registry.host}/org/tiny:other", store=store)
    pull(reference, store=store)
    for digest in (tiny.digest, other.digest):
        os.utime(store.path / "bundles" / f"{digest[7:]}.json", (0, 0))
    store.open(tiny.digest)  # is a use

    found = store.collect(unused_days=30)

    assert found.bundles == (other.digest,)
    assert store.open(tiny.digest).digest == tiny.digest
    assert store.collect(unused_days=0).bundles == (tiny.digest,)
    assert os.listdir(store.path / "blobs" / "sha256") == []


def test_gc_waits_for_a_pull(reference: str, tiny: Bundle, store: Store, registry: FakeRegistry) -> None:
    """A pull that has blobs and no list yet holds the lock; the gc that begins meanwhile removes none of them."""
    arrived, go_on = threading.Event(), threading.Event()

    def hold(handler: Any) -> bool:
        arrived.set()
        go_on.wait(LONG)
        return False

    registry.misbehave("GET", tiny.layers[0].digest, hold, times=1)
    pulling = threading.Thread(target=pull, args=(reference,), kwargs={"store": store})
    pulling.start()
    assert arrived.wait(LONG)
    collecting = threading.Thread(target=store.collect)
    collecting.start()
    go_on.set()
    pulling.join(LONG)
    collecting.join(LONG)

    assert store.open(tiny.digest).digest == tiny.digest


def test_gc_of_all_waits_until_a_pulled_bundle_is_written_out(
    reference: str, tiny: Bundle, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between fetching and writing out, somebody removes all that is not in use."""
    pull(reference, store=store)
    collecting = threading.Thread(target=store.collect, args=(0.0,))
    survey = Store.survey

    def begun_meanwhile(self: Store, digest: str) -> Any:
        if not collecting.ident:
            collecting.start()
            collecting.join(0.2)
        return survey(self, digest)

    monkeypatch.setattr(Store, "survey", begun_meanwhile)
    pull(reference, tmp_path / "out.bundle", store=store)
    collecting.join(LONG)

    assert Bundle.open(tmp_path / "out.bundle").digest == tiny.digest
    assert store.listing() == []


def test_verify_finds_damage(reference: str, tiny: Bundle, store: Store) -> None:
    pull(reference, store=store)
    blob = store.blob(tiny.layers[0].digest)
    blob.write_bytes(b"x" * blob.stat().st_size)

    found = store.verify()

    assert (found.bundles, found.blobs) == (1, 11)
    assert [str(blob) in problem or tiny.digest in problem for problem in found.problems] == [True, True]
    with pytest.raises(BundleError) as caught:
        store.open(tiny.digest)
    assert caught.value.code == "blob-digest"


@pytest.mark.parametrize("refresh", [False, True])
def test_pull_fetches_again_what_is_damaged(refresh: bool, reference: str, tiny: Bundle, store: Store) -> None:
    """Each blob in turn: the manifests, what they name, and what is attached."""
    pull(reference, store=store)
    for blob in (store.path / "blobs" / "sha256").iterdir():
        blob.write_bytes(b"x" * blob.stat().st_size)
        out = store.path.with_name(f"{blob.name}.bundle")

        pulled = pull(reference, out, store=store, refresh=refresh)

        assert store.verify().problems == (), blob
        assert Bundle.open_whole(out).attached == tiny.attached
        assert pulled.fetched_bytes in (0, blob.stat().st_size)  # manifests aren't counted


def test_pull_of_a_bundle_that_shares_a_damaged_blob(
    reference: str, registry: FakeRegistry, tiny: Bundle, store: Store, tmp_path: Path
) -> None:
    other = write_tiny(tmp_path / "other.bundle", num_layers=1)
    push(other.path, f"{registry.host}/org/tiny:other")
    pull(reference, store=store)
    shared = next(layer for layer in other.layers if store.has(layer.digest, layer.size))
    store.blob(shared.digest).write_bytes(b"x" * shared.size)

    pull(f"{registry.host}/org/tiny:other", store=store)

    assert store.has(shared.digest, shared.size)
    assert store.verify().problems == ()


def test_what_is_no_file_in_the_place_of_a_blob_is_a_problem(reference: str, tiny: Bundle, store: Store) -> None:
    pull(reference, store=store)
    os.mkfifo(store.blob("sha256:" + "a" * 64))  # which nobody writes to
    store.blob("sha256:" + "b" * 64).mkdir()
    store.blob("sha256:" + "c" * 64).symlink_to("nowhere")
    list_file = store.path / "bundles" / f"{'d' * 64}.json"
    os.mkfifo(list_file)

    found = store.verify()

    assert (found.bundles, found.blobs) == (2, 14)
    assert [next(letter for letter in "abcd" if letter * 64 in problem) for problem in found.problems] == list("abcd")


def test_list_that_is_damaged_is_no_bundle(reference: str, tiny: Bundle, store: Store) -> None:
    pull(reference, store=store)
    (store.path / "bundles" / f"{tiny.digest[7:]}.json").write_bytes(b"{")

    with pytest.raises(BundleError):
        store.open(tiny.digest)
    again = pull(reference, store=store)

    assert again.fetched_bytes == 0
    assert store.open(tiny.digest).digest == tiny.digest


def test_list_of_another_bundle_is_not_believed(reference: str, tiny: Bundle, store: Store) -> None:
    pull(reference, store=store)
    lists = store.path / "bundles"
    shutil.copy(lists / f"{tiny.digest[7:]}.json", lists / f"{'0' * 64}.json")

    with pytest.raises(BundleError, match="expected sha256:000"):
        store.open("sha256:" + "0" * 64)


def test_list_that_leads_to_another_bundle_is_no_bundle(
    reference: str, registry: FakeRegistry, tiny: Bundle, store: Store, tmp_path: Path
) -> None:
    """Whoever may write to the store can't have another bundle written out under a digest."""
    other = write_tiny(tmp_path / "other.bundle", num_layers=1)
    push(other.path, f"{registry.host}/org/tiny:other")
    for name in (reference, f"{registry.host}/org/tiny:other"):
        pull(name, store=store)
    lists = store.path / "bundles"
    shutil.copy(lists / f"{other.digest[7:]}.json", lists / f"{tiny.digest[7:]}.json")

    assert [tiny.digest in problem for problem in store.verify().problems] == [True]
    pulled = pull(f"{registry.host}/org/tiny@{tiny.digest}", tmp_path / "out.bundle", store=store)

    assert pulled.digest == Bundle.open(tmp_path / "out.bundle").digest == tiny.digest


def test_store_that_can_only_be_read(
    reference: str, registry: FakeRegistry, tiny: Bundle, store: Store, tmp_path: Path
) -> None:
    """On a file system that is mounted read-only, which stops root as well."""
    pull(reference, store=store)
    probe = ["unshare", "--mount", "--map-root-user", "mount", "--bind", "-o", "ro", str(store.path), str(store.path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("this system lets tests mount nothing")
    other = write_tiny(tmp_path / "other.bundle", num_layers=1)
    push(other.path, f"{registry.host}/org/tiny:other")
    code = (
        "from precast.ir.artifact import Bundle; from precast.registry.store import Store; "
        f"print(Bundle.open('oci://{registry.host}/org/tiny@{tiny.digest}').digest, len(Store().listing()), "
        "Store().verify().problems, flush=True); from precast.cli.main import main; "
        f"main(['pull', '{registry.host}/org/tiny:other'])"
    )
    shell = f'mount --bind -o ro {store.path} {store.path} && exec {sys.executable} -c "{code}"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", shell],
        capture_output=True, text=True, env={**os.environ, "PRECAST_STORE": str(store.path)},
    )  # fmt: skip

    assert done.stdout.split() == [tiny.digest, "1", "()"], done.stderr
    assert done.returncode == 1
    assert "write-failed" in done.stderr
    assert "PRECAST_STORE" in done.stderr
    assert "Traceback" not in done.stderr


def test_store_that_can_t_be_made(reference: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PrecastError) as caught:
        pull(reference, store=Store(tmp_path / "file" / "store"))

    assert caught.value.code == "write-failed"
    assert "PRECAST_STORE" in str(caught.value)


def test_full_disk(registry: FakeRegistry, tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle", files={"tokenizer.json": os.urandom(300_000)})
    push(bundle.path, f"{registry.host}/org/tiny:v1")
    place = tmp_path / "place"
    place.mkdir()
    code = (
        "import sys; from precast.registry import pull; pull._check_room = lambda *x: None; "
        "from precast.cli.main import main; main(sys.argv[1:])"
    )
    shell = (
        f"mount -t tmpfs -o size=128k none {place} && "
        f'exec {sys.executable} -c "{code}" pull {registry.host}/org/tiny:v1'
    )
    probe = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", str(place)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("this system lets tests mount nothing")

    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", shell],
        capture_output=True, text=True, env={**os.environ, "PRECAST_STORE": str(place / "store")},
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    assert "disk-full" in done.stderr
    assert "Traceback" not in done.stderr


def test_file_that_is_written_out_is_not_the_stores(reference: str, tiny: Bundle, store: Store, tmp_path: Path) -> None:
    pull(reference, tmp_path / "out.bundle", store=store)
    for file in (tmp_path / "out.bundle").rglob("*"):
        if file.is_file():
            file.write_bytes(b"changed")

    assert store.verify().problems == ()
    assert write_out(store, tiny.digest, tmp_path / "again.bundle").digest == tiny.digest


# --- together, killed, interrupted -----------------------------------------------------------------------------


def test_pulls_at_once_fetch_each_blob_once(
    registry: FakeRegistry, reference: str, tiny: Bundle, tmp_path: Path
) -> None:
    done = run("together", registry.host, str(tiny.path), str(tmp_path), "4")

    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 0, 0, 0] 1 ()"
    assert registry.count("GET", tiny.layers[0].digest) == 1


def test_a_blob_that_comes_between_the_question_for_it_and_the_lock(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"a blob"
    digest = oci.digest_of(data)
    real, asked = store.has, []

    def has(digest: str, size: int) -> bool:
        asked.append(real(digest, size))
        if len(asked) == 1:
            Store(store.path).put(data)
        return asked[-1]

    with store.writing():
        monkeypatch.setattr(store, "has", has)
        fetched = store.receive(digest, len(data), lambda file: pytest.fail("it was fetched again"))

    assert (fetched, asked) == (False, [False, True])
    assert sorted(file.name for file in store.path.rglob("*") if file.is_file()) == [digest[len("sha256:") :], "lock"]
    assert store.blob(digest).read_bytes() == data


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_pulls_killed_at_random_moments(count: int, registry: FakeRegistry, tiny: Bundle, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()

    done = run("pulls", registry.host, str(tiny.path), str(tmp_path / "place"), str(count))

    assert done.returncode == 0, done.stderr
    states, rest = done.stdout.split(" ", 1)
    assert int(states) >= 2
    assert rest == "['out.bundle', 'store'] ()"


def test_pull_killed_before_each_step(registry: FakeRegistry, tiny: Bundle, tmp_path: Path) -> None:
    done = run("steps", registry.host, str(tiny.path), str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True"


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_pushes_killed_at_random_moments(count: int, registry: FakeRegistry, tiny: Bundle, tmp_path: Path) -> None:
    done = run("pushes", registry.host, str(tiny.path), str(tmp_path), str(count))

    assert done.returncode == 0, done.stderr
    assert done.stdout == "True"


def interrupted(registry: FakeRegistry, request: tuple[str, str], *arguments: str) -> tuple[int, str]:
    """Code and errors of a process that gets Ctrl-C while such a request is not answered."""
    reached, go_on = threading.Event(), threading.Event()

    def stall(handler: Any) -> bool:
        reached.set()
        go_on.wait(LONG)
        return False

    registry.misbehave(*request, stall, times=1)
    what, *others = arguments
    command = [sys.executable, SCRIPT, what, registry.host, *others]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert reached.wait(LONG)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LONG)
        finally:
            process.kill()
            go_on.set()
    return process.returncode, said.strip()


def test_ctrl_c_ends_a_pull(registry: FakeRegistry, reference: str, tiny: Bundle, tmp_path: Path) -> None:
    """While a blob doesn't come: the user is not kept waiting for it, and a later pull ends well."""
    found = interrupted(registry, ("GET", tiny.layers[0].digest), "interrupted", str(tiny.path), str(tmp_path))

    assert found == (130, "interrupted")
    assert not (tmp_path / "out.bundle").exists()
    assert pull(reference, tmp_path / "out.bundle", store=Store(tmp_path / "store")).digest == tiny.digest


def test_ctrl_c_ends_a_push(registry: FakeRegistry, tiny: Bundle, tmp_path: Path) -> None:
    """While the registry doesn't answer: there is no tag, and a later push ends well."""
    found = interrupted(registry, ("PUT", "blobs/uploads"), "interrupted-push", str(tiny.path), str(tmp_path))

    assert found == (130, "interrupted")
    assert ("org/interrupted", "v1") not in registry.manifests
    assert push(tiny.path, f"{registry.host}/org/interrupted:v1").digest == tiny.digest
