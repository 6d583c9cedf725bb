"""Layers, models, data, callbacks and strategies for PyTorch Lightning, for faster, larger and compressed models.

Begin with :func:`tune` and :func:`doctor` for a faster run; :class:`Pruning`, :class:`Quantization` and :class:`Export`
make a model smaller. ``help(lightning_accel.tune)`` is about one of them alone.

Importing the package imports nothing else, not even torch; each public name is imported on first use. The names are
those of ``__init__.pyi``, which type checkers read; all others are found in their packages.
"""

from pathlib import Path

from lightning_accel._lazy import lazy_getattr, names_in, public_dir

__version__ = "0.1.0"

_MODULE_OF = names_in(Path(__file__).with_suffix(".pyi"))
_MOVED = {
    name: f"{__name__}.{package}"
    for package, names in {
        "callbacks": "EarlyStopping ExpertLoadMonitor RBMMonitor SamplerCheck StallMonitor WeightedAccumulation",
        "compress": "load_compressed load_pruned",
        "data": (
            "AddRelationalTriples BarsAndStripesDataModule IdxDataModule LengthBatchSampler SequenceBatch "
            "length_batch_loader read_idx"
        ),
        "models": "DBNClassifier RBMTransformer Stage",
        "nn": (
            "ContrastiveDivergence ExpertChoiceGate ExpertLoad FeedForward RBMStack RelationalOrder3Pooling "
            "RelationalPooling TreeRNN UpDown assert_permutation_invariant"
        ),
        "precision": "Float8Precision",
        "strategies": "AtomicCheckpointIO AtomicModelParallelStrategy SyncBatchNormPlugin",
    }.items()
    for name in names.split()
}

__all__ = sorted([*_MODULE_OF, "__version__"])
__getattr__ = lazy_getattr(__name__, _MODULE_OF, _MOVED)
__dir__ = public_dir(__all__, globals())
