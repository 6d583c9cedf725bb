"""Experts that add the least go, with all that the gate holds for them."""

import copy
import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_accel import MixtureOfExperts, MoELanguageModel, TopKGate
from lightning_accel.compress import apply_plan_, plan_without_experts, score_experts
from lightning_accel.models import Experts
from lightning_accel.nn import ExpertChoiceGate
from tests.zoo import ZOO


def mixture(**options):
    torch.manual_seed(0)
    return MixtureOfExperts(6, 5, 4, 2, **options).eval()


@torch.no_grad()
def score(module, tokens):
    """Score our experts in float64, a slot at a time."""
    module, tokens = copy.deepcopy(module).double(), tokens.double().flatten(0, -2)
    routing = module.gate(tokens)
    norms = [[] for _ in range(module.num_experts)]
    for token, expert, weight in zip(*routing[:3], strict=True):
        hidden = F.gelu(module.experts.up_weight[expert] @ tokens[token] + module.experts.up_bias[expert])
        output = module.experts.down_weight[expert] @ hidden + module.experts.down_bias[expert]
        norms[expert].append(float((weight * output).norm()))
    return [torch.tensor(one, dtype=torch.float64) for one in norms]


@pytest.mark.parametrize("options", [{"backend": "loop"}, {"backend": "blocks"}, {"gate": ExpertChoiceGate}])
def test_scores_are_mean_norms_of_weighted_outputs(options):
    backend = options.pop("backend", "auto")
    module = mixture(**options)
    module.experts.backend = backend
    x = [torch.randn(3, 7, 6), torch.randn(2, 6)]
    scores = score_experts(module, [((one,), {}) for one in x])
    assert list(scores) == ["experts"]
    norms = zip(*(score(module, one) for one in x), strict=True)
    expected = torch.stack([torch.cat(both).mean().nan_to_num() for both in norms])
    torch.testing.assert_close(scores["experts"], expected, rtol=1e-5, atol=0)


def test_dropped_slots_do_not_count():
    module = mixture(capacity_factor=0.6)
    x = torch.randn(9, 6)
    routing = module.gate(x)
    capacity = math.ceil(0.6 * 18 / 4)
    assert (routing.report.expert_counts > capacity).any()
    expected = torch.stack([one[:capacity].mean() for one in score(module, x)])
    torch.testing.assert_close(score_experts(module, [((x,), {})])["experts"], expected, rtol=1e-5, atol=0)


class ChunkedExperts(nn.Module):
    """Take tokens sorted by expert and the numbers of each, as the experts of GraniteMoe do."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 3, nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, tokens, sizes):
        return torch.cat([part @ own.t() for part, own in zip(tokens.split(sizes), self.weight, strict=True)])


def test_experts_of_another_form_are_scored_by_their_tokens():
    module = nn.ModuleDict({"experts": ChunkedExperts()})
    module.forward = lambda tokens, sizes: module["experts"](tokens, sizes)
    calls = [((torch.randn(6, 4), [1, 3, 2]), {}), ((torch.randn(2, 4), [2, 0, 0]), {})]
    assert score_experts(module, calls)["experts"].tolist() == [3, 3, 2]


def test_tokens_go_to_the_best_of_those_that_stay():
    module = mixture(gate=lambda *sizes: TopKGate(*sizes, score="sigmoid", bias_update_rate=0.1))
    module.gate.bias_steps.copy_(torch.tensor([3, -2, 1, 0]))
    x = torch.randn(9, 6)
    plan, scores = plan_without_experts(module, [((x,), {})], 0.25)
    gone = int(scores["experts"].argmin())
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
    plan, scores = plan_without_experts(module, [((), batch)], 0.5)
    assert_are_mean_norms(scores, module, batch)
    small = copy.deepcopy(module)
    apply_plan_(small, plan)
    for path, own in scores.items():
        left = len(own) // 2
        assert small.get_submodule(path).num_experts == left
        gone = own.argsort(stable=True)[:left]
        keep = torch.tensor([one for one in range(len(own)) if one not in gone])
        assert torch.equal(small.get_submodule(path).down_proj, module.get_submodule(path).down_proj[keep])
    gates = [one for one in module.modules() if type(one).__name__.endswith("Router")]
    handles = [gate.register_forward_hook(_route_to_half(scores, number)) for number, gate in enumerate(gates)]
    expected = module(**batch).logits
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(small(**batch).logits, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def assert_are_mean_norms(scores, module, batch):
    seen = {}
    handles = [
        module.get_submodule(path).register_forward_pre_hook(lambda one, args: seen.update({one: args}))
        for path in scores
    ]
    module(**batch)
    for handle in handles:
        handle.remove()
    for own, (experts, (tokens, index, weights)) in zip(scores.values(), seen.items(), strict=True):
        norms = [[] for _ in own]
        for token, chosen, shares in zip(tokens, index, weights, strict=True):
            for number, share in zip(chosen, shares, strict=True):
                gate, up = (experts.gate_up_proj[number] @ token).chunk(2)
                norms[number].append(float((share * (experts.down_proj[number] @ (F.silu(gate) * up))).norm()))
        expected = torch.tensor([statistics.mean(one) if one else 0.0 for one in norms], dtype=torch.float64)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=0)


def _route_to_half(scores, number):
    own = [*scores.values()][number]
    gone = own.argsort(stable=True)[: len(own) // 2]

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
    for value, message in (0.0, "brought no token, or outputs of 0"), (1.0, "brought the score .* for each of them"):
        alike = mixture(gate=ExpertChoiceGate)
        for one in alike.parameters():
            one.data.fill_(value)
        with pytest.raises(ValueError, match=f"which experts of experts matter is not known: .* {message}"):
            plan_without_experts(alike, [((torch.ones(4, 6),), {})], 0.5)
    with pytest.raises(ValueError, match="experts of experts make NaN or infinity"):
        plan_without_experts(mixture(), [((x * torch.inf,), {})], 0.5)
    alone = mixture().experts
    with pytest.raises(ValueError, match="no mixture"):
        plan_without_experts(nn.Sequential(alone), [((x,), {})], 0.5, exclude=["0"])


def test_our_language_model_trains_on():
    model = MoELanguageModel(
        vocab_size=11, dim=8, num_layers=2, attention={"num_heads": 2}, experts=Experts(hidden_dim=8)
    )
    tokens = torch.randint(11, (4, 9))
    plan, _ = plan_without_experts(model, [((tokens,), {})], 0.5)
    apply_plan_(model, plan)
    output = model.train()(tokens)
    model.auxiliary_loss(output.reports).backward()
    assert len(model.expert_load.step()) == 2
    model.val_load.update(output.reports)
    assert model.val_load.compute().shape == (2, 4)


SIZES = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = dict.fromkeys(["q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8)


@pytest.mark.parametrize(
    ("name", "sizes", "bias"),
    [
        ("DeepseekV3", LATENT | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
         "gate.e_score_correction_bias"),
        ("MiniMaxM2", {"num_local_experts": 8}, "e_score_correction_bias"),
        ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 2}, "gate.moe_statics.e_score_correction_bias"),
    ],
)  # fmt: skip
def test_what_gates_hold_elsewhere_goes_and_groups_stay_equal(name, sizes, bias):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES | sizes)).eval()
    tokens = torch.randint(16, (2, 7))
    plan, scores = plan_without_experts(model, [((tokens,), {})], 0.25)
    small = copy.deepcopy(model)
    apply_plan_(small, plan)
    for path, own in scores.items():
        kept = plan.kept[f"{path}.down_proj"][0]
        gone = [one for one in range(8) if one not in kept]
        if "n_group" in sizes:
            assert gone == [int(own[:4].argmin()), 4 + int(own[4:].argmin())]
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        tensors[f"{path.removesuffix('experts')}{bias}"].data[..., gone] = -1e9  # never chosen
    torch.testing.assert_close(small(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-5)
    assert small(tokens[:1, :1]).logits.isfinite().all()
    if "n_group" in sizes:
        with pytest.raises(ValueError, match=r"0.125 of the 8 experts of .* is 1, .* 2 groups, .* a multiple of 0.25"):
            plan_without_experts(model, [((tokens,), {})], 0.125)
        with pytest.raises(ValueError, match=r"leaves 1 in the groups of a token; .* leave 2"):
            plan_without_experts(model, [((tokens,), {})], 0.75)
