"""Wake-sleep fine-tuning of deep belief networks.

Shapes: B batch size, C chains, V visible units, H_l units in layer l.
"""

import torch
from torch import Tensor

from lightning_accel.nn.boltzmann.contrastive import ContrastiveDivergence, Phase
from lightning_accel.nn.boltzmann.stack import RBMStack, log_prob_of_hidden, log_prob_of_visible
from lightning_accel.ops.gibbs import sample_bernoulli


class UpDown:
    """Train all layers of an untied stack together by the up-down algorithm, also called contrastive wake-sleep.

    Calling the object with an :class:`~lightning_accel.nn.RBMStack` and a batch of data draws samples and returns a
    loss, the sum of

    - wake phase: negative log-probability of each layer given the one above, for states sampled from the data upward by
      recognition; it trains the generative weights below the top;
    - the gap of :class:`~lightning_accel.nn.ContrastiveDivergence` at the top RBM;
    - sleep phase: negative log-probability of each layer given the one below, for states sampled from the top RBM
      downward; it trains the recognition weights.

    Samples are constants, so the gradient of the loss is that of the algorithm. The value does not measure the quality
    of the model, ``log_prob_bound`` does. Hidden biases below the top get no gradient, as the recognition model has its
    own. Use small learning rates, about a tenth of those of the layer-wise training.

    Args:
        contrastive: trains the top RBM, and determines where the sleep phase starts: with ``cd`` at the data after
            ``steps`` Gibbs steps, as in the paper; else at the chains. Its generator draws all samples. By default
            ``cd`` with 3 steps, without centering.

    Source: Hinton, Osindero and Teh 2006, A Fast Learning Algorithm for Deep Belief Nets, appendix B. In the paper the
    samples of the top RBM are used for both its gradient and the sleep phase; here the sleep phase draws new ones.
    """

    def __init__(self, contrastive: ContrastiveDivergence | None = None) -> None:
        self.contrastive = contrastive or ContrastiveDivergence("cd", steps=3, centering=0)

    def __call__(self, stack: RBMStack, visible: Tensor, labels: Tensor | None = None) -> Tensor:
        """Draw samples; return a scalar loss with the gradient of all layers, for data (B, V) and labels (B,).

        Labels of -100 are unknown, and drawn given the states below them.

        Raises:
            ValueError: if the stack is not untied, shapes do not fit, or labels are missing or unexpected.
        """
        if stack.recognition is None:
            raise ValueError("up-down needs recognition weights of their own: call untie_() of the stack first")
        if stack.num_labels and labels is None:
            raise ValueError(f"the top RBM has {stack.num_labels} labels: pass labels, (B,) integers")
        states = self._sample_upward(stack, visible)
        data = states[-1]
        if labels is not None:
            data = stack.join_labels(data, labels, self.contrastive.generator(visible.device))
        loss = self.contrastive(stack.top, data)
        sleep_states = self._sample_downward(stack, data)
        for layer, rbm in enumerate(stack.layers[:-1]):
            loss = loss - log_prob_of_visible(rbm, states[layer], states[layer + 1]).mean()
            activation = stack.activation(layer, sleep_states[layer])
            loss = loss - log_prob_of_hidden(sleep_states[layer + 1], activation).mean()
        return loss

    @torch.no_grad()
    def _sample_upward(self, stack: RBMStack, visible: Tensor) -> list[Tensor]:
        """Sample states (B, H_l) by recognition, from the visible units up to the top RBM's visible units."""
        generator = self.contrastive.generator(visible.device)
        states = [visible]
        for layer in range(len(stack.layers) - 1):
            states.append(sample_bernoulli(stack.activation(layer, states[-1]), generator))
        return states

    @torch.no_grad()
    def _sample_downward(self, stack: RBMStack, data: Tensor) -> list[Tensor]:
        """Sample states (B, H_l), or (C, H_l) for C chains, from the top RBM's samples downward."""
        top, generator = stack.top, self.contrastive.generator(data.device)
        start = Phase(data, top.hidden_activation(data), top(data))
        samples = self.contrastive.draw(top, start).visible
        states = [samples[:, : top.num_visible - top.num_labels]]
        for rbm in reversed(stack.layers[:-1]):
            states.insert(0, rbm.sample_visible(states[0], generator))
        return states
