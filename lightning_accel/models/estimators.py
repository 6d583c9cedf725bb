"""Estimators for scikit-learn. Shapes: N samples, V features, H components, C classes."""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from numpy.typing import ArrayLike, NDArray
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from lightning_accel.data.in_memory import BatchTensorDataset, identity_collate
from lightning_accel.models.dbn import DeepBeliefNetwork
from lightning_accel.models.dbn_fine_tuning import FineTuning
from lightning_accel.models.dbn_stages import Stage
from lightning_accel.nn.boltzmann.rbm import RBM
from lightning_accel.nn.boltzmann.stack import UNKNOWN, RBMStack
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.names import list_of_sizes

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError:
    require_module("sklearn")  # whose message names the extra
    raise

_MINIBATCHES = 500  # updates per training_step: one step of Lightning's loop costs as much as several updates
_LEAST_UPDATES = 100  # of a classifier in a pass over the data, which small data are gone through several times for
_MAX_SEED = 2**31 - 1
Array = NDArray[Any]


class _RowScaler:
    """Scale samples for visible units: unchanged for Bernoulli units, standardized for Gaussian ones."""

    mean: Array | None = None
    scale: Array | None = None

    def __init__(self, rows: Array, visible: str) -> None:
        if visible not in ("auto", "bernoulli", "gaussian"):
            raise ValueError(f"visible must be 'auto', 'bernoulli' or 'gaussian'; got {visible!r}")
        if visible == "auto":
            visible = "bernoulli" if rows.min() >= 0 and rows.max() <= 1 else "gaussian"
        self.visible: Any = visible
        self.varies = np.ones(rows.shape[1], dtype=bool)
        if visible == "gaussian":
            if len(rows) < 2:
                raise ValueError("standardising needs at least 2 rows; got n_samples = 1")
            self.mean, scale = rows.mean(axis=0, dtype=np.float64), rows.std(axis=0, dtype=np.float64)
            self.varies = (rows != rows[0]).any(axis=0) & (scale > 0)
            self.scale = np.where(self.varies, scale, 0)
        if not self.varies.any():
            raise ValueError(f"all {len(self.varies)} columns are constant: there is nothing to learn from")

    @property
    def num_varying(self) -> int:
        return int(self.varies.sum())

    @property
    def log_volume(self) -> float:
        """Return what standardization adds to the logarithm of a density."""
        return 0.0 if self.scale is None else float(np.log(self.scale[self.varies]).sum())

    def scaled(self, rows: Array) -> Tensor:
        """Scale samples (N, V) to the values of units, in the same dtype."""
        if self.mean is None or self.scale is None:
            return torch.from_numpy(np.ascontiguousarray(rows))
        kept = (rows[:, self.varies] - self.mean[self.varies]) / self.scale[self.varies]
        return torch.from_numpy(kept.astype(rows.dtype))

    def unscaled(self, states: Tensor) -> Array:
        """Scale values of units back to samples (N, V)."""
        if self.mean is None or self.scale is None:
            return states.numpy()
        rows = states.numpy() * self.scale[self.varies] + self.mean[self.varies]
        return self.with_constants(rows, self.mean).astype(states.numpy().dtype)

    def with_constants(self, values: Array, constant: Array | float) -> Array:
        """Insert ``constant`` for constant columns into ``values`` of the other columns; return (..., V)."""
        whole = np.empty((*values.shape[:-1], len(self.varies)), dtype=values.dtype)
        whole[...] = constant
        whole[..., self.varies] = values
        return whole


class RBMTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Transform samples into the means of the hidden units of a restricted Boltzmann machine, for scikit-learn.

    Replaces :class:`sklearn.neural_network.BernoulliRBM`, with its names; it also takes real values, and shuffles. Data
    within [0, 1] are treated as probabilities or bits of Bernoulli units, unchanged. Other data are standardized for
    Gaussian units, without constant columns; all results are in the units of the data again. Scale grey levels to [0,
    1] with ``MinMaxScaler(clip=True)`` if they are to be treated as probabilities.

    Args:
        n_components: H, number of hidden units.
        visible: ``bernoulli``, ``gaussian``, or ``auto``: by the data passed to ``fit``.
        preset: ``features`` trains by ``cd``, at a constant learning rate; ``density`` by ``pcd`` with centered units,
            at a rate that falls to 0: better for :meth:`score_samples` and :meth:`sample`, worse for classifiers on the
            output of :meth:`transform`.
        learning_rate: initial learning rate; ``auto`` is 0.1 for Bernoulli, 0.01 for Gaussian units.
        batch_size: samples of an update.
        n_iter: passes over the data.
        accelerator: accelerator of the Lightning Trainer, such as ``gpu``; the results are on the CPU.
        random_state: seed for reproducible fits, samples and scores.

    Attributes:
        components_: (H, V) weights; 0 for constant columns.
        intercept_hidden_: (H,) biases of the hidden units.
        intercept_visible_: (V,) biases, of standardized values for Gaussian units.
        visible_: kind of the visible units.
        mean_: (V,) that standardization subtracts, or None.
        scale_: (V,) that it divides by, or None; 0 for constant columns.
        rbm_: the :class:`lightning_accel.RBM`, for the columns that vary.

    Example:
        >>> RBMTransformer(n_components=2, random_state=0).fit_transform([[0, 0, 1], [0, 1, 1], [1, 1, 0]]).shape
        (3, 2)
    """

    def __init__(
        self,
        n_components: int = 256,
        *,
        visible: Literal["auto", "bernoulli", "gaussian"] = "auto",
        preset: Literal["features", "density"] = "features",
        learning_rate: float | Literal["auto"] = "auto",
        batch_size: int = 10,
        n_iter: int = 10,
        accelerator: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.visible = visible
        self.preset = preset
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.n_iter = n_iter
        self.accelerator = accelerator
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: object = None) -> "RBMTransformer":
        """Train on samples (N, V).

        Raises:
            ValueError: if parameters are out of range, samples are not finite or do not fit the units, or training
                diverges.
        """
        rows = _validate_input(self, X, reset=True)
        self.random_state_ = check_random_state(self.random_state)
        self._scaler = _RowScaler(rows, self.visible)
        scaled = self._scaler.scaled(rows)
        self._base = scaled.mean(dim=0)  # means of the independent units at which annealing starts
        make_network = partial(
            DeepBeliefNetwork,
            self._scaler.num_varying,
            [self.n_components],
            [_stage(self, self._scaler.visible)],
            visible=self._scaler.visible,
            minibatch_size=self.batch_size,
        )
        self.rbm_ = _fit_network(make_network, [scaled], self, self.n_iter)[0].top
        self._set_weights()
        return self

    def _set_weights(self) -> None:
        scaler, weight = self._scaler, self.rbm_.weight.detach().numpy()
        self.visible_, self.mean_, self.scale_ = scaler.visible, scaler.mean, scaler.scale
        self.components_ = scaler.with_constants(weight, 0)
        self.intercept_hidden_ = self.rbm_.hidden_bias.detach().numpy().copy()
        self.intercept_visible_ = scaler.with_constants(self.rbm_.visible_bias.detach().numpy(), 0)

    @property
    def _n_features_out(self) -> int:  # ClassNamePrefixFeaturesOutMixin names features by it
        return len(self.components_)

    @torch.no_grad()
    def transform(self, X: ArrayLike) -> Array:
        """Compute the means of the hidden units, (N, H), of samples (N, V)."""
        check_is_fitted(self)
        rows = _validate_input(self, X, reset=False)
        return self._rbm_as(rows)(self._scaler.scaled(rows)).numpy()

    @torch.no_grad()
    def inverse_transform(self, X: ArrayLike) -> Array:
        """Compute the means of the visible units, (N, V), of hidden ones (N, H)."""
        check_is_fitted(self)
        hidden = check_array(X, dtype=[np.float64, np.float32])
        if hidden.shape[1] != self.n_components:
            raise ValueError(f"inverse_transform takes {self.n_components} components; got {hidden.shape[1]} columns")
        rbm = self._rbm_as(hidden)
        return self._scaler.unscaled(rbm.visible_units.mean(rbm.visible_activation(torch.from_numpy(hidden))))

    def score_samples(self, X: ArrayLike) -> Array:
        """Compute the log-probability (density) of each sample in nats, (N,).

        It is exact if one side of the RBM has at most 20 bits, else annealed in 1000 steps, anew in each call; see
        :meth:`lightning_accel.RBM.log_z`. Constant columns are ignored. BernoulliRBM returns a random
        pseudo-likelihood here, which ranks models differently.
        """
        check_is_fitted(self)
        rows = _validate_input(self, X, reset=False)
        log_z = self.rbm_.log_z(
            "exact" if self._num_bits() <= 20 else "ais", base_mean=self._base, generator=Generator().manual_seed(0)
        )
        log_prob = self._rbm_as(rows).log_prob(self._scaler.scaled(rows), log_z)
        return log_prob.numpy() - self._scaler.log_volume

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Compute the mean of :meth:`score_samples`."""
        return float(self.score_samples(X).mean())

    @torch.no_grad()
    def gibbs(self, v: ArrayLike, n_steps: int = 1) -> Array:
        """Draw samples (N, V) by ``n_steps`` Gibbs steps starting from samples ``v`` (N, V)."""
        check_is_fitted(self)
        rows = _validate_input(self, v, reset=False)
        rbm, states, generator = self._rbm_as(rows), self._scaler.scaled(rows), self._generator()
        for _ in range(n_steps):
            states = rbm.sample_visible(rbm.sample_hidden(states, generator), generator)
        return self._scaler.unscaled(states)

    def sample(self, n_samples: int = 1, n_steps: int = 1000) -> Array:
        """Draw samples (N, V) from the model, by ``n_steps`` Gibbs steps starting from independent units."""
        check_is_fitted(self)
        return self._scaler.unscaled(self.rbm_.sample(n_samples, n_steps, generator=self._generator()))

    def _num_bits(self) -> float:
        visible = self.rbm_.num_visible if self.visible_ == "bernoulli" else math.inf
        return min(visible, self.rbm_.num_hidden)

    def _generator(self) -> Generator:
        return Generator().manual_seed(int(self.random_state_.randint(_MAX_SEED)))

    def _rbm_as(self, rows: Array) -> RBM:
        """Return the RBM in the dtype of ``rows``."""
        if rows.dtype == np.float32:
            return self.rbm_
        return copy.deepcopy(self.rbm_).double()


class DBNClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Classify by a deep belief network with a linear head, trained layer by layer, then by back-propagation.

    Rows of unknown class, marked by ``unlabeled`` in ``y``, train the layers like all others, and by
    back-propagation as :class:`lightning_accel.models.FineTuning` says.

    Args:
        hidden_layer_sizes: number of hidden units of each RBM.
        visible: kind of the visible units and scaling of the data, as in :class:`RBMTransformer`.
        preset: training of the RBMs, as in :class:`RBMTransformer`.
        learning_rate: initial learning rate of the RBMs, as in :class:`RBMTransformer`.
        n_iter: passes over the data for each RBM, each of at least 100 updates: smaller data are gone through several
            times.
        finetune_learning_rate: initial learning rate of the back-propagation; it falls to 0. ``auto`` is 1, which
            sigmoids need.
        finetune_n_iter: passes over the data by back-propagation, likewise.
        batch_size: samples of an update.
        dropout: probability with which back-propagation leaves out each hidden unit.
        unlabeled: value of ``y`` of rows whose class is unknown, -1 in scikit-learn's own semi-supervised estimators;
            None if every class is known. ``fit`` warns if ``y`` has no such row, as SelfTrainingClassifier
            does.
        accelerator: accelerator of the Lightning Trainer.
        random_state: seed for reproducible fits.

    Attributes:
        classes_: (C,) in the order of the columns of :meth:`predict_proba`.
        network_: the trained layers, an ``nn.Sequential`` from scaled samples to logits (N, C).

    Example:
        >>> model = DBNClassifier((3,), random_state=0).fit([[0, 0], [0, 1], [1, 0], [1, 1]], list("aabb"))
        >>> model.predict([[1, 1]]).shape
        (1,)
    """

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (256,),
        *,
        visible: Literal["auto", "bernoulli", "gaussian"] = "auto",
        preset: Literal["features", "density"] = "features",
        learning_rate: float | Literal["auto"] = "auto",
        n_iter: int = 10,
        finetune_learning_rate: float | Literal["auto"] = "auto",
        finetune_n_iter: int = 30,
        batch_size: int = 10,
        dropout: float = 0.0,
        unlabeled: int | str | None = None,
        accelerator: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.dropout = dropout
        self.unlabeled = unlabeled
        self.hidden_layer_sizes = hidden_layer_sizes
        self.visible = visible
        self.preset = preset
        self.learning_rate = learning_rate
        self.n_iter = n_iter
        self.finetune_learning_rate = finetune_learning_rate
        self.finetune_n_iter = finetune_n_iter
        self.batch_size = batch_size
        self.accelerator = accelerator
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> "DBNClassifier":
        """Train on samples (N, V) and their classes (N,).

        Raises:
            ValueError: as :meth:`RBMTransformer.fit`, or if there are fewer than two classes, or ``unlabeled`` is a
                number where classes are texts, or a text where they are numbers.
        """
        rows, classes = _validate_input(self, X, y, reset=True)
        known = np.ones(len(rows), dtype=bool)
        if self.unlabeled is not None:
            kind = classes.dtype.kind
            if kind != "O" and isinstance(self.unlabeled, str) != (kind in "SU"):
                raise ValueError(
                    f"unlabeled={self.unlabeled!r} is compared with the values of y, which are of another kind, such "
                    f"as {classes[0]!r}"
                )
            known = classes != self.unlabeled
            if known.all():
                warnings.warn(
                    f"y contains no row of unlabeled={self.unlabeled!r}, so every class counts as known; give such "
                    "rows, or leave unlabeled out",
                    stacklevel=2,
                )
        check_classification_targets(classes[known])
        labels = np.full(len(rows), UNKNOWN)
        self.classes_, labels[known] = np.unique(classes[known], return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"DBNClassifier needs at least 2 classes; y has {len(self.classes_)} class, {self.classes_.tolist()}"
                + ("" if known.all() else f", and {(~known).sum()} rows of unknown class: give that of more rows")
            )
        self._scaler = _RowScaler(rows, self.visible)
        sizes = list_of_sizes("hidden_layer_sizes", self.hidden_layer_sizes)
        kinds = [self._scaler.visible, *["bernoulli"] * (len(sizes) - 1)]
        make_network = partial(
            DeepBeliefNetwork,
            self._scaler.num_varying,
            sizes,
            [_stage(self, kind) for kind in kinds],
            visible=self._scaler.visible,
            fine_tuning=FineTuning(
                "classifier",
                self.finetune_n_iter,
                _resolve_rate("finetune_learning_rate", self.finetune_learning_rate, 1.0),
                self.dropout,
            ),
            labels=not known.all(),
            num_classes=len(self.classes_),
            minibatch_size=self.batch_size,
        )
        tensors = [self._scaler.scaled(rows), torch.from_numpy(labels.astype(np.int64))]
        epochs = len(sizes) * self.n_iter + self.finetune_n_iter
        stack, head = _fit_network(make_network, tensors, self, epochs, _LEAST_UPDATES)
        assert head is not None
        self.network_ = stack.to_mlp().append(head)
        return self

    @torch.no_grad()
    def predict_log_proba(self, X: ArrayLike) -> Array:
        """Compute the log-probabilities of the classes, (N, C), of samples (N, V)."""
        check_is_fitted(self)
        rows = _validate_input(self, X, reset=False)
        network = self.network_ if rows.dtype == np.float32 else copy.deepcopy(self.network_).double()
        return network(self._scaler.scaled(rows)).log_softmax(dim=1).numpy()

    def predict_proba(self, X: ArrayLike) -> Array:
        """Compute the probabilities of the classes, (N, C), of samples (N, V)."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: ArrayLike) -> Array:
        """Predict the most probable class, (N,), of samples (N, V)."""
        best = self.predict_log_proba(X).argmax(axis=1)  # raises if not fitted, before classes_ is read
        return self.classes_[best]


def _stage(estimator: RBMTransformer | DBNClassifier, visible: str) -> Stage:
    lr = _resolve_rate("learning_rate", estimator.learning_rate, 0.1 if visible == "bernoulli" else 0.01)
    if estimator.preset not in ("features", "density"):
        raise ValueError(f"preset must be 'features' or 'density'; got {estimator.preset!r}")
    if estimator.preset == "density":
        return Stage(epochs=estimator.n_iter, lr=lr)
    return Stage(epochs=estimator.n_iter, lr=lr, lr_decay="none", preset="features")


def _resolve_rate(name: str, rate: float | str, default: float) -> float:
    if isinstance(rate, str) and rate != "auto":
        raise ValueError(f"{name} must be a number or 'auto'; got {rate!r}")
    return default if isinstance(rate, str) else rate


def _fit_network(
    make_network: Callable[[], DeepBeliefNetwork],
    tensors: Sequence[Tensor],
    estimator: RBMTransformer | DBNClassifier,
    epochs: int,
    least_updates: int = 0,
) -> tuple[RBMStack, nn.Linear | None]:
    """Train without files, progress bars or messages, and without changing torch's global random state."""
    if estimator.batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {estimator.batch_size}")
    seed = int(check_random_state(estimator.random_state).randint(_MAX_SEED))
    rows = BatchTensorDataset(tensors[0].float(), *tensors[1:])
    batch_size = _MINIBATCHES * estimator.batch_size
    times = max(1, math.ceil(least_updates * estimator.batch_size / len(rows)))
    with _quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        network = make_network()
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator=estimator.accelerator,
            devices=1,
            plugins=[LightningEnvironment()],  # ignores how this process was launched
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        sampler = RandomSampler(rows, num_samples=times * len(rows))  # all rows, and then all of them again
        trainer.fit(network, DataLoader(rows, batch_size, sampler=sampler, collate_fn=identity_collate))
    assert network.stack is not None
    return network.stack.cpu(), None if network.head is None else network.head.cpu()


@contextmanager
def _quiet() -> Iterator[None]:
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")  # advice on workers, logging intervals
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _validate_input(estimator: Any, X: ArrayLike, y: object = "no_validation", *, reset: bool) -> Any:
    """Validate input as scikit-learn's own estimators do."""
    return validate_data(estimator, X, y, reset=reset, dtype=[np.float64, np.float32])
