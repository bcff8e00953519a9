"""Batches become micro-batches and come back as one, whatever tree they are."""

import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_roundpipe.exceptions import BatchSplitError, RoundPipeError
from lightning_roundpipe.runtime.microbatch import (
    MicroBatch,
    batch_size,
    label_leaf,
    map_structure,
    merge,
    split,
    valid_label_counts,
)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    x: Any
    note: str = "n"
    derived: int = field(init=False, default=3)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = None


def data(batch: Any, num_microbatches: int, rules: dict[str, int | str] | None = None) -> list[Any]:
    return [micro_batch.data for micro_batch in split(batch, num_microbatches, rules)]


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal in types, structure and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Record):
        return same((one.x, one.note, one.derived), (other.x, other.note, other.derived))
    if isinstance(one, Frozen):
        return same((one.x, one.y), (other.x, other.y))
    return bool(one == other)


def detection(num_samples: int, num_boxes: list[int], height: int = 5) -> tuple[list[Any], list[Any]]:
    images = [torch.rand(3, height, 4 + index) for index in range(num_samples)]
    targets = [{"boxes": torch.rand(n, 4), "labels": torch.arange(n) + 1, "id": torch.tensor([n])} for n in num_boxes]
    return images, targets


# Batch size


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(6, 2), 6),
        (torch.arange(6), 6),
        (np.ones((6, 2)), 6),
        ([torch.ones(8, 3), torch.ones(8)], 8),
        ((torch.ones(8, 3), torch.ones(8, 3)), 8),
        ([torch.ones(2, 96, 7), torch.ones(2, 24, 7)], 2),
        ({"ids": torch.ones(1, 7), "class_weights": torch.ones(5)}, 5),
        ({"ids": torch.ones(1, 7), "mask": torch.ones(1, 7), "class_weights": torch.ones(5)}, 1),
        ({"class_weights": torch.ones(5), "x": torch.ones(4, 2), "y": torch.ones(4)}, 4),
        ({"names": ("cat", "dog"), "x": torch.ones(4, 2)}, 4),
        ({"size": (480, 640), "x": torch.ones(4, 2)}, 4),
        ({"texts": ["a", "b", "c"]}, 3),
        ((["a", "b", "c"], ["d", "e", "f"]), 3),
        ([{"text": "a"}, {"text": "b"}], 2),
        ({"waves": [torch.ones(100), torch.ones(50), torch.ones(70)]}, 3),
        (detection(4, [1, 5, 2, 3]), 4),
        (detection(4, [2, 2, 2, 2]), 4),
        (detection(4, [3, 3, 3, 3]), 4),
        ([(torch.ones(3, 8, 8), 1), (torch.ones(3, 8, 8), 0)], 2),
        ([{"image": torch.ones(3, 8, 8), "label": 1}] * 2, 2),
        (detection(2, [2, 2]), 2),
        (detection(1, [5]), 1),
        ((torch.ones(4, 3, 8, 8), [{"boxes": torch.ones(2, 4)} for _ in range(4)]), 4),
        ({"crops": [torch.ones(6, 3, 8, 8)] * 4}, 6),
        ([{"x": torch.ones(6, 2)}, {"x": torch.ones(6, 2)}], 6),
        # Packed sequences: one row, and the running total of its sequences' lengths.
        ({"ids": torch.ones(1, 9, dtype=torch.long), "cu_seqlens": torch.tensor([0, 4, 9])}, 1),
        (Frozen(torch.ones(5, 1)), 5),
        (pack_padded_sequence(torch.ones(4, 3, 2), torch.tensor([3, 2, 2, 1]), batch_first=True), 4),
        (torch.ones(()), None),
        ({}, None),
        ([], None),
        (None, None),
        ("text", None),
        ({"x": 1.0, "y": object(), "z": torch.Size([3, 4])}, None),
    ],
)
def test_batch_size(batch: Any, expected: int | None) -> None:
    assert batch_size(batch) == expected


def test_a_rule_decides_the_batch_size() -> None:
    batch = {"a": torch.ones(3, 4, 5), "b": torch.ones(3, 4, 5), "c": torch.ones(4)}
    assert batch_size(batch) == 3
    assert batch_size(batch, {"b": 1}) == 4
    assert batch_size(batch, {"a": "replicate", "b": -2}) == 4
    images = [torch.ones(3, 8, 8) for _ in range(5)]
    assert batch_size(images) == 3
    assert batch_size(images, {"": 0}) == 5


# Split


@pytest.mark.parametrize("num_samples", range(1, 10))
def test_sizes_differ_by_one_at_most_larger_first(num_samples: int) -> None:
    x = torch.arange(num_samples) + 5
    micro_batches = split({"x": x}, 4)
    sizes = [micro_batch.num_samples for micro_batch in micro_batches]
    assert sizes == [len(part) for part in x.tensor_split(min(4, num_samples))]
    assert [micro_batch.index for micro_batch in micro_batches] == list(range(min(4, num_samples)))
    assert torch.equal(torch.cat([micro_batch.data["x"] for micro_batch in micro_batches]), x)


def test_arrays_are_cut_as_views() -> None:
    batch = {"x": torch.ones(4, 3), "y": np.ones((4, 2))}
    first, second = data(batch, 2)
    batch["x"][3] = 7
    batch["y"][3] = 7
    assert second["x"].tolist() == [[1, 1, 1], [7, 7, 7]]
    assert second["y"].tolist() == [[1, 1], [7, 7]]
    assert first["x"].tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    "batch", [torch.ones(1, 3), torch.ones(3), {"x": None}, object(), torch.ones(0, 3), [torch.ones(3, 3, 3)] * 3]
)
def test_a_single_micro_batch_is_the_batch_itself(batch: Any) -> None:
    (only,) = split(batch, 1)
    assert only.data is batch
    assert only.num_samples == (1 if batch_size(batch) is None else batch_size(batch))


@pytest.mark.parametrize("batch", [torch.ones(1, 3), {"x": None, "y": 3}, torch.ones(0, 3)])
def test_what_has_no_samples_to_share_is_not_split(batch: Any) -> None:
    (only,) = split(batch, 3)
    assert only.data is batch


def test_everything_else_is_replicated() -> None:
    note = object()
    batch = {
        "x": torch.ones(4, 2),
        "positions": torch.arange(6)[None],
        "class_weights": torch.rand(10),
        "scale": torch.tensor(2.0),
        "shape": torch.Size([4, 2]),
        "missing": None,
        "note": note,
        "name": "abcd",
        "count": 4,
        "table": np.ones((7, 3)),
    }
    for part in data(batch, 2):
        assert list(part) == list(batch)
        assert all(part[key] is batch[key] for key in batch if key != "x")


def test_a_step_may_change_its_batch() -> None:
    batch = {"x": torch.ones(4, 2), "meta": {"a": 1}, "empty": {}, "cache": [], "more": {"y": torch.ones(4)}}
    first, second = data(batch, 2)
    for container in (first, first["meta"], first["more"]):
        container.popitem()
    first["empty"]["new"] = 1
    first["cache"].append(1)
    assert list(second) == list(batch) == ["x", "meta", "empty", "cache", "more"]
    assert same(second, {**batch, "x": torch.ones(2, 2), "more": {"y": torch.ones(2)}})
    assert batch["meta"] == {"a": 1}
    assert batch["empty"] == {}
    assert batch["cache"] == []


@pytest.mark.parametrize(
    "container",
    [
        lambda x: {"x": x, "n": 1},
        lambda x: OrderedDict(n=1, x=x),
        lambda x: UserDict({"x": x, "n": 1}),
        lambda x: MappingProxyType({"x": x}),
        lambda x: {0: x, ("a", 1): x},
        lambda x: [x, x],
        lambda x: (x, "text", None),
        lambda x: Pair(x, "text"),
        Record,
        Frozen,
        lambda x: [{"x": (x, {"x": Pair(x, Frozen(x))})}],
        lambda x: torch.return_types.max((x, x.long())),
    ],
)
def test_containers_keep_their_type_and_come_back(container: Any) -> None:
    batch = container(torch.rand(5, 2))
    parts = data(batch, 2)
    assert all(type(part) is type(batch) for part in parts)
    assert same(parts[0], container(nested_first(batch)[:3]))
    assert same(merge(parts, [3, 2], [3, 2]), batch)


def nested_first(tree: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def look(path: Any, *nodes: Any) -> list[Any] | None:
        if isinstance(nodes[0], torch.Tensor):
            found.append(nodes[0])
        return None if isinstance(nodes[0], list | tuple | Mapping | Record | Frozen) else []

    map_structure(look, tree)
    return found[0]


def test_attributes_of_containers_survive() -> None:
    counts = defaultdict(list, x=torch.ones(4))
    record = Record(torch.ones(4), "hello")
    record.derived = 8
    for part in data((counts, record), 2):
        assert part[0].default_factory is list
        assert (part[1].note, part[1].derived) == ("hello", 8)


def test_batch_encoding_and_batch_feature() -> None:
    transformers = pytest.importorskip("transformers")
    for kind in (transformers.BatchEncoding, transformers.BatchFeature):
        batch = kind({"input_ids": torch.arange(10).reshape(5, 2), "text": list("abcde")})
        first, second = data(batch, 2)
        assert type(first) is type(second) is kind
        assert first["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert second["text"] == ["d", "e"]
        assert second.input_ids.tolist() == [[6, 7], [8, 9]]
        assert same(merge([first, second], [3, 2], [3, 2]), batch)


def test_model_output() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    whole = outputs.CausalLMOutput(
        loss=torch.tensor(1.6), logits=torch.rand(5, 2, 3), hidden_states=(torch.rand(5, 2), torch.rand(5, 2))
    )
    first, second = data(whole, 2)
    assert type(first) is outputs.CausalLMOutput
    assert first.logits.shape == (3, 2, 3)
    assert first["logits"] is first.logits
    assert first.attentions is None
    assert [state.shape[0] for state in second.hidden_states] == [2, 2]
    first.loss, second.loss = torch.tensor(1.0), torch.tensor(2.5)
    merged = merge([first, second], [3, 2], [3, 2])
    assert type(merged) is outputs.CausalLMOutput
    assert torch.equal(merged.logits, whole.logits)
    assert merged.loss.item() == pytest.approx(1.6)
    assert len(merged.to_tuple()) == 3


# Lists: one element per sample, or fields


@pytest.mark.parametrize("num_boxes", [[1, 5, 2], [2, 2, 2], [3, 1, 7]])
def test_detection_batches_are_cut_between_samples(num_boxes: list[int]) -> None:
    images = [torch.rand(1, 5, 4 + index) for index in range(3)]
    targets = detection(3, num_boxes)[1]
    first, second = data((images, targets), 2)
    assert [len(part) for part in (*first, *second)] == [2, 2, 1, 1]
    assert first[0][1] is images[1]
    assert first[1][0] is targets[0]
    assert second[1][0] is targets[2]


@pytest.mark.parametrize("num_boxes", [[2, 2], [2, 5], [1, 3]])
def test_two_images_and_two_targets_are_not_taken_for_two_samples(num_boxes: list[int]) -> None:
    images, targets = detection(2, num_boxes)
    first, second = data((tuple(images), tuple(targets)), 2)
    assert first[0] == (images[0],)
    assert second[1] == (targets[1],)


@pytest.mark.parametrize("batch_type", [list, tuple])
def test_inputs_and_targets_are_not_taken_for_two_samples(batch_type: type) -> None:
    batch = batch_type([torch.ones(2, 7), torch.ones(2, 7)])
    assert all([len(part) for part in parts] == [1, 1] for parts in data(batch, 2))
    queries_and_documents = batch_type([{"ids": torch.ones(2, n), "mask": torch.ones(2, n)} for n in (5, 9)])
    for part in data(queries_and_documents, 2):
        assert [value.shape for encoding in part for value in encoding.values()] == [(1, 5), (1, 5), (1, 9), (1, 9)]


@pytest.mark.parametrize(
    "samples",
    [
        ["a", "b", "c", "d"],
        [b"a", b"b", b"c", b"d"],
        [1, 2, 3, 4],
        [None, "b", None, "d"],
        [object(), object(), object(), object()],
        [torch.ones(3), torch.ones(9), torch.ones(2), torch.ones(5)],
        [torch.ones(3), torch.ones(4), torch.ones(2), torch.ones(5)],  # the second is of length 4 by chance
        [torch.tensor(1), torch.tensor(2), torch.tensor(3), torch.tensor(4)],
        [["a"], ["b", "c"], [], ["d"]],
        [(np.ones(3), "a")] * 4,
        [(np.ones(4), "a")] * 4,
        ({"text": "a"},) * 4,
    ],
)
def test_a_list_with_one_element_per_sample_is_cut(samples: Any) -> None:
    batch = {"x": torch.ones(4, 2), "y": torch.ones(4), "samples": samples}
    first, second, third = data(batch, 3)
    assert type(first["samples"]) is type(samples)
    parts = [*first["samples"], *second["samples"], *third["samples"]]
    assert [len(part["samples"]) for part in (first, second, third)] == [2, 1, 1]
    assert all(part is sample for part, sample in zip(parts, samples, strict=True))


def test_lists_of_other_lengths_are_replicated_element_by_element() -> None:
    batch = {"x": torch.ones(4, 2), "names": ["a", "b", "c"], "crops": [torch.ones(4, 3), torch.ones(4, 5)]}
    for part in data(batch, 2):
        assert part["names"] == ["a", "b", "c"]
        assert [crop.shape for crop in part["crops"]] == [(2, 3), (2, 5)]


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"ids": torch.ones(3, 5), "images": [torch.ones(3, 4, 4)] * 3}, "images"),
        ({"ids": torch.ones(2, 5), "y": torch.ones(2), "captions": [["a", "b"], ["c", "d"]]}, "captions"),
    ],
)
def test_a_list_that_could_be_either_is_refused(batch: dict[str, Any], path: str) -> None:
    with pytest.raises(BatchSplitError, match=rf"`{path}` have it as well.*\{{'{path}': 0\}}.*'{path}\.\*': 0"):
        split(batch, 2)
    as_samples = data(batch, 2, {path: 0})
    assert len(as_samples[1][path]) == 1
    assert as_samples[1][path][0] is batch[path][-1]
    as_fields = data(batch, 2, {f"{path}.*": 0})
    assert len(as_fields[1][path]) == len(batch[path])
    assert all(len(field) == 1 for field in as_fields[1][path])


# What is refused, and rules


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"input_ids": torch.ones(3, 7), "inputs": {"position_ids": torch.ones(3, 3, 7, dtype=torch.long)}},
            r"`inputs\.position_ids` with shape \[3, 3, 7\] has it in dim 0 and in dim 1.*"
            r"\{'inputs\.position_ids': 1\}.*'replicate'",
        ),
        (
            {"x": torch.ones(4, 7), "y": torch.ones(4), "position_ids": torch.ones(3, 4, 7)},
            r"batch size 4 is, but `position_ids` with shape \[3, 4, 7\] has it in dim 1. .*\{'position_ids': 1\}",
        ),
        (
            {"x": torch.ones(4, 7), "y": torch.ones(4), "a": [np.ones((2, 3, 4))]},
            r"`a\.0` with shape \[2, 3, 4\] has it in dim 2. .*\{'a\.0': 2\}",
        ),
        (
            (torch.ones(4, 7), torch.ones(4, 1), torch.tensor([0, 3, 3, 9, 28], dtype=torch.int32)),
            r"`2` with shape \[5\] looks like sequence boundaries.*\{'2': 'replicate'\}",
        ),
        (
            {"x": torch.ones(4), "y": torch.ones(4, 2).to_sparse()},
            r"dense .* `y` is a `torch\.sparse_coo` tensor.*\{'y': 'replicate'\}",
        ),
        (pack_padded_sequence(torch.ones(4, 3, 2), torch.tensor([3, 2, 2, 1]), batch_first=True), "`PackedSequence`"),
    ],
)
def test_ambiguous_parts_are_refused_by_name(batch: Any, message: str) -> None:
    with pytest.raises(BatchSplitError, match=message) as caught:
        split(batch, 2)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RoundPipeError)
    assert split(batch, 1)[0].data is batch


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(4, 2)], layout=layout)
    assert batch_size(nested) == 2
    for batch in (nested, {"x": torch.ones(4), "y": torch.ones(4), "z": nested}):
        with pytest.raises(BatchSplitError, match="is a nested tensor"):
            split(batch, 2)
    assert merge([nested, nested * 2], [1, 1], [2, 2])[0] is nested


@pytest.mark.parametrize(
    "array",
    [
        torch.rand(4, 4, 7),  # features, not position ids
        torch.ones(4, 4, 7, dtype=torch.bool),  # an attention mask
        torch.ones(4, 4, dtype=torch.long),
        torch.ones(4, 4, 2, 2, dtype=torch.long),
    ],
)
def test_the_same_size_twice_is_ambiguous_for_position_ids_only(array: torch.Tensor) -> None:
    assert [len(part["a"]) for part in data({"a": array, "y": torch.ones(4)}, 2)] == [2, 2]


@pytest.mark.parametrize(
    "array",
    [
        torch.arange(7),  # positions
        torch.tensor([0, 5]),
        torch.tensor([1, 4, 9]),
        torch.tensor([0, 4, 3]),
        torch.zeros(7, dtype=torch.long),
        torch.tensor([0.0, 4.0, 9.0]),
        torch.ones(1, 4),
        torch.ones(1, 7, 4),
        torch.ones(9, 2),
    ],
)
def test_arrays_without_the_batch_size_are_replicated(array: torch.Tensor) -> None:
    batch = {"x": torch.ones(4, 6), "y": torch.ones(4, 6), "a": array}
    assert all(part["a"] is array for part in data(batch, 2))


def test_rules_win() -> None:
    batch = {
        "x": torch.ones(4, 2),
        "inputs": {"position_ids": torch.arange(3 * 4 * 5).reshape(3, 4, 5), "a_mask": torch.ones(4), "b_mask": None},
        "weights": torch.ones(4),
        "pairs": [torch.ones(2, 4), np.ones((2, 4))],
        "names": ["a", "b", "c", "d"],
        "whole": {"y": torch.ones(4), "z": torch.ones(3, 4)},
    }
    rules = {
        "position_ids": 1,
        "inputs.*_mask": "replicate",
        "weights": "replicate",
        "pairs.*": -1,
        "names": "replicate",
        "whole": "replicate",
        "nothing.*.here": 5,
    }
    for index, part in enumerate(data(batch, 2, rules)):
        assert torch.equal(
            part["inputs"]["position_ids"], batch["inputs"]["position_ids"][:, 2 * index : 2 * index + 2]
        )
        assert part["inputs"]["a_mask"] is batch["inputs"]["a_mask"]
        assert all(part[key] is batch[key] for key in ("weights", "names", "whole"))
        assert [pair.shape for pair in part["pairs"]] == [(2, 2), (2, 2)]


def test_the_first_rule_that_names_a_part_decides() -> None:
    batch = {"x": torch.ones(4, 2), "a": {"y": torch.ones(4)}}
    assert data(batch, 2, {"a.y": "replicate", "*": 0})[0]["a"]["y"].shape == (4,)
    assert data(batch, 2, {"*": 0, "a.y": "replicate"})[0]["a"]["y"].shape == (2,)
    odd = {"odd[key]": torch.ones(4), "x": torch.ones(4)}
    assert data(odd, 2, {"odd[key]": "replicate"})[0]["odd[key]"].numel() == 4


def test_the_batch_itself_is_named_by_an_empty_rule() -> None:
    images = [torch.rand(3, 8, 8) for _ in range(5)]
    assert [len(part) for part in data(images, 2, {"": 0})] == [3, 2]
    assert [part.shape for part in data(torch.ones(3, 4), 2, {"": 1})] == [(3, 2), (3, 2)]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"y": 2}, r"batch size 3.* dim 2 of `y` with shape \[3, 4\]"),
        ({"y": 1, "z": 0}, r"dim 0 of `z` with shape \[3\]"),
        ({"y": 1, "names": 1}, r"dim 1 of `names` with 3 elements.*'names\.\*'"),
    ],
)
def test_a_rule_must_find_the_batch_size(rules: dict[str, int | str], message: str) -> None:
    batch = {"x": torch.ones(4), "y": torch.ones(3, 4), "z": torch.ones(3), "names": ["a", "b", "c"]}
    if "z" in rules:
        batch["x2"] = torch.ones(4)
        rules = {**rules, "x*": 0}
    with pytest.raises(BatchSplitError, match=message):
        split(batch, 2, rules)


@pytest.mark.parametrize("rule", ["Replicate", 1.0, True, None])
def test_a_wrong_rule_is_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match='must be a dim or "replicate"'):
        split(torch.ones(4), 2, {"nothing": rule})


def test_a_wrong_number_of_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, but got 0"):
        split(torch.ones(4), 0)


# Merge


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_scalars_are_averaged_by_weight(dtype: torch.dtype) -> None:
    merged = merge([torch.tensor(1.0, dtype=dtype), torch.tensor(4.0, dtype=dtype)], [6, 3], [2, 1])
    assert merged.dtype == dtype
    assert merged == 2


def test_means_are_taken_in_double_precision() -> None:
    losses = [torch.tensor(16777216.0), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(2.0)]
    assert merge(losses, [1, 1, 1, 1], [1, 1, 1, 1]).item() == (16777216 + 4) / 4


def test_python_numbers() -> None:
    mean = merge([1.0, 4.0], [2, 1], [4, 2])
    assert type(mean) is float
    assert mean == pytest.approx(2.0)
    assert merge([0, 0.5], [1, 1], [1, 1]) == 0.25
    assert merge([np.float32(1), np.float32(2)], [1, 1], [1, 1]) == 1.5
    assert merge([3, 3], [1, 1], [2, 2]) == 3
    assert merge([3, 4], [1, 1], [2, 2]) == [3, 4]
    assert merge([True, True], [1, 1], [2, 2]) is True
    assert merge([True, False], [1, 1], [2, 2]) == [True, False]


def test_integer_scalars() -> None:
    assert merge([torch.tensor(3), torch.tensor(3)], [1, 2], [1, 2]).tolist() == 3
    assert merge([torch.tensor(3), torch.tensor(4)], [1, 2], [1, 2]).tolist() == [3, 4]


def test_a_mean_over_nothing_does_not_spoil_the_mean() -> None:
    nan = float("nan")
    assert merge([torch.tensor(nan), torch.tensor(2.0)], [0, 5], [2, 2]) == 2
    assert merge([nan, 2.0], [0, 5], [2, 2]) == 2
    assert math.isnan(merge([nan, nan], [0, 0], [2, 2]))
    assert merge([1.0, 3.0], [0, 0], [2, 2]) == 2


def test_none_is_left_out_with_its_weight() -> None:
    x = torch.rand(3)
    assert merge([None, None], [1, 1], [1, 1]) is None
    assert merge([None, x], [1, 1], [2, 1]) is x
    outputs = [{"loss": 1.0, "y": torch.ones(2)}, None, {"loss": 4.0, "y": torch.zeros(1)}]
    merged = merge(outputs, [2, 7, 1], [2, 7, 1])
    assert merged["loss"] == pytest.approx(2.0)
    assert merged["y"].tolist() == [1, 1, 0]
    assert merge([{"a": None}, {"a": None}], [1, 1], [1, 1]) == {"a": None}


def test_a_single_output_is_returned_as_it_is() -> None:
    output = {"x": [torch.ones(2)]}
    assert merge([output], [1], [2]) is output


def test_autograd_is_left_alone() -> None:
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    features = [torch.ones(3, 1, requires_grad=True), torch.ones(1, 1)]
    merged = merge([{"loss": x, "y": y} for x, y in zip(losses, features, strict=True)], [3, 1], [3, 1])
    merged["loss"].backward()
    assert [loss.grad.item() for loss in losses] == [0.75, 0.25]
    assert merged["y"].requires_grad


def test_arrays_that_do_not_fit_stay_apart() -> None:
    padded = [torch.ones(2, 5), torch.ones(2, 7)]
    assert same(merge(padded, [1, 1], [2, 2]), padded)
    statistics = [torch.ones(10), torch.zeros(10)]
    assert same(merge(statistics, [1, 1], [2, 2]), statistics)
    tables = [np.ones((2, 3)), np.zeros((1, 3))]
    assert same(merge(tables, [2, 1], [2, 1]), np.concatenate(tables))
    assert same(merge(tables, [2, 1], [5, 1]), tables)


def test_predictions_in_lists() -> None:
    predictions = [[{"boxes": torch.ones(2, 4)}, {"boxes": torch.ones(2, 4)}], [{"boxes": torch.ones(5, 4)}]]
    merged = merge(predictions, [2, 1], [2, 1])
    assert [prediction["boxes"].shape[0] for prediction in merged] == [2, 2, 5]
    assert merge([["a", "b"], ["a", "b"]], [1, 1], [2, 2]) == ["a", "b", "a", "b"]
    assert merge([[0.1, 0.2], [0.3]], [2, 1], [2, 1]) == [0.1, 0.2, 0.3]
    assert merge([("a", "b"), ("c",)], [2, 1], [2, 1]) == ("a", "b", "c")


def test_fields_in_lists_and_tuples() -> None:
    loss, accuracy = torch.tensor(1.0), torch.tensor(0.5)
    assert merge([(loss, accuracy), (loss + 2, accuracy + 0.5)], [1, 1], [2, 2]) == (2.0, 0.75)
    assert merge([(0.1, 3), (0.3, 3)], [1, 1], [2, 2]) == (pytest.approx(0.2), 3)
    merged = merge([[loss, torch.ones(2, 3)], [loss, torch.ones(2, 3)]], [1, 1], [2, 2])
    assert merged[0] is loss
    assert merged[1].shape == (4, 3)


def test_what_cannot_be_merged_is_listed() -> None:
    assert merge(["a", "a"], [1, 1], [2, 2]) == "a"
    assert merge(["a", "b"], [1, 1], [2, 2]) == ["a", "b"]
    assert merge([{"a": 1}, {"b": 1}], [1, 1], [2, 2]) == [{"a": 1}, {"b": 1}]
    assert merge([{"a": 1.0}, (1.0,)], [1, 1], [2, 2]) == [{"a": 1.0}, (1.0,)]
    assert merge([{"a": None}, {"a": 2.0}], [1, 1], [2, 2]) == {"a": [None, 2.0]}
    assert merge([{}, {}], [1, 1], [2, 2]) == {}
    one, other = object(), object()
    assert merge([{"o": one}, {"o": other}], [1, 1], [2, 2]) == {"o": [one, other]}
    assert merge([{"o": one}, {"o": one}], [1, 1], [2, 2]) == {"o": one}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], []), "one entry per micro-batch, but got 0, 0 and 0"),
        (([1, 2], [1], [1, 1]), "but got 2, 1 and 2"),
        (([1, 2], [1, -1], [1, 1]), r"not negative, but got \[1, -1\]"),
        (([1, 2], [1, float("nan")], [1, 1]), "must be finite"),
    ],
)
def test_wrong_arguments_of_merge_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(*arguments)


# Round trip


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int, int]:
    """A batch, its number of samples and a number of micro-batches.

    Nothing here is ambiguous: other dims are larger than any number of samples, and lists of fields start with a tensor
    that has the samples.
    """
    num_microbatches = draw(st.integers(1, 5))
    B = draw(st.integers(1, 2 * num_microbatches + 1))
    dims = st.lists(st.integers(31, 33), max_size=2)
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    seeds = st.integers(0, 99)

    def tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
        return torch.randint(0, 9, [B, *shape], generator=torch.Generator().manual_seed(seed)).to(dtype)

    tensors = st.builds(tensor, dims, dtypes, seeds)
    leaves = st.one_of(
        tensors,
        tensors.filter(lambda array: array.dtype != torch.bfloat16).map(torch.Tensor.numpy),
        st.sampled_from([None, "text", 3, True, 2.5, b"bytes"]),
        st.builds(lambda shape: torch.rand(19, *shape), dims),
        st.builds(lambda shape: torch.rand(1, *shape), dims),
        st.just(torch.tensor(0.5)),
        st.just(["abcdefghijkl"[index] * 2 for index in range(B)]),
        st.builds(lambda shape: [torch.rand(20 + index, *shape) for index in range(B)], dims),
    )
    names = st.text("abc_", min_size=1, max_size=2)

    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(names, children, max_size=3),
            st.dictionaries(names, children, max_size=3).map(OrderedDict),
            st.dictionaries(names, children, max_size=3).map(UserDict),
            st.builds(Pair, children, children),
            st.builds(Record, children),
            st.builds(Frozen, children, children),
            st.builds(lambda first, second: (first, {"other": second}), tensors, children),
            st.builds(lambda first, second: [{"first": first}, second], tensors, children),
        )

    tree = draw(st.recursive(leaves, containers, max_leaves=8))
    return {"samples": tensor([], torch.float32, 0), "tree": tree}, B, num_microbatches


@settings(max_examples=100, deadline=None)
@given(batches())
def test_merge_undoes_split(drawn: tuple[Any, int, int]) -> None:
    batch, B, num_microbatches = drawn
    rules: dict[str, int | str] = {"samples": 0}  # so many other arrays may be drawn that the guess would be theirs
    assert batch_size(batch, rules) == B
    micro_batches = split(batch, num_microbatches, rules)
    sizes = [micro_batch.num_samples for micro_batch in micro_batches]
    assert len(sizes) == min(B, num_microbatches)
    assert sum(sizes) == B
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert same(merge([micro_batch.data for micro_batch in micro_batches], sizes, sizes), batch)


# Labels


def test_the_leaf_called_labels_comes_first() -> None:
    labels = torch.tensor([[1, -100], [2, 3]])
    other = torch.tensor([[-100, 1], [2, 3]])
    assert label_leaf({"a": other, "inputs": {"labels": labels}}, 2) is labels
    assert label_leaf((labels, torch.ones(2)), 2) is labels
    assert label_leaf({"a": other, "b": labels}, 2) is None
    assert label_leaf({"a": other, "labels": torch.ones(2, 2, dtype=torch.long)}, 2) is other
    assert label_leaf(labels, 2) is labels


@pytest.mark.parametrize(
    "labels",
    [
        torch.ones(2, 2, dtype=torch.long),
        torch.tensor([[1.0, -100.0], [2.0, 3.0]]),
        torch.tensor([[1, 156], [2, 3]], dtype=torch.uint8),  # -100 in 8 bits
        torch.tensor([[1, -100]]),
        torch.tensor(-100),
        None,
        "labels",
    ],
)
def test_what_holds_no_ignored_labels(labels: Any) -> None:
    batch = {"x": torch.ones(2, 4), "labels": labels}
    assert label_leaf(batch, 2) is None
    assert valid_label_counts(split(batch, 2), shifted=True) is None


@pytest.mark.parametrize(("shifted", "expected"), [(False, [7, 1]), (True, [5, 1])])
def test_labels_are_counted_as_the_loss_does(shifted: bool, expected: list[int]) -> None:
    # Only the last micro-batch ignores labels.
    labels = torch.tensor([[1, 2, 3, 4], [5, 6, 7, -100], [-100, 8, -100, -100]])
    micro_batches = split({"x": torch.ones(3, 2), "inputs": {"labels": labels}}, 2)
    assert valid_label_counts(micro_batches, shifted) == expected


def test_a_micro_batch_without_ignored_labels_counts_too() -> None:
    labels = torch.tensor([[1, 2, 3], [-100, -100, 4], [-100, -100, -100]])
    assert valid_label_counts(split((torch.ones(3), labels), 3), shifted=False) == [3, 1, 0]


def test_one_label_per_sample_is_not_shifted() -> None:
    labels = torch.tensor([1, -100, 2, 3])
    assert valid_label_counts(split((torch.ones(4, 2), labels), 2), shifted=True) == [1, 2]


def test_replicated_tensors_are_not_labels() -> None:
    batch = {"x": torch.ones(3, 4), "y": torch.ones(3), "labels": torch.tensor([[-100, 1]])}
    assert valid_label_counts(split(batch, 3), shifted=False) is None


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_weighted_losses_equal_the_loss_of_the_batch(num_microbatches: int) -> None:
    logits = torch.randn(5, 6, 7, dtype=torch.float64)
    labels = torch.randint(0, 7, (5, 6)).masked_fill(torch.rand(5, 6) < 0.4, -100)

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        shifted = batch["labels"][:, 1:].flatten(), batch["logits"][:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(shifted[1], shifted[0])

    batch = {"logits": logits, "labels": labels}
    micro_batches = split(batch, num_microbatches)
    counts = valid_label_counts(micro_batches, shifted=True)
    assert counts is not None
    sizes = [micro_batch.num_samples for micro_batch in micro_batches]
    merged = merge([loss(micro_batch.data) for micro_batch in micro_batches], counts, sizes)
    torch.testing.assert_close(merged, loss(batch))


# Trees


def test_map_structure_gives_paths_and_any_number_of_trees() -> None:
    point = namedtuple("point", "u v")
    tree = {"a": [1, 2], "b": point(3, Frozen(4))}
    paths = []

    def visit(path: tuple[str, ...], node: Any) -> list[Any] | None:
        if not isinstance(node, int | type(None)):
            return None
        paths.append(".".join(path))
        return [node, str(node)]

    numbers, texts = map_structure(visit, tree)
    assert paths == ["a.0", "a.1", "b.u", "b.v.x", "b.v.y"]
    assert numbers == tree
    assert texts == {"a": ["1", "2"], "b": point("3", Frozen("4", "None"))}


def test_micro_batches_are_frozen() -> None:
    micro_batch = MicroBatch(0, None, 1)
    with pytest.raises(AttributeError):
        micro_batch.index = 1  # type: ignore[misc]
