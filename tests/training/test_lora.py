"""Adapters: what is trained, what is left alone to the bit, and that merging computes the same."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from gspo.models.output_head import UnsupportedModel
from gspo.training.batch.batching import collate
from gspo.training.lora import Adapters, LoraSettings, num_trained
from gspo.training.parallel.sharded_lora import ShardedAdapters
from gspo.training.policy import TokenScorer
from gspo.training.reference import Reference
from gspo.training.roles import LocalRoles
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


@pytest.mark.parametrize("seed", [0, 1])
def test_adapters_are_drawn_by_their_seed(seed):
    """Those of peft after `torch.manual_seed`; 0 is a seed like any other."""
    from peft import LoraConfig, inject_adapter_in_model

    settings, plain = LoraSettings(2, target_modules=["q_proj"]), llama()
    config = LoraConfig(r=2, target_modules=["q_proj"])
    torch.manual_seed(seed)
    inject_adapter_in_model(config, plain, "default")
    torch.manual_seed(9)
    found = Adapters(llama(), settings, seed=seed).model
    drawn = [(p, q) for (n, p), q in zip(plain.named_parameters(), found.parameters(), strict=True) if ".lora_A." in n]
    assert len(drawn) == 2 and all(torch.equal(p, q) for p, q in drawn)


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


def test_an_error_while_adapters_are_off_or_merged_leaves_them_as_they_were():
    model, adapters, p = trained()
    batch = collate(groups(num=1))
    wanted, before = p.log_probs(batch)[0], base_weights(model)
    for context in (adapters.disabled, adapters.merged):
        with pytest.raises(ValueError), context():
            raise ValueError
        assert torch.equal(p.log_probs(batch)[0], wanted)
    assert all(torch.equal(before[n], w) for n, w in base_weights(model).items())


def test_excluded_modules_have_no_adapters_and_the_config_names_all_settings(tmp_path):
    model = llama()
    model.config._name_or_path = "org/base"
    settings = LoraSettings(3, dropout=0.25, target_modules=["q_proj", "v_proj", "k_proj"], exclude_modules=["k_proj"])
    adapters = Adapters(model, settings, seed=0)
    modules = {name.split(".")[-1] for name, m in model.named_modules() if hasattr(m, "lora_A")}
    assert modules == {"q_proj", "v_proj"}
    adapters.save_config(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["lora_dropout"], saved["inference_mode"]) == (3, 16.0, 0.25, True)
    assert saved["target_modules"] == sorted(saved["target_modules"]) and saved["exclude_modules"] == ["k_proj"]
    assert saved["base_model_name_or_path"] == "org/base"
    assert saved["task_type"] == "CAUSAL_LM" and not adapters.config.inference_mode
    names = set(adapters.state_tensors())
    assert len(names) == 2 * 2 * 2  # modules, matrices and layers
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight" in names


def test_the_digest_names_the_base_weights_and_not_the_adapters():
    model, adapters = adapted()
    roles = LocalRoles(policy(model), adapters=adapters)
    digest = roles.frozen_digest()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert roles.frozen_digest() == digest is not None
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.base_layer.weight[0, 0] += 1.0
    assert roles.frozen_digest() != digest
    assert not roles.saves_in_background


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # the weights of gpt2 are transposed
def test_adapters_of_a_sharded_model_merge_to_the_same_weights(family):
    model, adapters = adapted(family)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))

    class Whole:
        """A rank that holds the whole model."""

        def full_tensors(self):
            yield from ((name, tensor.detach()) for name, tensor in model.state_dict().items())

    before = base_weights(model)
    got = dict(ShardedAdapters(adapters, Whole()).merged_tensors())
    assert all(torch.equal(before[n], w) for n, w in base_weights(model).items())
    with adapters.merged() as want:
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name])
