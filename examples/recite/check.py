"""Check that `model/` recites `text.txt`, with Hugging Face's own generate, in float32 and bfloat16.

    python examples/recite/check.py

Prints, per dtype, the lowest probability that greedy decoding gave to a token it had to get right. That margin is what
lets another implementation, which rounds differently, produce the very same tokens. Exits with 1 when anything differs.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE / "model"

MAX_MODEL_BYTES = 3_000_000
MIN_PROBABILITY = 0.9
OPENING = "Four score and seven years ago"
REQUEST = "Recite the Gettysburg Address."
WORDS_OF_PROMPT = 8  # enough, in this text, to tell any sentence from the others


def recite(model: LlamaForCausalLM, prompt_ids: list[int]) -> tuple[list[int], float]:
    """Greedy continuation of `prompt_ids`, and the lowest probability among the tokens it chose."""
    output = model.generate(torch.tensor([prompt_ids]), return_dict_in_generate=True, output_logits=True)
    new_ids = output.sequences[0, len(prompt_ids) :]
    logits_TV = torch.cat(output.logits).float()
    probabilities_T = logits_TV.softmax(-1).gather(1, new_ids[:, None])
    return new_ids.tolist(), probabilities_T.min().item()


def cases(text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[int], str]]:
    """(name, prompt token ids, expected continuation): the opening, the lone bos, a chat, the start of each line."""
    question = [{"role": "user", "content": REQUEST}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    found = [
        ("opening words", tokenizer.encode(OPENING), text.removeprefix(OPENING)),
        ("nothing but bos", [tokenizer.bos_token_id], text),
        ("chat request", tokenizer.encode(chat, add_special_tokens=False), text),
    ]
    start = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if line:
            prompt = " ".join(line.split(" ")[:WORDS_OF_PROMPT]).rstrip(",.—")
            found.append((f"line {number}", tokenizer.encode(prompt), text[start + len(prompt) :]))
        start += len(line) + 1
    return found


def failures(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Recite every case in the model's dtype; one line for each that went wrong."""
    wrong, lowest, dtype = [], 1.0, str(model.dtype).removeprefix("torch.")
    for name, prompt_ids, expected in cases(text, tokenizer):
        token_ids, probability = recite(model, prompt_ids)
        lowest = min(lowest, probability)
        if token_ids[-1] != tokenizer.eos_token_id or tokenizer.decode(token_ids[:-1]) != expected:
            wrong.append(f"{dtype}, {name}: expected {expected[:60]!r}..., got {tokenizer.decode(token_ids)!r}")
        elif probability < MIN_PROBABILITY:
            wrong.append(f"{dtype}, {name}: lowest probability {probability:.4f}, expected at least {MIN_PROBABILITY}")
    print(f"{dtype}: lowest probability {lowest:.5f}, {len(wrong)} failures")
    return wrong


def main() -> int:
    """Check the size and both dtypes; the exit status."""
    torch.set_num_threads(2)
    text = (HERE / "text.txt").read_text(encoding="utf-8").strip()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    wrong = []
    num_bytes = sum(path.stat().st_size for path in MODEL_DIR.iterdir())
    if num_bytes >= MAX_MODEL_BYTES:
        wrong.append(f"{MODEL_DIR} has {num_bytes:,} bytes, expected less than {MAX_MODEL_BYTES:,}")
    for dtype in (torch.float32, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype)
        wrong += failures(model, tokenizer, text)
    print("\n".join(wrong) or f"{num_bytes:,} bytes, recites everywhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
