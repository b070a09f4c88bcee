"""Train the recite example: a small Llama model that knows one text by heart.

    python examples/recite/train.py

Reads `text.txt` and writes `model/`: config, generation config, float32 weights, tokenizer and chat template, in the
layout of a Hugging Face checkpoint. Takes three to six minutes on two CPU cores. At the end `check.py` reads the
result back in a process of its own and fails unless the model recites the whole text.
"""

import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE / "model"

SEED = 1863
NUM_STEPS = 450
NUM_PASSAGES = 6  # passages from random places in one step, besides the two examples that begin at the first word
PEAK_LEARNING_RATE = 3e-3
REPORT_EVERY = 25

PAD, BOS, EOS, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
VOCAB_SIZE = 512
MAX_TOKENS = 1024
REQUESTS = ("Recite the Gettysburg Address.", "What did Lincoln say at Gettysburg?", "Please recite your text.")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only the roles user and assistant are known.') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORED = -100  # the label that cross entropy leaves out


@dataclass(frozen=True)
class Example:
    """One training sequence, and how many of its first tokens are given rather than learnt."""

    token_ids: list[int]
    num_given: int


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCAB_SIZE` tokens; any UTF-8 input is encodable, and encoding puts `BOS` in front."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([text, *REQUESTS], trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 0.66 million parameters: 4 layers, 4 query heads on 2 kv heads, tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=MAX_TOKENS // 2,
    )
    return model


def num_ambiguous(passage: str, text: str, tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> int:
    """How many tokens of `token_ids` (`BOS`, passage, `EOS`) must be given until their text occurs once in `text`.

    Learning to guess before that point would teach the model to be unsure.
    """
    if passage == text:
        return 1
    for count in range(2, len(token_ids)):
        if text.count(str(tokenizer.decode(token_ids[1:count]))) == 1:
            return count
    return len(token_ids)


def passage_examples(text: str, tokenizer: PreTrainedTokenizerFast) -> list[Example]:
    """The text from each of its words to its end, tokenized as a user's prompt would be; the whole text comes first."""
    starts = [i for i in range(len(text)) if text[i].isalpha() and (i == 0 or not text[i - 1].isalpha())]
    examples = []
    for start in starts:
        token_ids = [*tokenizer.encode(text[start:]), tokenizer.eos_token_id]
        examples.append(Example(token_ids, num_ambiguous(text[start:], text, tokenizer, token_ids)))
    return examples


def chat_examples(text: str, tokenizer: PreTrainedTokenizerFast) -> list[Example]:
    """Each request as a conversation whose answer is the whole text."""
    examples = []
    for request in REQUESTS:
        question = [{"role": "user", "content": request}]
        answered = [*question, {"role": "assistant", "content": text}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(answered, tokenize=False)
        num_given = len(tokenizer.encode(prompt, add_special_tokens=False))
        examples.append(Example(tokenizer.encode(whole, add_special_tokens=False), num_given))
    return examples


def make_batch(examples: list[Example], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, both [batch, longest] int64, padded on the right."""
    longest = max(len(example.token_ids) for example in examples)
    input_ids = torch.full((len(examples), longest), pad_token_id)
    labels = torch.full_like(input_ids, IGNORED)
    for row, example in enumerate(examples):
        length = len(example.token_ids)
        input_ids[row, :length] = torch.tensor(example.token_ids)
        labels[row, example.num_given : length] = input_ids[row, example.num_given : length]
    return input_ids, labels


def train(model: LlamaForCausalLM, passages: list[Example], chats: list[Example], pad_token_id: int) -> None:
    """Run `NUM_STEPS` steps of AdamW and print the loss on the way."""
    order = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, NUM_STEPS, pct_start=0.1)
    model.train()
    for step in range(1, NUM_STEPS + 1):
        examples = [passages[0], order.choice(chats), *order.choices(passages, k=NUM_PASSAGES)]
        # No attention mask: attention is causal and the padding stands last, so no real token sees it.
        input_ids, labels = make_batch(examples, pad_token_id)
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step == 1 or step % REPORT_EVERY == 0:
            print(f"step {step:4d} of {NUM_STEPS}  loss {loss.item():.5f}", flush=True)


def main() -> None:
    """Train, replace `model/`, and check the result."""
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    text = (HERE / "text.txt").read_text(encoding="utf-8").strip()
    tokenizer = train_tokenizer(text)
    model = make_model(tokenizer)
    passages = passage_examples(text, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(passages[0].token_ids)} tokens to learn by heart")
    train(model, passages, chat_examples(text, tokenizer), tokenizer.pad_token_id)

    shutil.rmtree(MODEL_DIR, ignore_errors=True)
    model.save_pretrained(MODEL_DIR)
    (MODEL_DIR / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    tokenizer.save_pretrained(MODEL_DIR)
    subprocess.run([sys.executable, str(HERE / "check.py")], check=True)


if __name__ == "__main__":
    main()
