"""Checkpoints of models whose arguments have been renamed load, and keep what they hold."""

import lightning as L
import pytest
import torch

from lightning_accel import Classifier, DeepBeliefNetwork, MoEClassifier, MoELanguageModel, RelationalGNN, SequenceModel

MODELS = {
    "classifier": (Classifier, {"num_features": 5, "num_classes": 3}, {"num_features": "in_features"}),
    "belief": (
        DeepBeliefNetwork,
        {"num_visible": 5, "num_classes": 3, "hidden_dims": [4, 3], "fine_tuning": {"method": "classifier", "lr": 0.2}},
        {
            "hidden_dims": "layers",
            "fine_tuning.method": "finetune",
            "fine_tuning.epochs": "finetune_epochs",
            "fine_tuning.lr": "finetune_lr",
        },
    ),
    "moe": (
        MoEClassifier,
        {"num_features": 5, "num_classes": 3, "experts": {"num_experts": 3, "k": 1, "hidden_dim": 6, "z_weight": 0.1}},
        {"experts.hidden_dim": "expert_dim"},
    ),
    "language": (
        MoELanguageModel,
        {
            "vocab_size": 11,
            "dim": 8,
            "num_layers": 2,
            "attention": {"num_heads": 2},
            "experts": {"hidden_dim": 6},
            "generation": {"max_new_tokens": 3},
        },
        {"experts.hidden_dim": "expert_dim", "attention.num_heads": "num_heads"},
    ),
    "sequence": (
        SequenceModel,
        {"num_features": 2, "num_classes": 3, "target_kind": "labelling", "layers": {"hidden_dim": 5, "cell": "lstm"}},
        {"layers.hidden_dim": "hidden_size"},
    ),
    "relational": (
        RelationalGNN,
        {
            "num_features": 2,
            "num_classes": 3,
            "level": "graph",
            "target_kind": "classification",
            "layers": {"conv": "GATConv", "conv_options": {"heads": 2, "concat": False}, "dim": 5, "dropout": 0.1}
            | {"compress_sums": False},  # as before there was the option
            "marking": {"num_nodes": 2, "tuples": "edges", "samples": 3},
        },
        {"marking.num_nodes": "marks"},
    ),
}
GROUPS = ("attention", "layers", "marking", "fine_tuning", "experts", "generation")


@pytest.mark.sampled(default=2)
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's call
@pytest.mark.parametrize("by_command_line", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_with_old_names_restore_sizes(tmp_path, name, by_command_line):
    kind, sizes, old_names = MODELS[name]
    model = kind(**sizes)
    saved = {"an_option_that_went": 1}
    for key, value in model.hparams.items():
        options = {f"{key}.{option}": part for option, part in value.items()} if key in GROUPS else {key: value}
        saved |= {old_names.get(name, name.rpartition(".")[2]): part for name, part in options.items()}
    if by_command_line:
        class_path = f"{kind.__module__}.{kind.__name__}"
        saved |= {"_class_path": class_path, "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    content = {"state_dict": model.state_dict(), "hyper_parameters": saved}
    torch.save({**content, "pytorch-lightning_version": L.__version__}, tmp_path / "old.ckpt")
    with pytest.warns(FutureWarning, match="is now called"):
        loaded = (L.LightningModule if by_command_line else kind).load_from_checkpoint(tmp_path / "old.ckpt")
    assert {key: loaded.hparams[key] for key in sizes} == {key: model.hparams[key] for key in sizes}
    assert all(
        model.hparams[key][option] == part for key in sizes if key in GROUPS for option, part in sizes[key].items()
    )
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
