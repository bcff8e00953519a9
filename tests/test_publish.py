"""Finished gradients reach ``.grad`` through an ordinary ``backward``, once."""

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.publish import publish_gradients


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def gradient_of(tensor: Tensor) -> list[float]:
    assert tensor.grad is not None
    return tensor.grad.tolist()


def test_backward_publishes() -> None:
    one, two = parameter(1.0, 2.0), parameter(3.0)
    loss = publish_gradients(torch.tensor(7.0), [(one, torch.tensor([5.0, 6.0])), (two, torch.tensor([8.0]))], 1.0)
    assert loss.item() == 7
    assert loss.requires_grad
    assert one.grad is None
    loss.backward()
    assert gradient_of(one) == [5, 6]
    assert gradient_of(two) == [8]


def test_gradients_accumulate() -> None:
    weight = parameter(1.0)
    for value in (2.0, 3.0):
        publish_gradients(torch.tensor(0.0), [(weight, torch.tensor([value]))], 1.0).backward()
    assert gradient_of(weight) == [5]


def test_what_accumulates_is_apart_from_what_was_published_first() -> None:
    weight, second = parameter(1.0), torch.tensor([3.0])
    publish_gradients(torch.tensor(0.0), [(weight, torch.tensor([2.0]))], 1.0).backward()
    publish_gradients(torch.tensor(0.0), [(weight, second)], 1.0).backward()
    assert second.tolist() == [3]


@pytest.mark.parametrize("factor", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_multiplied_loss_multiplies_the_gradients(factor: float, scale: float) -> None:
    """As the loss scale of float16 training, and Lightning's division by `accumulate_grad_batches`."""
    weight = parameter(1.0)
    loss = publish_gradients(torch.tensor(2.0), [(weight, scale * torch.tensor([4.0]))], scale)
    (factor * loss).backward()
    assert gradient_of(weight) == [4 * factor]


def test_the_loss_is_not_the_tensor_that_was_given() -> None:
    given = torch.tensor(7.0)
    loss = publish_gradients(given, [(parameter(1.0), torch.ones(1))], 1.0)
    loss.data.zero_()
    assert given.item() == 7
    assert not given.requires_grad


def test_hooks_of_parameters_run() -> None:
    weight, seen = parameter(1.0), []
    weight.register_hook(lambda gradient: 10 * gradient)
    weight.register_post_accumulate_grad_hook(lambda tensor: seen.append(gradient_of(tensor)))
    publish_gradients(torch.tensor(0.0), [(weight, torch.tensor([2.0]))], 1.0).backward()
    assert gradient_of(weight) == [20]
    assert seen == [[20]]


def test_backward_twice_is_refused() -> None:
    weight = parameter(1.0)
    loss = publish_gradients(torch.tensor(0.0), [(weight, torch.ones(1))], 1.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="`backward` can be called once for each `training_step`"):
        loss.backward()
    assert gradient_of(weight) == [1]


def test_without_gradients_the_loss_still_takes_a_backward() -> None:
    given = torch.tensor(7.0)
    loss = publish_gradients(given, [], 1.0)
    loss.backward()
    assert loss.item() == 7
    assert not given.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=dtype))
    (0.5 * publish_gradients(torch.tensor(0.0), [(weight, torch.ones(2, dtype=dtype))], 1.0)).backward()
    assert weight.grad is not None
    assert weight.grad.dtype is dtype
    assert gradient_of(weight) == [0.5, 0.5]


def sparse(value: float) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        return torch.sparse_coo_tensor([[1]], [[value]], (3, 1))


DENSE = torch.ones(3, 1)


@pytest.mark.parametrize(
    "first, second",
    [
        (DENSE, DENSE),
        (DENSE, sparse(2.0)),
        (sparse(1.0), sparse(2.0)),
        (sparse(1.0), DENSE),
    ],
    ids=["dense, dense", "dense, sparse", "sparse, sparse", "sparse, dense"],
)
def test_sparse_and_dense_gradients_accumulate(first: Tensor, second: Tensor) -> None:
    weight = nn.Parameter(torch.zeros(3, 1))
    for gradient in (first.clone(), second.clone()):
        publish_gradients(torch.tensor(0.0), [(weight, gradient)], 1.0).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad.to_dense(), first.to_dense() + second.to_dense())
