"""On a GPU: bundles of nine families, built elsewhere, against transformers' float32 logits on the CPU.

Claim: dense, experts, latent attention, hybrid state space and shared kv models give, in bfloat16 on the GPU, logits
that are as near to the float32 reference as transformers' own bfloat16 logits on the CPU are; and in float32 the
same greedy tokens; and steps replayed as graphs, one ahead, give the tokens of steps run op by op, greedy and drawn,
in one graph a step. Head sizes, state sizes and ranks are those of published models; widths and depths are small.

    python benchmarks/bench_gpu_families.py --prepare DIR     # where transformers is: bundles, weights, references
    python benchmarks/bench_gpu_families.py --compare DIR     # on the GPU, without transformers
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from support import harness

LENGTHS = (3, 40, 97)
NUM_TOKENS = 32
DTYPES = ("float32", "bfloat16")

_BASE: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 192, "intermediate_size": 384, "max_position_embeddings": 2048,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 192, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"num_hidden_layers": 3, "head_dim": 128}),
    "experts": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4,
         "moe_intermediate_size": 96, "norm_topk_prob": True},
    ),
    "latent attention": (
        "deepseek_v3",
        {**_LATENT, "num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
         "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 96},
    ),
    "hybrid state space": (
        "nemotron_h",
        {"num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-", "head_dim": 128, "mamba_num_heads": 8,
         "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2, "chunk_size": 64},
    ),
    "shared kv": (
        "gemma4_text",
        {"num_hidden_layers": 6, "head_dim": 256, "global_head_dim": 512, "sliding_window": 32,
         "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 1024,
         "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "sinks and windows": (
        "gpt_oss",
        {"num_hidden_layers": 2, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
         "sliding_window": 32},
    ),
    "gated delta rule": (
        "qwen3_next",
        {"num_hidden_layers": 4, "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
    ),
    "selective scan": ("mamba", {"num_hidden_layers": 3, "state_size": 16, "time_step_rank": 12}),
    "linear attention": (
        "minimax",
        {"num_hidden_layers": 2, "head_dim": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
         "block_size": 64, "sliding_window": 64},
    ),
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Bundles in both dtypes, weights in bfloat16, and transformers' logits and tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import precast

    for family, (model_type, changes) in FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **{**_BASE, **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, param in model.named_parameters():
                centre = 1.0 if param.dim() == 1 and name.endswith("weight") else 0.0
                # what comes back is what the checkpoint can say
                param.copy_((centre + 0.04 * torch.randn_like(param)).to(torch.bfloat16))
        place = folder / family.replace(" ", "_")
        model.to(torch.bfloat16).save_pretrained(place / "weights")
        for dtype in DTYPES:
            precast.build(config, place / f"{dtype}.bundle", dtype=dtype)
        references, tokens = {}, []
        for dtype in DTYPES:
            loaded = AutoModelForCausalLM.from_pretrained(
                place / "weights", dtype=dtype, attn_implementation="eager"
            ).eval()
            references[dtype] = [_logits(loaded, prompt) for prompt in _prompts()]
            tokens = tokens or [_greedy(loaded, prompt) for prompt in _prompts()]
        torch.save(references, place / "logits.pt")
        (place / "tokens.json").write_text(json.dumps(tokens))


def compare(folder: Path) -> dict[str, Any]:
    """The figures of each family."""
    return {family: _compare(folder / family.replace(" ", "_")) for family in FAMILIES}


def _compare(place: Path) -> dict[str, Any]:
    import precast

    references = torch.load(place / "logits.pt")
    expected = json.loads((place / "tokens.json").read_text())
    figures: dict[str, Any] = {}
    for dtype in DTYPES:
        with precast.load(
            place / f"{dtype}.bundle", weights=place / "weights", device="cuda", max_num_tokens=64, cache_bytes=1 << 28
        ) as engine:
            found = [engine.logits(prompt).float().cpu() for prompt in _prompts()]
            errors = [_error(a, b) for a, b in zip(found, references["float32"], strict=True)]
            params = precast.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
            outputs = engine.generate(_prompts(), params)
        figures[f"{dtype}_captured"] = _captured(place, dtype)
        figures[f"{dtype}_logits_error"] = round(max(errors), 7)
        figures[f"{dtype}_greedy_equal"] = sum(
            list(output.token_ids) == tokens for output, tokens in zip(outputs, expected, strict=True)
        )
    own = [_error(a, b) for a, b in zip(references["bfloat16"], references["float32"], strict=True)]
    figures["transformers_bfloat16_logits_error"] = round(max(own), 7)
    figures["ratio_to_transformers_bfloat16"] = round(figures["bfloat16_logits_error"] / max(own), 2)
    return figures


def _captured(place: Path, dtype: str) -> dict[str, Any]:
    """Whether all tokens are those of an engine that captures nothing; six prompts, in mixed steps of all sizes."""
    import precast

    prompts = [*_prompts(), *(prompt[:20] for prompt in _prompts())]
    greedy = precast.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    drawn = [
        precast.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8, top_p=0.95, top_k=50, seed=seed)
        for seed in range(len(prompts))
    ]
    tokens, found = [], {}
    for capture in ("off", "before"):
        with precast.load(
            place / f"{dtype}.bundle", weights=place / "weights", device="cuda", max_num_tokens=64, max_num_seqs=16,
            cache_bytes=1 << 28, capture=capture, reuse_prefixes=False,
        ) as engine:  # fmt: skip
            answers = [*engine.generate(prompts, greedy), *engine.generate(prompts, drawn)]
            tokens.append([list(answer.token_ids) for answer in answers])
            stats = engine.stats
            found = {"steps": stats.steps, "captured": stats.captured_steps, "eager": stats.eager_reasons}
    return {"tokens_equal": sum(a == b for a, b in zip(*tokens, strict=True)), "of": len(tokens[0]), **found}


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 1024, (length,), generator=generator).tolist() for length in LENGTHS]


def _logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    return logits


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
                         pad_token_id=0)  # fmt: skip
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    """One of the two halves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    halves = parser.add_mutually_exclusive_group(required=True)
    halves.add_argument("--prepare", type=Path, metavar="DIR")
    halves.add_argument("--compare", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_families.json")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare)
    else:
        harness.write(arguments.out, "gpu_families", compare(arguments.compare))


if __name__ == "__main__":
    main()
