"""Make the embedded model: random Llama weights from a fixed seed, warmed up on `arithmetic` by `gspo sft`'s trainer.

    python scripts/make_embedded_model.py OUT [--device cpu|cuda] [--threads 2]

writes an ordinary Hugging Face folder and, beside the weights, `recipe.json`: how they were made, their hash and what
they score. Float32; the same machine and thread count give the same bits. docs/embedded-model.md has the
times and the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gspo.config import load_supervised
from gspo.data.chat_template import encode_prompt
from gspo.data.datasets import load_rows
from gspo.data.rows import Row
from gspo.data.tasks.arithmetic import score
from gspo.loop.supervised import SupervisedTrainer
from gspo.models.load import load_model, load_tokenizer

SEED = 0
NUM_EXAMPLES = 40_000
SHAPE = {"hidden_size": 144, "num_hidden_layers": 4, "intermediate_size": 384, "num_attention_heads": 4}
# The settings under the names of the recipe, and the key of each.
SFT: dict[str, Any] = {
    "steps": 2800,
    "lr": 2e-3,
    "batch_size": 128,
    "max_tokens_per_micro_batch": 2048,
    "warmup_steps": None,  # a twentieth of the steps
    "min_lr_ratio": 0.1,
    "weight_decay": 0.01,
    "grad_clip": 1.0,
    "max_length": 256,
    "seed": SEED,
}
KEYS = {
    "steps": "trainer.total_training_steps",
    "lr": "actor_rollout_ref.actor.optim.lr",
    "batch_size": "data.train_batch_size",
    "max_tokens_per_micro_batch": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "min_lr_ratio": "actor_rollout_ref.actor.optim.min_lr_ratio",
    "weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
    "grad_clip": "actor_rollout_ref.actor.grad_clip",
    "max_length": "data.max_length",
    "seed": "trainer.seed",
}

PAD, EOS, SYSTEM, USER, ASSISTANT = "<pad>", "<eos>", "<system>", "<user>", "<assistant>"
SPECIAL_TOKENS = (PAD, EOS, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + message['role'] + ' is not one of system, user, assistant') }}"
    "{% endif %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: an ASCII character is one token, any other one token per UTF-8 byte.

    So every text survives encoding and decoding, and no token is unknown.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        padding_side="right",
    )


def save_random_model(folder: str, shape: dict[str, int]) -> None:
    """An untrained model of a shape with its tokenizer."""
    tokenizer = build_tokenizer()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=shape["num_attention_heads"],
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_up(model: str, runs: str, out: Path, args: argparse.Namespace) -> None:
    """Train the model on the answers of `arithmetic`."""
    words = [f"{KEYS[name]}={value}" for name, value in SFT.items() if value is not None]
    words += [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={runs}"]
    words += [f"trainer.device={args.device}", f"trainer.num_threads={args.threads}"]
    words += ["actor_rollout_ref.model.dtype=float32", f"data.num_train_samples={NUM_EXAMPLES}", "trainer.save_freq=-1"]
    SupervisedTrainer(load_supervised(None, words), out=out).fit()


def answer(model: Any, tokenizer: Any, rows: list[Row], *, sample: bool) -> list[str]:
    """One answer a row from `transformers` generate, greedy or at temperature 1."""
    texts: list[str] = []
    torch.manual_seed(SEED)
    for start in range(0, len(rows), 128):
        ids = [list(encode_prompt(row, tokenizer).token_ids) for row in rows[start : start + 128]]
        batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
        out = model.generate(**batch, max_new_tokens=48, do_sample=sample, top_k=0, top_p=1.0)
        texts += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def measure(model: Any, tokenizer: Any, rows: list[Row], *, sample: bool) -> dict[str, float]:
    """Accuracy, how often the answer is worked out, the accuracy of either kind, and the mean length."""
    texts = answer(model, tokenizer, rows, sample=sample)
    scores = [score(text, row.ground_truth) for text, row in zip(texts, rows)]
    kinds = {kind: [s for s, t in zip(scores, texts) if (";" in t) == kind] for kind in (True, False)}
    values = {
        "acc": sum(scores) / len(rows),
        "worked_out": len(kinds[True]) / len(rows),
        "acc_worked_out": sum(kinds[True]) / max(1, len(kinds[True])),
        "acc_direct": sum(kinds[False]) / max(1, len(kinds[False])),
        "mean_chars": sum(map(len, texts)) / len(rows),
    }
    return {name: round(value, 4) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    out: Path = args.out
    torch.set_num_threads(args.threads)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(f"{folder}/untrained", SHAPE)
        warm_up(f"{folder}/untrained", f"{folder}/runs", out, args)
    seconds = time.monotonic() - start
    model, tokenizer = load_model(str(out)), load_tokenizer(str(out))
    held_out = load_rows("arithmetic", "val", seed=SEED)
    weights = (out / "model.safetensors").read_bytes()
    recipe = {
        "seed": SEED,
        "shape": SHAPE,
        "data": "arithmetic",
        "num_examples": NUM_EXAMPLES,
        "sft": SFT,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "sha256": hashlib.sha256(weights).hexdigest(),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
        "threads": args.threads,
        "torch": torch.__version__,
        "seconds": round(seconds),
        "held_out_greedy": measure(model, tokenizer, held_out, sample=False),
        "held_out_sampled": measure(model, tokenizer, held_out, sample=True),
    }
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    print("result:", json.dumps(recipe))


if __name__ == "__main__":
    main()
