"""dapo-math inside Verifiers: episodes, metrics, faults, and Verifiers' own evaluation command."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import verifiers.v1 as vf
from aiohttp import web
from dapo_math import harness
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

AGENT = {"runtime": {"type": "subprocess"}}


class Endpoint:
    """An OpenAI-compatible endpoint that answers at once with `text`, or with an HTTP error."""

    def __init__(self, text: str, status: int = 200, finish: str = "stop") -> None:
        self.text, self.status, self.finish, self.requests = text, status, finish, list[dict[str, Any]]()

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        return web.json_response(body)

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


def episode(endpoint: Endpoint, **taskset: Any) -> Any:
    """One episode on the taskset's first task."""

    async def play() -> Any:
        config = resolve_env_config({"taskset": {"id": "dapo-math", **taskset}, "agent": AGENT})
        environment = load_environment(config)
        task = next(iter(load_taskset(config.taskset)))
        async with endpoint as url, environment.serving():
            client = EvalClientConfig(base_url=url, api_key_var="NONE")
            context = ModelContext(client=client, model="m", sampling=SamplingConfig(max_tokens=32))
            return await environment.run_episode(task, context)

    return asyncio.run(play())


def test_a_right_answer_earns_one_and_a_wrong_one_nothing():
    for text, reward, verdict in (
        ("\\boxed{18}", 1.0, "correct"),
        ("\\boxed{19}", 0.0, "wrong"),
        ("?", 0.0, "no_answer"),
    ):
        result = episode(Endpoint(f"So\n{text}"), dataset="gsm8k")
        (trace,) = result.traces
        assert result.ok and trace.reward == reward
        assert trace.metrics[f"verdict/{verdict}"] == 1.0
        assert sum(value for name, value in trace.metrics.items() if name.startswith("verdict/")) == 1.0
        assert trace.metrics["answer_on_last_line"] == float(verdict != "no_answer")
        assert trace.metrics["response_chars"] == len(f"So\n{text}")


@pytest.mark.parametrize(("finish", "truncated"), [("stop", 0.0), ("length", 1.0)])
def test_a_response_that_the_token_limit_cut_off_counts_as_truncated(finish: str, truncated: float):
    result = episode(Endpoint("\\boxed{18}", finish=finish), dataset="gsm8k")
    assert result.ok and result.traces[0].metrics["truncated"] == truncated and result.traces[0].reward == 1.0


@pytest.mark.parametrize(
    ("style", "ends"), [("boxed", "within \\boxed{}."), ("answer_line", 'after "Answer:".'), ("plain", "= ?")]
)
def test_the_prompt_asks_in_the_chosen_style_with_the_chosen_instruction(style: str, ends: str):
    endpoint = Endpoint("\\boxed{1}")
    episode(endpoint, dataset="arithmetic", prompt_style=style, instruction="Be brief.")
    (request,) = endpoint.requests
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert request["messages"][0]["content"] == "Be brief."
    assert request["messages"][1]["content"].endswith(ends) and request["max_tokens"] == 32


def test_an_endpoint_error_fails_the_episode_and_is_no_zero_reward():
    result = episode(Endpoint("", status=500), dataset="gsm8k")
    assert not result.ok
    assert any(error.type == "ProviderError" for trace in result.traces for error in trace.errors)


def test_rollouts_share_one_client_session_and_close_it_after_the_last():
    async def play() -> list[bool]:
        config = resolve_env_config({"taskset": {"id": "dapo-math", "dataset": "gsm8k"}, "agent": AGENT})
        environment = load_environment(config)
        tasks = list(load_taskset(config.taskset))[:12]
        async with Endpoint("\\boxed{18}") as url, environment.serving():
            client = EvalClientConfig(base_url=url, api_key_var="NONE")
            context = ModelContext(client=client, model="m", sampling=SamplingConfig(max_tokens=32))
            return [e.ok for e in await asyncio.gather(*(environment.run_episode(t, context) for t in tasks))]

    opened: list[Any] = []

    def session(**kwargs: Any) -> Any:
        opened.append(aiohttp.ClientSession(**kwargs))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "aiohttp", SimpleNamespace(**{**vars(aiohttp), "ClientSession": session}))
        assert all(asyncio.run(play()))
    assert 1 <= len(opened) < 12 and all(session.closed for session in opened)
    assert not harness._sessions


def test_repeating_an_arithmetic_problem_earns_nothing():
    result = episode(Endpoint("\\boxed{0 + 0}"), dataset="arithmetic", arithmetic={"high": 30})
    task = result.traces[0].task.data
    expression = task.prompt.split(" = ?")[0]
    repeated = episode(Endpoint(f"\\boxed{{{expression}}}"), dataset="arithmetic", arithmetic={"high": 30})
    assert repeated.ok and repeated.traces[0].reward == 0.0
    answered = episode(Endpoint(f"\\boxed{{{task.answer}}}"), dataset="arithmetic", arithmetic={"high": 30})
    assert answered.ok and answered.traces[0].reward == 1.0


def test_a_failing_checker_fails_the_episode_and_is_no_zero_reward(monkeypatch: pytest.MonkeyPatch):
    from dapo_math import taskset
    from dapo_math.grading import CheckerError

    async def broken(*_: object, **__: object) -> None:
        raise CheckerError("no worker")

    monkeypatch.setattr(taskset, "agrade", broken)
    result = episode(Endpoint("\\boxed{18}"), dataset="gsm8k")
    assert not result.ok and "no worker" in str([t.errors for t in result.traces])


def tasks(**taskset: Any) -> list[Any]:
    return list(load_taskset(resolve_env_config({"taskset": {"id": "dapo-math", **taskset}}).taskset))


@pytest.mark.parametrize("style", ["boxed", "answer_line", "plain"])
def test_every_task_validates_its_own_answer_in_its_prompts_style(style: str):
    async def check() -> list[bool]:
        return [await task.validate(None) for task in tasks(dataset="math500", limit=50, prompt_style=style)]

    assert all(asyncio.run(check()))


@pytest.mark.parametrize(("style", "asked"), [("boxed", "boxed"), ("answer_line", "Answer: ")])
def test_a_task_that_refuses_its_own_answer_says_why_and_how_to_leave_it_out(style: str, asked: str, tmp_path: Path):
    path = tmp_path / "set.jsonl"
    rows = [{"id": "good", "problem": "P", "answer": "1"}, {"id": "bad", "problem": "Q", "answer": "}{"}]
    rows[1]["answer"] = "}{" if style == "boxed" else "*"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good, bad = tasks(dataset=str(path), prompt_style=style)
    assert asyncio.run(good.validate(None))
    with pytest.raises(ValueError, match=rf"its own answer.*{asked}.*graded no_answer; drop_ids = \['bad'\]"):
        asyncio.run(bad.validate(None))
    assert [task.data.id for task in tasks(dataset=str(path), drop_ids=["bad"])] == ["good"]


def test_a_task_whose_problem_can_be_repeated_as_its_answer_does_not_validate(monkeypatch: pytest.MonkeyPatch):
    from dapo_math import check

    (task,) = tasks(dataset="arithmetic", prompt_style="answer_line", limit=1)
    assert asyncio.run(task.validate(None))
    agrade = check.agrade
    monkeypatch.setattr(check, "agrade", lambda response, answer, **_: agrade(response, answer))
    with pytest.raises(ValueError, match="repeating the problem as its answer is graded correct"):
        asyncio.run(task.validate(None))


def test_no_task_validates_where_the_checker_does_not_work(monkeypatch: pytest.MonkeyPatch):
    from dapo_math import check, taskset
    from dapo_math.grading import CheckerError, Grade

    async def slow(*_: object, **__: object) -> Grade:
        return Grade(0.0, "timeout", "x")

    monkeypatch.setattr(taskset, "_proven", False)
    monkeypatch.setattr(check, "agrade", slow)
    with pytest.raises(CheckerError, match="grade a right answer timeout"):
        asyncio.run(tasks(dataset="gsm8k", limit=1)[0].validate(None))


def test_tasks_survive_the_wire_to_an_environment_server():
    config = resolve_env_config({"taskset": {"id": "dapo-math", "dataset": "aime25"}})
    task = next(iter(load_taskset(config.taskset)))
    data = type(task.data).model_validate(json.loads(task.data.model_dump_json()))
    assert data == task.data and isinstance(task, vf.Task)


def test_verifiers_own_evaluation_command_runs_it(tmp_path: Path):
    async def play() -> str:
        async with Endpoint("\\boxed{18}") as url:
            command = [str(Path(sys.executable).with_name("vf-eval")), "dapo-math", "-n", "2", "-r", "1", "-m", "m"]
            command += ["--client.base-url", url, "--client.api-key-var", "NONE", "--sampling.max-tokens", "32"]
            command += ["--env.agent.runtime.type", "subprocess", "--env.taskset.dataset", "gsm8k"]
            command += ["--no-push", "--no-rich", "-o", str(tmp_path / "out")]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output, _ = await asyncio.wait_for(process.communicate(), 120)
            assert process.returncode == 0, output.decode()
            return output.decode()

    asyncio.run(play())
    (record,) = (tmp_path / "out").rglob("*.jsonl")
    rewards = sorted(
        sum(reward["score"] for reward in trace["rewards"].values())
        for line in record.read_text().splitlines()
        for trace in (json.loads(line).get("traces") or [json.loads(line)])
    )
    assert rewards == [0.0, 1.0]
