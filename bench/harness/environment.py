"""The machine behind a figure: device, versions, commit, date, and the folder of its results."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[1]  # bench


def pick_device(name: str | None) -> torch.device:
    """`name` ("cpu", "cuda", "cuda:1"), or by default CUDA if there is a usable GPU and else the CPU.

    Raises ValueError if the device cannot be used here.
    """
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: not a device; accepted: cpu, cuda, cuda:<index>")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch {torch.__version__} finds no CUDA GPU here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """Name of the GPU or of the processor, as its maker gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def load_warning(device: torch.device) -> str | None:
    """Why times on the CPU of a busy machine say little, if it is busy."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    if device.type != "cpu" or load < cores / 4:
        return None
    said = f"WARNING: the load average is {load:.1f} on {cores} cores: others run here, and "
    if torch.get_num_threads() == 1:
        return said + "times may be too long. Wait until the machine is idle"
    return (
        said
        + "ratios with several threads may be wrong many times over. Wait until the machine is idle, or set OMP_NUM_THREADS=1"
    )


def describe(device: torch.device) -> dict[str, object]:
    """Machine and versions behind a figure: JSON-serialisable."""
    machine: dict[str, object] = {
        "device": device_name(device),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "triton", "amp_kernels") if version(name)},
    }
    if device.type == "cpu":
        from amp_kernels._dispatch import cpu_isa  # here: the rest of this file works without the package

        machine["isa"] = cpu_isa.chosen()
        machine["load"] = round(os.getloadavg()[0], 1)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["cuda"] = torch.version.cuda
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["memory_bytes"] = properties.total_memory
    return machine


def clocks(device: torch.device) -> dict[str, float]:
    """Clock of the SMs in MHz and power in W of a GPU, as they are now; nothing where nvidia-smi does not tell."""
    if device.type != "cuda":
        return {}
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-i"]
    try:
        told = subprocess.run(
            [*query, str(device.index or 0)], capture_output=True, text=True, check=True, timeout=5
        ).stdout
        clock, power = map(float, told.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {"sm_mhz": clock, "watts": power}


def version(package: str) -> str | None:
    """Installed version of `package`, or None. From a source tree without an install, amp_kernels' own."""
    if package == "torch":
        return torch.__version__
    if package == "amp_kernels":
        try:
            import amp_kernels
        except ImportError:
            return None
        return amp_kernels.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def results_folder(device: torch.device, quick: bool = False) -> Path:
    """Default place of results: bench/results/<device> of the source tree, or of the current folder when installed. Those of a
    quick run are no record and go to the user's cache."""
    in_tree = (FOLDER.parent / "setup.py").exists()
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    if quick:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amp_kernels" / "bench" / slug
    return (FOLDER if in_tree else Path.cwd() / "bench") / "results" / slug


def commit() -> str | None:
    """The source tree's commit, "+changes" if files differ from it; None for an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FOLDER), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    if not (FOLDER.parent / "setup.py").exists():
        return None  # an installed package inside somebody else's repository is not that repository's commit
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)bench/results")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
