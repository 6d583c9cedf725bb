import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_accel._private.torch import foreach_on_cpu
from lightning_accel.models import Experts, MoELanguageModel
from lightning_accel.strategies import AtomicModelParallelStrategy
from lightning_accel.strategies.mixed_updates import update_mixed_groups_one_by_one
from tests.ranks import run_ranks
from tests.strategies.pipeline.test_strategy import ADAMW, load, tokens, trained

SIZES = {"dim": 8, "num_layers": 2, "experts": Experts(4, hidden_dim=8, balance_weight=0.5), "moe_every": 2}


def model(num_key_value_heads=2, tie_embeddings=False):
    torch.manual_seed(3)
    attention = {"num_heads": 4, "num_key_value_heads": num_key_value_heads, "separate_documents": True}
    options = {"attention": attention, "tie_embeddings": tie_embeddings, "optimizer": ADAMW}
    return MoELanguageModel(vocab_size=11, **options, **SIZES)


def check_trained(rank, folder, kind, tied):
    """Updates are made as on CUDA."""
    torch.manual_seed(3)
    module = model(tie_embeddings=tied)
    with torch.no_grad():
        module.norm.weight.add_(rank)  # which that of the first process replaces
    strategy = kind(data_parallel_size=1, tensor_parallel_size=2, save_distributed_checkpoint=False)
    with foreach_on_cpu():
        result = trained(folder, strategy, module, tokens(24), gradient_clip_val=0.5)
    plain = [parameter.detach() for parameter in module.parameters() if not isinstance(parameter, DTensor)]
    split = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    return result["logged"], plain, split


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied"), [(ModelParallelStrategy, False), (AtomicModelParallelStrategy, True)])
def test_three_steps_equal_those_of_one_process(tmp_path, kind, tied):
    one = trained(tmp_path, module=model(tie_embeddings=tied), data=tokens(24), gradient_clip_val=0.5)
    (logged, first, split), (_, second, _) = run_ranks(check_trained, tmp_path, kind, tied)
    assert logged == pytest.approx(one["logged"], abs=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(split) == 5  # tied weights are one
    whole, parallel = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(parallel["state_dict"], dict(whole["state_dict"]), rtol=0, atol=1e-5)
    for one, other in zip(whole["optimizer_states"], parallel["optimizer_states"], strict=True):
        assert [group["foreach"] for group in other["param_groups"]] == [
            group["foreach"] for group in one["param_groups"]
        ]


def check_options(rank):
    mesh = init_device_mesh("cpu", (2,))
    split = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}, {}):
        whole = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([split, whole], **options)
        before = {name: optimizer.param_groups[0][name] for name in ("foreach", "fused")}
        update_mixed_groups_one_by_one([optimizer, object()])
        split.grad, whole.grad = torch.ones_like(split), torch.ones_like(whole)
        with foreach_on_cpu():
            optimizer.step()
            with pytest.raises(RuntimeError, match="planted"):
                optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError("planted")))
            optimizer.step()
        assert {name: optimizer.param_groups[0][name] for name in before} == before
        assert whole[0] < 1
    unmixed = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    update_mixed_groups_one_by_one([unmixed])
    assert not unmixed._optimizer_step_pre_hooks


def test_options_of_optimizers_are_changed_for_steps_alone():
    """Also those that PyTorch refuses for such groups; what is no optimizer of torch is left alone."""
    run_ranks(check_options)


def check_refused(rank, folder, sizes, num_key_value_heads, said):
    with pytest.raises(ValueError, match=said):
        trained(folder, ModelParallelStrategy(*sizes), model(num_key_value_heads), tokens())


def test_heads_must_go_into_the_devices(tmp_path):
    said = "tensor_parallel_size must divide the heads of keys and values; got 2 and 1"
    run_ranks(check_refused, tmp_path, (1, 2), 1, said)


@pytest.mark.slow
def test_data_parallelism_is_refused(tmp_path):
    run_ranks(
        check_refused, tmp_path, (2, 2), 4, "data_parallel_size=2 nothing would average the gradients", world_size=4
    )
