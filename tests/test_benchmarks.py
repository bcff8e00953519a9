"""The benchmarks' arithmetic; what they measure needs a GPU."""

import importlib
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401 - sets an environment variable, for which counting would else be blamed

from lightning_roundpipe.plan.devices import PROFILES

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RUN = {
    "model": "tiny",
    "sequence": 64,
    "batch": 4,
    "micro_batches": 2,
    "overlap": "exact",
    "plan": "2-3|1-1-1-1-1-1",
}


def test_prediction_follows_the_profile(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    predicted = importlib.import_module("prediction").predicted
    fast = replace(PROFILES["h200"], launch_s=1e-6)
    slow = replace(fast, launch_s=1e-3)  # so slow that nothing but the launches counts
    assert predicted(RUN, slow)["busy_s"] > 100 * predicted(RUN, fast)["busy_s"]
    for overlap in ("exact", "off"):
        told = predicted({**RUN, "overlap": overlap}, fast)
        assert told["tokens_per_s"] == pytest.approx(4 * 64 / told["step_s"])
        assert told["step_s"] >= told["busy_s"] * 0.99


@pytest.mark.parametrize(("most", "answer"), [(63, 0), (64, 64), (100, 96), (127, 120), (1000, 512)])
def test_longest_is_found_by_bisection(most, answer, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    tried = []
    found = importlib.import_module("long").longest(
        lambda length: tried.append(length) or length <= most, start=64, limit=512, precision=8
    )
    assert found == answer
    assert len(tried) == len(set(tried))


def test_weights_are_cheap_but_not_equal(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    build = importlib.import_module("step").build
    model = build("tiny", "cpu")
    rows = model.model.embed_tokens.weight
    assert not torch.equal(rows[0], rows[1])
    assert 0.01 < rows.std() < 0.03
    logits = model(torch.arange(8)[None]).logits
    assert logits.isfinite().all()
    assert model.lm_head.weight is rows


def test_a_mixture_trains_from_files(monkeypatch, tmp_path, capsys):
    """What virtual workers read where it lies is not uploaded."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("mapped").main
    arguments = ["--folder", str(tmp_path / "experts"), "--shape", "tiny", "--layers", "2", "--batch", "2"]
    arguments += ["--sequence", "8", "--micro-batches", "1", "--steps", "2", "--cold", "--host-weights"]
    steps = {}
    for kind in ("mmap", "pageable"):
        with warnings.catch_warnings():
            program([*arguments, kind])
        steps[kind] = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]
    assert all(len(told) == 2 for told in steps.values())
    for mapped, pageable in zip(steps["mmap"], steps["pageable"], strict=True):
        assert 0 < mapped["uploaded_bytes"] < pageable["uploaded_bytes"]
