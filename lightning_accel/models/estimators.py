"""Estimators for scikit-learn. Shapes: N rows, V features, H components, C classes."""

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
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel.data.in_memory import TensorRows, already_a_batch
from lightning_accel.models.dbn import DeepBeliefNetwork
from lightning_accel.models.dbn_stages import Stage
from lightning_accel.models.row_scaler import Array, RowScaler
from lightning_accel.nn.dbn import RBMStack
from lightning_accel.nn.rbm import RBM, Hidden

_MINIBATCHES = 500  # that one call of Lightning's loop updates by: its own cost is that of several small ones
_STARTS = 2**31 - 1


class RBMTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A restricted Boltzmann machine that turns rows into the means of its hidden units, for scikit-learn.

    Takes the place of :class:`sklearn.neural_network.BernoulliRBM` and has its names; it also takes real values, and
    shuffles. Rows within [0, 1] are taken for probabilities or bits of Bernoulli units, as they are. Others are
    standardised and given to Gaussian units, without the columns that are constant; all results are in the units of
    the data again. Scale grey levels to [0, 1], with ``MinMaxScaler(clip=True)``, where that is what they are.

    Args:
        n_components: H, hidden units.
        visible: ``bernoulli``, ``gaussian``, or ``auto``: by the data that ``fit`` sees.
        hidden: ``bernoulli`` or ``relu``.
        preset: ``features`` trains by ``cd``, at a constant learning rate; ``density`` by ``pcd`` with centred units,
            at a rate that falls to 0: better for :meth:`score_samples` and :meth:`sample`, worse for classifiers of
            what :meth:`transform` makes.
        learning_rate: at the start; ``auto`` is 0.1 for Bernoulli, 0.01 for Gaussian units.
        batch_size: rows of an update.
        n_iter: passes over the data.
        accelerator: of the Lightning Trainer that fits, such as ``gpu``; the results are on the CPU.
        random_state: a number for fits, samples and scores that repeat.

    Attributes:
        components_: (H, V) weights; 0 for constant columns.
        intercept_hidden_: (H,) biases.
        intercept_visible_: (V,) biases, of standardised values if those are what units hold.
        visible_: kind of the visible units.
        mean_: (V,) that standardising subtracts, or None.
        scale_: (V,) that it divides by, or None; 0 for constant columns.
        rbm_: the :class:`lightning_accel.RBM`, of the columns that vary.

    >>> RBMTransformer(n_components=2, random_state=0).fit_transform([[0, 0, 1], [0, 1, 1], [1, 1, 0]]).shape
    (3, 2)
    """

    def __init__(
        self,
        n_components: int = 256,
        *,
        visible: Literal["auto", "bernoulli", "gaussian"] = "auto",
        hidden: Hidden = "bernoulli",
        preset: Literal["features", "density"] = "features",
        learning_rate: float | Literal["auto"] = "auto",
        batch_size: int = 10,
        n_iter: int = 10,
        accelerator: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.visible = visible
        self.hidden = hidden
        self.preset = preset
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.n_iter = n_iter
        self.accelerator = accelerator
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: object = None) -> "RBMTransformer":
        """Train on rows (N, V).

        Raises:
            ValueError: if parameters are out of range, rows are not finite or do not fit the units, or training
                diverges.
        """
        rows = _validated(self, X, reset=True)
        self.random_state_ = check_random_state(self.random_state)
        self._scaler = RowScaler(rows, self.visible)
        scaled = self._scaler.scaled(rows)
        self._base = scaled.mean(dim=0)  # of the independent units that annealing begins with
        make_network = partial(
            DeepBeliefNetwork,
            self._scaler.num_varying,
            [self.n_components],
            [_stage(self, self._scaler.visible)],
            visible=self._scaler.visible,
            hidden=self.hidden,
            minibatch_size=self.batch_size,
        )
        self.rbm_ = _fitted(make_network, [scaled], self, self.n_iter)[0].top
        self._tell_weights()
        return self

    def _tell_weights(self) -> None:
        scaler, weight = self._scaler, self.rbm_.weight.detach().numpy()
        self.visible_, self.mean_, self.scale_ = scaler.visible, scaler.mean, scaler.scale
        self.components_ = scaler.with_constants(weight, 0)
        self.intercept_hidden_ = self.rbm_.hidden_bias.detach().numpy().copy()
        self.intercept_visible_ = scaler.with_constants(self.rbm_.visible_bias.detach().numpy(), 0)

    @property
    def _n_features_out(self) -> int:  # by which ClassNamePrefixFeaturesOutMixin names features
        return len(self.components_)

    @torch.no_grad()
    def transform(self, X: ArrayLike) -> Array:
        """Means of the hidden units, (N, H), of rows (N, V)."""
        check_is_fitted(self)
        rows = _validated(self, X, reset=False)
        return self._rbm_of(rows)(self._scaler.scaled(rows)).numpy()

    @torch.no_grad()
    def inverse_transform(self, X: ArrayLike) -> Array:
        """Means of the visible units, (N, V), of hidden ones (N, H)."""
        check_is_fitted(self)
        hidden = check_array(X, dtype=[np.float64, np.float32])
        if hidden.shape[1] != self.n_components:
            raise ValueError(f"inverse_transform takes {self.n_components} components; got {hidden.shape[1]} columns")
        rbm = self._rbm_of(hidden)
        return self._scaler.unscaled(rbm.visible_units.mean(rbm.visible_activation(torch.from_numpy(hidden))))

    def score_samples(self, X: ArrayLike) -> Array:
        """Log-probability (density) of each row in nats, (N,).

        It is exact where one side of the RBM has at most 20 bits, else annealed in 1000 steps, anew in each call; see
        :meth:`lightning_accel.RBM.log_z`. Constant columns count for nothing. BernoulliRBM has a random
        pseudo-likelihood here, which ranks models otherwise.
        """
        check_is_fitted(self)
        rows = _validated(self, X, reset=False)
        log_z = self.rbm_.log_z(
            "exact" if self._num_bits() <= 20 else "ais", base_mean=self._base, generator=Generator().manual_seed(0)
        )
        log_prob = self._rbm_of(rows).log_prob(self._scaler.scaled(rows), log_z)
        return log_prob.numpy() - self._scaler.log_volume

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Mean of :meth:`score_samples`."""
        return float(self.score_samples(X).mean())

    @torch.no_grad()
    def gibbs(self, v: ArrayLike, n_steps: int = 1) -> Array:
        """Draw rows (N, V) by ``n_steps`` Gibbs steps from rows ``v`` (N, V)."""
        check_is_fitted(self)
        rows = _validated(self, v, reset=False)
        rbm, states, generator = self._rbm_of(rows), self._scaler.scaled(rows), self._generator()
        for _ in range(n_steps):
            states = rbm.sample_visible(rbm.sample_hidden(states, generator), generator)
        return self._scaler.unscaled(states)

    def sample(self, n_samples: int = 1, n_steps: int = 1000) -> Array:
        """Draw rows (N, V) from the model, by ``n_steps`` Gibbs steps from independent units."""
        check_is_fitted(self)
        return self._scaler.unscaled(self.rbm_.sample(n_samples, n_steps, generator=self._generator()))

    def _num_bits(self) -> float:
        visible = self.rbm_.num_visible if self.visible_ == "bernoulli" else math.inf
        return min(visible, self.rbm_.num_hidden if self.hidden == "bernoulli" else math.inf)

    def _generator(self) -> Generator:
        return Generator().manual_seed(int(self.random_state_.randint(_STARTS)))

    def _rbm_of(self, rows: Array) -> RBM:
        """The RBM in the dtype of ``rows``."""
        if rows.dtype == np.float32:
            return self.rbm_
        return copy.deepcopy(self.rbm_).double()


class DBNClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A deep belief network with a linear head, trained layer by layer and then by back-propagation, for scikit-learn.

    Args:
        hidden_layer_sizes: hidden units of each RBM.
        visible: as in :class:`RBMTransformer`, which tells what is done with rows.
        hidden: ``bernoulli`` or ``relu``.
        preset: of the RBMs, as there.
        learning_rate: of the RBMs, as there.
        n_iter: passes over the data for each RBM.
        finetune_learning_rate: of the back-propagation, at the start; it falls to 0. ``auto`` is 1 for Bernoulli hidden
            units, whose sigmoids need it, and 0.1 for ``relu``.
        finetune_n_iter: passes over the data by back-propagation.
        batch_size: rows of an update.
        accelerator: of the Lightning Trainer that fits.
        random_state: a number for fits that repeat.

    Attributes:
        classes_: (C,) in the order of the columns of :meth:`predict_proba`.
        network_: the trained layers, an ``nn.Sequential`` of rows as the units hold them to logits (N, C).

    >>> DBNClassifier((3,), random_state=0).fit([[0, 0], [0, 1], [1, 0], [1, 1]], list("aabb")).predict([[1, 1]]).shape
    (1,)
    """

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (256,),
        *,
        visible: Literal["auto", "bernoulli", "gaussian"] = "auto",
        hidden: Hidden = "bernoulli",
        preset: Literal["features", "density"] = "features",
        learning_rate: float | Literal["auto"] = "auto",
        n_iter: int = 10,
        finetune_learning_rate: float | Literal["auto"] = "auto",
        finetune_n_iter: int = 30,
        batch_size: int = 10,
        accelerator: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.visible = visible
        self.hidden = hidden
        self.preset = preset
        self.learning_rate = learning_rate
        self.n_iter = n_iter
        self.finetune_learning_rate = finetune_learning_rate
        self.finetune_n_iter = finetune_n_iter
        self.batch_size = batch_size
        self.accelerator = accelerator
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> "DBNClassifier":
        """Train on rows (N, V) and their classes (N,).

        Raises:
            ValueError: as :meth:`RBMTransformer.fit`, or if there are fewer than two classes.
        """
        rows, classes = _validated(self, X, y, reset=True)
        check_classification_targets(classes)
        self.classes_, labels = np.unique(classes, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"DBNClassifier needs at least 2 classes; y has 1 class, {self.classes_.tolist()}")
        self._scaler = RowScaler(rows, self.visible)
        upper = "gaussian" if self.hidden == "relu" else "bernoulli"
        sizes = list(self.hidden_layer_sizes)
        kinds = [self._scaler.visible, *[upper] * (len(sizes) - 1)]
        make_network = partial(
            DeepBeliefNetwork,
            self._scaler.num_varying,
            sizes,
            [_stage(self, kind) for kind in kinds],
            visible=self._scaler.visible,
            hidden=self.hidden,
            finetune="classifier",
            finetune_epochs=self.finetune_n_iter,
            finetune_lr=_rate_of(
                "finetune_learning_rate", self.finetune_learning_rate, 0.1 if self.hidden == "relu" else 1.0
            ),
            num_classes=len(self.classes_),
            minibatch_size=self.batch_size,
        )
        tensors = [self._scaler.scaled(rows), torch.from_numpy(labels.astype(np.int64))]
        stack, head = _fitted(make_network, tensors, self, len(sizes) * self.n_iter + self.finetune_n_iter)
        assert head is not None
        self.network_ = stack.to_mlp().append(head)
        return self

    @torch.no_grad()
    def predict_log_proba(self, X: ArrayLike) -> Array:
        """Logarithms of the probabilities of the classes, (N, C), of rows (N, V)."""
        check_is_fitted(self)
        rows = _validated(self, X, reset=False)
        network = self.network_ if rows.dtype == np.float32 else copy.deepcopy(self.network_).double()
        return network(self._scaler.scaled(rows)).log_softmax(dim=1).numpy()

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities of the classes, (N, C), of rows (N, V)."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: ArrayLike) -> Array:
        """The likeliest class of each row, (N,), of rows (N, V)."""
        best = self.predict_log_proba(X).argmax(axis=1)  # which refuses to go on where classes are not known
        return self.classes_[best]


def _stage(estimator: RBMTransformer | DBNClassifier, visible: str) -> Stage:
    lr = _rate_of("learning_rate", estimator.learning_rate, 0.1 if visible == "bernoulli" else 0.01)
    if estimator.preset not in ("features", "density"):
        raise ValueError(f"preset must be 'features' or 'density'; got {estimator.preset!r}")
    if estimator.preset == "density":
        return Stage(epochs=estimator.n_iter, lr=lr)
    return Stage(epochs=estimator.n_iter, lr=lr, lr_decay="none", preset="features")


def _rate_of(name: str, rate: float | str, default: float) -> float:
    if isinstance(rate, str) and rate != "auto":
        raise ValueError(f"{name} must be a number or 'auto'; got {rate!r}")
    return default if isinstance(rate, str) else rate


def _fitted(
    make_network: Callable[[], DeepBeliefNetwork],
    tensors: Sequence[Tensor],
    estimator: RBMTransformer | DBNClassifier,
    epochs: int,
) -> tuple[RBMStack, nn.Linear | None]:
    """Train without files, bars or messages, and without a trace in torch's own random numbers."""
    if estimator.batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {estimator.batch_size}")
    seed = int(check_random_state(estimator.random_state).randint(_STARTS))
    rows = TensorRows(tensors[0].float(), *tensors[1:])
    batch_size = _MINIBATCHES * estimator.batch_size
    with _quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        network = make_network()
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator=estimator.accelerator,
            devices=1,
            plugins=[LightningEnvironment()],  # whatever launched this process
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(network, DataLoader(rows, batch_size, shuffle=True, collate_fn=already_a_batch))
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


def _validated(estimator: Any, X: ArrayLike, y: object = "no_validation", *, reset: bool) -> Any:
    """What scikit-learn's own estimators do with their input; a method before 1.6, a function since."""
    options: dict[str, Any] = {"reset": reset, "dtype": [np.float64, np.float32]}
    try:
        from sklearn.utils.validation import validate_data
    except ImportError:
        return estimator._validate_data(X, y, **options)
    return validate_data(estimator, X, y, **options)
