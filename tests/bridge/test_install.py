"""vf-install: what it installs for an id, and what it says where it cannot."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bridge import install
from bridge.install import InstallError, hub_arguments, installer, local_arguments, main, repository_arguments

INDEX = "https://hub.example/simple"


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, Any]]]:
    """A hub's address, and what it answers by path; a number is a status."""
    answers: dict[str, Any] = {}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path, 404)
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            if not isinstance(answer, int):
                self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    for name in ("dapo_math", "other_env"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text("")
    (tmp_path / "half").mkdir()
    return tmp_path


def test_an_id_or_its_module_name_is_a_folder_that_is_installed_editable(environments: Path):
    for env in ("dapo-math", "dapo_math", "DAPO-Math"):
        arguments = local_arguments(env, environments)
        assert arguments == ["--editable", str(environments / "dapo_math")]


def test_a_folder_that_is_missing_is_named_with_those_that_are_there(environments: Path, tmp_path: Path):
    with pytest.raises(InstallError, match=r"no environment 'dapo'.*it holds dapo-math, other-env.* -p,.*OWNER/dapo"):
        local_arguments("dapo", environments)
    with pytest.raises(InstallError, match=r"half has no pyproject.toml"):
        local_arguments("half", environments)
    with pytest.raises(InstallError, match=r"there is no folder .*nowhere; .*-p PATH"):
        local_arguments("dapo-math", tmp_path / "nowhere")


def test_the_hub_names_an_index_or_a_wheel(hub: tuple[str, dict[str, Any]]):
    address, answers = hub
    answers["/me/my-env/@latest"] = {"data": {"simple_index_url": INDEX}}
    answers["/me/my-env/@0.2.0"] = {"data": {"simple_index_url": INDEX}}
    answers["/me/wheel/@latest"] = {"wheel_url": "https://hub.example/wheel-1-py3-none-any.whl"}
    assert hub_arguments("me/my-env", address) == ["--upgrade", "my_env", "--extra-index-url", INDEX]
    assert hub_arguments("me/my-env@0.2.0", address) == ["--upgrade", "my_env==0.2.0", "--extra-index-url", INDEX]
    assert hub_arguments("me/wheel", address) == ["--upgrade", "https://hub.example/wheel-1-py3-none-any.whl"]


def test_what_the_hub_does_not_give_is_said(hub: tuple[str, dict[str, Any]]):
    address, answers = hub
    answers["/me/private/@latest"] = {"data": {"visibility": "PRIVATE"}}
    answers["/me/broken/@latest"] = b"<html>"
    answers["/me/down/@latest"] = 503
    answers["/me/file/@latest"] = {"wheel_url": "file:///etc/passwd"}
    for env, words in (
        ("me/unknown", "does not know it"),
        ("me/private", "is private; fetch it with `prime env pull`"),
        ("me/broken", "no JSON"),
        ("me/down", "answered 503"),
        ("me/file", "offers no package"),
        ("me/a/b", "owner/name or owner/name@version"),
        ("me/", "owner/name or owner/name@version"),
    ):
        with pytest.raises(InstallError, match=words):
            hub_arguments(env, address)
    with pytest.raises(InstallError, match="no connection to the Environments Hub"):
        hub_arguments("me/env", "http://127.0.0.1:9")


def test_an_example_of_verifiers_comes_from_its_repository():
    (wanted,) = repository_arguments("gsm8k", "main")
    assert wanted.startswith("gsm8k @ git+https://github.com/") and wanted.endswith(
        "@main#subdirectory=environments/gsm8k"
    )


def test_pip_installs_where_there_is_no_uv(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(install.shutil, "which", lambda _: None)
    assert installer()[:3] == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(install.shutil, "which", lambda _: "/bin/uv")
    assert installer() == ["/bin/uv", "pip", "install", "--python", sys.executable]


def test_a_failure_is_one_line_and_an_exit_code(environments: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["nothing", "-p", str(environments)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: no environment 'nothing'") and not captured.out
