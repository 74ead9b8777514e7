"""The memory plan of `gspo doctor` against what runs of two steps reserved on one H200 (torch 2.11).

Every response ran to its limit. Measured by `tests/checks/memory_child.py`; `tests/checks/test_memory_gpu.py` measures
again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gspo.build.memory import plan_memory
from gspo.build.model_size import measure_size
from gspo.config import load

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
AVAILABLE = 150_111_000_000
# hidden size, MLP width, layers, heads, key heads, vocabulary
SMALL = (576, 1536, 16, 9, 3, 333)
SMOL = (576, 1536, 30, 9, 3, 49152)
QWEN = (896, 4864, 24, 14, 2, 151936)
# response tokens, prompts per step, prompts per mini-batch, responses per prompt, slots
SHORT, LONG = (128, 32, 8, 8, 256), (1000, 8, 8, 8, 64)
RECOMPUTE = [f"{MODEL}.enable_gradient_checkpointing=true", f"{ACTOR}.use_kl_loss=true"]
EAGER, CRITIC = [f"{ACTOR}.use_torch_compile=false"], ["algorithm.adv_estimator=gae"]
PADDED = [f"{MODEL}.use_remove_padding=false", f"{MODEL}.use_shared_prefix=false"]
TWO_CUTS = [f"{ACTOR}.ppo_max_token_len_per_gpu=4300"]

CASES = {
    "captured": (SMALL, (128, 16, 8, 8, 128), [], 3_445_620_736),
    "recomputed, with a reference": (SMALL, LONG, RECOMPUTE, 3_160_408_064),
    "smol": (SMOL, SHORT, [], 7_847_542_784),
    "smol, three micro-batches of even size": (SMOL, (128, 128, 32, 8, 1024), [], 13_732_151_296),
    "smol, eager": (SMOL, SHORT, EAGER, 11_060_379_648),
    "smol, float32": (SMOL, SHORT, [f"{MODEL}.dtype=float32"], 18_373_148_672),
    "smol, critic": (SMOL, SHORT, CRITIC, 15_617_490_944),
    "smol, 512 questions evaluated": (SMOL, (256, 32, 8, 8, 256), ["data.num_val_samples=512"], 9_598_664_704),
    "qwen": (QWEN, SHORT, [], 16_808_673_280),
    "qwen, two micro-batches": (QWEN, SHORT, TWO_CUTS, 16_728_981_504),
    "qwen, long": (QWEN, LONG, [], 24_454_889_472),
    "qwen, long, recomputed, with a reference": (QWEN, LONG, RECOMPUTE, 14_237_564_928),
    "qwen, eager": (QWEN, SHORT, EAGER, 23_517_462_528),
    "qwen, eager, padded rows": (QWEN, SHORT, [*EAGER, *PADDED], 28_267_511_808),
    "qwen, critic": (QWEN, SHORT, CRITIC, 36_276_535_296),
    "qwen, critic, two micro-batches": (QWEN, SHORT, [*CRITIC, *TWO_CUTS], 28_848_422_912),
    "qwen, adapters": (QWEN, SHORT, [f"{MODEL}.lora_rank=16"], 14_206_107_648),
    "qwen, optimiser in host memory": (
        QWEN, SHORT, [f"{ACTOR}.fsdp_config.optimizer_offload=true"], 10_114_564_096,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def measured_once():
    """A model is measured once for all cases that share it."""
    sizes = {}

    def measure(config, dtype, name, lora_rank):
        key = (config.num_hidden_layers, config.vocab_size, dtype, lora_rank)
        if key not in sizes:
            sizes[key] = measure_size(config, dtype, name, lora_rank)
        return sizes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gspo.build.memory.measure_size", measure)
        yield


def save_config(folder: Path, shape: tuple[int, ...]) -> Path:
    from transformers import LlamaConfig

    hidden, width, layers, heads, key_heads, vocab = shape
    LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocab,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_near_what_was_reserved(tmp_path, name):
    shape, (length, batch, mini, n, slots), more, reserved = CASES[name]
    words = [
        f"{MODEL}.path={save_config(tmp_path, shape)}",
        "data.max_prompt_length=24",
        f"data.max_response_length={length}",
        f"data.train_batch_size={batch}",
        "data.num_val_samples=8",
        f"{ACTOR}.ppo_mini_batch_size={mini}",
        f"{ROLLOUT}.n={n}",
        f"{ROLLOUT}.max_num_seqs={slots}",
        f"{ROLLOUT}.ignore_eos=true",
        *more,
    ]
    config = load(None, words).config
    num_val = config.data.num_val_samples or 0
    plan = plan_memory(config, torch.device("cuda"), base=0, available=AVAILABLE, num_val=num_val)
    lowest = 0.84 if "padded" in name else 0.92  # padded rows leave gaps that the allocator cannot use
    assert lowest < plan.peak / reserved < 1.14, plan.to_dict()
