"""Experts with the least load go, with all that the gate holds for them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_accel import MixtureOfExperts, MoELanguageModel, TopKGate
from lightning_accel.compress import apply_plan_, measure_expert_load, plan_without_experts
from lightning_accel.models import Experts
from lightning_accel.nn import ExpertChoiceGate
from tests.zoo import ZOO


def mixture(**options):
    torch.manual_seed(0)
    return MixtureOfExperts(6, 5, 4, 2, **options).eval()


@pytest.mark.parametrize("backend", ["loop", "blocks"])
def test_load_is_what_the_gate_reports(backend):
    module = mixture()
    module.experts.backend = backend
    x = [torch.randn(3, 7, 6), torch.randn(2, 6)]
    load = measure_expert_load(module, [((one,), {}) for one in x])
    assert list(load) == ["experts"]
    assert torch.equal(load["experts"], sum(module(one).report.expert_counts for one in x))


def test_tokens_go_to_the_best_of_those_that_stay():
    module = mixture(gate=lambda *sizes: TopKGate(*sizes, score="sigmoid", bias_update_rate=0.1))
    module.gate.bias_steps.copy_(torch.tensor([3, -2, 1, 0]))
    x = torch.randn(9, 6)
    counts = module(x).report.expert_counts
    plan, _ = plan_without_experts(module, [((x,), {})], 0.25)
    gone = int(counts.argmin())
    stay = [one for one in range(4) if one != gone]
    small = copy.deepcopy(module)
    apply_plan_(small, plan)
    assert small.num_experts == small.gate.num_experts == len(small.experts.up_weight) == 3
    assert small.gate.bias_steps.tolist() == [[3, -2, 1, 0][one] for one in stay]
    scores = (x @ module.gate.weight.t()).sigmoid()
    biased = scores + 0.1 * module.gate.bias_steps
    biased[:, gone] = -torch.inf
    expected = torch.zeros(9, 6)
    for row in range(9):
        chosen = biased[row].topk(2).indices
        weights = scores[row, chosen] / scores[row, chosen].sum()
        for expert, weight in zip(chosen, weights, strict=True):
            hidden = F.gelu(module.experts.up_weight[expert] @ x[row] + module.experts.up_bias[expert])
            expected[row] += weight * (module.experts.down_weight[expert] @ hidden + module.experts.down_bias[expert])
    torch.testing.assert_close(small(x).features, expected, rtol=1e-4, atol=1e-5)


def test_a_foreign_mixture():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = ZOO["olmoe"].make().eval()
    batch = next(iter(ZOO["olmoe"].loader()))
    plan, load = plan_without_experts(module, [((), batch)], 0.5)
    small = copy.deepcopy(module)
    apply_plan_(small, plan)
    for path, counts in load.items():
        left = len(counts) // 2
        assert small.get_submodule(path).num_experts == left
        gone = counts.argsort(stable=True)[:left]
        keep = torch.tensor([one for one in range(len(counts)) if one not in gone])
        assert torch.equal(small.get_submodule(path).down_proj, module.get_submodule(path).down_proj[keep])
    gates = [one for one in module.modules() if type(one).__name__.endswith("Router")]
    handles = [gate.register_forward_hook(_route_to_half(load, number)) for number, gate in enumerate(gates)]
    expected = module(**batch).logits
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(small(**batch).logits, expected, rtol=1e-3, atol=1e-4)


def _route_to_half(load, number):
    counts = [*load.values()][number]
    gone = counts.argsort(stable=True)[: len(counts) // 2]

    def hook(gate, args, output):
        hidden = args[0].reshape(-1, args[0].shape[-1])
        logits = (hidden @ gate.weight.t()).index_fill(1, gone, -torch.inf)
        value, index = logits.softmax(-1).topk(gate.top_k)
        if getattr(gate, "norm_topk_prob", True):
            value = value / value.sum(-1, keepdim=True)
        return logits, value, index

    return hook


def test_what_cannot_go_says_why():
    x = torch.randn(9, 6)
    with pytest.raises(ValueError, match=r"Linear has no mixture.*structure='channel' or 'block'"):
        plan_without_experts(nn.Linear(6, 2), [((x,), {})], 0.5)
    with pytest.raises(ValueError, match=r"share of 0.75 of the 4 experts of experts leaves 1; .* leave 2, to which"):
        plan_without_experts(mixture(), [((x,), {})], 0.75)
    chosen_by_experts = mixture(gate=ExpertChoiceGate)
    with pytest.raises(ValueError, match=r"which experts of experts matter is not known: .* brought 5 tokens for each"):
        plan_without_experts(chosen_by_experts, [((x,), {})], 0.5)
    alone = mixture().experts
    with pytest.raises(ValueError, match="no mixture"):
        plan_without_experts(nn.Sequential(alone), [((x,), {})], 0.5, exclude=["0"])


def test_our_language_model_trains_on():
    model = MoELanguageModel(vocab_size=11, dim=8, num_layers=2, num_heads=2, experts=Experts(hidden_dim=8))
    tokens = torch.randint(11, (4, 9))
    plan, _ = plan_without_experts(model, [((tokens,), {})], 0.5)
    apply_plan_(model, plan)
    output = model.train()(tokens)
    model.auxiliary_loss(output.reports).backward()
    assert len(model.expert_load.step()) == 2
    model.val_load.update(output.reports)
    assert model.val_load.compute().shape == (2, 4)
