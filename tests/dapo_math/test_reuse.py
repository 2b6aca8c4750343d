"""The pages of docs/reuse: each block on them runs here, as far as it goes without GPUs or a remote service."""

import asyncio
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dapo_math.trl
import pytest
import verifiers.v1 as vf
from dapo_math import CheckerError
from dapo_math.trl import load_dataset, reward
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.serve import EnvClient, env_config_data, serve_env

from tests.conftest import run, start
from tests.dapo_math.test_environment import Endpoint
from trainer.tiny import tiny_model_dir

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reuse"

HERE = Path(__file__).parent

# A CPython environment in the cache, made once. tinker_cookbook comes without its dependencies, of which the recipe
# imports these alone.
TINKER_COOKBOOK = "tinker_cookbook==0.6.1"
TINKER_NEEDS = (
    "torch==2.13.0",
    "verifiers>=0.1.9,<0.1.10",
    "tinker==0.38.0",
    *("blobfile", "chz", "cloudpickle", "datasets", "numpy", "pillow", "rich", "termcolor", "tiktoken", "tqdm"),
    "transformers>=5.7",
)


def blocks(page: str, info: str) -> list[str]:
    """The contents of the page's code blocks with this info string."""
    found = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", (PAGES / page).read_text(), re.MULTILINE)
    return [body for name, body in found if name == info]


def execute(command: list[str], folder: Path = ROOT, timeout: float = 600, **env: str) -> str:
    """Standard output of a command that must succeed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def first_and_last(values: list[float]) -> tuple[float, float]:
    """Means of the first and the last quarter."""
    part = len(values) // 4
    return sum(values[:part]) / part, sum(values[-part:]) / part


def test_no_page_has_a_block_that_no_test_knows():
    known = {
        "plain-pytorch.md": ["sh", "text", "python"],
        "trl.md": ["python", "python", "text"],
        "prime-rl.md": ["toml", "sh prime-rl"],
        "tinker-cookbook.md": ["sh tinker"],
        "README.md": [],
    }
    assert {page.name for page in PAGES.glob("*.md")} == set(known)
    for page, infos in known.items():
        fences = re.findall(r"^```(.*)$", (PAGES / page).read_text(), re.MULTILINE)
        assert fences[::2] == infos and not any(fences[1::2]), page


# Plain PyTorch


def test_the_plain_loop_on_the_page_is_the_file_and_learns():
    (script,) = blocks("plain-pytorch.md", "python")
    assert script == (PAGES / "plain_pytorch.py").read_text()
    assert len(script.splitlines()) < 80
    (command,) = blocks("plain-pytorch.md", "sh")
    program, *arguments = shlex.split(command)
    assert program == "python"
    lines = execute([sys.executable, *arguments]).splitlines()
    assert len(lines) == int(arguments[-1])
    (sample,) = blocks("plain-pytorch.md", "text")
    shape = re.compile(r"step (\d+)  reward ([\d.]+)  loss ([-+][\d.]+)  gradient ([\d.]+)")
    rows = [shape.fullmatch(line) for line in lines]
    assert all(rows) and all(shape.fullmatch(line) for line in sample.splitlines() if line != "...")
    numbers = [[float(value) for value in row.groups()] for row in rows if row]
    assert all(math.isfinite(value) for row in numbers for value in row)
    first, last = first_and_last([row[1] for row in numbers])
    assert last > first


# TRL


def test_trl_trains_on_the_page_s_reward_and_dataset(tmp_path: Path):
    script = blocks("trl.md", "python")[0].replace('"trainer/assets/tiny"', repr(str(tiny_model_dir())))
    report = 'import json\nprint("HISTORY", json.dumps(trainer.state.log_history))\n'
    (line,) = [
        line
        for line in execute([sys.executable, "-W", "ignore", "-c", script + report], tmp_path).splitlines()
        if line.startswith("HISTORY ")
    ]
    steps = [row for row in json.loads(line.removeprefix("HISTORY ")) if "reward" in row]
    assert len(steps) == 20
    for row in steps:
        assert row["reward"] == pytest.approx(row["verdict/correct"])
        verdicts = [value for name, value in row.items() if name.startswith("verdict/")]
        assert sum(verdicts) == pytest.approx(1.0) and row["verdict/checker_error"] == 0.0
        assert row["grad_norm"] > 0
    first, last = first_and_last([row["reward"] for row in steps])
    assert last > first


def test_the_page_s_thinking_reward_prints_what_it_says(tmp_path: Path):
    (said,) = blocks("trl.md", "text")
    assert execute([sys.executable, "-c", blocks("trl.md", "python")[1]], tmp_path) == said


def test_trl_gives_a_completion_without_reward_no_advantage(tmp_path: Path):
    """Of each group one reward is None: TRL's own advantages are 0 there and those of the others alone elsewhere."""
    script = """
import json, sys
from dapo_math import CheckerError, trl as ours
from trl import GRPOConfig, GRPOTrainer

real, calls = ours.grade, []
def broken(response, answer, **settings):
    calls.append(response)
    if len(calls) % 4 == 0:
        raise CheckerError("the checker is gone")
    return real(response, answer, **settings)
ours.grade, ours._THREADS = broken, 1

config = GRPOConfig(output_dir="out", max_steps=2, per_device_train_batch_size=16, num_generations=4, bf16=False,
    max_completion_length=16, logging_steps=1, save_strategy="no", report_to="none", learning_rate=3e-4)
data = ours.load_dataset("arithmetic", prompt_style="plain", arithmetic={"low": 0, "high": 49})
trainer = GRPOTrainer(model=sys.argv[1], reward_funcs=ours.reward, args=config, train_dataset=data)
trainer.train()
print(json.dumps([list(trainer._logs["rewards"]["reward"]), list(trainer._logs["advantages"]),
    trainer.state.log_history]))
"""
    out = execute([sys.executable, "-W", "ignore", "-c", script, str(tiny_model_dir())], tmp_path)
    rewards, advantages, history = json.loads(out.splitlines()[-1])
    assert rewards and len(rewards) == len(advantages)
    for begin in range(0, len(rewards), 4):
        group = rewards[begin : begin + 4]
        known = [value for value in group if not math.isnan(value)]
        assert len(known) == 3
        mean = sum(known) / 3
        for value, advantage in zip(group, advantages[begin : begin + 4], strict=True):
            assert advantage == 0 if math.isnan(value) or len(set(known)) == 1 else advantage * (value - mean) > 0
    assert all(row["verdict/checker_error"] == pytest.approx(0.25) for row in history if "reward" in row)


def test_a_failing_checker_gives_none_and_never_zero(monkeypatch: pytest.MonkeyPatch):
    real = dapo_math.trl.grade

    def fails_on_roots(response: str, answer: str, **settings: Any) -> Any:
        if "sqrt" in response:
            raise CheckerError("the checker is gone")
        return real(response, answer, **settings)

    monkeypatch.setattr(dapo_math.trl, "grade", fails_on_roots)
    replies = ["\\boxed{2}", "\\boxed{\\sqrt{4}}", "\\boxed{3}"]
    metrics: dict[str, float] = {}
    assert reward(replies, ["2"] * 3, log_metric=metrics.__setitem__) == [1.0, None, 0.0]
    assert metrics["verdict/checker_error"] == pytest.approx(1 / 3)
    with pytest.raises(CheckerError):
        reward(replies[1:2], ["2"])


def test_the_reward_reads_texts_and_messages_alike():
    asked = [{"role": "user", "content": "Compute \\gcd(34,68)."}]
    right, restated = [[{"role": "assistant", "content": f"\\boxed{{{text}}}"}] for text in ("34", "\\gcd(34,68)")]
    call = [{"role": "assistant", "content": None, "tool_calls": []}]
    assert reward([right, restated, call], ["34"] * 3, prompts=[asked] * 3) == [1.0, 0.0, 0.0]
    assert reward(["\\boxed{34}", ""], ["34"] * 2, prompts=["Compute 34.", "Compute 34."]) == [1.0, 0.0]
    with pytest.raises(ValueError):
        reward(["\\boxed{34}"], ["34", "35"])


def test_every_known_answer_of_a_trl_dataset_earns_its_reward():
    data = load_dataset("math500", instruction="Be brief.", limit=40)
    assert data.column_names == ["prompt", "answer", "id", "source"] and len(data) == 40
    assert [message["role"] for message in data[0]["prompt"]] == ["system", "user"]
    answers = [str(answer) for answer in data["answer"]]
    assert reward([f"\\boxed{{{answer}}}" for answer in answers], answers) == [1.0] * 40


def test_a_trl_dataset_refuses_a_setting_that_does_not_exist():
    with pytest.raises(ValueError, match="promt_style"):
        load_dataset("math500", promt_style="boxed")


# prime-rl


def sources(kind: str) -> list[dict[str, Any]]:
    """The page's `[[orchestrator.train.source]]` or `[[orchestrator.eval.source]]` tables."""
    (page,) = blocks("prime-rl.md", "toml")
    return tomllib.loads(page)["orchestrator"][kind]["source"]


@contextlib.contextmanager
def served(config: Any) -> Iterator[str]:
    """An environment server as prime-rl's `env-server` starts it; gives its address."""
    context = multiprocessing.get_context("spawn")
    addresses: Any = context.Queue()
    settings = {
        **vf.pool_serve_kwargs(vf.ServeConfig().pool),  # pyright: ignore[reportCallIssue]
        "address": "tcp://127.0.0.1:0",
        "address_queue": addresses,
        "config_data": env_config_data(config),
        "max_concurrent": None,
    }
    process = context.Process(target=serve_env, kwargs=settings)
    process.start()
    try:
        yield addresses.get(timeout=120)
    finally:
        process.terminate()
        process.join(20)
        if process.is_alive():
            process.kill()


async def rolled_out(address: str, task: Any, client: Any, model: str, sampling: dict[str, Any]) -> Any:
    """One episode through the server, as prime-rl's `Env.run` asks for it."""
    environment = EnvClient(address=address)
    try:
        await environment.wait_for_server_startup(timeout=120)
        return await environment.run(
            task_data=task.data.model_dump(mode="json"),
            client=client,
            model=model,
            sampling=vf.SamplingConfig(**sampling),
        )
    finally:
        await environment.close()


def test_prime_rl_s_evaluation_source_scores_a_right_and_a_wrong_answer():
    source = sources("eval")[0]
    config = vf.resolve_env_config(source["env"])
    task = next(iter(vf.load_taskset(config.taskset)))
    data: Any = task.data
    assert data.source == source["name"] == "math500"

    async def play(text: str) -> Any:
        async with Endpoint(text) as url:
            client = vf.EvalClientConfig(base_url=url, api_key_var="NONE")
            return await rolled_out(address, task, client, "m", {"max_completion_tokens": 64})

    with served(config) as address:
        for text, value in ((f"\\boxed{{{data.answer}}}", 1.0), ("\\boxed{no}", 0.0)):
            episode = run(play(text))
            (trace,) = episode.traces
            assert episode.ok and trace.ok and trace.reward == value, (episode.errors, trace.errors)


@pytest.mark.engine
def test_prime_rl_s_training_source_brings_tokens_and_logprobs_from_a_real_vllm(bridge_url: str):
    source = sources("train")[0]
    # The page's set comes from the hub and is longer than the tiny model's context.
    table = {"id": source["env"]["taskset"]["id"], "dataset": "arithmetic", "prompt_style": "plain"}
    config = vf.resolve_env_config({**source["env"], "taskset": table})
    task = next(iter(vf.load_taskset(config.taskset)))
    name = str(tiny_model_dir())
    client = vf.TrainClientConfig(  # pyright: ignore[reportCallIssue]
        base_url=f"{bridge_url}/v1", api_key_var="NONE", renderer_model_name=name
    )
    # As prime-rl: TrainSamplingConfig.to_sampling_args, and the salt of its dispatcher.
    sampling = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_completion_tokens": 16}
    with served(config) as address:
        episode = run(rolled_out(address, task, client, name, {**sampling, "extra_body": {"cache_salt": "0"}}))
    (trace,) = episode.traces
    assert episode.ok and trace.reward in (0.0, 1.0), (episode.errors, trace.errors)
    (branch,) = trace.branches
    assert len(branch.token_ids) == len(branch.logprobs) == len(branch.sampled_mask)
    assert 0 < sum(branch.sampled_mask) <= 16
    assert all(p < 0 for p, sampled in zip(branch.logprobs, branch.sampled_mask, strict=True) if sampled)


def test_prime_rl_s_sources_use_the_package_s_own_harness():
    for source in sources("train") + sources("eval"):
        config: Any = vf.resolve_env_config(source["env"])
        assert type(config.taskset).__name__ == "DapoMathConfig" and config.taskset.id == "dapo-math"
        assert config.agent.runtime.type == "subprocess"
        assert config.agent.harness is None
        assert type(default_agent_harness(config.taskset.id)).__name__ == "DapoMathHarnessConfig"


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that nobody listens on."""
    while True:
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind(("127.0.0.1", 0))
            first = probes[0].getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for offset, probe in enumerate(probes[1:], 1):
                    probe.bind(("127.0.0.1", first + offset))
                return first


@pytest.mark.skipif("PRIME_RL_PYTHON" not in os.environ, reason="PRIME_RL_PYTHON names no Python that has prime-rl")
def test_prime_rl_itself_reads_the_page_and_runs_an_episode(tmp_path: Path):
    """With prime-rl's own launcher, environment server and orchestrator client; no GPU is asked for."""
    python = os.environ["PRIME_RL_PYTHON"]
    (tmp_path / "dapo_math.toml").write_text(blocks("prime-rl.md", "toml")[0])
    dry = next(line for line in blocks("prime-rl.md", "sh prime-rl")[0].splitlines() if "--dry-run" in line)
    arguments = shlex.split(dry.removeprefix("uv run --no-sync rl"))
    port = ["--orchestrator.env-server-base-port", str(free_ports(3))]
    execute([python, "-m", "prime_rl.entrypoints.rl", *arguments, *port], tmp_path)
    configs = tmp_path / "outputs" / "dapo-math" / "configs"
    server_config = configs / "envs" / "eval" / "math500.json"
    address = json.loads(server_config.read_text())["serve"]["address"]

    async def play(text: str) -> Any:
        async with Endpoint(text) as url:
            script = str(HERE / "prime_rl_episode.py")
            command = [python, script, str(configs / "orchestrator.json"), address, url]
            return await asyncio.to_thread(execute, command, tmp_path, 120)

    log = tmp_path / "server.log"
    server = start([python, "-m", "prime_rl.entrypoints.env_server", "@", str(server_config)], log)
    try:
        for text, value in (("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", 1.0), ("\\boxed{no}", 0.0)):
            result = json.loads(run(play(text)).splitlines()[-1])
            assert result["ok"] and result["reward"] == value and result["tasks"] == 500, log.read_text()
            assert result["metrics"]["verdict/correct"] == value
    finally:
        server.terminate()
        server.wait(60)


# tinker-cookbook


@pytest.fixture(scope="module")
def tinker_python() -> Path:
    """The Python of an environment with tinker-cookbook, Verifiers 0.1.9 and what dapo-math depends on."""
    project = tomllib.loads((ROOT / "environments" / "dapo_math" / "pyproject.toml").read_text())["project"]
    needs = [*TINKER_NEEDS, *project["dependencies"]]
    key = hashlib.sha256(json.dumps([TINKER_COOKBOOK, *needs, sys.version_info[:2]]).encode()).hexdigest()[:12]
    folder = ROOT / ".cache" / "reuse" / f"tinker-cookbook-{key}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        execute([sys.executable, "-m", "venv", "--clear", str(folder)])
        execute([*pip, *shlex.split(os.environ.get("PIP_TORCH_ARGS", "")), *needs], timeout=1200)
        execute([*pip, "--no-deps", TINKER_COOKBOOK])
        (folder / "ready").touch()
    return python


def recipe(python: Path, mode: str, folder: Path) -> Any:
    """What the recipe's command on the page makes of one group, at the size of a test and with the tiny tokenizer."""
    (page,) = blocks("tinker-cookbook.md", "sh tinker")
    lines = page.replace("\\\n", "").splitlines()
    (command,) = [shlex.split(line) for line in lines if line.startswith("python ")]
    assert command[:3] == ["python", "-m", "tinker_cookbook.recipes.verifiers_rl.train"]
    tiny = str(tiny_model_dir())
    given = dict(argument.split("=", 1) for argument in command[3:])
    small = {"model_name": tiny, "renderer_name": "role_colon", "group_size": "2", "log_path": str(folder / "log")}
    arguments = [f"{name}={value}" for name, value in {**given, **small}.items()]
    script = [str(python), str(HERE / "tinker_recipe.py"), tiny, mode, *arguments]
    return json.loads(execute(script, folder, PYTHONPATH=str(ROOT / "environments/dapo_math")).splitlines()[-1])


@pytest.mark.packages
def test_the_tinker_recipe_rewards_a_right_and_a_wrong_answer(tinker_python: Path, tmp_path: Path):
    group = recipe(tinker_python, "right", tmp_path)
    assert group["rows"] == 500 and group["rewards"] == [1.0, 0.0]
    assert group["replies"] == [f"\\boxed{{{group['answer']}}}\n\nUser:", "\\boxed{x}\n\nUser:"]
    assert all(prompt.endswith("\\boxed{}.\n\nAssistant:") for prompt in group["prompts"])
    assert [metrics["verdict/correct"] for metrics in group["metrics"]] == [1.0, 0.0]
    assert [metrics["verdict/wrong"] for metrics in group["metrics"]] == [0.0, 1.0]
    assert [set(logprobs) for logprobs in group["logprobs"]] == [{-0.5}, {-0.5}]


@pytest.mark.packages
def test_a_failing_checker_stops_the_tinker_recipe_s_group(tinker_python: Path, tmp_path: Path):
    assert recipe(tinker_python, "fault", tmp_path) == {"error": "the checker is gone"}
