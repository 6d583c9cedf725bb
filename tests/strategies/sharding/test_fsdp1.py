import re

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_accel.strategies import FSDP1Strategy
from tests.ranks import run_ranks
from tests.strategies.trained import fit
from tests.tolerance import CLOSE


def gathered(run):
    with FullyShardedDataParallel.summon_full_params(run.strategy.model):
        return {name: value.detach().clone() for name, value in run.lightning_module.named_parameters()}


def check_fit_and_resume(rank, name, path):
    options = {"rows": 4, "num_rows": 8, "devices": 2}
    fit(name, **options, strategy=FSDP1Strategy(state_dict_type="sharded"), max_steps=1).save_checkpoint(path)
    return gathered(fit(name, **options, strategy="accel_fsdp1", ckpt_path=path))


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "classifier"])
def test_training_and_resuming_on_cpus_equal_one_process(name, tmp_path):
    expected = dict(fit(name, 8, num_rows=8).lightning_module.named_parameters())
    for actual in run_ranks(check_fit_and_resume, name, tmp_path / "parts.ckpt"):
        assert actual.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(actual[key], expected[key].detach(), **CLOSE)


def check_refused(rank, options):
    with pytest.raises(ValueError, match="on a CPU") as error:
        fit("plain", 4, strategy=FSDP1Strategy(**options), devices=2)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "state_dict_type='sharded', or take FullyShardedStrategy"),
        ({"cpu_offload": True, "state_dict_type": "sharded"}, "leave cpu_offload out"),
    ],
)
def test_what_torch_cannot_do_on_a_cpu_is_refused(options, message):
    for actual in run_ranks(check_refused, options):
        assert re.search(message, actual)
