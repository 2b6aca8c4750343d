"""New weights in a running vLLM, proven by the logprobs it then samples with."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bridge.transfer
from bridge.client import BridgeClient
from bridge.protocol import BridgeError, ModelCall
from tests.bridge.test_serving import captured, post, request
from tests.conftest import forward_logprobs, run, serving
from trainer.tiny import tiny_model_dir

pytestmark = pytest.mark.engine
DIALECT = "v1/chat/completions"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tiny_model_dir(), tmp_path_factory.mktemp("publish"), "--engine.max-model-len", "256") as url:
        yield url


@pytest.fixture
def changed(tiny: Any) -> Any:
    """A copy of the tiny model with every tensor changed, the tied embedding too."""
    model = copy.deepcopy(tiny[0])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def publish(url: str, model: Any, version: int) -> dict[str, float]:
    async def call() -> dict[str, float]:
        async with BridgeClient(url) as client:
            return await client.publish(model.named_parameters(), version)

    return run(call())


def sampled(url: str, session: str, seed: int = 0) -> ModelCall:
    status, _ = run(post(url, DIALECT, request(DIALECT, seed=seed, temperature=1.0), session))
    assert status == 200
    return run(captured(url, session))[0]


def mismatch(model: Any, call: ModelCall) -> float:
    expected = forward_logprobs(model, call.prompt_ids, call.completion_ids)
    return float((expected - torch.tensor(call.logprobs)).abs().max())


def info(url: str) -> dict[str, Any]:
    async def call() -> dict[str, Any]:
        async with BridgeClient(url) as client:
            return await client.info()

    return run(call())


def test_after_an_update_the_engine_samples_from_the_new_weights_under_the_new_version(
    url: str, tiny: Any, changed: Any
):
    assert tiny[0].config.tie_word_embeddings
    before = sampled(url, "before")
    assert mismatch(tiny[0], before) < 1e-4
    version = info(url)["version"] + 1
    seconds = publish(url, changed, version)
    assert set(seconds) == {"write", "stage", "drain", "commit"}
    # The same prompt again: cached keys of the old weights would show here.
    for seed in range(4):
        after = sampled(url, f"after-{seed}", seed)
        assert mismatch(changed, after) < 1e-4
        assert mismatch(tiny[0], after) > 0.01, "the test must be able to see a missed update"
        assert after.versions[0].version == version
    files = [path.name for path in Path(info(url)["weights_dir"]).iterdir()]
    assert files == [f"{version}.safetensors"], "only what a restarted engine needs stays"


CORRUPTIONS = {
    "bytes": (lambda t: t.__setitem__("model.norm.weight", t["model.norm.weight"] + 1), "bytes differ"),
    "missing": (lambda t: t.pop("model.norm.weight"), "did not arrive"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_damaged_update_is_refused_by_tensor_and_the_old_weights_go_on(
    url: str, tiny: Any, changed: Any, kind: str, monkeypatch: pytest.MonkeyPatch
):
    damage, reason = CORRUPTIONS[kind]
    write = bridge.transfer.write_file

    def write_damaged(tensors: Any, path: Path) -> int:
        write(tensors, path)
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        loaded = load_file(path)
        damage(loaded)
        save_file(loaded, path, metadata=metadata)
        return 0

    version = info(url)["version"]
    publish(url, tiny[0], version + 1)
    monkeypatch.setattr(bridge.transfer, "write_file", write_damaged)
    with pytest.raises(BridgeError, match=rf"'model\.norm\.weight': .*{reason}"):
        publish(url, changed, version + 2)
    call = sampled(url, f"damaged-{kind}")
    assert mismatch(tiny[0], call) < 1e-4 and call.versions[0].version == version + 1


@pytest.mark.parametrize("kind", ["lacks", "unknown", "shape"])
def test_weights_of_another_model_are_refused_by_tensor(url: str, tiny: Any, kind: str):
    tensors = {name: p.detach() for name, p in tiny[0].named_parameters()}
    name = "model.layers.0.mlp.up_proj.weight"
    if kind == "lacks":
        del tensors[name]
    elif kind == "unknown":
        name = "model.layers.9.mlp.up_proj.weight"
        tensors[name] = torch.zeros(1)
    else:
        tensors[name] = tensors[name][:-1]
    reason = {"lacks": "lacks it", "unknown": "no such tensor", "shape": "shape"}[kind]

    async def call() -> None:
        async with BridgeClient(url) as client:
            await client.publish(tensors.items(), (await client.info())["version"] + 1)

    with pytest.raises(BridgeError, match=f"'{name}'.*{reason}"):
        run(call())
    assert mismatch(tiny[0], sampled(url, f"other-{kind}")) < 1e-4


def test_an_old_version_is_refused(url: str, tiny: Any):
    publish(url, tiny[0], info(url)["version"] + 1)
    with pytest.raises(BridgeError, match="versions only rise"):
        publish(url, tiny[0], info(url)["version"])
