import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_roundpipe import cli
from lightning_roundpipe.cli import main
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
