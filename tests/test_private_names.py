"""Private names of other libraries that the package uses: each is there in the installed versions."""

import ast
import inspect
import pkgutil
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_accel"

# By the module, class or function that has them
USED = {
    "torch": "_C _foreach_mul_ _foreach_norm _amp_foreach_non_finite_check_and_unscale_ _inductor _int_mm",
    "torch.Tensor": "_version _backward_hooks _post_accumulate_grad_hooks",
    "torch._C": "_are_functorch_transforms_active",
    "torch._ops.OpOverload": "_schema",
    "torch.cpu": "_is_amx_tile_supported _is_avx512_bf16_supported _is_vnni_supported",
    "torch.amp.GradScaler": "_lazy_init_scale_growth_tracker",
    "torch.amp.grad_scaler": "_found_inf_per_device",
    "torch.ao.quantization.observer.UniformQuantizationObserverBase": "_calculate_qparams",
    "torch.distributed": "_functional_collectives",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
    "torch.distributed.distributed_c10d": "_get_default_store",
    "torch.nn.Conv2d": "_conv_forward",
    "torch.nn.Module": ("_apply _buffers _call_impl _compiled_call_impl _modules _replicate_for_data_parallel"),
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.modules.batchnorm": "_BatchNorm _NormBase",
    "torch.nn.modules.batchnorm.BatchNorm2d": "_check_input_dim",
    "torch.nn.modules.conv": "_ConvNd _ConvTransposeNd",
    "torch.ops.aten": "_grouped_mm",
    "torch.optim.Optimizer": "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
    "torch.optim.optimizer": "_global_optimizer_pre_hooks _global_optimizer_post_hooks",
    "torch.serialization": "_get_layout",
    "torch.utils": "_pytree _python_dispatch",
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": "_rcvd_idx _task_info _workers",
    "torch_geometric.nn.MessagePassing": "_apply_sigmoid _edge_mask",
    "torchmetrics.Metric": "_computed _forward_cache _update_count",
    "lightning.fabric.utilities.distributed": "_sync_ddp_if_available",
    "lightning.pytorch.LightningModule": "_compiler_ctx _metric_attributes",
    "lightning.pytorch.Trainer": "_data_connector _logger_connector",
    "lightning.pytorch.callbacks.Callback": "_generate_state_key",
    "lightning.pytorch.callbacks.EarlyStopping": "_evaluate_stopping_criteria",
    "lightning.pytorch.callbacks.ModelCheckpoint": (
        "_defer_save_until_validation _last_checkpoint_saved _last_global_step_saved _monitor_candidates "
        "_save_last_checkpoint"
    ),
    "lightning.pytorch.callbacks.WeightAveraging": "_average_model",
    "lightning.pytorch.loggers.CSVLogger": "_version",
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop": (
        "_data_source _logged_outputs _results _seen_batches_per_dataloader"
    ),
    "lightning.pytorch.loops.fit_loop._FitLoop": (
        "_combined_loader _combined_loader_states_to_load _data_fetcher _data_source _load_combined_loader_states "
        "_restart_stage"
    ),
    "lightning.pytorch.loops.loop._Loop": "_loaded_from_state_dict _resuming_from_checkpoint _restarting",
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": (
        "_batches_that_stepped _num_ready_batches_reached _results _skip_next_val"
    ),
    "lightning.pytorch.plugins.precision.Precision": "_after_closure",
    "lightning.pytorch.strategies.DDPStrategy": "_start_method _timeout",
    "lightning.pytorch.strategies.ModelParallelStrategy": "_timeout",
    "lightning.pytorch.strategies.ParallelStrategy": "_layer_sync",
    "lightning.pytorch.strategies.strategy": "_reset_optimizers_and_schedulers",
    "lightning.pytorch.strategies.launchers.multiprocessing": "_MultiProcessingLauncher",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": (
        "_current_fx _first_loop_iter"
    ),
    "lightning.pytorch.trainer.connectors.logger_connector.result": "_Metadata _ResultMetric _Sync",
    "sys": "_current_frames _getframe",
}


@pytest.mark.parametrize("owner", USED)
def test_is_there(owner):
    found = pkgutil.resolve_name(owner)
    for name in USED[owner].split():
        # Instances have some alone: their class, or a base of it, then sets them
        classes = found.__mro__[:-1] if inspect.isclass(found) else [found] if inspect.ismodule(found) else []
        is_set = any(name in inspect.getsource(each) for each in classes if not hasattr(found, name))
        assert hasattr(found, name) or is_set, f"{owner} has no {name}"


def test_all_that_are_used_are_listed():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    own = {"_asdict", "_replace", "_fields", "_field_defaults"}  # public ones of named tuples
    for _, node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            own.update([node.attr] if node.value.id in ("self", "cls") else [])
    listed = {name for names in USED.values() for name in names.split()}
    unlisted = []
    for path, node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_accel"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        private = {name for name in names if name.startswith("_") and not name.startswith("__")}
        unlisted += [f"{path.relative_to(PACKAGE)}: {name}" for name in sorted(private - own - listed)]
    assert not unlisted
