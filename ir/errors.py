"""What goes wrong, by name: the kinds of error that a user sees, each with a stable code.

A message says what was read and what was expected; `where` says where, `fix` what to do. Codes are part of the
public interface: scripts and tests match them, so a code keeps its meaning for good. Our own bugs are assertions,
never one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from precast.ir import limits

CODES: dict[str, str] = {
    # --- bundle: the container --------------------------------------------------------------------------------
    "bundle-missing": "there is nothing at the path",
    "bundle-unreadable": "the operating system refuses to read a file or directory of the bundle",
    "bundle-not-a-directory": "the path is not a directory",
    "layout-missing": "a file or directory that every bundle has is missing",
    "layout-extra": "a file or directory that no part of the bundle refers to",
    "layout-kind": "a symbolic link, device, socket or pipe, or a directory in place of a file, inside the bundle",
    "layout-marker": "the file oci-layout does not say what an OCI image layout of version 1.0.0 says",
    "index-invalid": "index.json is not a valid list of this bundle's manifests",
    "json-invalid": "JSON that does not parse, has fields that the format does not know, or values of a wrong type",
    "json-duplicate-key": "a JSON object that has one key twice",
    "json-not-canonical": "JSON that differs from its own canonical encoding",
    "image-invalid": "an OCI image manifest that does not describe a bundle",
    "artifact-type": "an artifact type that is not a bundle's",
    "media-type": "a media type other than the one that this place of the bundle has",
    "digest-invalid": "a digest that is not `sha256:` and 64 lower-case hexadecimal digits",
    "name-invalid": "a file name that is not a plain name",
    "blob-missing": "a blob that the bundle refers to is not there",
    "blob-size": "a blob has another size than the bundle says",
    "blob-digest": "a blob has another content than its digest says",
    "blob-list": "the manifest's blobs are not the image's layers",
    "limit-exceeded": "more, larger, longer or deeper than the format allows",
    # --- bundle: versions -------------------------------------------------------------------------------------
    "format-newer": "the bundle's format is newer than this Precast reads",
    "format-unknown": "the bundle's format is none that this Precast knows",
    "op-unknown": "an op, or a version of an op, that this Precast does not have",
    # --- bundle: the contents ---------------------------------------------------------------------------------
    "manifest-invalid": "the manifest does not decode as a manifest, or contradicts the graph",
    "graph-compression": "the graph's blob is not exactly one zstd frame of a declared, allowed size",
    "graph-encoding": "the graph does not decode as a graph",
    "graph-not-canonical": "the graph differs from its own canonical encoding",
    "graph-nesting": "expressions or recipes are nested deeper than the format allows",
    "graph-invalid": "the graph breaks rules of the verifier",
    "constants-invalid": "the constants are not a canonical safetensors file",
    "constants-mismatch": "the constants are not those that the graph declares",
    "native-compression": "a native layer's blob is not exactly one zstd frame of a declared, allowed size",
    "native-encoding": "a native layer does not decode as one",
    "native-not-canonical": "a native layer differs from its own canonical encoding",
    "native-nesting": "a native layer is nested deeper than the format allows",
    "native-invalid": "a native layer contradicts itself, its target or the launches that there are",
    # --- trust ------------------------------------------------------------------------------------------------
    "statement-invalid": "what is attached to the bundle is not one statement under one signature",
    "signature-missing": "nothing of the wanted kind is attached to the bundle",
    "signature-invalid": "no signature or attestation of the bundle is good under the keys that were given",
    "untrusted": "no rule of the trust policy lets the bundle, or its native layer, in",
    "trust-invalid": "a trust policy that can't be read, or contradicts itself",
    "key-invalid": "a file is no key or certificate of a kind that can be used",
    "key-passphrase": "a private key is encrypted, and no passphrase or a wrong one was given",
    "link-missing": "nothing links the weights to a bundle for the target",
    "lock-invalid": "a precast.lock that can't be read",
    "lock-mismatch": "the bundle or the checkpoint's config is not the one that precast.lock names",
    # --- build ------------------------------------------------------------------------------------------------
    "build-in-progress": "another build is writing to the same path",
    "disk-full": "the file system has no room for the bundle, or a quota or size limit is reached",
    "write-failed": "the bundle, or something else that was to be written, could not be",
    "output-not-a-bundle": "the output path holds something that is not a bundle; it is never overwritten",
    "config-missing": "there is no model config at the path or hub id",
    "config-invalid": "the model config cannot be read, or says what no model can be made of",
    "model-unknown": "the config names a model that transformers does not know",
    "remote-code": "the model is defined by code of its own, which only runs where that is allowed",
    "model-unsupported": "the model is not a decoder of a supported kind",
    "feature-unsupported": "the model uses a feature that cannot be built yet",
    "op-unsupported": "the model uses an operation outside the op table",
    "recipe-unsupported": "a parameter cannot be made from checkpoint tensors by a recipe",
    "export-failed": "the model cannot be exported",
    "check-failed": "what was built of the model does not compute what transformers computes",
    "option-invalid": "a build option has a value that is not allowed",
    "shard-plan-invalid": "a file that says how the model is to be split contradicts itself, or the model",
    "tokenizer-invalid": "a tokenizer file cannot be used",
    "compile-failed": "a kernel doesn't compile for a target",
    "command-failed": "a command that was to be measured gave no output",
    "dependency-missing": "an optional dependency is not installed",
    "dependency-unsupported": "a dependency is installed in a version that is not supported",
    # --- weights ----------------------------------------------------------------------------------------------
    "checkpoint-missing": "there is no checkpoint at the path",
    "checkpoint-format": "the checkpoint is in a format other than safetensors",
    "checkpoint-index": "the checkpoint's index does not parse, or contradicts its files",
    "checkpoint-shard-missing": "the checkpoint's index names files that are not there",
    "checkpoint-header": "the header of a checkpoint file is not a valid safetensors header",
    "checkpoint-duplicate": "a tensor is in two files of the checkpoint",
    "checkpoint-config": "the checkpoint's config.json cannot be read",
    "checkpoint-read": "a checkpoint file could not be read",
    "checkpoint-changed": "a checkpoint file changed while it was read",
    "checkpoint-address": "an address of a checkpoint that is none, or of a kind that is not read",
    "checkpoint-unreachable": "a server of a checkpoint does not answer, or not as it should",
    "checkpoint-denied": "a server does not give out a checkpoint file to whoever asks",
    "config-mismatch": "the checkpoint's config says other numbers than the one that the bundle was built from",
    "weights-mismatch": "tensors are missing, unexpected, or of another shape or dtype than the recipes read",
    "scale-invalid": "a checkpoint's scale of cached keys or values is no number above 0",
    # --- requests and engine options --------------------------------------------------------------------------
    "prompt-empty": "a prompt without tokens",
    "prompt-too-long": "prompt and answer do not fit the model's sequence limit",
    "prompt-invalid": "a prompt that is neither text nor a list of token ids",
    "prompt-too-large-for-cache": "a request that can never fit the cache",
    "token-out-of-range": "a token id outside the vocabulary",
    "sampling-invalid": "a sampling parameter outside its range",
    "engine-option-invalid": "an engine option outside its range",
    "cache-too-small": "the cache cannot hold what the engine options ask for",
    "tokenizer-missing": "text was given or asked for, and the bundle has no tokenizer",
    "engine-closed": "the engine is closed",
    "choices-invalid": "a file is no table of measured choices",
    "engine-busy": "a thread calls the engine while another one is inside it",
    "logits-not-finite": "the model gave logits that are NaN or all infinite",
    "input-mismatch": "inputs of a program are missing, unexpected, or of another shape or dtype",
    "symbol-unbound": "a symbol has no value, or two different ones",
    # --- registries -------------------------------------------------------------------------------------------
    "reference-invalid": "a reference that is not HOST[:PORT]/NAME[:TAG][@DIGEST]",
    "credentials-invalid": "a file of credentials can't be read, or a program that gives them fails",
    "registry-unreachable": "no connection to the registry, or one that breaks or stalls at each try",
    "registry-denied": "the registry wants other credentials, or more rights",
    "registry-missing": "the registry has nothing of this name",
    "registry-busy": "the registry asks to come back later, more often or for longer than is waited",
    "registry-refused": "the registry refuses a request",
    "registry-answer": "an answer that is not one of the OCI distribution protocol, or that can't be true",
    "registry-changed": "what was pushed is not what the registry gives back, or was pushed over by somebody else",
    # --- the target machine -----------------------------------------------------------------------------------
    "device-missing": "the device that was asked for is not there",
    "backend-unfit": "a backend does not run the model",
    "kernel-missing": "a native layer has no kernel for a launch",
    "device-invalid": "a device that Precast does not run on",
    "device-memory": "the device has not enough free memory",
    "host-memory": "the host has not the memory that goes to the device",
    "implementation-missing": "no implementation computes a node on this target",
    "native-refused": "a native layer was asked for by its digest, and can't be used on this machine",
    "engine-failed": "the process of a server's engine has ended",
    "draining": "a server ends, and an answer that ran is cut off",
    "group-missing": "a collective in the graph is about ranks that this one is not connected with",
    # --- ranks ------------------------------------------------------------------------------------------------
    "rank-missing": "a rank did not come to the others in time",
    "rank-late": "a rank did not do its part in time",
    "rank-lost": "a rank has ended, and the others with it",
    "rank-failed": "a rank has failed with an error of another kind",
    "ranks-differ": "the ranks are not of one kind: bundles, options, releases or devices differ",
    "port-taken": "the port that ranks were to meet at, or a server was to listen on, is taken",
    "host-unknown": "a server was to listen on an address that isn't this machine's",
}

FIXES: dict[str, str] = {
    "bundle-unreadable": "check the permissions of the bundle's directory and of the files in it",
    "bundle-not-a-directory": "name the bundle's directory",
    "layout-missing": "the copy is incomplete: copy or build the bundle again",
    "layout-kind": "copy the files themselves instead of links to them, or build the bundle again",
    "json-invalid": "the file was changed or damaged: copy or build the bundle again",
    "blob-missing": "the copy is incomplete: copy or build the bundle again",
    "write-failed": "check the path, the permissions there and the room on its disk",
    "config-invalid": "correct what is named, or download the model's config again",
    "model-unsupported": "name a decoder: a causal language model, or a multimodal model with one in it",
    "feature-unsupported": "docs/capture.md says what is known, and how more is made known",
    "recipe-unsupported": "docs/capture.md says what is known of checkpoints; report it with the config.json",
    "export-failed": "docs/capture.md says how code that can't be traced is replaced",
    "tokenizer-invalid": "download or copy the tokenizer's files again",
    "registry-unreachable": "check the host's name and the network; what has arrived is kept, and a new try goes on",
    "registry-missing": "check the name, the tag and the digest; some registries say so where rights are missing",
    "registry-answer": "check that the host is a registry, and what stands between",
    "checkpoint-index": "download or copy the checkpoint again",
    "checkpoint-read": "check the file's permissions and its disk, or download or copy it again",
    "checkpoint-config": "correct the checkpoint's config.json, or download or copy it again",
    "scale-invalid": "download or copy the checkpoint again, or build with kv_dtype='model', which reads no scales",
    "key-invalid": "check the path; docs/trust.md says which keys and certificates are taken, and how they are made",
    "lock-invalid": "correct the file, or remove it: `precast link BUNDLE DIR` writes it anew",
    "reference-invalid": "name it as HOST[:PORT]/NAME[:TAG][@DIGEST], such as ghcr.io/org/name:1.0",
}
"""What to do about the errors of a code, where who raises one knows no better."""


def printable(text: str) -> str:
    """The text with all but printable characters and line ends spelled out: terminals obey control characters."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


def shown(text: str, length: int = limits.MAX_SHOWN) -> str:
    """Text from a file as a message shows it: in one line, printable, and cut."""
    cut = text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"
    return printable(cut).replace("\n", "\\n")


def shown_value(value: object) -> str:
    """A value that a user gave, as a message shows it: its `repr`, in one line, printable, and cut.

    Python spells no integer of more than some thousand digits: that has its size shown, what holds one its type.
    """
    try:
        return shown(repr(value))
    except ValueError:
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def some(items: Sequence[str], most: int = limits.MAX_LISTED) -> list[str]:
    """The first `most` of the items, as messages show them, and in place of the others how many they are."""
    more = len(items) - most
    return [*map(shown, items[:most]), *([f"and {more} more"] if more > 0 else [])]


def is_failure(error: BaseException) -> bool:
    """Whether it is the failure of a library: an Exception, or a panic in Rust, whose class can't be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


_USAGE = frozenset(("option-invalid", "sampling-invalid", "engine-option-invalid", "reference-invalid"))
"""The codes of an option's value that is not allowed: usage, whether the command line finds it or what it calls."""


class PrecastError(Exception):
    """The root of all errors meant for a user.

    `code` is a key of `CODES`; `message` says what was read and what was expected; `where` names the file, tensor or
    place; `fix` says what to do, by default what `FIXES` says. `str()` gives all of it. The command line ends with
    `exit_code`: that of the kind of error, or 2 for usage.
    """

    exit_code = 1

    def __init__(self, code: str, message: str, *, where: str | None = None, fix: str | None = None) -> None:
        assert code in CODES, f"error code {code!r} is not in precast.ir.errors.CODES"
        message = printable(message[: limits.MAX_MESSAGE])
        super().__init__(code, message)
        self.code = code
        if code in _USAGE:
            self.exit_code = 2
        self.message = message
        self.where = where
        self.fix = fix or FIXES.get(code)

    def __str__(self) -> str:
        lines = [f"{shown(self.where, limits.MAX_MESSAGE)}: {self.message}" if self.where else self.message]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join([*lines, f"  code: {self.code}"])

    def inside(self, where: str) -> Self:
        """This error, its place put inside `where`: how callers add what they know while it travels outward."""
        self.where = f"{where}: {self.where}" if self.where else where
        return self


def told(error: BaseException, code: str) -> tuple[str, str, str, str | None, str | None]:
    """What another process is told of an error: the name of its class, its code, message, place and fix.

    One that isn't Precast's own is a TargetError with this code, in a line.
    """
    if isinstance(error, PrecastError):
        return type(error).__name__, error.code, error.message, error.where, error.fix
    first_line = next(iter(str(error).splitlines()), "")
    return "TargetError", code, f"{type(error).__name__}: {first_line}", None, None


class RecipeError(ValueError):
    """A recipe contradicts itself; whoever reads the recipe says where."""


class BundleError(PrecastError):
    """A bundle is refused."""

    exit_code = 3


class BuildError(PrecastError):
    """The input of a build cannot be built, or its output not be written."""


class WeightsError(PrecastError):
    """A checkpoint cannot be read, or does not fit the recipes."""


class RequestError(PrecastError, ValueError):
    """A prompt, sampling parameters or engine options that are not allowed."""


class TrustError(PrecastError):
    """A key, a certificate, a trust policy or a lock file can't be used."""


class RegistryError(PrecastError):
    """A registry can't be reached, refuses a request, or answers what no registry should."""


class TargetError(PrecastError):
    """The machine is not what the bundle or the request needs."""

    exit_code = 4
