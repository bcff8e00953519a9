"""The strategy by name, by class path and from YAML; arguments that are wrong are refused with the cure."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only

import lightning_roundpipe
from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import trainer_for

CLASS_PATH = "lightning_roundpipe.RoundPipeStrategy"
QUIET = [
    "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.fast_dev_run=1", "--trainer.logger=false",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
    "--trainer.enable_checkpointing=false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns if arguments are given to the CLI while the process, here pytest, has some, too."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


def cli(*args: str, run: bool = True) -> LightningCLI:
    return LightningCLI(
        BoringModel,
        args=[*(["fit"] if run else []), *QUIET, *args],
        run=run,
        save_config_callback=None,
        seed_everything_default=False,
    )


@pytest.mark.parametrize(
    "argument",
    [
        "--trainer.strategy=roundpipe",
        f"--trainer.strategy={CLASS_PATH}",
        f'--trainer.strategy={{"class_path": "{CLASS_PATH}", "init_args": {{"num_microbatches": 1}}}}',
    ],
    ids=["name", "class_path", "init_args"],
)
def test_command_line(argument: str) -> None:
    strategy = cli(argument).trainer.strategy
    assert isinstance(strategy, RoundPipeStrategy)


def test_yaml_file_and_printed_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All arguments are plain data: what ``--print_config`` prints is a config that trains."""
    arguments = {
        "num_microbatches": 1,
        "units": ["Linear"],
        "loss_weight": "samples",
        "optimizer_overlap": "off",
        "workers_per_device": 1,
        "plan": "auto",
        "replica_groups": 2,
        "show_plan": True,
    }
    strategy = {"class_path": CLASS_PATH, "init_args": arguments}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    assert isinstance(cli("--config", str(config)).trainer.strategy, RoundPipeStrategy)

    with pytest.raises(SystemExit):
        cli("--config", str(config), "--print_config")
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    loaded = yaml.safe_load(printed.read_text())["trainer"]["strategy"]["init_args"]
    assert arguments.items() <= loaded.items()
    assert isinstance(cli("--config", str(printed)).trainer.strategy, RoundPipeStrategy)


def test_unknown_argument_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(
            "--trainer.strategy=lightning_roundpipe.RoundPipeStrategy",
            "--trainer.strategy.init_args.num_microbatch=4",
        )
    assert "num_microbatch" in capsys.readouterr().err


def test_registered_once() -> None:
    assert "roundpipe" in StrategyRegistry
    trainer = trainer_for("roundpipe", 2)
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    assert set(lightning_roundpipe.__all__) >= {"RoundPipeStrategy", "RoundPipePrecision"}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"num_microbatches": "many"}, "num_microbatches"),
        ({"loss_weight": "rows"}, "loss_weight"),
        ({"optimizer_overlap": "always"}, "optimizer_overlap"),
        ({"workers_per_device": 0}, "workers_per_device"),
        ({"replica_groups": 0}, "replica_groups"),
        ({"replica_groups": "many"}, "replica_groups"),
        ({"plan": "plan.json", "replica_groups": 2}, "replica_groups"),
        ({"units": []}, "units"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"gradient_wire_dtype": "int8"}, "gradient_wire_dtype"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_at_construction(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        RoundPipeStrategy(**arguments)


def test_several_machines_need_a_launcher() -> None:
    with pytest.raises(MisconfigurationException, match="torchrun --nnodes 2 .* not set: MASTER_ADDR, MASTER_PORT"):
        trainer_for(RoundPipeStrategy(num_microbatches=2), 2, num_nodes=2)


LAUNCHERS = {
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "none",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "2",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
    },
    "srun": {
        "SLURM_NTASKS": "3",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "2",
        "SLURM_JOB_NAME": "train",
    },
    "by hand": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "2"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2, num_nodes=3)
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (3, 2, 0, 2)
    assert trainer.num_devices == 2
    assert not trainer.is_global_zero
    assert rank_zero_only.rank == 2
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 2}
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    if launcher != "by hand":
        with pytest.raises(MisconfigurationException, match=r"3 processes.*`num_nodes=2`"):
            trainer_for(RoundPipeStrategy(num_microbatches=2), 2, num_nodes=2)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "RANK": "0",
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match="(?i)process"):
        trainer = trainer_for(RoundPipeStrategy(num_microbatches=2), 2)
        trainer.fit(BoringModel())


def test_import_does_nothing() -> None:
    """No thread, no CUDA context, no compiler: checked in a fresh interpreter."""
    script = (
        "import threading, torch, lightning; before = set(threading.enumerate())\n"
        "import lightning_roundpipe\n"
        "assert set(threading.enumerate()) == before\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 5e-324 != 0.0 and bool(torch.tensor(1e-40) * 1 != 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_auto_microbatches_train() -> None:
    trainer = trainer_for(RoundPipeStrategy(), 3, fast_dev_run=2)
    module = BoringModel()
    before = module.layer.weight.detach().clone()
    trainer.fit(module)
    assert not torch.equal(module.layer.weight, before)
