"""Norms, rotations and the cache's write as one op. `tests/e2e/test_families.py` compares whole models' results."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest
from fx_text import read_graph, write_graph

from precast.builder import pipeline
from precast.builder.passes.cache.fuse_rotary_write import fuse_rotary_write

INPUTS = """
q: input(float32, 1, T, 4, 8)
k: input(float32, 1, T, 2, 8)
v: input(float32, 1, T, 2, 6)
cos: input(float32, 1, T, 4)
sin: input(float32, 1, T, 4)
k_cache: input(float32, 9, 16, 2, 8)
v_cache: input(float32, 9, 16, 2, 6)
slots: input(int64, T)
cu_seqlens: input(int32, B1)
kv_lens: input(int32, 2)
pages: input(int32, 5)
indptr: input(int32, B1)
start: input(int32, 2)
q_norm: param(float32, 8)
k_norm: param(float32, 8)
"""
ROTATE = """
q1 = precast.rotary({q}, cos, sin, interleaved=False)
k1 = precast.rotary({k}, {tables}, interleaved={interleaved})
"""
WRITE = "precast.write_kv({written}, v, k_cache, v_cache, slots)\n"
READ = (
    "{name} = precast.paged_attention({query}, k_cache, v_cache, None, cu_seqlens, kv_lens, pages, indptr, start,"
    " scale=0.5)\n"
)
NORMS = """
qn = precast.rms_norm(q, {q_weight}, eps=1e-06, {rule})
kn = precast.rms_norm(k, k_norm, eps={eps}, {rule})
"""
ALIKE = {"q": "q", "k": "k", "tables": "cos, sin", "interleaved": "False"}
NORMED = {"q_weight": "q_norm", "eps": "1e-06", "rule": "cast_before_scale=True"}
WRITTEN = WRITE.format(written="k1")
FIRST = READ.format(name="y", query="q1")


def fused(text: str, inputs: str = INPUTS) -> tuple[bool, str]:
    """Whether the pass changed the graph, and the graph after it without what reads the cache."""
    source = read_graph(inputs + text)
    (record,) = pipeline.run(source.graph, source.ctx, (dataclasses.replace(fuse_rotary_write, requires=()),))
    lines = write_graph(source.graph, source.ctx).splitlines()
    return record.changed, "\n".join(line for line in lines if " = precast.paged_" not in line)


def text(after: str) -> str:
    return textwrap.dedent(after).strip()


def test_rotations_and_a_write_become_one() -> None:
    assert fused(ROTATE.format(**ALIKE) + WRITTEN + FIRST + "return y") == (
        True,
        text("""
        v0 = precast.rotary_write_kv(q, k, v, cos, sin, None, None, k_cache, v_cache, slots, interleaved=False)
        return v1
        """),
    )


def test_selected_blocks_are_read_from_the_cache_as_all_are() -> None:
    selecting = "k_cache, v_cache, selected, cu_seqlens, kv_lens, pages, indptr, start, scale=0.5, block_size=4)\n"
    read = f"y = precast.paged_block_sparse_attention(q1, {selecting}return y"

    found = fused(ROTATE.format(**ALIKE) + WRITTEN + read, INPUTS + "selected: input(int32, 1, T, 2, 3)\n")

    assert found == (
        True,
        text("""
        v0 = precast.rotary_write_kv(q, k, v, cos, sin, None, None, k_cache, v_cache, slots, interleaved=False)
        return v1
        """),
    )


def test_scales_go_along() -> None:
    scaled = INPUTS.replace("k_cache: input(float32", "k_cache: input(float8_e4m3fn")
    scaled = scaled.replace("v_cache: input(float32", "v_cache: input(float8_e4m3fn")
    scaled += "k_scale: param(float32, 1)\nv_scale: param(float32, 1)\n"
    given = "k_scale=k_scale, v_scale=v_scale)"
    write, read = WRITTEN.replace(")", f", {given}"), FIRST.replace(")", f", {given}")

    assert fused(ROTATE.format(**ALIKE) + write + read + "return y", scaled) == (
        True,
        text(f"""
        v0 = precast.rotary_write_kv(q, k, v, cos, sin, None, None, k_cache, v_cache, slots, interleaved=False, {given}
        return v1
        """),
    )


@pytest.mark.parametrize("rule", ["cast_before_scale=True", "offset=1.0, cast_before_scale=False"])
@pytest.mark.parametrize("weight", ["q_norm", "None"])
def test_norms_of_both_are_taken_in(weight: str, rule: str) -> None:
    norms = NORMS.format(**NORMED | {"rule": rule, "q_weight": weight})
    offset, cast = ("1.0", "False") if "offset" in rule else ("0.0", "True")
    found = fused(norms + ROTATE.format(**ALIKE | {"q": "qn", "k": "kn"}) + WRITTEN + FIRST + "return y")

    assert found == (
        True,
        f"v0 = precast.rotary_write_kv(q, k, v, cos, sin, {weight}, k_norm, k_cache, v_cache, slots, interleaved=False,"
        f" eps=1e-06, offset={offset}, cast_before_scale={cast})\nreturn v1",
    )


@pytest.mark.parametrize(
    ("norm", "rotated", "returned"),
    [
        pytest.param({"eps": "1e-05"}, {"q": "qn", "k": "kn"}, "y", id="another eps"),
        pytest.param({}, {"q": "qn"}, "y", id="of the queries only"),
        pytest.param({}, {"k": "kn"}, "y", id="of the keys only"),
        pytest.param({}, {"q": "qn", "k": "kn"}, "y, kn", id="whose result is used elsewhere"),
    ],
)
def test_norms_that_stay(norm: dict[str, str], rotated: dict[str, str], returned: str) -> None:
    norms = NORMS.format(**NORMED | norm)
    changed, found = fused(norms + ROTATE.format(**ALIKE | rotated) + WRITTEN + FIRST + f"return {returned}")

    assert changed
    assert "precast.rms_norm(" in found
    assert "None, None, k_cache" in found


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(ROTATE.format(**ALIKE) + WRITTEN + FIRST + "return y, k1", id="keys that are used elsewhere"),
        pytest.param(ROTATE.format(**ALIKE | {"tables": "sin, cos"}) + WRITTEN + FIRST + "return y", id="other tables"),
        pytest.param(ROTATE.format(**ALIKE | {"interleaved": "True"}) + WRITTEN + FIRST + "return y", id="other pairs"),
        pytest.param(ROTATE.format(**ALIKE) + WRITE.format(written="k") + FIRST + "return y, k1", id="keys not turned"),
        pytest.param(
            ROTATE.format(**ALIKE) + WRITTEN + READ.format(name="y", query="q") + "return y, q1",
            id="queries not turned",
        ),
        pytest.param(
            ROTATE.format(**ALIKE) + "early = aten.neg(q1)\n" + WRITTEN + FIRST + "return y, early",
            id="queries that are used before the write",
        ),
        pytest.param(ROTATE.format(**ALIKE) + WRITTEN + "return q1", id="nothing that reads"),
    ],
)
def test_near_a_rotation_and_a_write(left: str) -> None:
    changed, found = fused(left)

    assert not changed
    assert "precast.write_kv(" in found


def test_a_layer_that_shares_its_keys_turns_its_queries_alone() -> None:
    second = "q2 = precast.rotary(q, sin, cos, interleaved=False)\n" + READ.format(name="z", query="q2")
    changed, found = fused(ROTATE.format(**ALIKE) + WRITTEN + FIRST + second + "return y, z")

    assert changed
    assert found.count("precast.rotary_write_kv(") == 1
    assert found.count("precast.rotary(") == 1


def test_queries_that_are_used_after_the_write_too() -> None:
    changed, found = fused(ROTATE.format(**ALIKE) + WRITTEN + FIRST + "late = aten.neg(q1)\nreturn y, late")

    assert changed
    assert "aten.neg.default(v0)" in found
