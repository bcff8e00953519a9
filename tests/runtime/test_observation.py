"""Parameters that code reaches without a lookup are replaced, and cross-entropies are noted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.runtime.observation import GlueObservation, ParameterSubstitution


def doubling(*parameters: Tensor) -> ParameterSubstitution:
    """Lets operations see twice the value of every parameter."""
    copies = {id(parameter): 2 * parameter.detach() for parameter in parameters}
    return ParameterSubstitution(parameters, lambda host: copies[id(host)])


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "operator": lambda w: w * 1,
    "function": lambda w: torch.mul(w, 1),
    "keyword": lambda w: torch.add(torch.zeros(2, 2), other=w),
    "method": lambda w: w.clone(),
    "list": lambda w: torch.cat([torch.zeros(0, 2), w]),
    "tuple": lambda w: torch.stack((w,))[0],
    "functional": lambda w: F.linear(torch.eye(2), w.t()),
    "data": lambda w: w.data.clone(),
    "transpose": lambda w: w.T.T.clone(),
    "indexing": lambda w: w[:].clone(),
    "einsum": lambda w: torch.einsum("ij->ij", w).clone(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_see_the_copy(operation: str, weight: nn.Parameter) -> None:
    with doubling(weight):
        result = OPERATIONS[operation](weight)
    assert torch.equal(result, 2 * weight.detach())


def test_other_tensors_are_left_alone(weight: nn.Parameter) -> None:
    other = nn.Parameter(torch.ones(2, 2))
    with doubling(weight):
        assert torch.equal(other * 1, other)
        assert torch.equal(torch.stack([other, other])[0], other)


def test_metadata_is_the_hosts(weight: nn.Parameter) -> None:
    weight.grad = torch.ones(2, 2)
    with doubling(weight):
        assert weight.shape == (2, 2)
        assert weight.requires_grad
        assert weight.is_leaf
        assert weight.grad is not None
        assert weight.dtype is torch.float32


def test_nothing_is_replaced_afterwards(weight: nn.Parameter) -> None:
    with pytest.raises(KeyError), doubling(weight):
        raise KeyError
    assert torch.equal(weight * 1, weight)


def test_a_recurrent_network_uses_the_copies() -> None:
    """It hands its own list of parameters to one operation."""
    network, other = nn.LSTM(2, 2), nn.LSTM(2, 2)
    copies = {id(host): copy.detach() for host, copy in zip(network.parameters(), other.parameters(), strict=True)}
    x = torch.ones(3, 1, 2)
    with ParameterSubstitution(network.parameters(), lambda host: copies[id(host)]):
        found, _ = network(x)
    assert torch.equal(found, other(x)[0])


def test_gradients_go_to_the_copy(weight: nn.Parameter) -> None:
    copy = weight.detach().clone().requires_grad_()
    with ParameterSubstitution([weight], lambda _: copy):
        loss = (weight**2).sum()
    loss.backward()
    assert weight.grad is None
    assert copy.grad is not None
    assert torch.equal(copy.grad, 2 * weight.detach())


# --------------------------------------------------------------------------------------------------------- observation


def observing(*parameters: Tensor) -> GlueObservation:
    return GlueObservation(parameters, lambda host: host.detach())


def test_substitution_is_noted(weight: nn.Parameter) -> None:
    observation = observing(weight)
    with observation:
        torch.ones(2) + 1
        assert not observation.found
        weight.sum()
    assert observation.found


LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]])
LABELS = torch.tensor([0, -100, 1])

LOSSES: dict[str, Callable[[], Tensor]] = {
    "function": lambda: F.cross_entropy(LOGITS, LABELS),
    "keywords": lambda: F.cross_entropy(input=LOGITS, target=LABELS),
    "module": lambda: nn.CrossEntropyLoss()(LOGITS, LABELS),
    "label smoothing": lambda: F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1),
    "nll": lambda: F.nll_loss(LOGITS.log_softmax(-1), LABELS),
    "nll module": lambda: nn.NLLLoss()(LOGITS.log_softmax(-1), LABELS),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_averaging_cross_entropies_are_noted_once(loss: str) -> None:
    found = observing()
    with found:
        result = LOSSES[loss]()
    [(noted, count)] = found.losses
    assert torch.equal(noted, result)
    assert count == 2


def test_other_ignored_labels_are_counted_by_their_own_value() -> None:
    found = observing()
    with found:
        F.cross_entropy(LOGITS, LABELS.clamp(min=0), ignore_index=0)
        nn.CrossEntropyLoss(ignore_index=1)(LOGITS, LABELS.clamp(min=0))
    assert [count for _, count in found.losses] == [1, 2]


@pytest.mark.parametrize(
    "loss",
    [
        lambda: F.cross_entropy(LOGITS, LABELS, reduction="sum"),
        lambda: nn.CrossEntropyLoss(reduction="none")(LOGITS, LABELS),
        lambda: F.cross_entropy(LOGITS, LOGITS.softmax(-1)),
        lambda: F.mse_loss(LOGITS, LOGITS),
    ],
)
def test_other_losses_are_not_noted(loss: Callable[[], Tensor]) -> None:
    found = observing()
    with found:
        loss()
    assert found.losses == []


def test_a_pause_does_not_watch(weight: nn.Parameter) -> None:
    observation = observing(weight)
    with observation:
        with observation.paused():
            LOSSES["function"]()
            weight.sum()
        assert observation.losses == []
        assert not observation.found
        LOSSES["function"]()
    assert len(observation.losses) == 1


def test_a_pause_leaves_the_modes_of_user_code_alone(weight: nn.Parameter) -> None:
    """A mode that was entered after the observation stays in force, and both are left in order."""
    seen: list[str] = []

    class Mine(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    observation = observing(weight)
    with observation, Mine():
        with observation.paused():
            torch.neg(weight)
        torch.neg(weight)
    assert seen.count("neg") == 2
    torch.neg(weight)
    assert seen.count("neg") == 2


def test_a_pause_outside_of_the_observation_does_nothing(weight: nn.Parameter) -> None:
    observation = observing(weight)
    with observation.paused():
        weight.sum()
    with pytest.raises(KeyError), observation, observation.paused():
        raise KeyError
    weight.sum()
    assert not observation.found


def test_noted_losses_hold_no_graph() -> None:
    found = observing()
    with found:
        F.cross_entropy(LOGITS.clone().requires_grad_(), LABELS)
    assert not found.losses[0][0].requires_grad


def test_gradients_inside_user_code_work_where_they_reach_their_inputs() -> None:
    x = torch.ones(2, requires_grad=True)
    with observing():
        (gradient,) = torch.autograd.grad((x**2).sum(), x)
    assert torch.equal(gradient, torch.full((2,), 2.0))


@pytest.mark.parametrize("allow_unused", [True, False])
def test_gradients_that_do_not_reach_their_inputs_are_refused(allow_unused: bool) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with observing(), pytest.raises(UnsupportedUseError, match="units are differentiated after it returns"):
        torch.autograd.grad((x**2).sum(), y, allow_unused=allow_unused)


def test_other_errors_of_autograd_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    with observing(), pytest.raises(RuntimeError, match="scalar outputs") as caught:
        torch.autograd.grad(x**2, x)
    assert not isinstance(caught.value, UnsupportedUseError)
