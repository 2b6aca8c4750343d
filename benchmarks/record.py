"""The form of every benchmark's result: one JSON object on the last line, and the same in `benchmarks/results/`."""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine_name() -> str:
    """`h200`, `h200x2` after the GPUs found, else `cpu` and the number of cores that this process may use."""
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
            return name.split()[-1].lower() + (f"x{count}" if count > 1 else "")
    return f"cpu{os.cpu_count()}"


def processor() -> str:
    """What `/proc/cpuinfo` calls the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def record(benchmark: str, results: Mapping[str, Any], packages: Iterable[str], save: bool) -> None:
    """Print the result as one line of JSON, and with `save` write it to `results/<benchmark>_<machine>.json`."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    result = {
        "benchmark": benchmark,
        "machine": machine_name(),
        "processor": processor(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "versions": versions,
        "results": dict(results),
    }
    line = json.dumps(result)
    if save:
        (RESULTS / f"{benchmark}_{result['machine']}.json").write_text(line + "\n")
    print(line)
