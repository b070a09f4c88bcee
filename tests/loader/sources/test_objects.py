"""Object stores: the library's own clients for S3 and Google's, against a minimal store on this machine."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from functools import partial as bind

import pytest
from file_server import FileServer, Request, drop_after, partial, ranged, serving, silent

from precast.ir.errors import PrecastError, TargetError, WeightsError
from precast.ir.weights.sources import Folder, Source
from precast.loader.sources.open import folder_of
from precast.loader.sources.remote import Waits

pytest.importorskip("obstore")

CONTENT = bytes(range(251)) * 5_000
FILE = "bucket/models/one/model.safetensors"
AT_ONCE = Waits(timeout=60.0, pauses=(0.0, 0.0))


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server that the environment names as the store of both kinds; `address` is its folder."""
    with serving({FILE: CONTENT}) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
        monkeypatch.setenv("AWS_REGION", "eu-central-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDS3CRET")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
        monkeypatch.setenv("GOOGLE_BASE_URL", server.address)
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        server.folder = f"{request.param}://bucket/models/one"  # type: ignore[attr-defined]
        yield server


def folder(store: FileServer, waits: Waits = AT_ONCE) -> Folder:
    """The folder of the store that the fixture made."""
    return folder_of(store.folder, waits)  # type: ignore[attr-defined]


def read(source: Source, start: int, *lengths: int) -> list[bytes]:
    """Pieces of these lengths, from `start` on."""
    pieces = [bytearray(length) for length in lengths]
    assert source.read_into(start, [memoryview(piece) for piece in pieces]) == sum(lengths)
    return list(map(bytes, pieces))


def test_ranges_fill_their_pieces(store: FileServer) -> None:
    source = folder(store).open("model.safetensors")

    found = read(source, 300_000, 3, 500_000, 1)

    assert (source.size, b"".join(found)) == (len(CONTENT), CONTENT[300_000:800_004])
    assert [name for name, _ in store.requests] == [FILE, FILE]


def test_a_file_is_there_or_not(store: FileServer) -> None:
    there = folder(store)

    assert there.has("model.safetensors")
    assert not there.has("config.json")


def test_the_address_of_one_file(store: FileServer) -> None:
    named = folder_of(f"{store.folder}/model.safetensors", AT_ONCE)  # type: ignore[attr-defined]

    assert (named.only, named.name) == ("model.safetensors", store.folder)  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", [lambda request: request.answer(500), bind(drop_after, 333)], ids=["500", "cut within"])
def test_a_failure_that_passes(bad: Callable[[Request], None], store: FileServer) -> None:
    source = folder(store).open("model.safetensors")
    turns = iter([bad])
    store.behave = lambda request: next(turns, ranged)(request)

    assert b"".join(read(source, 600_000, 100, 900)) == CONTENT[600_000:601_000]


def refused(store: FileServer, behave: Callable[[Request], None], waits: Waits = AT_ONCE) -> WeightsError:
    """The error of a read from a store that was good when the file was opened."""
    source = folder(store).open("model.safetensors")
    store.behave = behave
    with pytest.raises(WeightsError) as caught:
        read(folder(store, waits).open("model.safetensors", source.stamp), 600_000, 1000)
    assert "s3cret" not in str(caught.value).lower()
    assert caught.value.where == f"{store.folder}/model.safetensors"  # type: ignore[attr-defined]
    return caught.value


def test_a_store_that_denies(store: FileServer) -> None:
    error = refused(store, lambda request: request.answer(403))

    assert error.code == "checkpoint-denied"
    assert "credentials" in str(error.fix)


def test_a_store_that_says_nothing(store: FileServer) -> None:
    error = refused(store, silent, Waits(timeout=0.2, pauses=(0.0,)))

    assert error.code == "checkpoint-unreachable"
    assert "bytes 600000 to 600999: 0 of 1000 came in 2 attempts" in error.message


def test_answers_that_are_cut_short_end(store: FileServer) -> None:
    error = refused(store, bind(drop_after, 10))

    assert error.code == "checkpoint-unreachable"
    assert "came in 3 attempts" in error.message


def test_a_wrong_range(store: FileServer) -> None:
    error = refused(store, lambda request: partial(request, Content_Range=f"bytes 0-999/{len(CONTENT)}"))

    assert error.code == "checkpoint-unreachable"


def test_a_file_that_changes_while_it_is_read(store: FileServer) -> None:
    def replaced(request: Request) -> None:
        request.server.files[FILE] = CONTENT[::-1]
        ranged(request)

    assert refused(store, replaced).code == "checkpoint-changed"


def test_a_file_that_goes_while_it_is_read(store: FileServer) -> None:
    assert refused(store, lambda request: request.answer(404)).code == "checkpoint-changed"


# --- addresses ---------------------------------------------------------------------------------------------------


def refused_address(address: str) -> PrecastError:
    """The error of an address."""
    with pytest.raises(PrecastError) as caught:
        folder_of(address)
    return caught.value


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/s3cret", "ftp:// are not read, expected a path or one of https://, http://, s3://, gs://"),
        ("file:///s3cret", "file:// are not read"),
        ("https:///s3cret", "it names no server"),
        ("http://user:s3cret@host:port/x", "the address is none"),
        ("http://user:s3cret@[::1/x", "the address is none"),
        ("s3://", "the address is none"),
    ],
)
def test_addresses_that_are_none(address: str, message: str) -> None:
    error = refused_address(address)

    assert error.code == "checkpoint-address"
    assert message in error.message
    assert error.fix
    assert "s3cret" not in str(error)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an environment is that never installed it."""
    found = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.partition(".")[0] == "obstore":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    error = refused_address("s3://bucket/x")

    assert isinstance(error, TargetError)
    assert (error.code, error.fix) == ("dependency-missing", "pip install 'precast[remote]'")


@pytest.mark.parametrize("timeout", [0, -1.0, 1e300, float("inf"), float("nan"), True, "30"])
def test_timeouts_that_are_none(timeout: object) -> None:
    with pytest.raises(PrecastError, match="weights_timeout is") as caught:
        folder_of("/ckpt", Waits(timeout))  # type: ignore[arg-type]

    assert caught.value.code == "engine-option-invalid"
