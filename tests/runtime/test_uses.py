"""When a gradient counts as complete."""

import torch

from lightning_roundpipe.runtime.uses import UseCounter

WEIGHT, OTHER = torch.zeros(1), torch.zeros(1)


def test_complete_when_forwards_are_over_and_no_use_is_left() -> None:
    uses = UseCounter(2)
    uses.add([WEIGHT, WEIGHT])
    uses.forward_done()
    uses.remove([WEIGHT, WEIGHT])
    assert not uses.is_complete(WEIGHT)
    uses.forward_done()
    assert uses.is_complete(WEIGHT)


def test_what_is_held_is_not_complete_and_what_is_complete_can_not_be_held() -> None:
    uses = UseCounter(1)
    uses.add([WEIGHT])
    assert uses.hold(WEIGHT)
    uses.forward_done()
    uses.remove([WEIGHT])
    assert not uses.is_complete(WEIGHT)
    uses.remove([WEIGHT])
    assert uses.is_complete(WEIGHT)
    assert not uses.hold(WEIGHT)
    assert not uses.hold(OTHER)
