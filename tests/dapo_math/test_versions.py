"""The built wheel under each Verifiers version: its own commands, rewards 1.0 and 0.0, without this repository.

`make test` runs the oldest and the newest version, `make test-matrix` all of them. The virtual environments are made
from the package index once and kept in `.cache/verifiers`.
"""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dapo_math.test_environment import Endpoint

pytestmark = pytest.mark.packages

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "environments" / "dapo_math"

OLDEST, NEWEST = "0.1.9", "0.4.0"
VERSIONS = [
    OLDEST,
    *(pytest.param(version, marks=pytest.mark.matrix) for version in ("0.1.14", "0.2.1", "0.3.1")),
    NEWEST,
]
# What `eval` of the taskset is called, and where its settings are.
TASKSET_COMMANDS = {
    "0.2.1": ("eval", "--taskset"),
    "0.3.1": ("eval", "--env.taskset"),
    "0.4.0": ("vf-eval", "--env.taskset"),
}

# Nothing but this machine can be reached through these.
OFFLINE = {"HF_HUB_OFFLINE": "1", "UV_OFFLINE": "1", "NO_PROXY": "127.0.0.1,localhost", "NONE": "no key"} | {
    name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
}


def execute(command: list[str], folder: Path, timeout: float = 300, **environment: str) -> str:
    """What a command that must succeed prints."""
    # The tests' own interpreter may have this repository on its path; the wheel has to do without.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built wheel and sdist."""
    folder = tmp_path_factory.mktemp("dist")
    execute([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(PACKAGE)], ROOT)
    return folder


def wheel_of(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def virtual_environment(version: str) -> Path:
    """The `bin` folder of an environment with that Verifiers version and what the package depends on."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    needs = [need for need in project["dependencies"] if not need.startswith("verifiers")]
    needs += [f"verifiers=={version}", "uv", "hatchling", "editables"]
    key = hashlib.sha256(json.dumps([needs, sys.version_info[:2]]).encode()).hexdigest()[:12]
    folder = ROOT / ".cache" / "verifiers" / f"{version}-{key}"
    if not (folder / "ready").exists():
        execute([sys.executable, "-m", "venv", "--clear", str(folder)], ROOT)
        python = str(folder / "bin" / "python")
        execute([python, "-m", "pip", "install", "--quiet", *needs], ROOT, timeout=900)
        (folder / "ready").touch()
    return folder / "bin"


@pytest.fixture(params=VERSIONS)
def installed(request: pytest.FixtureRequest, dist: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A version, and the programs of an environment that has it and the wheel."""
    bin = virtual_environment(request.param)
    pip = [str(bin / "python"), "-m", "pip"]
    execute([*pip, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel_of(dist))], tmp_path)
    yield request.param, bin
    execute([*pip, "uninstall", "--quiet", "--yes", "dapo-math"], tmp_path)


def evaluate(command: list[str], folder: Path, text: str, **environment: str) -> str:
    """Run an evaluation command against an endpoint that answers `text`; `URL` in it stands for the address."""

    async def play() -> str:
        async with Endpoint(text) as url:
            filled = [url if part == "URL" else part for part in command]
            return await asyncio.to_thread(execute, filled, folder, 200, **environment)

    return asyncio.run(play())


def rewards(folder: Path) -> list[float]:
    """The rewards in the records of an evaluation, whatever wrote them."""
    found = []
    for line in (line for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()):
        record = json.loads(line)
        for trace in record.get("traces") or [record]:
            if "rewards" in trace:
                scores = trace["rewards"].values()
                found.append(sum(score["score"] if isinstance(score, dict) else score for score in scores))
            else:
                found.append(trace["reward"])
    return sorted(found)


def v0_command(version: str, bin: Path, dataset: str, count: int) -> list[str]:
    command = [str(bin / "vf-eval"), "dapo-math", "-m", "m", "-b", "URL", "-k", "NONE", "-n", str(count), "-r", "1"]
    command += ["-s", "-a", json.dumps({"dataset": dataset})]
    return command if version == OLDEST else [*command, "--disable-tui"]


def v1_command(version: str, bin: Path, dataset: str, count: int) -> list[str]:
    program, taskset = TASKSET_COMMANDS[version]
    command = [str(bin / program), "dapo-math", "-m", "m", "-n", str(count), "-r", "1", f"{taskset}.dataset", dataset]
    command += ["--client.base-url", "URL", "--client.api-key-var", "NONE", "--sampling.max-tokens", "32", "--no-push"]
    return command if version == "0.2.1" else [*command, "--env.agent.runtime.type", "subprocess"]


def test_every_version_rewards_a_right_and_a_wrong_answer(installed: tuple[str, Path], tmp_path: Path):
    version, bin = installed
    script = "from importlib.util import find_spec as f; print(f('dapo_math').origin, f('bridge'), f('trainer'))"
    where, *ours = execute([str(bin / "python"), "-c", script], tmp_path).split()
    assert where.startswith(str(bin.parent)) and ours == ["None", "None"]
    commands = {}
    if version != NEWEST:
        commands["v0"] = v0_command(version, bin, "gsm8k", 2)
    if version in TASKSET_COMMANDS:
        commands["v1"] = v1_command(version, bin, "gsm8k", 2)
    path = f"{bin}{os.pathsep}{os.environ['PATH']}"
    for name, command in commands.items():
        folder = tmp_path / name
        folder.mkdir()
        # The answer to the first of the two problems.
        output = evaluate(command, folder, "\\boxed{18}", PATH=path, **OFFLINE)
        assert rewards(folder) == [0.0, 1.0], output
        assert "verdict/correct" in output


def test_vf_install_makes_the_environment_known_to_that_version(installed: tuple[str, Path], tmp_path: Path):
    version, bin = installed
    path = f"{bin}{os.pathsep}{os.environ['PATH']}"
    arguments = ["dapo-math", "-p", str(PACKAGE.parent)]
    execute([str(bin / "python"), "-m", "pip", "uninstall", "--quiet", "--yes", "dapo-math"], tmp_path)
    # Verifiers has the command until 0.3; ours is the same with the newest.
    command = [str(bin / "python"), "-m", "bridge.install"] if version == NEWEST else [str(bin / "vf-install")]
    output = execute(
        [*command, *arguments],
        ROOT if version == NEWEST else tmp_path,
        PATH=path,
        UV_NO_BUILD_ISOLATION="1",
        UV_OFFLINE="1",
    )
    if version == NEWEST:
        assert "Installed dapo-math 0.1.0. Try it: vf-eval dapo-math" in output
    where = execute([str(bin / "python"), "-c", "import dapo_math; print(dapo_math.__file__)"], tmp_path)
    assert where.strip() == str(PACKAGE / "dapo_math" / "__init__.py")


def test_an_evaluation_from_the_wheel_needs_no_network(dist: Path, tmp_path: Path):
    """AIME 2025 and MATH-500, with an answer to the first problem of each."""
    bin = virtual_environment(NEWEST)
    pip = [str(bin / "python"), "-m", "pip"]
    execute([*pip, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel_of(dist))], tmp_path)
    for dataset, answer in (("aime25", "70"), ("math500", "\\left( 3, \\frac{\\pi}{2} \\right)")):
        folder = tmp_path / dataset
        folder.mkdir()
        command = [*v1_command(NEWEST, bin, dataset, 4), "--no-rich"]
        output = evaluate(command, folder, f"So it is $\\boxed{{{answer}}}$.", **OFFLINE)
        assert rewards(folder) == [0.0, 0.0, 0.0, 1.0], output


def test_the_distributions_hold_the_package_and_nothing_else(dist: Path):
    execute([sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())], ROOT)
    own = {path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "dapo_math").rglob("*.py")}
    own |= {f"dapo_math/data/{name}.jsonl" for name in ("aime24", "aime25", "amc23", "gsm8k", "math500")}
    with zipfile.ZipFile(wheel_of(dist)) as archive:
        names = set(archive.namelist())
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("METADATA")]
    info = {f"dapo_math-0.1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    assert names == own | info
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames()}
    assert packed - own <= {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"} and own <= packed
    for field in ("Summary: ", "License-Expression: Apache-2.0", "Keywords: ", "Requires-Dist: verifiers>=0.1.9"):
        assert field in metadata
