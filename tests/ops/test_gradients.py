import torch

from lightning_accel.ops.gradients import gradients_of_formula


class Product(torch.autograd.Function):
    """x * y, whose backward pass has no rule but the formula."""

    @staticmethod
    def forward(ctx, x, y, unused):
        ctx.save_for_backward(x, y, unused)
        return x * y, x + 1

    @staticmethod
    def backward(ctx, *gradients):
        return gradients_of_formula(
            lambda x, y, unused: (x * y, x + 1), ctx.saved_tensors, ctx.needs_input_grad, gradients
        )


def test_gradients_of_an_input_that_depends_on_another():
    """What reaches x through y is counted once, in both derivatives."""
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    first, second = {}, {}
    for name, product in (("formula", Product.apply), ("torch", lambda x, y, unused: (x * y, x + 1))):
        out, _ = product(x, x.square(), torch.ones((), dtype=torch.float64))
        (first[name],) = torch.autograd.grad(out, x, create_graph=True)
        (second[name],) = torch.autograd.grad(first[name], x)
    assert first["formula"] == first["torch"] == 27
    assert second["formula"] == second["torch"] == 18


def test_inputs_that_are_not_needed_or_used_get_none():
    x, y, unused = (torch.tensor(value, requires_grad=True) for value in (2.0, 5.0, 7.0))
    found = gradients_of_formula(
        lambda x, y, none, unused: (x * y,), (x, y, None, unused), (True, False, False, True, False), (torch.ones(()),)
    )
    assert found == (5, None, None, None, None)
