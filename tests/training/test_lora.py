"""Adapters: what is trained, what is left alone to the bit, and that merging computes the same."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from gspo.models.output_head import UnsupportedModel
from gspo.training.batch.batching import collate
from gspo.training.lora import Adapters, LoraSettings, num_trained
from gspo.training.policy import TokenScorer
from gspo.training.reference import Reference
from tests.training.models import FAMILIES, llama
from tests.training.test_policy import groups, policy, ready, token_loss

SMALL = {"llama": llama, "qwen3_moe": FAMILIES["qwen3_moe"], "gpt2": FAMILIES["gpt2"]}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


def adapted(family: str = "llama", rank: int = 2):
    model = SMALL[family]()
    return model, Adapters(model, LoraSettings(rank, alpha=8.0), seed=1)


def trained(family: str = "llama"):
    model, adapters = adapted(family)
    p = policy(model)
    p.update(ready(p), token_loss, step=0)
    return model, adapters, p


def base_weights(model) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in model.named_parameters() if ".lora_" not in n}


@pytest.mark.parametrize("family", SMALL)
def test_adapters_start_as_no_change_and_only_they_are_trained(family):
    plain = policy(SMALL[family]())
    model, _ = adapted(family)
    before, batch = base_weights(model), collate(groups())
    p = policy(model)
    assert torch.equal(p.log_probs(batch)[0], plain.log_probs(batch)[0])
    p.update(ready(p), token_loss, step=0)
    assert not torch.equal(p.log_probs(batch)[0], plain.log_probs(batch)[0])
    assert all(torch.equal(before[n], w) for n, w in base_weights(model).items())


def test_a_small_share_of_the_parameters_is_trained():
    model = llama(hidden_size=128, intermediate_size=256)
    Adapters(model, LoraSettings(rank=2), seed=0)
    some, all_ = num_trained(model)
    assert 0 < some < 0.05 * all_


@pytest.mark.parametrize("family", SMALL)
def test_the_merged_folder_is_an_ordinary_model_that_computes_the_same(family, tmp_path):
    model, adapters, p = trained(family)
    before, batch = base_weights(model), collate(groups())
    wanted = p.log_probs(batch)[0]
    with adapters.merged() as state:
        adapters.model.save_pretrained(tmp_path, state_dict=state)
    assert all(torch.equal(before[n], w) for n, w in base_weights(model).items())
    assert torch.equal(p.log_probs(batch)[0], wanted)  # merging left nothing behind
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {n.replace("base_layer.", "") for n in before} == {n for n, _ in merged.named_parameters()}
    assert torch.allclose(policy(merged).log_probs(batch)[0], wanted, atol=1e-4)


def test_peft_reads_the_saved_adapter(tmp_path):
    from peft import PeftModel

    _, adapters, p = trained()
    adapters.save_config(tmp_path)
    save_file({n: t.contiguous() for n, t in adapters.state_tensors().items()}, tmp_path / "adapter_model.safetensors")
    model = PeftModel.from_pretrained(llama(), str(tmp_path)).base_model.model
    batch = collate(groups())
    assert torch.allclose(TokenScorer(model, p.settings).log_probs(batch)[0], p.log_probs(batch)[0], atol=1e-6)


def test_adapters_round_trip_to_the_bit():
    _, adapters, p = trained()
    other, loaded = adapted()
    loaded.load_state_tensors({n: t.clone() for n, t in adapters.state_tensors().items()})
    batch = collate(groups())
    assert torch.equal(policy(other).log_probs(batch)[0], p.log_probs(batch)[0])


def test_the_reference_is_the_base_without_a_copy():
    batch = collate(groups())
    wanted = policy(llama()).log_probs(batch)[0]
    model, adapters, p = trained()
    reference = Reference(p, adapters.disabled)
    assert torch.equal(reference.score(batch).ref_log_probs, wanted)
    assert not torch.equal(p.log_probs(batch)[0], wanted)  # they are back on …
    assert all(w.requires_grad for n, w in model.named_parameters() if ".lora_" in n)  # … and still trained


def test_the_same_seed_gives_the_same_adapters_whatever_was_drawn_before():
    torch.manual_seed(7)
    _, a = adapted()
    torch.manual_seed(8)
    state = torch.get_rng_state()
    _, b = adapted()
    assert all(torch.equal(t, b.state_tensors()[n]) for n, t in a.state_tensors().items())
    model = llama()
    state = torch.get_rng_state()
    Adapters(model, LoraSettings(2), seed=3)
    assert torch.equal(state, torch.get_rng_state())


def test_modules_that_are_not_there_are_named():
    with pytest.raises(UnsupportedModel, match=r"target_modules=\['no_such'\]"):
        Adapters(llama(), LoraSettings(2, target_modules=["no_such"]), seed=0)


@pytest.mark.parametrize("alpha", [2.0, 16.0])
def test_an_adapter_adds_alpha_over_rank_times_its_product(alpha):
    model = llama()
    adapters = Adapters(model, LoraSettings(rank=4, alpha=alpha), seed=0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    layer = model.model.layers[0].self_attn.q_proj
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    with adapters.merged() as merged:
        got = merged["model.layers.0.self_attn.q_proj.weight"].clone()
    torch.testing.assert_close(got, layer.base_layer.weight + alpha / 4 * product)


@pytest.mark.parametrize("modules", [["q_proj"], ["gate_proj", "v_proj"], ["down_proj"]])
def test_some_modules_train_with_the_gradients_of_padded_rows(modules):
    """Projections that read the same input run as one product in the packed layout, adapters or not."""
    found = []
    for layout in ("shared", "plain"):
        model = llama()
        Adapters(model, LoraSettings(2, alpha=8.0, target_modules=modules), seed=1)
        p = policy(model, layout=layout, old_log_prob_source="recompute")
        p.update(ready(p), token_loss, step=0)
        found.append({n: w.detach() for n, w in model.named_parameters() if w.requires_grad})
    packed, padded = found
    assert packed and all(any(module in name for module in modules) for name in packed)
    assert all(torch.allclose(packed[name], padded[name], atol=1e-5) for name in padded)
    assert any(".lora_B." in name and w.abs().sum() > 0 for name, w in packed.items())
