"""Fine-tuning of a deep belief network by sampling up and down. Shapes: B rows, V visible units, H hidden units."""

import torch
from torch import Tensor

from lightning_accel.nn.contrastive import ContrastiveDivergence
from lightning_accel.nn.contrastive_gradient import Phase
from lightning_accel.nn.dbn import RBMStack
from lightning_accel.nn.rbm_units import RectifiedHidden
from lightning_accel.nn.stack_likelihood import log_prob_of_hidden, log_prob_of_visible


class UpDown:
    """The up-down algorithm, contrastive wake-sleep, as a loss for all layers of an untied stack at once.

    Calling it with an :class:`~lightning_accel.nn.RBMStack` and rows of data draws samples and returns the sum of

    - wake: from the data up by recognition, minus the log-probability of each layer given the one above, by which the
      generative weights below the top learn;
    - the gap of :class:`~lightning_accel.nn.ContrastiveDivergence` at the top RBM;
    - sleep: from the top RBM's own samples down, minus the log-probability of each layer given the one below, by which
      the recognition weights learn.

    Samples count as constants, so its gradient is the algorithm's, and whatever applies to losses applies to it. It
    does not tell how good the model is: ``log_prob_bound`` does. Hidden biases below the top have no part in it, as the
    recognition has its own. Learning rates should be small, about a tenth of those of the layers' training.

    Args:
        contrastive: training of the top RBM, and where the sleep pass begins: with ``cd`` at the data after ``steps``
            Gibbs steps, as in the paper; else at the chains. Its generator draws all samples. By default ``cd`` with 3
            steps, not centred.

    Source: Hinton, Osindero and Teh 2006, A Fast Learning Algorithm for Deep Belief Nets, appendix B. There the top's
    samples of learning and sleep are the same; here sleep takes one more draw.
    """

    def __init__(self, contrastive: ContrastiveDivergence | None = None) -> None:
        self.contrastive = contrastive or ContrastiveDivergence("cd", steps=3, centering=0)

    def __call__(self, stack: RBMStack, visible: Tensor, labels: Tensor | None = None) -> Tensor:
        """Draw samples; return a scalar, (), with the gradient of all layers, of rows (B, V) and their labels (B,).

        Raises:
            ValueError: if the stack is not untied, shapes do not fit, or labels are missing or superfluous.
        """
        if stack.recognition is None:
            raise ValueError("up-down needs recognition weights of their own: call untie_() of the stack first")
        if stack.num_labels and labels is None:
            raise ValueError(f"the top RBM has {stack.num_labels} labels: pass labels, (B,) integers")
        states = self._drawn_upward(stack, visible)
        data = states[-1] if labels is None else stack.join_labels(states[-1], labels)
        loss = self.contrastive(stack.top, data)
        dreams = self._drawn_downward(stack, data)
        for layer, rbm in enumerate(stack.layers[:-1]):
            loss = loss - log_prob_of_visible(rbm, states[layer], states[layer + 1]).mean()
            activation = stack.activation(layer, dreams[layer])
            loss = loss - log_prob_of_hidden(rbm.hidden_units, dreams[layer + 1], activation).mean()
        return loss

    @torch.no_grad()
    def _drawn_upward(self, stack: RBMStack, visible: Tensor) -> list[Tensor]:
        """States (B, H_l) from the visible ones to those of the top RBM's visible units."""
        generator = self.contrastive.generator(visible.device)
        states = [visible]
        for layer, rbm in enumerate(stack.layers[:-1]):
            states.append(rbm.hidden_units.sample(stack.activation(layer, states[-1]), generator))
        return states

    @torch.no_grad()
    def _drawn_downward(self, stack: RBMStack, data: Tensor) -> list[Tensor]:
        """The same of the top RBM's samples, (B, H_l) or (C, H_l) for C chains."""
        top, generator = stack.top, self.contrastive.generator(data.device)
        start = Phase(data, top.hidden_activation(data), top(data))
        samples = self.contrastive.draw(top, start).visible
        states = [samples[:, : top.num_visible - top.num_labels]]
        for rbm in reversed(stack.layers[:-1]):
            if isinstance(rbm.hidden_units, RectifiedHidden):
                states[0] = states[0].clamp(min=0)  # what recognition can give; Gaussian units above go below 0
            states.insert(0, rbm.sample_visible(states[0], generator))
        return states
