"""The benchmarks' arithmetic; what they measure needs a GPU."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
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
