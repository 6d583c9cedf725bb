"""All private names of other libraries that the package touches: ``torch``, ``lightning`` and ``others``.

Each is a small function or an alias here, so that a release which renames one breaks one place, and a test that names
it. Two things cannot be functions: methods of ours that override private ones, and methods that we replace on objects
of others, whose classes are not ours to choose. Both are listed here; tests find no others.
"""

__all__ = ["OVERRIDDEN", "REPLACED"]

OVERRIDDEN = {
    "callbacks.early_stopping.RestoringEarlyStopping._run_early_stopping_check": "all hooks of EarlyStopping call it",
    "callbacks.resume.logged_state._AtomicWriter._rewrite_with_new_header": "the only step of a save that loses rows",
    "cli.command.AccelCLI._parse_ckpt_path": "LightningCLI offers no hook between a checkpoint's values and the parser",
    "cli.command.AccelCLI._prepare_subcommand_parser": "the only place that fills the parser of one subcommand alone",
    "cli.help_text.HelpText._expand_help": "the place where argparse's own formatters complete the text of an option",
    "nn.recurrent.layer.RecurrentLayer._apply": "as of torch.nn.RNNBase, whose weights move into one piece of memory",
    "planning.simulated_group.SimulatedGroup._allgather_base": "torch before 2.13 calls it by this name",
    "planning.simulated_group.SimulatedGroup._reduce_scatter_base": "torch before 2.13 calls it by this name",
    "precision.amp.WorldGradScaler._unscale_grads_": "unscale_ passes all gradients to it, of all meshes",
    "strategies.sharding.strategy.FullyShardedStrategy._get_process_group_backend": "the group is made by its answer",
}

REPLACED = {
    "callbacks/adapters.py": {"load_checkpoint": "no hook comes between reading a checkpoint and loading its weights"},
    "callbacks/batching.py": {
        "process_dataloader": "no hook comes between a loader and its first iteration",
        "batch_to_device": "no hook of callbacks gets a batch before it is on the device, or may return another",
    },
    "callbacks/compression_phase.py": {"check_monitor_top_k": "ModelCheckpoint has no hook before it saves"},
    "callbacks/deployment/copies.py": {"training_step": "copies keep what somebody has set there, but no wrappers"},
    "callbacks/distillation/callback.py": {"training_step": "callbacks cannot add to the loss"},
    "callbacks/expert_losses.py": {"training_step": "callbacks cannot add to the loss"},
    "callbacks/pruning/callback.py": {"load_model_state_dict": "no hook comes before the weights are loaded"},
    "callbacks/pruning/semi_structured.py": {"__class__": "the layer stays where it is, with its name and hooks"},
    "callbacks/run_parts.py": dict.fromkeys(("start", "stop"), "the profiler is the user's, and stays"),
    "callbacks/recorded_calls.py": {"__call__": "a hook within a compiled module would break its graph"},
    "callbacks/resume/exact_resume.py": {
        "process_dataloader": "no hook comes between a loader and its first iteration",
        "on_train_start": "no hook comes after all others",
        "run": "nothing public goes around the loop of a fit",
    },
    "callbacks/resume/logged_state.py": {"__class__": "a CSVLogger makes its writer itself"},
    "callbacks/memory_savings.py": {
        "training_step": "no hook comes between a step's forward and backward",
        "log": "micro-batches log once for all",
    },
    "callbacks/weighted_accumulation.py": {"training_step": "no hook sees a step's output before backward"},
    "callbacks/speedups.py": {"process_dataloader": "no hook comes between a loader and its first iteration"},
    "cli/command.py": {"configure_optimizers": "LightningCLI does so, and ours knows the length of the run"},
    "compress/calls.py": {"forward": "outputs that are known already stand in for it, for a moment"},
    "compress/quantization/fake_quant.py": {"forward": "hooks cannot replace a weight, and wrappers would rename it"},
    "compress/uncompiled.py": {"__call__": "Module.compile cannot be undone"},
    "nn/deferred_weights.py": {"forward": "hooks see weights when they are computed, and a new class loses the place"},
    "nn/graph_attention.py": {"forward": "a block keeps its class, its place and its hooks"},
    "nn/message_passing.py": {"propagate": "hooks see messages when they are computed, and cannot stand in for them"},
    "nn/recurrent/fused.py": {"forward": "another layer would lose its hooks and its place, a class its methods"},
    "planning/simulation.py": {"setup_optimizers": "no hook comes between the move of a module and its optimizers"},
    "strategies/data_parallel.py": {"log": "replicas log from threads, once for all"},
    "strategies/pipeline/logging.py": {"log": "micro-batches log once for all"},
    "strategies/pipeline/random.py": {"__call__": "hooks of a layer draw from its generator, too"},
    "strategies/pipeline/stage.py": {"__call__": "layers of other stages run neither forward nor hooks"},
    "strategies/pipeline/strategy.py": {
        "clip_grad_by_norm": "the precision plug-in is the user's, and knows one process alone",
        "state_dict": "a process that was spawned returns what the whole module has",
    },
    "strategies/sharding/blocks.py": {"forward": "wrappers that recompute rename parameters"},
    "strategies/sharding/expert_parallel.py": {"forward": "the layer is the user's, and may be any with experts"},
    "strategies/sharding/strategy.py": {
        "clip_grad_by_norm": "the precision plug-in is the user's, and knows one process alone",
        "state_dict": "a process that was spawned returns what the whole module has",
    },
    "strategies/sync_batchnorm.py": {"__class__": "another layer would lose its hooks and its place"},
    "tuning/latency_recorder.py": {"log": "means over an epoch are not in the Trainer's metrics in its steps"},
    "tuning/serving.py": {
        **dict.fromkeys(("predict_dataloader", "val_dataloader"), "batches are cut to single samples"),
        **dict.fromkeys(("prepare_data", "setup", "teardown"), "samples go round and round without these"),
    },
}
