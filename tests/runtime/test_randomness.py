"""Seeds are counted: equal counters give equal draws, any other counters give other ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_roundpipe.runtime.randomness import counted_seed, generator_states, seed_generators

CPU = torch.device("cpu")
counters = st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=4)


@pytest.mark.parametrize("seed, first", [(0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)])
def test_one_counter_is_the_first_number_of_splitmix64(seed: int, first: int) -> None:
    """Published values of the generator."""
    assert counted_seed(seed) == first


@given(counters, counters)
def test_other_counters_give_another_seed(one: list[int], other: list[int]) -> None:
    same = [counter % 2**64 for counter in one] == [counter % 2**64 for counter in other]
    assert (counted_seed(*one) == counted_seed(*other)) == same


def test_order_number_and_neighbours_matter() -> None:
    seeds = {
        counted_seed(*places) for places in [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2)]
    }
    assert len(seeds) == 9


def test_steps_micro_batches_and_places_do_not_meet() -> None:
    seeds = {
        counted_seed(7, step, microbatch, place) for step in range(20) for microbatch in range(8) for place in range(40)
    }
    assert len(seeds) == 20 * 8 * 40


@given(counters)
def test_every_seed_suits_a_generator(places: list[int]) -> None:
    seed = counted_seed(*places)
    assert 0 <= seed < 2**64
    assert torch.Generator().manual_seed(seed).initial_seed() == seed


def test_seeding_repeats_the_draws() -> None:
    seed_generators(CPU, 3)
    first = torch.rand(4)
    seed_generators(CPU, 4)
    other = torch.rand(4)
    seed_generators(CPU, 3)
    assert torch.equal(torch.rand(4), first)
    assert not torch.equal(other, first)


def test_states_tell_whether_something_was_drawn() -> None:
    before = generator_states(CPU)
    torch.ones(3).sum()
    torch.nn.functional.dropout(torch.ones(3), 0.5, training=False)
    assert generator_states(CPU) == before
    torch.nn.functional.dropout(torch.ones(3), 0.5)
    assert generator_states(CPU) != before


def test_states_are_snapshots() -> None:
    before = generator_states(CPU)
    torch.rand(1)
    after = generator_states(CPU)
    torch.rand(1)
    assert before != after != generator_states(CPU)


@pytest.mark.gpu
def test_a_gpu_has_a_generator_of_its_own_beside_the_hosts() -> None:
    gpu = torch.device("cuda", 0)
    seed_generators(gpu, 3)
    before = generator_states(gpu)
    first = torch.rand(4, device=gpu)
    host, device = (old != new for old, new in zip(before, generator_states(gpu), strict=True))
    assert (host, device) == (False, True)
    seed_generators(gpu, 3)
    assert torch.equal(torch.rand(4, device=gpu), first)
    assert generator_states(CPU) == before[:1]
