"""Randomness is counted, not saved.

Before each call of a unit, and before each stretch of user code between calls, the generators are seeded from (base
seed, step, micro-batch, place). Recomputation therefore repeats the same dropout with no saved state, and the numbers
do not depend on how many workers there are or how they interleave.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["counted_seed", "generator_states", "preserved_generators", "seed_generators"]

_MASK = 2**64 - 1


def counted_seed(*counters: int) -> int:
    """A 64-bit seed from integers; another order or value gives an unrelated seed.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014), applied after each counter is added.
    """
    state = 0
    for counter in counters:
        state = (state + counter + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    return generators


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the default generators from which code on ``device`` draws: the host's and the device's own."""
    for generator in _generators(device):
        generator.manual_seed(seed)


def generator_states(device: torch.device) -> list[bytes]:
    """The states of those generators, to compare."""
    return [generator.get_state().numpy().tobytes() for generator in _generators(device)]


@contextmanager
def preserved_generators(devices: Sequence[torch.device]) -> Iterator[None]:
    """Leave the default generators as they were: data loaders and user code go on drawing from them as ever."""
    generators = {id(generator): generator for device in devices for generator in _generators(device)}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
