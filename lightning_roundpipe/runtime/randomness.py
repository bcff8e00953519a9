"""Randomness is counted, not saved.

Before each call of a unit, and before each stretch of user code between calls, the generators are seeded from (base
seed, step, micro-batch, place). Recomputation therefore repeats the same dropout with no saved state, and the numbers
do not depend on how many workers there are or how they interleave.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["counted_seed", "generator_states", "preserved_generators", "seed_generators"]

_MASK = 2**64 - 1

# [Note: Generator deadlock] PyTorch reads a generator's state with the generator's mutex held and may then wait for the
# interpreter lock, which another thread holds while it waits for the mutex. One thread at a time may ask.
_lock = threading.Lock()


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
    with _lock:
        for generator in _generators(device):
            generator.manual_seed(seed)


def generator_states(device: torch.device) -> list[bytes]:
    """The states of those generators, to compare."""
    with _lock:
        return [generator.get_state().numpy().tobytes() for generator in _generators(device)]


@contextmanager
def preserved_generators(devices: Sequence[torch.device]) -> Iterator[None]:
    """Leave the default generators as they were: data loaders and user code go on drawing from them as ever."""
    generators = {id(generator): generator for device in devices for generator in _generators(device)}
    with _lock:
        states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        yield
    finally:
        with _lock:
            for generator, state in states:
                generator.set_state(state)
