"""A harness that asks the model once, in the environment's own process: milliseconds an episode, nothing to install."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import verifiers.v1 as vf


@dataclass
class _Shared:
    session: aiohttp.ClientSession
    users: int = 0


_sessions: dict[asyncio.AbstractEventLoop, _Shared] = {}


@contextlib.asynccontextmanager
async def _shared_session() -> AsyncIterator[aiohttp.ClientSession]:
    """The event loop's session, which lives while any rollout uses it: one of its own would cost each some 0.9 ms."""
    loop = asyncio.get_running_loop()
    shared = _sessions.get(loop)
    if shared is None:
        # The rollout's own deadline bounds the wait, and the environment how many run at once; the client does not.
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        shared = _sessions[loop] = _Shared(session)
    shared.users += 1
    try:
        yield shared.session
    finally:
        shared.users -= 1
        if not shared.users:
            del _sessions[loop]
            await shared.session.close()


class DapoMathHarnessConfig(vf.HarnessConfig):
    """No settings of its own."""


class DapoMathHarness(vf.Harness[DapoMathHarnessConfig]):
    """One chat completion: the system prompt, if any, and the problem."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt or ""})
        async with (
            _shared_session() as session,
            session.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            ) as response,
        ):
            if response.status == 200:
                await response.read()
                return vf.ProgramResult(exit_code=0, stdout="", stderr="")
            reason = f"the model endpoint answered {response.status}: {(await response.text())[:500]}"
            return vf.ProgramResult(exit_code=1, stdout="", stderr=reason)
