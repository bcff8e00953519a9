from dataclasses import replace

import pytest
import torch
import torch._dynamo  # noqa: F401 - sets an environment variable, for which counting would else be blamed
from torch import nn

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.costs import PRECISIONS, CallCost, CallCount, MeasuredCosts, Work, stage_seconds
from lightning_roundpipe.plan.devices import PROFILES, Machine, call_costs, load_profile, save_profile
from lightning_roundpipe.plan.predict import Setup, longest_sequence, predict
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.search import better_choice
from lightning_roundpipe.plan.simulator import simulate
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.runtime.counting import count_calls


class Block(nn.Module):
    def __init__(self, width, frozen=False):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False).requires_grad_(not frozen)
        self.down = nn.Linear(4 * width, width, bias=False).requires_grad_(not frozen)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, num_blocks=3, width=8, tied=False, frozen=False):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, frozen) for _ in range(num_blocks))
        self.head = nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def counted(**kwargs):
    return count_calls(lambda: Model(**kwargs), lambda: {"ids": torch.zeros(2, 5, dtype=torch.long)})


def test_counts_of_a_block():
    block = counted()[1]
    products = 2 * 10 * 8 * 32  # 2 x tokens x width x 4 width
    assert block.forward.product_flops == 2 * products
    assert block.backward.product_flops == 4 * products
    assert block.weight_bytes == block.gradient_bytes == 4 * 2 * 8 * 32
    assert block.input_bytes == block.output_bytes == 4 * 10 * 8
    # relu reads and writes 4 widths, the sum reads two and writes one.
    assert block.forward.moved_bytes == 4 * 10 * 8 * (4 + 4 + 3)
    # Alive: what relu returns, the output; of `up` and `down` nothing is kept that relu and the sum do not need.
    assert block.graph_bytes == 4 * 10 * 8 * (4 + 1)
    assert 0 < block.working_bytes <= 4 * 10 * 8 * (4 + 4 + 2)


def test_frozen_weights_have_no_gradient_and_less_backward():
    trained, frozen = counted()[1], counted(frozen=True)[1]
    assert frozen.gradient_bytes == 0
    assert frozen.num_trained == 0
    assert frozen.num_weights == trained.num_weights == 2 * 8 * 32
    assert frozen.backward.product_flops == trained.backward.product_flops / 2


def test_tied_weights_are_uploaded_twice_and_stored_once():
    *_, head = counted(tied=True)
    assert head.num_weights == 0
    assert head.weight_bytes == 4 * 32 * 8
    assert counted()[-1].num_weights == 32 * 8


def test_counting_leaves_no_memory_and_no_model_behind():
    counts = count_calls(
        lambda: Model(num_blocks=2, width=2**15), lambda: {"ids": torch.zeros(1, 4096, dtype=torch.long)}
    )
    assert counts[1].weight_bytes == 4 * 2 * 2**15 * 2**17


def test_attention_is_counted_as_attention():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(q, k, v)

    def batch():
        return {"input": torch.zeros(3, 20, 16)}

    (whole,) = count_calls(lambda: nn.Sequential(Attention()), batch, units="Attention")
    (half,) = count_calls(lambda: nn.Sequential(Attention()), batch, units="Attention", causal=True)
    assert whole.forward.attention_flops == 4 * 3 * 20 * 20 * 16
    assert whole.backward.attention_flops == 2.5 * whole.forward.attention_flops
    assert half.forward.attention_flops == whole.forward.attention_flops / 2


def count(**kwargs):
    work = Work(product_flops=28e12, moved_bytes=9.072e9, num_operations=3)
    sizes = dict.fromkeys(("weight_bytes", "gradient_bytes", "input_bytes", "output_bytes"), 1000)
    sizes |= {"graph_bytes": 5000, "working_bytes": 70}
    return CallCount(forward=work, backward=work + work, **(sizes | kwargs))


def test_costs_from_counts():
    profile = PROFILES["rtx-4090"]
    layer, head = call_costs(
        [count(num_weights=500, num_trained=400), count()],
        profile,
        PRECISIONS["bf16-mixed"],
        scale=2,
        chunked_loss=True,
    )
    one_s = 28e12 / (0.85 * 330e12) + 9.072e9 / (0.9 * 1008e9)
    assert layer.forward_s == pytest.approx(2 * one_s)
    assert layer.backward_s == pytest.approx(4 * one_s)
    assert (layer.input_bytes, layer.graph_bytes, layer.working_bytes) == (2000, 10000, 140)
    assert layer.host_bytes == 400 * 20 + 100 * 2
    assert layer.optimizer_bytes == 400 * 30
    assert (head.graph_bytes, head.working_bytes) == (0, 2 * 500)  # 500 logits, a 16th of them, 16 bytes each
    assert head.recompute_s == 0


def test_all_logits_at_once_take_more():
    counts = [count(), count(output_bytes=10**9)]
    chunked, full = (
        call_costs(counts, PROFILES["rtx-4090"], PRECISIONS["bf16-mixed"], chunked_loss=chunked)[-1]
        for chunked in (True, False)
    )
    assert full.graph_bytes + full.working_bytes > 5 * (chunked.graph_bytes + chunked.working_bytes)
    assert full.forward_s > chunked.forward_s


def test_small_work_is_bound_by_launches():
    profile = PROFILES["h200"]
    assert profile.seconds(Work(product_flops=1, num_operations=10)) == pytest.approx(10 * profile.launch_s)


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090", "rtx-5090", "a100-80g", "a800-80g", "h100", "h200"])
def test_shipped_profiles_go_through_a_file(name, tmp_path):
    save_profile(PROFILES[name], tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == PROFILES[name]


def test_a_profile_that_is_none_is_refused(tmp_path):
    (tmp_path / "profile.json").write_text('{"name": "mine"}')
    with pytest.raises(PlanError, match="must be a JSON object with name, memory_bytes"):
        load_profile(tmp_path / "profile.json")


def test_speeds_must_fit_the_workers():
    with pytest.raises(PlanError, match="`speeds` must hold a positive number for each of 2 workers"):
        Machine(num_workers=2, speeds=(1.0,))


def setup(**kwargs):
    profile = replace(PROFILES["rtx-4090"], memory_bytes=10**9)
    counts = [count(weight_bytes=10**7, gradient_bytes=10**7, graph_bytes=10**7, num_trained=5 * 10**6)] * 6
    options = {"counts": counts, "sequence": 1000, "profile": profile, "num_workers": 2}
    return Setup(**(options | {"precision": PRECISIONS["bf16-mixed"]} | kwargs))


def test_predict_uses_no_more_than_the_machine_has():
    prediction = predict(setup(), 16)
    assert prediction.choice.worker_bytes <= 0.95e9
    assert prediction.tokens_per_s == pytest.approx(16 * 1000 / prediction.choice.step_s)
    assert prediction.limit == "compute"
    assert 0 < prediction.busy["compute"] <= 1


@pytest.mark.parametrize(
    "change, limit",
    [
        ({"profile": replace(PROFILES["rtx-4090"], product_flops_per_s=1e16, link_bytes_per_s=1e6)}, {"h2d", "d2h"}),
        ({"host_bytes_per_s": 1e7}, {"host memory", "optimizer"}),
    ],
)
def test_predict_names_the_limit(change, limit):
    assert predict(setup(**change), 4).limit in limit


def test_longest_sequence_is_the_longest_that_fits():
    case = setup()
    longest = longest_sequence(case)
    assert longest > 1000
    predict(replace(case, sequence=longest, counts=case.counts), 2)
    assert longest_sequence(setup(host_memory_bytes=5 * 10**8)) == 0  # 6 x 5e6 trained weights of 20 bytes
    assert longest_sequence(setup(profile=replace(PROFILES["rtx-4090"], memory_bytes=5 * 10**8))) < longest


def test_predict_refuses_what_does_not_fit():
    with pytest.raises(PlanError, match="stages of one call need"):
        predict(setup(host_memory_bytes=10**8), 4)


def test_measured_times_move_costs_step_by_step():
    plan = Plan((2,), 1, (2,))
    believed = MeasuredCosts([CallCost(forward_s=1, backward_s=2)] * 3, share=0.5)
    true = [
        CallCost(forward_s=2, backward_s=5),
        CallCost(forward_s=2, backward_s=5),
        CallCost(forward_s=3, backward_s=6),
    ]
    for _ in range(30):
        for stage in plan.stages:
            believed.observe(stage, sum(stage_seconds(true, stage)))
    for stage in plan.stages:
        assert sum(stage_seconds(believed.costs, stage)) == pytest.approx(sum(stage_seconds(true, stage)))
    believed.observe(plan.stages[0], 8.0, speed=0.5)  # a slow worker took twice as long for the same work
    assert sum(stage_seconds(believed.costs, plan.stages[0])) == pytest.approx(4.0)


def test_measured_costs_check_their_share():
    with pytest.raises(ValueError, match="`share` must be above 0 and at most 1, but got 0"):
        MeasuredCosts([], share=0)


def test_a_new_plan_must_be_worth_it():
    costs = [CallCost(forward_s=1, backward_s=2)] * 16
    machine = Machine(num_workers=4)
    poor = Schedule(Plan((15,), 1, (15,)), 4, 8)
    choices = better_choice(poor, costs, machine)
    assert choices is not None
    now, better = choices
    assert now.schedule == poor
    assert better.step_s < now.step_s == simulate(poor, costs, machine).makespan
    assert better_choice(better.schedule, costs, machine) is None


def test_a_new_plan_keeps_what_is_fixed():
    costs = [CallCost(forward_s=1, backward_s=2)] * 16
    poor = Schedule(Plan((12,), 4, (12,)), 4, 8)
    fixed = {"replica_groups": 1, "num_rounds": 1, "min_fused": 3, "max_fused": 3}
    choices = better_choice(poor, costs, Machine(num_workers=4), **fixed)
    assert choices is not None
    schedule = choices[1].schedule
    assert (schedule.replica_groups, schedule.num_rounds, schedule.plan.fused) == (1, 1, 3)
