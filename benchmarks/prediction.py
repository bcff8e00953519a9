"""How well a measured profile predicts a measured step. One JSON line: both, and predicted over measured.

    python benchmarks/prediction.py --model qwen3-1.7b --memory-gib 24 --overlap exact
    python benchmarks/prediction.py --profile gpu.json --model qwen3-1.7b

Without ``--profile`` the machine is measured first, as ``lightning-roundpipe doctor`` does. All other arguments are
those of ``step.py``, which runs in a process of its own; its plan is then simulated with the costs that the profile
predicts.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_roundpipe.doctor import examine, measured_profile
from lightning_roundpipe.plan.costs import PRECISIONS
from lightning_roundpipe.plan.devices import DeviceProfile, call_costs, load_profile
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.search import judge
from lightning_roundpipe.plan.simulator import Boundary
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.runtime.counting import count_calls
from step import build


def measured(arguments: list[str]) -> dict[str, Any]:
    script = Path(__file__).with_name("step.py")
    done = subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def predicted(run: dict[str, Any], profile: DeviceProfile) -> dict[str, float]:
    counts = count_calls(
        lambda: build(run["model"], "meta").bfloat16(),
        lambda: {"input_ids": torch.zeros(1, run["sequence"], dtype=torch.long), "use_cache": False},
        causal=True,
    )
    scale = run["batch"] / run["micro_batches"]
    costs = call_costs(counts, profile, PRECISIONS["bf16-mixed"], scale=scale, chunked_loss=True)
    forward, _, rest = run["plan"].partition("|")
    fused, *backward = map(int, rest.split("-"))
    # The benchmark forms logits and loss between calls; here the head is one more call of the fused stage.
    plan = Plan(tuple(int(size) for size in forward.split("-") if size), fused + 1, tuple(backward))
    machine = profile.machine(1, host_bytes_per_s=profile.host_bytes_per_s or float("inf"))
    boundary = Boundary.EXACT if run["overlap"] == "exact" else Boundary.SYNC
    choice = judge(Schedule(plan, 1, run["micro_batches"]), costs, machine, boundary=boundary)
    step = choice.timeline
    steps = max(1, len(step.step_ends))
    return {
        "tokens_per_s": run["batch"] * run["sequence"] / choice.step_s,
        "step_s": choice.step_s,
        "busy_s": sum(span.stop - span.start for span in step.spans) / steps,
        "gpu_peak_gib": choice.worker_bytes / 2**30,
        "host_peak_gib": choice.host_bytes / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="JSON file; the machine is measured without it")
    args, others = parser.parse_known_args()
    profile = load_profile(args.profile) if args.profile else measured_profile(examine(needs_gpu=True))
    run = measured(others)
    told = predicted(run, profile)
    ratios = {name: round(value / run[name], 3) for name, value in told.items() if run[name]}
    rounded = {name: round(value, 4) for name, value in told.items()}
    print(
        json.dumps({"predicted_over_measured": ratios, "predicted": rounded, "measured": run, "profile": vars(profile)})
    )


if __name__ == "__main__":
    main()
