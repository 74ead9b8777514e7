"""The share of routed experts that an update changes."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from gspo.training.batch.batching import collate
from gspo.training.router_change import RouterWatch, experts_per_token
from tests.training.models import VOCAB, llama, qwen3_moe
from tests.training.test_policy import groups, policy, ready, token_loss


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCAB, **shape, num_key_value_heads=2, num_local_experts=4, initializer_range=0.2)
    ).eval()


MODELS = {"qwen3_moe": qwen3_moe, "mixtral": mixtral}


def routers(model) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]


@pytest.mark.parametrize("name", MODELS)
def test_every_real_token_has_its_number_of_experts(name):
    model, batch = MODELS[name](), collate(groups(num=1))
    choices = RouterWatch(model).choices(batch)
    num_tokens = sum(len(p) + len(r) for p, r in zip(batch.prompt_ids, batch.response_ids))
    assert choices.shape == (2, num_tokens, 4)
    assert (choices.sum(-1) == experts_per_token(model)).all()


@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes_without_an_update_and_everything_when_routers_turn_round(name):
    model, batch = MODELS[name](), collate(groups())
    assert len(routers(model)) == 2
    watch = RouterWatch(model)
    with watch.watching(batch) as still:
        pass
    assert still["actor/router_change"].result() == 0
    with watch.watching(batch) as turned:
        for router in routers(model)[:1]:  # of four experts the two best become the two worst in the first layer
            router.data.neg_()
    first, second = watch.choices(batch), turned["actor/router_change"].result()
    assert first.shape[0] == 2 and 0.5 <= second <= 1.0


@pytest.mark.parametrize("name", MODELS)
def test_an_update_of_the_policy_changes_a_few(name):
    p = policy(MODELS[name]())
    batch = ready(p)
    with RouterWatch(p.model).watching(batch) as seen:
        metrics = p.update(batch, token_loss, step=0).metrics
    assert metrics["actor/skipped_updates"].result() == 0
    assert 0 < seen["actor/router_change"].result() < 0.5


def test_a_dense_model_has_no_routers():
    with RouterWatch(llama()).watching(collate(groups())) as seen:
        pass
    assert seen == {}


def test_the_change_is_the_share_of_choices_that_are_not_made_again(monkeypatch):
    """Of the three choices before, one is made again; those that are new do not count."""
    watch = RouterWatch(mixtral())
    before = torch.tensor([[[True, True, False, False], [True, False, False, False]]])
    after = torch.tensor([[[True, False, True, True], [False, True, False, False]]])
    found = iter([before, after])
    monkeypatch.setattr(watch, "choices", lambda batch: next(found))
    with watch.watching(collate(groups(num=1))) as seen:
        assert seen == {}
    assert seen["actor/router_change"].result() == pytest.approx(2 / 3)
    assert float(seen["actor/router_change"].weight) == 3


def test_choices_are_those_of_each_row_alone_and_of_eight_rows_at_most():
    model, batch = mixtral(), collate(groups(num=3))
    together = RouterWatch(model).choices(batch)
    start = 0
    for prompt, response in zip(batch.prompt_ids[:8], batch.response_ids[:8]):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response]), output_router_logits=True).router_logits
        for layer, scores in enumerate(logits):
            best = scores.topk(2).indices
            own = together[layer, start : start + len(scores)]
            assert own.gather(-1, best).all() and int(own.sum()) == 2 * len(scores)
        start += len(prompt + response)
    assert start == together.shape[1]
