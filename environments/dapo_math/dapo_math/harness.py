"""A harness that asks the model once, in the environment's own process: milliseconds an episode, nothing to install."""

import aiohttp
import verifiers.v1 as vf


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
        # The rollout's own deadline bounds the wait, so the client sets none.
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
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
