"""What each request dialect needs so that a call can be captured, and what its client must see in the end.

One class a path: `prepare` adds the fields that the capture needs, `read` collects token ids and logprobs from an
answer or a stream's chunk, `restore` removes what the client did not ask for. The answer itself is vLLM's own.
"""

from dataclasses import dataclass, field
from typing import Any

from bridge.protocol import BridgeError

Json = dict[str, Any]


@dataclass
class ChoiceTokens:
    """Tokens of one choice, complete or so far: ids, float32 logprobs and the finish reason once it is known."""

    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class Dialect:
    """Capture of one request. `tokens[i]` fills as answers or chunks are read."""

    path: str

    def __init__(self, body: Json) -> None:
        self.body = body
        self.tokens: dict[int, ChoiceTokens] = {}

    def prepare(self) -> Json:
        """The body to send to vLLM."""
        raise NotImplementedError

    def read(self, answer: Json) -> None:
        """Collect the tokens of an answer or of one chunk of a stream."""
        for choice in answer.get("choices") or []:
            tokens = self.tokens.setdefault(choice.get("index", 0), ChoiceTokens())
            if prompt_ids := self._prompt_ids(answer, choice):
                tokens.prompt_ids = prompt_ids
            tokens.completion_ids += choice.get("token_ids") or []
            tokens.logprobs += self._logprobs(choice)
            tokens.finish_reason = choice.get("finish_reason") or tokens.finish_reason

    def restore(self, answer: Json) -> Json:
        """The answer (or chunk) as the client would have got it from vLLM."""
        raise NotImplementedError

    def sampling(self) -> Json:
        """The request's sampling parameters, as the client gave them."""
        names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "seed", "n")
        return {name: self.body[name] for name in names if self.body.get(name) is not None}

    def _prompt_ids(self, answer: Json, choice: Json) -> list[int] | None:
        return answer.get("prompt_token_ids")

    def _logprobs(self, choice: Json) -> list[float]:
        content = (choice.get("logprobs") or {}).get("content") or []
        return [entry["logprob"] for entry in content]


class ChatCompletions(Dialect):
    path = "v1/chat/completions"

    def prepare(self) -> Json:
        body = {**self.body, "return_token_ids": True, "logprobs": True}
        body.setdefault("top_logprobs", 0)
        return body

    def restore(self, answer: Json) -> Json:
        if not self.body.get("return_token_ids"):
            _blank(answer, "prompt_token_ids")
            for choice in answer.get("choices") or []:
                _blank(choice, "token_ids")
        if not self.body.get("logprobs"):
            for choice in answer.get("choices") or []:
                _blank(choice, "logprobs")
        return answer


class Completions(Dialect):
    path = "v1/completions"

    def prepare(self) -> Json:
        body = {**self.body, "return_token_ids": True}
        if body.get("logprobs") is None:
            body["logprobs"] = 0
        return body

    def restore(self, answer: Json) -> Json:
        for choice in answer.get("choices") or []:
            if not self.body.get("return_token_ids"):
                _blank(choice, "token_ids")
                _blank(choice, "prompt_token_ids")
            if self.body.get("logprobs") is None:
                _blank(choice, "logprobs")
        return answer

    def _prompt_ids(self, answer: Json, choice: Json) -> list[int] | None:
        return choice.get("prompt_token_ids")

    def _logprobs(self, choice: Json) -> list[float]:
        return (choice.get("logprobs") or {}).get("token_logprobs") or []


class Generate(Dialect):
    """Token ids in, token ids out. Answers in the shape that `renderers` (Verifiers' TrainClient) reads:
    `{"token": "token_id:N", "logprob": x}`, which vLLM itself stopped sending with 0.32."""

    path = "inference/v1/generate"

    def prepare(self) -> Json:
        if not isinstance(self.body.get("token_ids"), list):
            raise BridgeError("/inference/v1/generate needs `token_ids`, a list of integers")
        sampling = dict(self.body.get("sampling_params") or {})
        if sampling.get("logprobs") is None:
            sampling["logprobs"] = 0
        return {**self.body, "sampling_params": sampling}

    def restore(self, answer: Json) -> Json:
        for choice in answer.get("choices") or []:
            logprobs = choice.get("logprobs")
            if logprobs and logprobs.get("content"):
                logprobs["content"] = [
                    {"token": f"token_id:{entry['token_id']}", "logprob": entry["logprob"]}
                    if "token_id" in entry
                    else entry
                    for entry in logprobs["content"]
                ]
        return answer

    def sampling(self) -> Json:
        return {name: value for name, value in (self.body.get("sampling_params") or {}).items() if value is not None}

    def _prompt_ids(self, answer: Json, choice: Json) -> list[int] | None:
        return self.body["token_ids"]


DIALECTS: dict[str, type[Dialect]] = {cls.path: cls for cls in (ChatCompletions, Completions, Generate)}


def _blank(container: Json, key: str) -> None:
    if key in container:
        container[key] = None
