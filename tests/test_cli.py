import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 - sets an environment variable, for which counting would else be blamed

from lightning_roundpipe import cli
from lightning_roundpipe.cli import main
from lightning_roundpipe.plan.devices import PROFILES, save_profile
from lightning_roundpipe.plan.files import load_schedule, schedule_from_dict
from tests.plan.figures import TIMES, rows

KEYS = {"makespan_ms", "bubble_pct", "fill_pct", "drain_pct", "steady_pct", "stall_pct", "partition", "replica_groups"}


def simulate(model, *more):
    row = TIMES[model]
    times = [f"--{name.replace('_', '-')}={row[name]}" for name in row if name.endswith("_ms")]
    return ["simulate", f"--layers={row['layers']}", *times, f"--gpus={row['gpus']}", "--micro-batches=16", *more]


@pytest.mark.parametrize("row", rows("bubbles"), ids=lambda row: f"{row['schedule']}-{row['model']}")
def test_simulate_reproduces_published_rows(row, capsys):
    args = simulate(row["model"], f"--schedule={row['schedule']}", f"--partition={row['partition']}", "--json")
    assert main(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= KEYS
    assert report["bubble_pct"] == pytest.approx(float(row["bubble_pct"]), abs=0.5)
    parts = [report[f"{part}_pct"] for part in ("fill", "drain", "steady", "stall")]
    assert sum(parts) == pytest.approx(report["bubble_pct"])
    assert report["partition"] == row["partition"]


def test_simulate_searches_without_a_partition(capsys):
    links = ["--link-gb-per-s=25", "--host-gb-per-s=200", "--layer-mb=100.7", "--head-mb=622", "--input-mb=33.6"]
    assert main(simulate("qwen3-1.7b", *links, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bubble_pct"] <= 4.1
    assert report["link_busy_pct"]["h2d"] > 0


@pytest.mark.parametrize("sync", ["exact", "stale"])
def test_simulate_with_overlapping_steps(sync, capsys):
    assert main(simulate("llama3.1-8b", f"--sync={sync}", "--replica-groups=1", "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["replica_groups"] == 1
    assert (report["bubble_pct"] < 3) == (sync == "stale")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"])
def test_simulate_cuts_other_schedules_itself(schedule, capsys):
    assert main(simulate("qwen3-1.7b", f"--schedule={schedule}", "--json")) == 0
    published = next(row for row in rows("bubbles") if (row["schedule"], row["model"]) == (schedule, "qwen3-1.7b"))
    assert json.loads(capsys.readouterr().out)["bubble_pct"] < float(published["bubble_pct"]) + 1


def test_simulate_prints_a_table_and_the_workers(capsys):
    assert main(simulate("qwen3-1.7b", "--partition=7-7-7-7|0-3-3-3-3-3-3-3-3-2-2")) == 0
    out = capsys.readouterr().out
    assert "bubble pct" in out
    assert "19.07" in out
    assert out.count("worker") == 8


def test_simulate_prints_a_plain_table_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(simulate("qwen3-1.7b", "--partition=7-7-7-7|0-3-3-3-3-3-3-3-3-2-2")) == 0
    assert "bubble pct      19.07\n" in capsys.readouterr().out


def test_simulate_draws_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(simulate("qwen3-1.7b", f"--picture={tmp_path / 'step.png'}")) == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_says_what_a_picture_needs(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(simulate("qwen3-1.7b", f"--picture={tmp_path / 'step.png'}")) == 1
    assert "pip install lightning-roundpipe[plots]" in capsys.readouterr().err


def test_the_command_line_says_what_it_needs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert main(["simulate"]) == 1
    assert "pip install lightning-roundpipe[cli]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, message",
    [
        (["--partition=7-7|0-3"], "`--partition` must hold 28 layers|both must cover"),
        (["--partition=14-14"], "must have a forward and a backward side"),
        (["--partition=a-b|c"], "must be layers per stage"),
        (["--schedule=zigzag"], "`--schedule` must be one of roundpipe, gpipe"),
        (["--sync=later"], "`--sync` must be one of sync, exact, stale"),
        (["--replica-groups=3"], "must divide the number of workers"),
        (["--replica-groups=many"], "`--replica-groups` must be a whole number"),
        (["--gpus=0"], "`--gpus` must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(more, message, capsys):
    assert main(simulate("qwen3-1.7b", *more)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert any(part in error for part in message.split("|")) or message in error


def test_the_planner_needs_neither_cuda_nor_lightning():
    # The package's own `__init__` imports the strategy; the planner is imported past it.
    code = f"""
import sys, types
package = types.ModuleType("lightning_roundpipe")
package.__path__ = [{str(Path(cli.__file__).parent)!r}]
sys.modules["lightning_roundpipe"] = package
import lightning_roundpipe.plan.search, lightning_roundpipe.plan.picture, lightning_roundpipe.plan.files
print([name for name in ("torch", "lightning", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def config(tmp_path):
    """The config.json of a small model."""
    transformers = pytest.importorskip("transformers")
    small = transformers.Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    small.architectures = ["Qwen3ForCausalLM"]
    small.save_pretrained(tmp_path / "model")
    return tmp_path / "model" / "config.json"


def plan(config, *more):
    return ["plan", f"--model={config}", "--gpu=rtx-4090", "--gpus=4", "--sequence=256", "--batch=16", *more]


PLAN_KEYS = {
    "fits",
    "gpu_peak_bytes",
    "host_bytes",
    "step_ms",
    "tokens_per_s",
    "bubble_pct",
    "limit",
    "max_sequence",
    "plan",
}


def test_plan_from_a_configuration(config, tmp_path, capsys):
    assert main(plan(config, "--json", f"--output={tmp_path / 'plan.json'}")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= PLAN_KEYS
    assert report["fits"] is True
    assert report["tokens_per_s"] == pytest.approx(16 * 256 / report["step_ms"] * 1e3)
    assert report["limit"] in {"compute", "h2d", "d2h", "host memory", "optimizer"}
    assert report["max_sequence"] > report["max_sequence_full_loss"] > 256
    schedule = load_schedule(tmp_path / "plan.json")
    assert schedule == schedule_from_dict(report["plan"])
    assert schedule.plan.num_calls == 9  # embedding, 6 layers, norm, head
    assert schedule.num_microbatches * report["micro_batch"] == 16


def test_plan_prints_a_table_and_stages(config, capsys):
    assert main(plan(config.parent, "--micro-batch=2", "--fused-layers=0", "--loss=full")) == 0
    out = capsys.readouterr().out
    assert "tokens per s" in out
    assert "fused: 1;" in out
    assert out.count("\nworker") == 4


def test_plan_with_lora_stores_and_moves_less(config, capsys):
    pytest.importorskip("peft")
    host_bytes = []
    for more in ([], ["--lora-rank=4"]):
        assert main(plan(config, "--json", *more)) == 0
        host_bytes.append(json.loads(capsys.readouterr().out)["host_bytes"])
    assert host_bytes[1] < host_bytes[0]


def test_plan_says_what_does_not_fit(config, capsys):
    assert main(plan(config, "--json", "--host-memory-gb=0.001")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= PLAN_KEYS
    assert report["fits"] is False
    assert report["max_sequence"] == 0
    assert report["host_bytes"] > 1e6
    assert main(plan(config, "--host-memory-gb=0.001")) == 0
    assert "fewer trained weights" in capsys.readouterr().out


def test_plan_takes_a_measured_profile(config, tmp_path, capsys):
    save_profile(replace(PROFILES["h200"], name="mine", link_bytes_per_s=1e6), tmp_path / "mine.json")
    assert main(plan(config, "--json", f"--profile={tmp_path / 'mine.json'}")) == 0
    assert json.loads(capsys.readouterr().out)["limit"] in {"h2d", "d2h"}


def test_plan_takes_the_host_from_the_profile_unless_told_otherwise(config, tmp_path, capsys):
    path = tmp_path / "mine.json"
    save_profile(replace(PROFILES["h200"], host_memory_bytes=10**6, host_bytes_per_s=1e6), path)
    told = {}
    for more in ("", "--host-memory-gb=0", "--host-memory-gb=0 --host-gb-per-s=0"):
        assert main(plan(config, "--json", f"--profile={path}", *more.split())) == 0
        told[more] = json.loads(capsys.readouterr().out)
    assert [report["fits"] for report in told.values()] == [False, True, True]
    limits = [report["limit"] for report in told.values()]
    assert limits[0] == "memory"
    assert limits[1] in {"host memory", "optimizer"}
    assert limits[2] not in {"host memory", "optimizer"}


def test_plan_of_a_model_of_235_billion_weights(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("peft")
    large = transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )
    large.save_pretrained(tmp_path / "model")
    args = ["--gpus=8", "--sequence=2048", "--batch=8", "--lora-rank=16", "--host-memory-gb=1024", "--json"]
    assert main(["plan", f"--model={tmp_path / 'model'}", *args]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is True
    assert 470e9 < report["host_bytes"] < 1024e9


@pytest.mark.parametrize(
    "more, message",
    [
        (["--gpu=rtx-1"], "`--gpu` must be one of rtx-3090"),
        (["--precision=8"], "`--precision` must be one of bf16-mixed"),
        (["--loss=half"], "`--loss` must be one of chunked, full"),
        (["--model=nowhere"], "`--model` must be a folder with a config.json"),
        (["--micro-batch=0"], "`--micro-batch` must be a whole number of at least 1 or `auto`"),
        (["--batch=0"], "`--batch` must be at least 1"),
    ],
)
def test_wrong_arguments_of_plan_are_named(config, more, message, capsys):
    assert main(plan(config, *more)) == 1
    assert message in capsys.readouterr().err
