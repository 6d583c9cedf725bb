"""Estimators by scikit-learn's own checks, and by what RBMs say."""

import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from lightning_accel.models import DeepBeliefNetwork, Stage, estimators
from lightning_accel.models.estimators import DBNClassifier, RBMTransformer
from lightning_accel.nn import ContrastiveDivergence
from tests.tolerance import rounding

QUICK = "check_no_attributes_set_in_init", "check_estimators_pickle", "check_methods_subset_invariance"


def conformity():
    """Parametrize over scikit-learn's checks, of which all but a few are weekly."""
    estimators = [
        RBMTransformer(n_components=3, n_iter=2),
        DBNClassifier((8,), n_iter=2, finetune_n_iter=10),
    ]
    names, cases = (mark := parametrize_with_checks(estimators)).args
    marked = []
    for case in cases:
        values, marks = (case.values, case.marks) if hasattr(case, "marks") else (case, ())
        is_quick = getattr(values[1], "func", values[1]).__name__ in QUICK
        rare = [] if is_quick else [pytest.mark.slow, pytest.mark.weekly]
        marked.append(pytest.param(*values, marks=[*marks, *rare]))
    return pytest.mark.parametrize(names, marked, **mark.kwargs)


@pytest.mark.sampled(default=6)
@conformity()
def test_scikit_learn_accepts(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def bits():
    rows = np.random.RandomState(0).rand(80, 4) < [0.2, 0.9, 0.5, 0.4]
    return (rows | rows[:, ::-1]).astype(float)


def test_scores_are_log_probabilities(bits):
    rbm = RBMTransformer(n_components=3, preset="density", n_iter=5, random_state=0).fit(bits)
    every = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    scores = rbm.score_samples(every)
    assert np.exp(scores).sum() == pytest.approx(1, abs=1e-6)
    hidden = np.array(list(itertools.product([0.0, 1.0], repeat=3)))
    joint = every @ rbm.intercept_visible_ + ((every @ rbm.components_.T + rbm.intercept_hidden_) @ hidden.T).T
    expected = np.log(np.exp(joint).sum(axis=0) / np.exp(joint).sum())
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert rbm.score(bits) == pytest.approx(rbm.score_samples(bits).mean())
    assert rbm.score(bits) > -4 * np.log(2)


def test_features_are_those_of_bernoulli_rbm(bits):
    rbm = RBMTransformer(n_components=3, n_iter=2, random_state=0).fit(bits)
    expected = 1 / (1 + np.exp(-(bits @ rbm.components_.T + rbm.intercept_hidden_)))
    np.testing.assert_allclose(rbm.transform(bits), expected, atol=1e-7)
    assert list(rbm.get_feature_names_out()) == ["rbmtransformer0", "rbmtransformer1", "rbmtransformer2"]
    means = 1 / (1 + np.exp(-(expected @ rbm.components_ + rbm.intercept_visible_)))
    np.testing.assert_allclose(rbm.inverse_transform(expected), means, atol=1e-7)
    assert rbm.visible_ == "bernoulli"
    assert rbm.mean_ is None


@pytest.mark.slow
def test_real_values_keep_their_units():
    """The density is that of the data: scaled by 10 it falls by the log of 10 for each column that varies."""
    generator = np.random.RandomState(0)
    rows = generator.randn(200, 3) * [2, 5, 1] + [7, 0, -3]
    rows = np.concatenate([rows, np.full((200, 1), 4.0)], axis=1)
    one, tenfold = (RBMTransformer(n_components=2, random_state=0).fit(rows * scale) for scale in (1, 10))
    assert one.visible_ == "gaussian"
    np.testing.assert_allclose(one.score_samples(rows), tenfold.score_samples(rows * 10) + 3 * np.log(10), atol=1e-4)
    normal = -(((rows - rows.mean(0))[:, :3] / rows.std(0)[:3]) ** 2 / 2 + np.log(rows.std(0)[:3] * (2 * np.pi) ** 0.5))
    assert one.score(rows) == pytest.approx(normal.sum(axis=1).mean(), abs=0.3)
    drawn = one.sample(2000, n_steps=20)
    # of chains that take other ways on other processors; means were seen 0.1 deviations off
    np.testing.assert_array_less(abs(drawn.mean(axis=0) - rows.mean(axis=0)), 0.3 * rows.std(axis=0) + 1e-6)
    np.testing.assert_allclose(drawn.std(axis=0), rows.std(axis=0), rtol=0.2)
    for back in (one.gibbs(rows), one.inverse_transform(one.transform(rows)), drawn):
        assert back.shape[1] == 4
        assert (back[:, 3] == 4).all()
    assert (one.components_[:, 3] == 0).all()
    assert one.components_.shape == (2, 4)


def test_fits_repeat_and_leave_no_trace(bits, run_folder, capfd, caplog):
    before = torch.get_rng_state()
    with warnings.catch_warnings(), caplog.at_level("INFO"):
        warnings.simplefilter("error")
        one = RBMTransformer(n_components=3, n_iter=2, random_state=3).fit(bits)
    assert torch.get_rng_state().equal(before)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert not list(run_folder.iterdir())
    torch.manual_seed(8)
    again = clone(one).fit(bits)
    assert (one.components_ == again.components_).all()
    assert (one.gibbs(bits, 3) == again.gibbs(bits, 3)).all()
    assert (one.sample(5, 3) == again.sample(5, 3)).all()
    assert (clone(one).set_params(random_state=4).fit(bits).components_ != one.components_).any()
    assert (pickle.loads(pickle.dumps(one)).transform(bits) == one.transform(bits)).all()


@pytest.mark.slow
def test_gibbs_steps_keep_the_distribution(bits):
    rbm = RBMTransformer(n_components=3, n_iter=170, random_state=0).fit(bits)
    every = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    exact = np.exp(rbm.score_samples(every))
    start = every[np.random.RandomState(0).choice(16, size=20000, p=exact / exact.sum())]
    for drawn in (rbm.gibbs(start, 2), rbm.sample(20000, 100)):
        share = np.bincount((drawn @ [8, 4, 2, 1]).astype(int), minlength=16) / 20000
        statistic = (20000 * (share - exact) ** 2 / exact).sum()
        assert statistic < 15 + 4 * 30**0.5


def test_presets(bits, monkeypatch):
    stages = []

    def record(*arguments, **options):
        stages.extend(arguments[2])
        return DeepBeliefNetwork(*arguments, **options)

    monkeypatch.setattr("lightning_accel.models.estimators.DeepBeliefNetwork", record)
    RBMTransformer(n_components=3, n_iter=2).fit(bits)
    RBMTransformer(n_components=3, n_iter=2, preset="density").fit(bits * 2)
    DBNClassifier((3, 2), n_iter=2, finetune_n_iter=1, learning_rate=0.001).fit(bits, bits[:, 0])
    features = Stage(epochs=2, lr=0.1, lr_decay="none", preset="features")
    assert stages[:2] == [features, Stage(epochs=2, lr=0.01)]
    assert [stage.lr for stage in stages[2:]] == [0.001, 0.001]


@pytest.mark.weekly
@pytest.mark.slow
def test_digits():
    x, y = load_digits(return_X_y=True)
    for scale in (16, 1):
        classifier = DBNClassifier((64,), random_state=0, finetune_n_iter=15).fit(x[:1400] / scale, y[:1400])
        assert classifier.score(x[1400:] / scale, y[1400:]) > 0.9
    pipeline = make_pipeline(RBMTransformer(64, random_state=0), LogisticRegression(C=100, max_iter=1000))
    assert pipeline.fit(x[:1400] / 16, y[:1400]).score(x[1400:] / 16, y[1400:]) > 0.86  # BernoulliRBM: 0.90


def test_predictions_are_the_classes_given(bits):
    names = np.array(["up", "down", "charm"])[np.arange(len(bits)) % 3]
    classifier = DBNClassifier((3,), n_iter=1, finetune_n_iter=1, random_state=0).fit(bits, names)
    assert classifier.classes_.tolist() == ["charm", "down", "up"]
    expected = classifier.classes_[classifier.predict_proba(bits).argmax(axis=1)]
    assert classifier.predict(bits).tolist() == expected.tolist()


def test_rows_of_unknown_class(bits, monkeypatch):
    fits = []

    def record(make_network, tensors, *rest):
        fits.append((make_network(), tensors))
        return fit(make_network, tensors, *rest)

    fit = estimators._fit_network
    monkeypatch.setattr(estimators, "_fit_network", record)
    names = np.array(["up", "?", "down", "?"])[np.arange(len(bits)) % 4]
    classifier = DBNClassifier((3,), n_iter=1, finetune_n_iter=1, random_state=0, unlabeled="?", dropout=0.25)
    assert set(classifier.fit(bits, names).predict(bits)) <= {"up", "down"}
    network, (rows, labels) = fits[0]
    assert len(rows) == len(bits)
    assert labels.tolist() == [1, -100, 0, -100] * (len(bits) // 4)
    assert (network.labels, network.fine_tuning.dropout) == (True, 0.25)
    classifier.set_params(unlabeled=-1).fit(bits, np.where(names == "?", -1, names.astype(object)))
    assert fits[1][1][1].equal(labels)
    classifier.set_params(unlabeled="?")
    with pytest.raises(ValueError, match=r"at least 2 classes; y has 1 class, \['up'\]"):
        classifier.fit(bits, np.where(names == "down", "?", names))


def test_a_mark_of_unknown_classes_that_is_not_there_is_told(bits):
    one, marked = (DBNClassifier((3,), n_iter=1, finetune_n_iter=1, random_state=0, unlabeled=to) for to in (None, -1))
    with pytest.warns(UserWarning, match=r"y contains no row of unlabeled=-1, .* leave unlabeled out"):
        marked.fit(bits, bits[:, 0])
    assert (marked.predict_proba(bits) == one.fit(bits, bits[:, 0]).predict_proba(bits)).all()


def test_few_rows_are_gone_through_several_times(bits, monkeypatch):
    counts = []
    update = ContrastiveDivergence._differentiate
    monkeypatch.setattr(ContrastiveDivergence, "_differentiate", lambda *of: counts.append(1) or update(*of))
    DBNClassifier((3,), n_iter=2, finetune_n_iter=1, random_state=0).fit(bits[:25], np.arange(25) % 2)
    assert sum(counts) == 2 * 100


@pytest.mark.weekly
@pytest.mark.slow
def test_classes_and_layers():
    x = np.random.RandomState(0).rand(60, 5)
    y = np.where(x[:, 0] > 0.5, "up", "down")
    classifier = DBNClassifier((6, 4), n_iter=2, finetune_learning_rate=3, finetune_n_iter=150, random_state=0).fit(
        x, y
    )
    assert list(classifier.classes_) == ["down", "up"]
    assert classifier.score(x, y) > 0.9
    logits = classifier.network_(torch.tensor(x, dtype=torch.float32)).detach()
    np.testing.assert_allclose(
        classifier.predict_proba(x), logits.softmax(1), atol=rounding(torch.float32, 5 + 6 + 4 + 2)
    )
    np.testing.assert_allclose(np.exp(classifier.predict_log_proba(x)), classifier.predict_proba(x))
    assert len(classifier.network_) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: RBMTransformer(visible="relu").fit(x), "'auto', 'bernoulli' or 'gaussian'; got 'relu'"),
        (lambda x: RBMTransformer(preset="fast").fit(x), "preset must be 'features' or 'density'; got 'fast'"),
        (lambda x: RBMTransformer(learning_rate="adam").fit(x), "learning_rate must be a number or 'auto'; got 'adam'"),
        (lambda x: RBMTransformer(batch_size=0).fit(x), "batch_size must be at least 1; got 0"),
        (lambda x: RBMTransformer(n_iter=0).fit(x), "at least 1 epoch"),
        (lambda x: RBMTransformer(visible="bernoulli").fit(x * 2), r"Bernoulli visible units take values in \[0, 1\]"),
        (lambda x: RBMTransformer().fit(np.ones((5, 3)) * 7), "all 3 columns are constant: there is nothing to learn"),
        (lambda x: RBMTransformer().fit(x[:1] * 2), "n_samples = 1"),
        (lambda x: RBMTransformer(2).fit(x).inverse_transform(np.ones((3, 4))), "takes 2 components; got 4 columns"),
        (lambda x: DBNClassifier().fit(x, np.zeros(20)), r"needs at least 2 classes; y has 1 class, \[0.0\]"),
        (lambda x: DBNClassifier(unlabeled=-1).fit(x, np.full(20, -1)), r"0 class, \[\], and 20 rows of unknown"),
        (lambda x: DBNClassifier(unlabeled=-1).fit(x, np.array(["a", "b"] * 10)), "unlabeled=-1 is compared .*'a'"),
        (lambda x: DBNClassifier(unlabeled="?").fit(x, np.arange(20) % 2), r"unlabeled='\?' is compared"),
        (lambda x: DBNClassifier(64).fit(x, np.arange(20) % 2), r"hidden_layer_sizes must be .* \[64\]; got 64"),
        (lambda x: DBNClassifier(()).fit(x, np.arange(20) % 2), "hidden_dims must name the hidden units of at least"),
        (lambda x: DBNClassifier(finetune_learning_rate="x").fit(x, np.arange(20) % 2), "finetune_learning_rate must"),
    ],
)  # fmt: skip
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.random.RandomState(0).rand(20, 3) + 0.001)
