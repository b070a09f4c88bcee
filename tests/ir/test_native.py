"""Native layers: which are refused, and how they lie in a bundle."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from native_layers import DIGEST, IMAGE, KERNEL, LAYER, MODULE, layer, with_kernel

from examples import write_tiny
from precast.ir import encoding, limits, native
from precast.ir.artifact import Bundle
from precast.ir.bundle import codec, oci
from precast.ir.bundle.scan import NATIVE_CAPS
from precast.ir.errors import BundleError
from precast.ir.native import NO_ARGUMENT, NativeLayer, NativeParam


def test_a_layer_comes_back_as_it_was() -> None:
    assert encoding.decode_native(encoding.encode_native(LAYER)) == LAYER


WRONG: dict[str, tuple[NativeLayer, str]] = {
    "a target that no GPU is": (layer(target="sm_75"), "none of sm_80"),
    "no version of CUDA": (layer(driver=0), "no version of CUDA"),
    "a source without a digest": (layer(sources={MODULE: "cd"}), "has no digest"),
    "a kernel of no source": (layer(sources={"precast.kernels.rotary.triton": "cd" * 32}), "rms_norm_kernel is no ker"),
    "a kernel of another package": (with_kernel(kernel="os:system"), "os:system is no kernel"),
    "another content": (layer(images={DIGEST: IMAGE + b"."}), "another content"),
    "no cubin": (layer(images={hashlib.sha256(b"MZ").hexdigest(): b"MZ"}), "is no cubin"),
    "an image without a kernel": (layer(kernels=()), "no kernel is in image"),
    "a kernel without an image": (with_kernel(image="0" * 64), "there is no image 0000"),
    "kernels out of order": (layer(kernels=(KERNEL, msgspec.structs.replace(KERNEL, key="aa" * 32))), "order"),
    "a general kernel in front": (layer(kernels=(msgspec.structs.replace(KERNEL, aligned=()), KERNEL)), "order"),
    "a key that is none": (with_kernel(key="x"), "its key is no digest"),
    "a function that is none": (with_kernel(function="a b"), "is no function"),
    "no threads": (with_kernel(threads=0), "0 threads"),
    "too many threads": (with_kernel(threads=2048), "2048 threads"),
    "part of a warp": (with_kernel(threads=100), "100 threads"),
    "more shared memory than there is": (with_kernel(shared_bytes=(227 << 10) + 1), "sm_90 has 232448"),
    "less shared memory than none": (with_kernel(shared_bytes=-1), "-1 bytes"),
    "a number that is no argument": (with_kernel(params=(NativeParam("int32", NO_ARGUMENT),)), "no argument"),
    "an argument twice": (with_kernel(params=(NativeParam("int32", 0),) * 2), "that there are not"),
    "an argument below none": (with_kernel(params=(NativeParam("int32", -2),)), "that there are not"),
    "conditions out of order": (with_kernel(aligned=(2, 0)), "not in their order"),
    "a constant that is passed": (with_kernel(ones=(2,)), "an argument that is 1 has a parameter"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), WRONG.values(), ids=WRONG)
def test_a_layer_that_contradicts_itself_is_refused(wrong: NativeLayer, said: str) -> None:
    with pytest.raises(BundleError, match=said) as error:
        encoding.decode_native(packed(wrong))

    assert error.value.code == "native-invalid"


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(BundleError) as error:
        native.check(with_kernel(threads=0, shared_bytes=-1, key="x"))

    assert all(said in error.value.message for said in ("threads", "shared memory", "key"))


def test_a_layer_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError) as many:
        native.check(layer(kernels=(KERNEL,) * (limits.MAX_KERNELS + 1)))
    big = bytes(limits.MAX_IMAGE_BYTES + 1)
    with pytest.raises(BundleError, match="an image of") as large:
        encoding.decode_native(packed(layer(images={DIGEST: big})))

    assert many.value.code == large.value.code == "limit-exceeded"
    assert NATIVE_CAPS.raw_bytes > limits.MAX_IMAGE_BYTES


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "native-compression"),
        (zstandard.ZstdCompressor().compress(b"\x81\xa1a\x01"), "native-encoding"),
        (zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(LAYER) + b"\0"), "native-encoding"),
    ],
)
def test_what_is_no_layer_is_refused(data: bytes, code: str) -> None:
    with pytest.raises(BundleError) as error:
        encoding.decode_native(data)

    assert error.value.code == code


def test_fields_in_another_order_are_refused() -> None:
    raw = msgspec.msgpack.encode(dict(reversed(msgspec.msgpack.decode(msgspec.msgpack.encode(LAYER)).items())))
    with pytest.raises(BundleError) as error:
        encoding.decode_native(zstandard.ZstdCompressor().compress(raw))

    assert error.value.code == "native-not-canonical"


def test_a_graph_holds_no_images() -> None:
    with pytest.raises(BundleError, match="0xc4"):
        encoding.decode_graph(zstandard.ZstdCompressor().compress(msgspec.msgpack.encode({"a": b"x"})))


# --- in a bundle -------------------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Bundle:
    return write_tiny(tmp_path / "plain")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_tiny(tmp_path / "native", native=[LAYER, layer(target="sm_80")])


def test_a_bundle_lists_its_layers_and_opens_with_them(bundle: Bundle, plain: Bundle) -> None:
    assert {target: found.target for target, found in bundle.native.items()} == {"sm_80": "sm_80", "sm_90": "sm_90"}
    assert bundle.native["sm_90"] == LAYER
    listed = [blob for blob in bundle.manifest.blobs if blob.role == "native"]
    assert [blob.name for blob in listed] == ["sm_80", "sm_90"]
    assert bundle.native_digest("sm_90") == listed[1].digest == oci.digest_of(bundle.files("native")["sm_90"])
    assert plain.native == {}


def test_layers_belong_to_the_identity_and_none_change_nothing(bundle: Bundle, plain: Bundle, tmp_path: Path) -> None:
    assert write_tiny(tmp_path / "again", native=[]).digest == plain.digest
    assert write_tiny(tmp_path / "both", native=[layer(target="sm_80"), LAYER]).digest == bundle.digest
    assert bundle.digest != plain.digest
    assert write_tiny(tmp_path / "one", native=[LAYER]).digest not in (bundle.digest, plain.digest)


def test_a_damaged_layer_is_refused(bundle: Bundle) -> None:
    file = bundle.path / oci.BLOBS / bundle.native_digest("sm_90").replace(":", "/")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    with pytest.raises(BundleError, match="sm_90") as error:
        Bundle.open(bundle.path)
    assert error.value.code == "blob-digest"


def test_a_layer_under_another_target_s_name_is_refused(tmp_path: Path) -> None:
    found = write_tiny(tmp_path / "b", native=[LAYER])

    def rename(image: dict[str, Any]) -> None:
        image["layers"][-1]["annotations"][oci.TITLE] = "sm_80"

    with pytest.raises(BundleError) as error:
        Bundle.open_whole(retold(found, rename, tmp_path / "other"))
    assert error.value.code == "native-invalid"
    assert "sm_80 says that it is for sm_90" in error.value.message


def packed(found: NativeLayer) -> bytes:
    """The layer's blob, whatever it says."""
    raw = msgspec.msgpack.encode(found, order="sorted")
    return zstandard.ZstdCompressor(level=3, write_checksum=False).compress(raw)


def retold(bundle: Bundle, change: Any, path: Path) -> Path:
    """The bundle with a change in its image manifest, and in the list of blobs that goes with it."""
    blobs = {f.name: f.read_bytes() for f in (bundle.path / oci.BLOBS / oci.ALGORITHM).iterdir()}
    image = json.loads(blobs[bundle.digest.partition(":")[2]])
    manifest = json.loads(blobs[image["config"]["digest"].partition(":")[2]])
    change(image)
    manifest["blobs"][-1]["name"] = image["layers"][-1]["annotations"][oci.TITLE]
    config = canonical(manifest)
    image["config"] |= {"digest": oci.digest_of(config), "size": len(config)}
    data = canonical(image)
    kept = {part["digest"].partition(":")[2] for part in image["layers"]}
    written = {name: blobs[name] for name in kept if name in blobs}
    written |= {oci.digest_of(each).partition(":")[2]: each for each in (config, data)}
    folder = path / oci.BLOBS / oci.ALGORITHM
    folder.mkdir(parents=True)
    for name, content in written.items():
        (folder / name).write_bytes(content)
    entry = {"digest": oci.digest_of(data), "mediaType": oci.IMAGE_TYPE, "size": len(data)}
    (path / oci.INDEX_FILE).write_bytes(canonical({"manifests": [entry], "schemaVersion": 2}))
    (path / oci.LAYOUT_FILE).write_bytes(oci.MARKER)
    return path


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# --- larger than what is held --------------------------------------------------------------------------------------

PEAK = """
import sys
from precast.ir.artifact import Bundle

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

before = peak()
opened = Bundle.open(sys.argv[1])
print(opened.digest, len(opened.native), peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs what Linux says of a process's memory")
def test_layers_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """140 MiB of native layers, more than all else in a bundle may have together."""
    monkeypatch.setattr(codec, "ZSTD_LEVEL", 1)  # nothing here can be packed
    images = [b"\x7fELF" + os.urandom(limits.MAX_IMAGE_BYTES - 4) for _ in range(7)]
    digests = [hashlib.sha256(image).hexdigest() for image in images]
    kernels = [msgspec.structs.replace(KERNEL, image=digest, key=digest) for digest in sorted(digests)]
    made = layer(kernels=tuple(kernels), images=dict(zip(digests, images, strict=True)))
    targets = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
    bundle = write_tiny(tmp_path / "large", native=[msgspec.structs.replace(made, target=each) for each in targets])

    done = subprocess.run([sys.executable, "-c", PEAK, bundle.path], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    digest, count, grown = done.stdout.split()
    assert sum(found.size for found in bundle.layers) > limits.MAX_HELD_BYTES
    assert (digest, int(count)) == (bundle.digest, 5)
    assert int(grown) < 32 << 20
    assert bundle.native["sm_89"].images.keys() == set(digests)


def test_layer_that_was_changed_since_the_bundle_was_opened(bundle: Bundle) -> None:
    file = bundle.path / oci.BLOBS / bundle.native_digest("sm_90").replace(":", "/")
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    with pytest.raises(BundleError) as changed:
        bundle.native["sm_90"]
    file.unlink()
    with pytest.raises(BundleError) as removed:
        bundle.native["sm_90"]

    assert (changed.value.code, removed.value.code) == ("blob-digest", "blob-missing")
    assert bundle.native["sm_80"].target == "sm_80"
