"""The loss of a batch is the mean of its micro-batches' losses, weighted by what each was taken over."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_roundpipe.runtime.microbatch import MicroBatch, split
from lightning_roundpipe.runtime.objective import BatchObjective, LossWeight, loss_of

LABELS = torch.tensor(
    [
        [1, 2, 3, -100],
        [1, -100, -100, -100],
        [-100, 1, 2, 3],
        [-100, 1, -100, -100],
    ]
)
BATCH = {"x": torch.ones(4, 4), "labels": LABELS}


class TinyCausalLM(nn.Module):
    """Named as transformers names models that shift their labels."""


def objective(
    rule: LossWeight = "auto",
    batch: Any = BATCH,
    parts: int = 2,
    root: nn.Module | None = None,
    **kwargs: Any,
) -> BatchObjective:
    return BatchObjective(rule, split(batch, parts), root or nn.Linear(1, 1), **kwargs)


def losses(*counts: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor(float(count)), torch.tensor(count)) for count in counts]


# ------------------------------------------------------------------------------------------------------------ loss_of


def test_loss_of_a_tensor_a_mapping_and_nothing() -> None:
    loss = torch.tensor(1.0)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "logits": 3}) is loss
    assert loss_of(None) is None
    assert loss_of({"loss": None}) is None
    assert objective().loss({"loss": loss}) is loss


@pytest.mark.parametrize(
    "output, found",
    [
        (1.0, "returned float."),
        ([torch.tensor(1.0)], "returned list."),
        ({"loss": 1.0, "b": 2}, r"keys \['b', 'loss'\]"),
    ],
)
def test_other_outputs_are_refused(output: Any, found: str) -> None:
    with pytest.raises(
        TypeError, match="must return a loss tensor, a dict with a tensor under 'loss', or None"
    ) as caught:
        loss_of(output)
    caught.match(found)


def test_a_mapping_without_a_loss_is_refused() -> None:
    """Lightning refuses it, too; taken for None it would train nothing, silently."""
    with pytest.raises(TypeError, match=r"keys \['los'\]"):
        loss_of({"los": torch.tensor(1.0)})


# ------------------------------------------------------------------------------------------------------------- shares


def test_samples_without_ignored_labels() -> None:
    batch = {"x": torch.ones(5, 3), "labels": torch.ones(5, 3, dtype=torch.long)}
    assert objective(batch=batch).shares() == pytest.approx([3 / 5, 2 / 5])


def test_samples_by_rule_although_labels_are_ignored() -> None:
    assert objective("samples").shares() == [0.5, 0.5]


@pytest.mark.parametrize("rule", ["auto", "tokens"])
def test_valid_labels(rule: str) -> None:
    assert objective(rule).shares() == [4 / 8, 4 / 8]
    assert objective(rule, labels_shifted=False).shares() == [4 / 8, 4 / 8]
    assert objective(rule, labels_shifted=True).shares() == [2 / 6, 4 / 6]


def test_class_names_decide_where_nothing_was_seen() -> None:
    assert objective(root=nn.Sequential(TinyCausalLM())).shares() == [2 / 6, 4 / 6]


def test_what_was_seen_beats_class_names() -> None:
    root = nn.Sequential(TinyCausalLM())
    assert objective(root=root, labels_shifted=False).shares() == [4 / 8, 4 / 8]


def test_a_micro_batch_without_labels_stands_for_nothing() -> None:
    labels = LABELS.clone()
    labels[2:] = -100
    assert objective(batch={"labels": labels}).shares() == [1.0, 0.0]


def test_samples_count_where_every_label_is_ignored() -> None:
    """Plain training divides 0 by 0 there; the loss is NaN then, with any shares."""
    assert objective(batch={"labels": torch.full((3, 2), -100)}).shares() == pytest.approx([2 / 3, 1 / 3])


def test_a_function_weighs_the_micro_batches() -> None:
    seen: list[Any] = []

    def weight(batch: Any) -> float:
        seen.append(batch)
        return float(batch["x"].shape[0] ** 2)

    found = objective(weight, {"x": torch.ones(5, 2)})
    assert found.shares() == pytest.approx([9 / 13, 4 / 13])
    assert [batch["x"].shape for batch in seen] == [(3, 2), (2, 2)]


def test_one_share_at_a_time() -> None:
    found = objective(labels_shifted=True)
    assert [found.share(0), found.share(1)] == found.shares()


def test_shares_are_fixed_when_the_first_is_asked_for() -> None:
    """A micro-batch that ran with one share must not be joined by one with a share of another sum."""
    found = objective()
    assert found.share(0) == 4 / 8
    found.observe(0, losses(2))
    assert found.labels_shifted is True
    assert found.share(1) == 4 / 8  # and not 4 / 6


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8), st.integers(1, 9), st.booleans()
)
def test_the_weighted_mean_of_means_is_the_mean(kept: Sequence[Sequence[bool]], parts: int, shifted: bool) -> None:
    """For any labels and any split."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.where(torch.tensor(kept), 1, -100)
    logits = torch.randn(*labels.shape, 4, generator=generator, dtype=torch.float64)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, 4), labels.reshape(-1))

    micro_batches = split({"logits": logits, "labels": labels}, parts)
    shares = BatchObjective("auto", micro_batches, nn.Linear(1, 1), labels_shifted=shifted).shares()
    expected = loss(logits, labels)
    parts_of_loss = [
        share * loss(micro_batch.data["logits"], micro_batch.data["labels"])
        for share, micro_batch in zip(shares, micro_batches, strict=True)
        if share > 0
    ]
    assert sum(shares) == pytest.approx(1)
    torch.testing.assert_close(torch.stack(parts_of_loss).sum(), expected, equal_nan=True)


# -------------------------------------------------------------------------------------------------------- observation


@pytest.mark.parametrize(
    "counts, decided",
    [
        ([4], False),  # the number of labels
        ([2], True),  # without the first of each row
        ([7, 2], True),  # beside an auxiliary loss
        ([], None),
        ([3], None),
        ([4, 2], None),  # both: not to be told apart
    ],
)
def test_label_counts_tell_whether_labels_are_shifted(counts: Sequence[int], decided: bool | None) -> None:
    found = objective()
    found.observe(0, losses(*counts))
    assert found.labels_shifted is decided


def test_what_is_known_is_not_decided_anew() -> None:
    found = objective(labels_shifted=False)
    found.observe(0, losses(2))
    assert found.labels_shifted is False


def test_only_the_first_micro_batch_decides() -> None:
    """Others are observed in any order, and a step must not depend on it."""
    found = objective(batch={"labels": LABELS.repeat(2, 1)}, parts=4)
    found.observe(2, losses(2))
    assert found.labels_shifted is None
    found.observe(0, losses(4))
    assert found.labels_shifted is False


def test_a_micro_batch_with_equal_counts_decides_nothing() -> None:
    """Its rows' first labels are ignored anyway."""
    found = objective(batch={"labels": LABELS.flip(0)})
    found.observe(0, losses(4))
    assert found.labels_shifted is None


def test_nothing_to_observe_without_ignored_labels() -> None:
    found = objective(batch={"x": torch.ones(4, 2)})
    found.observe(0, losses(4))
    assert found.labels_shifted is None


def test_evaluation_keeps_the_first_cross_entropy_of_each_micro_batch() -> None:
    found = objective(labels_shifted=True, watch=True)
    found.observe(1, losses(6, 4))
    found.observe(0, [])
    assert found.seen[0] is None
    assert found.seen[1] == torch.tensor(6.0)


def test_training_keeps_none() -> None:
    found = objective()
    found.observe(0, losses(4))
    assert found.seen == [None, None]


def test_scale() -> None:
    assert objective().scale == 1
    assert objective(scale=8.0).scale == 8


@pytest.mark.parametrize("weight", [lambda _: 0.0, lambda _: float("nan"), lambda _: float("inf"), lambda _: -1.0])
def test_weights_that_make_no_shares_are_refused(weight: Callable[[Any], float]) -> None:
    with pytest.raises(ValueError, match="a finite weight of at least 0, and not 0 to all, but gave"):
        BatchObjective(weight, [MicroBatch(0, None, 1)], nn.Linear(1, 1))
