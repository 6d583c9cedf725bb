"""All private names of other libraries that the package touches: ``torch``, ``lightning`` and ``others``.

Each is a small function or an alias here, so that a release which renames one breaks one place, and a test that names
it. Two things cannot be functions: methods of ours that override private ones, and methods that we replace on objects
of others, whose classes are not ours to choose. Both are listed here; tests find no others.
"""

__all__ = ["OVERRIDDEN"]

OVERRIDDEN = {
    "callbacks.early_stopping.RestoringEarlyStopping._run_early_stopping_check": "all hooks of EarlyStopping call it",
    "callbacks.resume.logged_state._AtomicWriter._rewrite_with_new_header": "the only step of a save that loses rows",
    "cli.command.AccelCLI._parse_ckpt_path": "LightningCLI offers no hook between a checkpoint's values and the parser",
    "precision.amp.WorldGradScaler._unscale_grads_": "unscale_ passes all gradients to it, of all meshes",
    "strategies.sharding.strategy.FullyShardedStrategy._get_process_group_backend": "the group is made by its answer",
}
