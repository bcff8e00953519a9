"""What holds for every test: a seed, a folder of its own, no network, one torch thread, nothing left behind."""

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

# Before anything imports transformers: no test may ask a hub for a file.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The compiler's helpers, and the folder that it names in the environment, outlive the test that is first to compile.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor-tests"))

import pytest
import torch
from tqdm import tqdm

from tests.helpers.machines import Machines

# Virtual workers are threads already, and sums come out the same on every machine.
torch.set_num_threads(1)
# Whatever runs in a shell's background is started deaf to Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# tqdm's monitor is a thread that outlives every progress bar; 0 says not to start it.
tqdm.monitor_interval = 0

# Set for good by `Trainer(deterministic=True)`, `seed_everything`, the compiler and the import of scikit-learn: no
# fault of a test.
LASTING_VARIABLES = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_ORDER",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    }
)
# A thread that has been told to stop may take this long to do so.
THREAD_GRACE_S = 2.0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked ``gpu`` or ``gpu(n)`` where there are fewer than ``n`` CUDA devices."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed = marker.args[0] if marker.args else marker.kwargs.get("n", 1)
    found = torch.cuda.device_count()
    if found < needed:
        pytest.skip(f"needs {needed} CUDA device(s), found {found}")


# The other fixtures here ask for this one, so that it is set up first and looks last, when they have been undone.
@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a thread running, or the environment or a mode of torch changed, and puts it right."""
    threads = set(threading.enumerate())
    variables = dict(os.environ)
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    num_threads = torch.get_num_threads()

    yield

    complaints = []
    if left := _threads_left(threads):
        complaints.append(f"threads still running: {', '.join(sorted(thread.name for thread in left))}")

    variables["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]  # pytest's own, new for every phase
    changed = {name for name in variables.keys() | os.environ.keys() if variables.get(name) != os.environ.get(name)}
    if changed - LASTING_VARIABLES:
        complaints.append(f"environment variables changed: {', '.join(sorted(changed - LASTING_VARIABLES))}")
    for name in changed:
        os.environ.pop(name, None)
        if name in variables:
            os.environ[name] = variables[name]

    if torch.get_default_dtype() != dtype:
        complaints.append(f"default dtype changed from {dtype} to {torch.get_default_dtype()}")
        torch.set_default_dtype(dtype)
    if not torch.is_grad_enabled():
        complaints.append("gradients are switched off")
        torch.set_grad_enabled(True)
    if torch.is_inference_mode_enabled():
        complaints.append("inference mode is switched on")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        complaints.append("autocast is switched on")

    # Set for the process by Trainer(deterministic=True) and by the examples, and never reset: no fault of a test.
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.set_num_threads(num_threads)

    if complaints:
        pytest.fail("this test left something behind: " + "; ".join(complaints), pytrace=False)


@pytest.fixture(autouse=True)
def seeded(leaves_nothing_behind: None) -> None:
    """Seeds torch's generators, so that a test does not depend on which tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    """Processes that stand for machines, for all tests that need some."""
    started = Machines(3)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def own_working_directory(leaves_nothing_behind: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in its ``tmp_path``: a Trainer's default ``lightning_logs`` and checkpoints land there."""
    monkeypatch.chdir(tmp_path)


def _threads_left(before: set[threading.Thread]) -> list[threading.Thread]:
    def new() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]

    if new():
        gc.collect()  # an owner that is only unreachable stops its threads here
        for thread in new():
            thread.join(THREAD_GRACE_S)
    return new()
