"""The corpus, made from the tiny examples. Valid inputs only: mutation finds the rest.

The graphs in text form, in `corpus/text`, are kept by hand; the encoded ones are made from them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import registry_readers
import tokenizers_by_hand
import trust_readers
import zstandard
from forge import Forgery, canonical
from graph_text import parse_graph

from precast.ir import encoding
from precast.ir.bundle import oci
from precast.ir.graph.schema import (
    Cast,
    Concat,
    Dequantise,
    Each,
    Param,
    Quantise,
    Read,
    Recipe,
    Repack,
    Repeat,
    Reshape,
    Scale,
    Slice,
    Stack,
    TensorType,
    Tie,
    Transpose,
)
from precast.ir.weights import recipes, tensorfile

Seeds = Iterator[tuple[str, str, bytes]]
"""Target, name, content."""

_W = Read("w", (4, 6))
_FP8 = Dequantise(Read("q", (8, 6), "float8_e4m3fn"), Read("s", (2, 2)), "fp8", (4, 4))
_MXFP4 = Dequantise(Read("q", (2, 6, 3, 16), "uint8"), Read("s", (2, 6, 3), "uint8"), "mxfp4")
_AWQ = Dequantise(Read("q", (6, 2), "int32"), Read("s", (3, 16)), "awq", zeros=Read("z", (3, 2), "int32"))
_GPTQ_GROUPS = Read("g", (16,), "int32")
_GPTQ = Dequantise(
    Read("q", (2, 8), "int32"), Read("s", (3, 8)), "gptq", None, Read("z", (3, 1), "int32"), _GPTQ_GROUPS, 1
)
_NVFP4 = Dequantise(
    Read("q", (6, 24), "uint8"),
    Read("s", (6, 3), "float8_e4m3fn"),
    "nvfp4",
    global_scale=Reshape(Read("t", ()), (1, 1)),
)
_PACKED4 = Dequantise(
    Read("q", (6, 4), "int32"),
    Read("s", (6, 2)),
    "packed4",
    None,
    Read("z", (1, 2), "int32"),
    Read("g", (32,), "int32"),
)
_AFFINE = Dequantise(Read("q", (6, 4), "int32"), Read("s", (6, 2)), "packed4", biases=Read("b", (6, 2)))
_INT8 = Dequantise(Read("q", (8, 6), "int8"), Read("s", (8, 1)), "int8", (1, 6), Read("z", (8, 1), "int8"))
_RECIPES: dict[str, Recipe] = {
    "views": Cast(Slice(Transpose(Reshape(_W, (2, 12)), 0, 1), 0, 3, 5), "float32"),
    "joins": Cast(Concat((_W, Reshape(Stack((_W, _W), 1), (8, 6))), 0), "bfloat16"),
    "each": Cast(Each(Concat((Read("e.*.gate", (4, 3)), Read("e.*.up", (2, 3))), 0), 0, 3, 7), "bfloat16"),
    "repeat": Cast(Slice(Repeat(Read("s", (2, 1)), 1, 9), 0, 1, 1), "float32"),
    "fp8": Cast(_FP8, "bfloat16"),
    "mxfp4": Cast(_MXFP4, "bfloat16"),
    "awq": Cast(_AWQ, "bfloat16"),
    "gptq": Cast(_GPTQ, "bfloat16"),
    "nvfp4": Cast(_NVFP4, "bfloat16"),
    "packed4": Cast(_PACKED4, "bfloat16"),
    "affine": Cast(_AFFINE, "bfloat16"),
    "int8": Cast(_INT8, "bfloat16"),
    "repack": Slice(Each(Repack(Read("e.*.q", (16, 3), "int32"), "values"), 0, 2), 1, 8, 12),
    "repacked": Repack(Read("z", (5, 3), "int32"), "zeros"),
    "groups": Slice(Repack(Read("z", (16, 4), "int32"), "groups"), 1, 0, 3),
    "quantise": Quantise(Read("a", (5, 7)), "values", (2, 3)),
    "scale": Scale(("a.k_scale", "a.k_proj.k_scale")),
}
_ROPE = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 32, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": [2, 3], "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
_QUANTISED = _CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}}
_MULTIMODAL = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 16}}
_KINDS: dict[str, dict[str, object]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64, "activation_function": "gelu_new"},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "n_routed_experts": 4, "n_group": 1},
    "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "expand": 2, "conv_kernel": 4, "n_groups": 1},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}},
}
_AT_LOAD = {"rms_norm_eps": 1e-6, "sliding_window": 4096, "layer_types": ["full", "sliding"], "rope_scaling": _ROPE}
_FACTS = {
    "values": {"rms_norm_eps": 1e-6, "layer_types": ["full", "sliding"], "window": None}
    | {f"rope_parameters.{name}": value for name, value in _ROPE.items()},
    "same": {"window": [0]}, "absent": {"rms_norm_eps": 1e-5}, "part": ["text_config"],
    "absent_objects": {"rope_parameters.rope_theta": 1e4}, "spellings": {"rope_scaling": ["rope_parameters"]},
}  # fmt: skip


_MEASURED = {
    "machine": {
        "gpu": "NVIDIA H200", "capability": [9, 0], "driver": "580.95", "torch": "2.11.0", "triton": "3.6.0",
        "cublaslt": 130100,
    },
    "choices": [{
        "op": "aten.linear.default", "dtype": "bfloat16", "sizes": {"T": [9, 16], "R": [17, None]},
        "order": ["cublaslt.linear", "torch.linear.default"], "microseconds": [1.5, 2.0], "arguments": "input=int8[2]",
    }],
    "products": [{
        "dtype": "bfloat16", "outputs": 8, "inputs": 16, "bias": False, "rows": 32, "algorithm": "0" * 128,
        "microseconds": 1.0, "first_microseconds": 2.0,
    }],
}  # fmt: skip


def write(corpus: Path) -> None:
    """Write all of the corpus but the graphs in text form, which are in it."""
    for target, name, data in _seeds(corpus / "text"):
        (corpus / target).mkdir(parents=True, exist_ok=True)
        (corpus / target / name).write_bytes(data)


def _seeds(texts: Path) -> Seeds:
    yield from _bundle()
    yield (
        "bundle-graph",
        "states",
        encoding.encode_graph(parse_graph((texts / "states.txt").read_text(encoding="utf-8"))),
    )
    for file in sorted(texts.iterdir()):
        blob = encoding.encode_graph(parse_graph(file.read_text(encoding="utf-8")))
        yield "graph", file.stem, zstandard.ZstdDecompressor().decompress(blob)
    for name, recipe in _RECIPES.items():
        kind = TensorType(recipes.dtype(recipe) or "float32", recipes.shape(recipe))
        params = [Param(f"p.{name}", kind, recipe), Param("p.tied", kind, Tie(f"p.{name}"))]
        yield "recipes", name, msgspec.msgpack.encode(params, order="sorted")
    stored = {"a": ("float32", (2, 3), bytes(24)), "b.c": ("bfloat16", (), bytes(2)), "d": ("int8", (0, 4), b"")}
    yield "checkpoint-header", "three", tensorfile.encode(stored)
    yield "checkpoint-index", "two", canonical({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}})
    yield "checkpoint-config", "flat", canonical(_AT_LOAD)
    yield "checkpoint-config", "nested", canonical({"text_config": _AT_LOAD | {"rope_parameters": _ROPE}})
    yield "choices", "one", canonical(_MEASURED)
    yield "shard-plan", "two", canonical({"layers.*": "replicate", "embed": "split"})
    yield "config-facts", "both", canonical({"config": {"text_config": _AT_LOAD}, "facts": _FACTS})
    yield "config", "llama", canonical(_CONFIG)
    for name, entries in _KINDS.items():
        kind = {"model_type": name} if name not in ("yarn", "fp8") else {}
        yield "config", name, canonical(_CONFIG | {"architectures": None} | kind | entries)
    yield "config", "quantised", canonical(_QUANTISED)
    yield "config", "multimodal", canonical(_MULTIMODAL)
    yield "config", "code", canonical(_CONFIG | {"auto_map": {"AutoModelForCausalLM": "own.Model"}})
    yield "generation-config", "sampling", canonical({"eos_token_id": [1, 2], "do_sample": False, "top_p": 0.5})
    yield from _registries()
    yield from _trust()
    yield from _tokenizers()


def _registries() -> Seeds:
    document = registry_readers.signature()
    yield "registry-attached", "signature", json.dumps(document, indent=1).encode()
    entry = {"mediaType": oci.IMAGE_TYPE, "digest": registry_readers.SUBJECT.digest, "size": 7, "artifactType": "x"}
    yield "registry-list", "one", canonical({"schemaVersion": 2, "mediaType": oci.INDEX_TYPE, "manifests": [entry]})
    yield "registry-reference", "whole", f"oci://ghcr.io:443/org/a_b:v1@{registry_readers.SUBJECT.digest}".encode()
    scope = "repository:a:pull,push repository:b:pull"
    yield "registry-challenge", "both", f'Basic realm="x", Bearer realm="http://localhost/t",scope="{scope}"'.encode()
    auths = {"ghcr.io": {"auth": "YTpi"}, "https://index.docker.io/v1/": {"identitytoken": "x"}}
    helpers = {"gcr.io": "gcloud"}
    yield "registry-credentials", "docker", canonical({"auths": auths, "credHelpers": helpers, "credsStore": ""})


def _trust() -> Seeds:
    for name in ("signature", "attestation"):
        yield "trust-statement", name, (trust_readers.SIGNED / f"{name}.json").read_bytes()
    signed = json.loads((trust_readers.SIGNED / "signature.json").read_bytes())
    leaf = {"rawBytes": base64.b64encode(trust_readers.LEAF).decode()}
    yield "trust-statement", "certificate", canonical(signed | {"verificationMaterial": {"certificate": leaf}})
    chain = {"x509CertificateChain": {"certificates": [leaf, leaf]}, "tlogEntries": [{"logIndex": "1"}]}
    yield "trust-statement", "chain", canonical(signed | {"verificationMaterial": chain})
    yield "trust-certificate", "leaf", trust_readers.LEAF
    key = (trust_readers.SIGNED / "cosign.pub").read_bytes()
    yield "trust-key", "p256", key
    authority = trust_readers.pem(trust_readers.ROOT)
    yield "trust-authority", "two", authority + trust_readers.pem(trust_readers.LEAF)
    rules = [
        {"name": "a", "scope": "any", "key": key.decode(), "repositories": ["ghcr.io/acme/*"]},
        {"name": "b", "scope": "native", "ca": authority.decode(), "identities": ["*@acme.example"]},
        {"name": "c", "scope": "portable", "digests": [trust_readers.DIGEST]},
    ]
    yield "trust-policy", "three", canonical({"version": 1, "rules": rules, "portable": "vouched"})
    bundle = {"digest": trust_readers.DIGEST, "reference": "oci://ghcr.io/acme/llama", "targets": ["sm_90"]}
    config = f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
    yield "lock", "one", canonical({"version": 1, "config": config, "bundles": [bundle]})


def _bundle() -> Seeds:
    parts: dict[str, bytes] = {}
    forgery = Forgery()
    for part in ("index_bytes", "image_bytes", "manifest_bytes", "attached_bytes"):
        forgery.edit(part, lambda data, part=part: parts.setdefault(part, data))
    with tempfile.TemporaryDirectory() as folder:
        forgery.write(Path(folder) / "x.bundle")
    for part, data in parts.items():
        yield f"bundle-{part.removesuffix('_bytes')}", "tiny", data
    yield "bundle-marker", "tiny", oci.MARKER
    yield "bundle-provenance", "tiny", forgery.provenance
    yield "bundle-constants", "tiny", forgery.constants


def _tokenizers() -> Seeds:
    for kind in (tokenizers_by_hand.letters(32), tokenizers_by_hand.sentencepiece(), tokenizers_by_hand.byte_level()):
        made = json.loads(kind)
        vocab, merges = made["model"]["vocab"], made["model"]["merges"]
        needed = {"".join(merge) for merge in merges} | {part for merge in merges for part in merge}
        # A part of the tokens for bytes is enough.
        made["model"]["vocab"] = {token: id for token, id in vocab.items() if id < 60 or token in needed or id > 258}
        yield "tokenizer", made["decoder"]["type"], json.dumps(made, separators=(",", ":")).encode()
    settings = {"chat_template": "{{ messages }}", "bos_token": "<s>", "added_tokens_decoder": {"0": {"content": "x"}}}
    yield "tokenizer-settings", "plain", canonical(settings)
    letters = {letter: index for index, letter in enumerate("abcdef")} | {"ab": 6, "<s>": 7}
    yield "tokenizer-vocab", "letters", canonical({"merges.txt": "#version: 0.2\na b\n", "vocab.json": letters})
    yield "tokenizer-model", "pieces", _pieces(["<unk>", "<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}a", "a", "b", "ab"])


def _pieces(pieces: list[str]) -> bytes:
    """A sentencepiece model of these pieces, as its protobuf message writes them."""
    from sentencepiece import sentencepiece_model_pb2 as messages

    model = messages.ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.BPE
    for index, piece in enumerate(pieces):
        model.pieces.add(piece=piece, score=-float(index), type=2 if index == 0 else 3 if index < 3 else 1)
    return model.SerializeToString()
