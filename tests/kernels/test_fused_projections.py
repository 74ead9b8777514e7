"""Projections that read one input run as one product, and stay the parameters they were."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.fx import GraphModule

from gspo.kernels.compiled_layers import CompiledLayers
from gspo.kernels.fused_projections import FusedProjections
from tests.rollout.models import make_model

IDS = torch.arange(12).view(2, 6)


def hidden(model):
    with torch.no_grad():
        return model.base_model(input_ids=IDS, use_cache=False).last_hidden_state


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_hidden_states_are_the_same(family):
    model = make_model(family)
    want = hidden(model)
    fused = FusedProjections(model)
    assert len(fused) == 5 * model.config.num_hidden_layers
    assert torch.equal(hidden(model), want), "outside nothing has changed"
    with fused.active():
        assert torch.allclose(hidden(model), want, atol=1e-5)
    assert torch.equal(hidden(model), want)


def test_what_training_writes_is_what_the_product_reads():
    model, other = make_model("llama"), make_model("llama")
    fused = FusedProjections(model)
    for p, q in zip(model.parameters(), other.parameters()):
        p.data.mul_(1.5), q.data.mul_(1.5)  # as an optimiser does, in place
    with fused.active():
        assert torch.allclose(hidden(model), hidden(other), atol=1e-5)
    model.base_model(input_ids=IDS).last_hidden_state.sum().backward()
    other.base_model(input_ids=IDS).last_hidden_state.sum().backward()
    for p, q in zip(model.base_model.parameters(), other.base_model.parameters()):
        assert torch.equal(p.grad, q.grad)


def test_a_fused_model_saves_and_loads_as_before(tmp_path):
    model = make_model("qwen2")
    before = {name: p.clone() for name, p in model.named_parameters()}
    FusedProjections(model)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in before.items() if name in saved)
    assert len(saved) >= len(before) - 1
    model.load_state_dict({name: p * 2 for name, p in model.state_dict().items()})
    assert torch.equal(
        model.get_parameter("model.layers.0.mlp.up_proj.weight"), before["model.layers.0.mlp.up_proj.weight"] * 2
    )


def test_moved_weights_are_refused():
    model = make_model("llama")
    fused = FusedProjections(model)
    model.to(torch.float64)
    with pytest.raises(RuntimeError, match="moved to other memory"), fused.active():
        pass


def test_a_refusal_leaves_every_layer_as_it_was():
    model = make_model("llama")
    fused = FusedProjections(model)
    last = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    last.data = last.data.clone()
    with pytest.raises(RuntimeError, match="moved to other memory"), fused.active():
        pass
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


def test_a_compiled_layer_has_one_product_for_siblings_and_one_code_for_all_layers():
    model = make_model("llama")
    want = hidden(model)
    fused, graphs = FusedProjections(model), []

    def keep(graph: GraphModule, inputs):
        graphs.append(graph)
        return graph

    layers = CompiledLayers(model.base_model, backend=keep)
    with fused.active(), layers.active():
        assert torch.allclose(hidden(model), want, atol=1e-5)
    assert len(graphs) == 1
    products = [n for n in graphs[0].graph.nodes if "linear" in str(n.target)]
    assert len(products) == 4  # q with k and v, o, gate with up, down


def test_a_second_engine_leaves_the_weights_where_the_first_ones_graphs_read_them():
    model = make_model("llama")
    FusedProjections(model)
    places = [p.data_ptr() for p in model.parameters()]
    again = FusedProjections(model)
    assert [p.data_ptr() for p in model.parameters()] == places
    want = hidden(model)
    with again.active():
        assert torch.allclose(hidden(model), want, atol=1e-5)
