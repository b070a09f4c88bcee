"""`inspect` and `diff`: what they show is what the bundle holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import families
import msgspec
import pytest
from graph_text import parse_graph
from recitation import Command

from precast.cli import show
from precast.cli.capture_view import capture
from precast.cli.compare import difference
from precast.cli.kernels_view import kernels
from precast.cli.shards_view import shards
from precast.ir.artifact import Bundle
from precast.ir.bundle.attached import compose
from precast.ir.encoding import FORMAT
from precast.ir.graph.schema import CachePlan, Call, CapturePlan, Graph, Node, Ref, TensorType, Value
from precast.ir.memory.capture import NODE_SECONDS, WORK_PER_SECOND, capture_plan
from precast.ir.native import NativeLayer
from precast.kernels.stateful.limits import MAX_WALKED
from precast.kernels.use import Target


def fields_of(command: Command, *arguments: str | Path) -> dict[str, Any]:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def with_caches(bundle: Path, window: int | None, count: int) -> Bundle:
    """The opened bundle with the first `count` of its cache groups, their window set."""
    opened = Bundle.open(bundle)
    groups = tuple(
        msgspec.structs.replace(group, spec=msgspec.structs.replace(group.spec, window=window))
        for group in opened.graph.caches.groups[:count]
    )
    plan = CachePlan(opened.graph.caches.pools, groups)
    return msgspec.structs.replace(opened, graph=msgspec.structs.replace(opened.graph, caches=plan))


def test_summary_in_fields(bundle: Path, command: Command) -> None:
    fields = fields_of(command, "inspect", bundle)

    opened = Bundle.open(bundle)
    on_disk = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    tokenizer = sum(len(data) for data in opened.files("tokenizer").values())
    assert set(fields) == {
        "digest", "format", "model", "graph", "ops", "cache_groups", "bytes", "files", "built_with", "checked",
        "precast_share", "weights_bytes", "few_bits", "activations", "expert_activations", "activation_bytes",
        "provenance", "attached", "cache_dtypes", "native_layers",
    }  # fmt: skip
    assert [(each["tokens"], each["sequences"]) for each in fields["activation_bytes"]] == [(8192, 256), (256, 256)]
    assert fields["activation_bytes"][0]["bytes"] > fields["activation_bytes"][1]["bytes"] > 256 * 131 * 48
    assert fields["digest"] == opened.digest
    assert fields["format"] == ".".join(map(str, FORMAT))
    assert fields["model"]["num_parameters"] == 656_512
    assert fields["graph"] == {"blocks": 2, "calls": 4, "nodes": 35, "params": 26}
    assert fields["ops"] == opened.manifest.ops
    assert (fields["checked"], fields["precast_share"]) == (False, 1.0)
    assert fields["cache_groups"] == {"full": 4}
    assert (fields["cache_dtypes"], fields["native_layers"]) == ({"full": "float32"}, [])
    assert fields["bytes"] == {"total": on_disk, "without_tokenizer": on_disk - tokenizer}
    assert fields["files"] == ["graph", "constants", *sorted(opened.files("tokenizer"))]
    assert fields["provenance"]["from_snapshot"] is False


def test_summary_in_words(bundle: Path, command: Command) -> None:
    text = command("inspect", bundle).stdout

    assert Bundle.open(bundle).digest in text
    assert "LlamaForCausalLM, 4 layers, 656,512 parameters, float32" in text
    assert "1,024 tokens a sequence, vocabulary 512" in text
    assert "full: 4 layers" in text


@pytest.mark.parametrize(
    ("notes", "rows", "others"),
    [
        (["float32 was chosen", "eos_token_id 9"], ["float32 was chosen", "eos_token_id 9"], "python 3"),
        (["a"] * 7, [*"aaaaa", "and 2 more"], "python 3"),
        ([], [], "python 3, notes []"),
        ("of another form", [], "python 3, notes of another form"),
    ],
)
def test_what_a_build_noted_has_rows_of_its_own(notes: object, rows: list[str], others: str, bundle: Path) -> None:
    opened = msgspec.structs.replace(Bundle.open(bundle), provenance={"python": "3", "notes": notes})

    lines = [line.partition(" ") for line in show.summary(opened).text.splitlines()]

    assert [text.strip() for name, _, text in lines if name == "note"] == rows
    assert [text.strip() for name, _, text in lines if name == "provenance"] == [others]


@pytest.mark.parametrize(
    ("left", "rows", "others"),
    [
        ({"it is a head": ["a", "b"], "taken twice": ["c"]}, ["a, b: it is a head", "c: taken twice"], "python 3"),
        ({"it is a head": 3}, ["3: it is a head"], "python 3"),
        ({}, [], "python 3, dequantised {}"),
        (["a"], [], "python 3, dequantised ['a']"),
    ],
)
@pytest.mark.parametrize("kind", ["dequantised", "not quantised", "inputs not rounded"])
def test_what_is_dequantised_has_rows_with_the_reason(
    kind: str, left: object, rows: list[str], others: str, bundle: Path
) -> None:
    opened = msgspec.structs.replace(Bundle.open(bundle), provenance={"python": "3", kind: left})

    lines = show.summary(opened).text.splitlines()

    assert [line.removeprefix(kind).strip() for line in lines if line.startswith(f"{kind} ")] == rows
    said = [line.removeprefix("provenance").strip() for line in lines if line.startswith("provenance ")]
    assert said == [others.replace("dequantised", kind)]


def test_summary_has_the_bytes_of_weights_by_their_type(bundle: Path, command: Command) -> None:
    num_bytes = 4 * Bundle.open(bundle).manifest.model.num_parameters

    assert fields_of(command, "inspect", bundle)["weights_bytes"] == {"float32": num_bytes}
    assert f"weights      {num_bytes:,} bytes of float32\n" in command("inspect", bundle).stdout


def test_summary_names_native_layers_and_dtypes_of_caches(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    plan = msgspec.structs.replace(opened.graph.caches, groups=tuple(
        msgspec.structs.replace(group, spec=msgspec.structs.replace(group.spec, dtype="bfloat16"))
        for group in opened.graph.caches.groups
    ))  # fmt: skip
    layer = NativeLayer("sm_90", 12000, {}, {}, (), {})
    graph = msgspec.structs.replace(opened.graph, caches=plan)

    found = show.summary(msgspec.structs.replace(opened, graph=graph, native={"sm_90": layer}))

    assert re.search("^caches +full: 4 layers in bfloat16$", found.text, re.MULTILINE)
    assert re.search("^native +layers for sm_90$", found.text, re.MULTILINE)
    assert found.fields["cache_dtypes"] == {"full": "bfloat16"}


def test_summary_says_how_many_manifests_it_does_not_list(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    signature = compose(opened.descriptor, "application/x-signature", [])

    lines = show.summary(msgspec.structs.replace(opened, attached=(signature,) * 23)).text.splitlines()

    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("attached ")][-2:] == [
        "application/x-signature", "and 3 more",
    ]  # fmt: skip


def test_summary_of_one_layer(tmp_path: Path, command: Command) -> None:
    config = families.make_config("llama")
    config.num_hidden_layers = 1
    config.save_pretrained(tmp_path / "model")

    text = command("build", tmp_path / "model", "-o", tmp_path / "b").stdout

    assert "LlamaForCausalLM, 1 layer, " in text
    assert "full: 1 layer\n" in text


def test_graph_is_the_text_form(bundle: Path, command: Command) -> None:
    graph = Bundle.open(bundle).graph

    assert parse_graph(command("inspect", bundle, "--graph").stdout) == graph
    assert parse_graph(fields_of(command, "inspect", bundle, "--graph")["graph"]) == graph


def test_passes_are_those_that_ran(bundle: Path, command: Command) -> None:
    records = Bundle.open(bundle).manifest.passes

    rows = command("inspect", bundle, "--passes").stdout.splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [[record.stage, record.name] for record in records]
    assert any("precast.rms_norm +9" in row for row in rows)
    fields = fields_of(command, "inspect", bundle, "--passes")
    assert msgspec.convert(fields["passes"], tuple[type(records[0]), ...]) == records  # type: ignore[misc]


def test_all_parts_that_are_asked_for_are_shown(bundle: Path, command: Command) -> None:
    graph, cache = (command("inspect", bundle, part).stdout for part in ("--graph", "--cache"))

    assert command("inspect", bundle, "--cache", "--graph").stdout == f"{graph}\n{cache}"
    fields = fields_of(command, "inspect", bundle, "--graph", "--cache")
    assert {"graph", "groups", "slab_bytes"} <= set(fields)


def test_weights_say_which_config_was_built_from(bundle: Path, command: Command) -> None:
    assert fields_of(command, "inspect", bundle, "--weights")["config"]["rope_parameters.rope_theta"] == 10000.0
    assert "rms_norm_eps                1e-6" in command("inspect", bundle, "--weights").stdout


def test_weights_have_their_recipes(bundle: Path, command: Command) -> None:
    fields = fields_of(command, "inspect", bundle, "--weights")

    params = {param["name"]: param for param in fields["params"]}
    assert len(params) == 26
    assert params["model.embed_tokens.weight"] == {
        "name": "model.embed_tokens.weight",
        "type": "float32[ceildiv(512, tp), 128]",
        "recipe": 'cast(slice(read("model.embed_tokens.weight", [512, 128]), dim=0, start=(ceildiv(512, tp) * rank),'
        " length=ceildiv(512, tp)), float32)",
    }
    assert params["model.norm.weight"] == {
        "name": "model.norm.weight",
        "type": "float32[128]",
        "recipe": 'cast(read("model.norm.weight", [128]), float32)',
    }
    fused = params["model.layers.3.mlp.gate_proj_up_proj.weight"]["recipe"]
    assert fused.startswith("concat([")
    assert "layers.3.mlp.up_proj.weight" in fused
    assert fields["unused"] == []
    assert fields["ignored"] == ["*rotary_emb.inv_freq"]
    assert fields["optional_prefixes"] == ["model."]
    text = command("inspect", bundle, "--weights").stdout
    assert all(name in text for name in params)


def test_cache_costs_whole_pages(bundle: Path, other_bundle: Path, command: Command) -> None:
    one, other = (fields_of(command, "inspect", path, "--cache") for path in (bundle, other_bundle))

    token = 4 * 2 * (32 + 32)  # layers, kv heads, key and value size
    assert one["groups"] == [
        {
            "name": "full", "pool": "pool0", "layers": 4, "bytes_per_token": 4 * token, "bytes_per_sequence": 0,
            "page_bytes": 16 * 4 * token, "page_stride": 16 * 4 * token, "pages_per_slab": 1,
            "spec": {
                "kind": "paged", "num_kv_heads": 2, "head_size": 32, "value_size": 32, "dtype": "float32",
                "page_size": 16, "window": None, "chunk": None,
            },
        }
    ]  # fmt: skip
    assert one["slab_bytes"] == 16 * 4 * token
    assert one["bytes_per_sequence"] == {"128": 128 * 4 * token, "1024": 1024 * 4 * token}
    assert other["bytes_per_sequence"] == {"128": 144 * 2 * token, "200": 240 * 2 * token}


def test_cache_says_how_much_a_window_leaves_visible(bundle: Path) -> None:
    text = show.cache(with_caches(bundle, window=64, count=1)).text

    # 63 tokens before the next one, in pages of 16 tokens of 2048 bytes each: the rest was given back
    assert [line.split()[1:] for line in text.splitlines()[-2:]] == [["131,072", "100.0", "%"]] * 2


STATES = """
pool pool0(pages=P0)
pool pool1(pages=P1)
pool pool2(pages=P2)
pool pool3(pages=P3)
group conv_6x3(pool=pool0, spec=conv(shape=[6, 3], dtype=bfloat16), slot_ids=%c) {
  slot layers.0(%layers.0.conv: bfloat16[P0, 6, 3])
  slot layers.1(%layers.1.conv: bfloat16[P0, 6, 3])
}
group state_4x5(pool=pool1, spec=state(shape=[4, 5], dtype=float32), slot_ids=%s) {
  slot layers.0.s(%layers.0.state: float32[P1, 4, 5])
}
group latent(pool=pool2, spec=latent(latent_size=16, rope_size=4, dtype=bfloat16, page_size=8, window=none),
    page_indices=%a, page_indptr=%b, page_start=%d, slot_mapping=%e) {
  slot layers.2(%layers.2.latent: bfloat16[P2, 8, 20])
}
group chunks(pool=pool3,
    spec=paged(num_kv_heads=2, head_size=4, value_size=6, dtype=bfloat16, page_size=8, window=none, chunk=64),
    page_indices=%f, page_indptr=%g, page_start=%h, slot_mapping=%i) {
  slot layers.3(%layers.3.k: bfloat16[P3, 8, 2, 4], %layers.3.v: bfloat16[P3, 8, 2, 6])
}
main { return }
"""


def test_caches_of_every_kind(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    plan = parse_graph(STATES).caches
    report = show.cache(msgspec.structs.replace(opened, graph=msgspec.structs.replace(opened.graph, caches=plan)))

    latent, chunks, conv, state = report.fields["groups"]
    assert conv["spec"] == {"kind": "conv", "shape": (6, 3), "dtype": "bfloat16"}
    assert (conv["layers"], conv["bytes_per_token"], conv["bytes_per_sequence"]) == (2, 0, 2 * 6 * 3 * 2)
    assert (state["spec"]["kind"], state["bytes_per_sequence"]) == ("state", 4 * 5 * 4)
    assert latent["spec"] == {
        "kind": "latent", "latent_size": 16, "rope_size": 4, "dtype": "bfloat16", "page_size": 8, "window": None,
    }  # fmt: skip
    assert (latent["bytes_per_token"], latent["bytes_per_sequence"]) == (20 * 2, 0)
    assert chunks["spec"]["chunk"] == 64
    # Tensors begin at multiples of 256 bytes: a page of the latents takes 512, of the keys and values 256 each.
    assert [(group["page_bytes"], group["page_stride"]) for group in report.fields["groups"]] == [
        (320, 512), (320, 512), (72, 512), (80, 256),
    ]  # fmt: skip
    assert (report.fields["slab_bytes"], [group["pages_per_slab"] for group in report.fields["groups"]]) == (
        512, [1, 1, 1, 2],
    )  # fmt: skip
    # At 128 and at 1024 a chunk begins: of those before it no page is kept.
    assert report.fields["bytes_per_sequence"] == {n: 512 + 256 + n // 8 * 512 for n in (128, 1024)}
    rows = [line.split() for line in report.text.splitlines()]
    assert rows[1] == ["latent", "pool2", "1", "latent", "16", "+", "4", "bfloat16", "8", "-", "40", "-"]
    assert rows[2][3:] == ["kv", "2", "x", "(4", "+", "6)", "bfloat16", "8", "chunks", "of", "64", "40", "-"]
    assert rows[3] == ["conv_6x3", "pool0", "2", "conv", "6x3", "bfloat16", "-", "-", "-", "72"]
    assert rows[8] == ["latent", "320", "512", "1", "37.5", "%"]
    # The token at 1024 sees all states and latents, and nothing of the chunk before its own.
    assert rows[-1][-2] == f"{100 * (72 + 80 + 1024 * 40) / (512 + 256 + 128 * 512):.1f}"


def test_model_without_caches(bundle: Path) -> None:
    report = show.cache(with_caches(bundle, window=None, count=0))

    assert report.text == "no caches"
    assert report.fields["bytes_per_sequence"] == {128: 0, 1024: 0}


def test_equal_bundles(bundle: Path, command: Command) -> None:
    result = command("diff", bundle, bundle)

    assert result.exit_code == 0
    assert result.stdout == f"equal: {Bundle.open(bundle).digest}\n"
    assert fields_of(command, "diff", bundle, bundle) == {"equal": True, "differences": []}


def test_bundles_that_differ(bundle: Path, other_bundle: Path, command: Command) -> None:
    result = command("diff", bundle, other_bundle, "--json")

    assert result.exit_code == 1
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["equal"] is False
    lines = found["differences"]
    assert 'manifest model.dtype: "float32" -> "bfloat16"' in lines
    assert "manifest model.max_seq_len: 1024 -> 200" in lines
    assert any(line.startswith("param model.norm.weight: float32[128] = ") for line in lines)
    (line,) = [line for line in lines if line.startswith("param model.layers.*.input_layernorm.weight (4 alike): ")]
    assert line.count('"model.layers.*.input_layernorm.weight"') == 2
    assert any(line.startswith("cache group full: 4 layers") and '"page_size":48' in line for line in lines)
    (line,) = [line for line in lines if line.startswith("block layer1: ")]
    assert re.match(r"block layer1: \d+ lines differ: %\S+: float32\[.* -> %\S+: bfloat16\[", line)
    assert {line.split()[1] for line in lines if line.startswith("file ")} == {"graph:"}
    assert [line for line in lines if line.startswith("graph capture")] == []
    assert command("diff", bundle, other_bundle).stdout.splitlines() == lines


def test_a_pass_that_was_left_out_is_named_alone(bundle: Path) -> None:
    """Those behind it are still the same."""
    first = Bundle.open(bundle)
    passes = first.manifest.passes
    manifest = msgspec.structs.replace(first.manifest, passes=(*passes[:3], *passes[4:]))

    lines = difference(first, msgspec.structs.replace(first, manifest=manifest, digest="another")).fields["differences"]

    assert [line.partition(":")[0] for line in lines] == sorted(f"pass {passes[place].name}" for place in (2, 3))
    assert f"pass {passes[3].name}: " in lines[0] + lines[1]


def test_capture_plans_that_differ(bundle: Path) -> None:
    first = Bundle.open(bundle)
    graph = msgspec.structs.replace(first.graph, capture=CapturePlan((1, 2)))
    second = msgspec.structs.replace(first, graph=graph, digest="another")

    (line,) = difference(first, second).fields["differences"]

    assert re.fullmatch(r"graph capture: 1 line differs: 1, 2, 4, 8, .* -> 1, 2", line)


@pytest.mark.parametrize("swapped", [False, True])
def test_what_only_one_bundle_has(swapped: bool, bundle: Path, bare_bundle: Path, command: Command) -> None:
    paths = (bare_bundle, bundle) if swapped else (bundle, bare_bundle)

    lines = command("diff", *paths).stdout.splitlines()

    (line,) = [line for line in lines if line.startswith("file tokenizer.json: ")]
    assert line.endswith(" -> absent") is not swapped
    assert line.startswith("file tokenizer.json: absent -> ") is swapped


def test_names_in_a_table_stay_in_their_cells() -> None:
    text = show.table([("na\nme", "last\x1b"), ("x" * 10_000, "y"), ("short", "z" * 5_000)])

    assert len(text.splitlines()) == 3
    assert text.startswith(r"na\nme")
    assert r"last\x1b" in text
    assert max(map(len, text.splitlines())) < 6_000


# --- kernels -----------------------------------------------------------------------------------------------------


def kernels_of(command: Command, bundle: Path, *target: str) -> dict[str, dict[str, Any]]:
    """The rows of `inspect --kernels`, by op."""
    fields = fields_of(command, "inspect", bundle, "--kernels", *target)
    assert fields["target"] == (target[1] if target else "sm_90")
    return {row["op"]: row for row in fields["kernels"]}


def test_kernels_of_a_gpu_are_shown_by_default(bundle: Path, command: Command) -> None:
    found = kernels_of(command, bundle)

    slots = ("to_48", "to_64", "to_96", "many")
    beside = [f"beside_{what}_{each}" for what in ("hopper", "prompts") for each in slots]
    others = ["small", "to_16", "to_32", "to_48", "to_64", *beside]
    assert found["precast.paged_attention@1"] == {
        "op": "precast.paged_attention@1", "dtype": "float32", "implementation": "triton.paged_attention.small",
        "sizes": "T 0 to 64, B 3 to 32", "control": "static", "nodes": 2,
        "reason": "the fastest of 20; not cuda.paged_attention.few: q is float32, it takes float16, bfloat16; nor "
                  + ", ".join(f"cuda.paged_attention.{name}" for name in others)
                  + "; not triton.paged_attention.few: B is 3, it takes 0 to 2",
    }  # fmt: skip
    assert {row["control"] for row in found.values()} == {"static"}
    assert sum(row["nodes"] for row in found.values()) == 35


def test_kernels_of_a_cpu_say_why_not_the_faster_ones(bundle: Path, command: Command) -> None:
    row = kernels_of(command, bundle, "--target", "cpu")["precast.rotary_write_kv@1"]

    assert row["implementation"] == "reference.rotary_write_kv"
    assert row["reason"] == "the only one; not triton.rotary_write_kv: it runs on cuda"


def test_kernels_of_an_older_gpu_are_not_triton_s(bundle: Path, command: Command) -> None:
    row = kernels_of(command, bundle, "--target", "sm_75")["precast.paged_attention@1"]

    assert (row["implementation"], row["control"]) == ("torch.paged_attention", "host")
    assert row["reason"].endswith("not triton.paged_attention: it wants compute capability 8.0 or higher")


def test_an_op_that_nothing_computes_is_shown_as_such(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    given = Value("x", TensorType("float8_e4m3fn", (2, 2)))
    node = Node("aten.matmul.default", {"self": Ref("x"), "other": Ref("x")}, (Value("y", given.type),))
    graph = Graph((), (given,), (), (), (), (node,), {"y": "y"})

    report = kernels(msgspec.structs.replace(opened, graph=graph), Target.parse("sm_90"))

    (row,) = report.fields["kernels"]
    assert (row["implementation"], row["nodes"]) == ("none", 1)
    assert "self is float8_e4m3fn, it takes float16, bfloat16, float32, float64" in row["reason"]


def test_fused_ops_are_shown_with_their_steps(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    graph = parse_graph(
        """
        inputs { %x: float32[4, 8] %y: float32[4, 8] }
        main {
          %a, %a1 = precast.fused(x0=%x, x1=%y, steps={%s0 = aten.silu.default(self=%x0),
            %s1 = aten.mul.Tensor(self=%s0, other=%x1), return %s0, %s1})
          %b, %b1 = precast.fused(x0=%x, x1=%y, steps={%s0 = aten.silu.default(self=%x0),
            %s1 = aten.mul.Tensor(self=%s0, other=%x1), return %s0, %s1})
          return y=%a
        }
        """
    )

    report = kernels(msgspec.structs.replace(opened, graph=graph), Target.parse("sm_90"))

    assert report.fields["fused"] == [{"steps": ["silu", "mul"], "operands": 2, "results": 2, "nodes": 2}]
    assert report.fields["kernels"][0]["implementation"] == "triton.fused"
    assert "2         2        2      silu, mul" in report.text


# --- captured steps ----------------------------------------------------------------------------------------------


def test_captured_sizes_are_the_bundle_s_with_their_reasons(bundle: Path, command: Command) -> None:
    fields = fields_of(command, "inspect", bundle, "--capture")

    sizes = list(Bundle.open(bundle).graph.capture.sizes)
    assert len(sizes) > 20
    assert fields["target"] == "sm_90"
    found = fields["capture"]
    assert (found["sizes"], found["planned_by"]) == (sizes, "builder")
    assert (found["nodes"], found["launch_seconds"]) == (65, round(65 * NODE_SECONDS, 6))
    assert found["hidden_from_tokens"] == pytest.approx(
        65 * NODE_SECONDS * WORK_PER_SECOND / found["flop_per_token"], abs=1
    )
    # The model's products, once for each parameter but the embedding, which the head reads as well; attention beside.
    assert 2 * 656_512 < found["flop_per_token"] < 4 * 656_512
    assert found["pieces"] == {str(size): 1 for size in sizes}
    assert found["reads_host"] == []


def test_captured_sizes_in_words(bundle: Path, command: Command) -> None:
    text = command("inspect", bundle, "--capture").stdout

    assert "sizes     1, 2, 4, 8, 16, 32, 64, 128, 256, " in text
    assert f"65 nodes run, which takes a host {65_000 * NODE_SECONDS:.1f} ms op by op" in text
    assert text.endswith("pieces    1: steps are captured whole\n")


def test_a_target_whose_attention_reads_the_host_cuts_steps_in_front_of_it(bundle: Path, command: Command) -> None:
    options = ("--capture", "--target", "sm_75")
    found = fields_of(command, "inspect", bundle, *options)["capture"]

    assert set(found["pieces"].values()) == {5}  # 4 layers
    (row,) = found["reads_host"]
    assert (row["op"], row["implementation"], row["nodes"]) == (
        "precast.paged_attention@1", "torch.paged_attention", 4,
    )  # fmt: skip
    assert row["sizes"] == found["sizes"]
    text = command("inspect", bundle, *options).stdout
    assert "pieces    5\n" in text
    assert re.search(r"^precast.paged_attention@1  4      torch.paged_attention  all    the only one; not", text, re.M)


BY_ROWS = """
  symbols { T: 1.. B: 1.. P: 0.. }
  inputs {
    %x: float32[1, T, 2, 8] %state: float32[P, 2, 8, 8] %slots: int32[B] %cu: int32[(B + 1)] %kv: int32[B]
  }
  capture(sizes=SIZES)
  block layer {
    inputs { %x: float32[1, T, 2, 8] %slots: int32[B] %cu: int32[(B + 1)] %kv: int32[B] }
    caches { %state: float32[P, 2, 8, 8] }
    %y = precast.stateful_linear_attention(
      q=%x, k=%x, v=%x, decay=%x, state=%state, slots=%slots, cu_seqlens=%cu, kv_lens=%kv, scale=1.0
    )
    return %y
  }
  main {
    %a = call layer(x=%x, slots=%slots, cu=%cu, kv=%kv, state=%state)
    %b = call layer(x=%a, slots=%slots, cu=%cu, kv=%kv, state=%state)
    return a=%a, b=%b
  }
"""


def test_an_implementation_for_few_tokens_cuts_the_larger_steps_alone(bundle: Path) -> None:
    """The one for many reads the host, in each layer of the two."""
    opened = Bundle.open(bundle)
    graph = parse_graph(BY_ROWS.replace("SIZES", f"[64, {MAX_WALKED + 1}, {MAX_WALKED}, 1]"))

    report = capture(msgspec.structs.replace(opened, graph=graph), Target.parse("sm_90"))

    found = report.fields["capture"]
    assert found["pieces"] == {64: 1, MAX_WALKED + 1: 3, MAX_WALKED: 1, 1: 1}
    assert [row["sizes"] for row in found["reads_host"]] == [(MAX_WALKED + 1,)]
    more = f"{MAX_WALKED + 1} to {MAX_WALKED + 1}"
    assert f"1: steps are captured whole (sizes 1 to {MAX_WALKED}); 3 (sizes {more})" in report.text


def test_a_bundle_without_a_plan_says_that_the_loader_makes_it(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    graph = msgspec.structs.replace(opened.graph, capture=CapturePlan())

    report = capture(msgspec.structs.replace(opened, graph=graph), Target.parse("sm_90"))

    assert report.fields["capture"]["planned_by"] == "loader"
    assert report.fields["capture"]["sizes"] == capture_plan(graph).sizes
    assert "the bundle has no plan, the loader makes this one" in report.text


def test_an_op_that_nothing_computes_is_shown_beside_the_pieces(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    given = Value("x", TensorType("float8_e4m3fn", (2, 2)))
    node = Node("aten.matmul.default", {"self": Ref("x"), "other": Ref("x")}, (Value("y", given.type),))
    graph = Graph((), (given,), (), (), (), (node,), {"y": "y"})

    report = capture(msgspec.structs.replace(opened, graph=graph), Target.parse("sm_90"))

    (row,) = report.fields["capture"]["reads_host"]
    assert (row["implementation"], row["nodes"]) == ("none", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "cpu"], "--target goes with --kernels or --capture"),
        (["--capture", "--target", "h100"], "'h100' is no target"),
        (["--kernels", "--target", "h100"], "'h100' is no target: expected cpu, or a compute capability such as sm_90"),
        (["--kernels", "--target", "sm_9"], "'sm_9' is no target"),
    ],
)
def test_targets_that_are_none_are_usage_errors(
    bundle: Path, command: Command, options: list[str], message: str
) -> None:
    result = command("inspect", bundle, *options)

    assert result.exit_code == 2
    assert message in result.stderr


def test_shards_are_shown_beside_the_plan_of_transformers(bundle: Path, command: Command) -> None:
    fields, text = fields_of(command, "inspect", bundle, "--shards"), command("inspect", bundle, "--shards").stdout

    theirs = fields["tp_plan"]
    assert theirs["same"] == theirs["entries"] > 0
    assert re.search(rf"transformers' own plan: {theirs['same']} of the {theirs['same']} entries", text)
    assert re.search(r"model.embed_tokens.weight +- +vocab +1 +embedding, by \d+", text)


def test_a_provenance_record_that_another_builder_wrote_is_not_shown_as_a_comparison(bundle: Path) -> None:
    opened = Bundle.open(bundle)

    report = shards(msgspec.structs.replace(opened, provenance={"tp_plan": {"entries": "many"}}))

    assert "tp_plan" not in report.fields
    assert "transformers" not in report.text


def test_entries_of_a_plan_file_are_shown(tmp_path: Path, command: Command) -> None:
    (tmp_path / "plan.json").write_text('{"model.layers.*.mlp": "replicate"}')
    families.make_config("llama").save_pretrained(tmp_path)
    said = command("build", tmp_path, "-o", tmp_path / "b", "--shard-plan", tmp_path / "plan.json")
    assert said.exit_code == 0, said.stderr

    fields = fields_of(command, "inspect", tmp_path / "b", "--shards")
    text = command("inspect", tmp_path / "b", "--shards").stdout

    assert fields["overrides"] == {"model.layers.*.mlp": "replicate"}
    assert re.search(r"the plan file's entry +choice\nmodel.layers.\*.mlp +replicate\n", text)
    assert re.search(r"other +replicated .* the plan file says replicate", text)


def test_a_plan_file_that_does_not_fit_names_itself_and_what_is_known(tmp_path: Path, command: Command) -> None:
    (tmp_path / "plan.json").write_text('{"model.layers.*.mlp": "whole"}')
    families.make_config("llama").save_pretrained(tmp_path)

    said = command("build", tmp_path, "-o", tmp_path / "b", "--shard-plan", tmp_path / "plan.json")

    assert said.exit_code == 1
    assert "plan.json: expected names with choices of replicate" in said.stderr
    assert "code: shard-plan-invalid" in said.stderr


def test_stages_are_shown_with_their_layers(bundle: Path, command: Command) -> None:
    fields, text = fields_of(command, "inspect", bundle, "--shards"), command("inspect", bundle, "--shards").stdout

    layers = sum(isinstance(step, Call) for step in Bundle.open(bundle).graph.main)
    assert [(each["pp"], sum(each["layers"])) for each in fields["pipelines"]] == [
        (stages, layers) for stages in range(2, layers + 1)
    ]
    one_each = ", ".join(map(str, range(layers)))
    assert re.search(
        rf"stages \(pp\) +layers of each +parameters of the largest\n.*\n{layers} +{one_each} ", text, re.S
    )


def test_what_ranks_with_sequences_of_their_own_change_is_shown(bundle: Path, command: Command) -> None:
    fields, text = fields_of(command, "inspect", bundle, "--shards"), command("inspect", bundle, "--shards").stdout

    layers = sum(isinstance(step, Call) for step in Bundle.open(bundle).graph.main)
    assert fields["dp"]["refused"] is None
    assert {each["kind"]: (each["tokens"], each["layers"]) for each in fields["dp"]["shards"]} == {
        "attention": ("own", layers),
        "feed-forward": ("all", layers),
        "embedding": ("all", 1),
        "head": ("all", 1),
    }
    assert fields["replicated_share"] < fields["dp"]["replicated_share"] < 1
    assert re.search(rf"with sequences of their own \(dp\) +tokens +layers\nattention +own +{layers}\n", text)


def test_why_ranks_of_a_model_have_no_sequences_of_their_own_is_shown(tmp_path: Path, command: Command) -> None:
    families.make_config("mamba").save_pretrained(tmp_path)
    command("build", tmp_path, "-o", tmp_path / "b")

    text = command("inspect", tmp_path / "b", "--shards").stdout

    assert "no sequences of their own (dp): nothing of this model's layers would stay split" in text


def test_a_head_that_is_tied_to_the_embedding_has_a_row(tmp_path: Path, command: Command) -> None:
    families.make_config("llama-tied-bias").save_pretrained(tmp_path)
    command("build", tmp_path, "-o", tmp_path / "b")

    rows = {row["kind"]: row for row in fields_of(command, "inspect", tmp_path / "b", "--shards")["shards"]}

    assert rows["embedding"]["params"] == ["model.embed_tokens.weight"]
    head = {name: rows["head"][name] for name in ("mode", "params", "units", "collective")}
    assert head == {"mode": "vocab", "params": [], "units": 131, "collective": "all_gather"}
