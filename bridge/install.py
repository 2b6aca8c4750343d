"""The command `vf-install`: installs a Verifiers environment by its id. Verifiers had it until 0.3; 0.4 has none.

Arguments and their meaning are those of Verifiers 0.3.1. Where uv is absent, pip installs.
"""

import argparse
import contextlib
import http.client
import importlib
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

HUB = "https://api.primeintellect.ai/api/v1/environmentshub"
"""The Environments Hub: `{HUB}/{owner}/{name}/@{version}` describes one version of an environment."""
REPOSITORY = "https://github.com/PrimeIntellect-ai/verifiers.git"

_EXAMPLES = """examples:
  vf-install dapo-math                      from ./environments/dapo_math, editable
  vf-install dapo-math -p path/to/envs      from path/to/envs/dapo_math, editable
  vf-install primeintellect/gsm8k@0.1.0     from the Environments Hub
  vf-install gsm8k -r                       from the repository of Verifiers
"""


class InstallError(Exception):
    """Nothing was installed; the message says why and what to do."""


def installer() -> list[str]:
    """The command that installs packages into the running interpreter: uv's where there is one, else pip's.

    Raises:
        InstallError: there is neither.
    """
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is None:
        raise InstallError(f"neither uv nor pip is there to install into {sys.executable}; run: python -m ensurepip")
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]


def local_arguments(env: str, path: Path) -> list[str]:
    """What to install for an environment in the folder `path`.

    Raises:
        InstallError: `path` has no such environment.
    """
    folder = path / _module(env)
    if (folder / "pyproject.toml").is_file() or (folder / "setup.py").is_file():
        return ["--editable", str(folder)]
    if not path.is_dir():
        raise InstallError(f"there is no folder {path}; name the one that holds your environments: -p PATH")
    there = sorted(file.parent.name.replace("_", "-") for file in path.glob("*/pyproject.toml"))
    found = f"it holds {', '.join(there)}" if there else "it holds no environment"
    if folder.is_dir():
        raise InstallError(f"{folder} has no pyproject.toml, so it cannot be installed; of {path}: {found}")
    raise InstallError(
        f"no environment {env!r} in {path} (looked for {folder}); {found}. "
        f"Name another folder with -p, or for one of the Environments Hub give its owner: OWNER/{env}"
    )


def hub_arguments(env: str, hub: str = HUB) -> list[str]:
    """What to install for `owner/name[@version]`, as the Environments Hub answers.

    Raises:
        InstallError: the id has another form, or the hub cannot be reached, does not know it, or keeps it private.
    """
    identity, _, version = env.partition("@")
    owner, _, name = identity.partition("/")
    version = version or "latest"
    if not owner or not name or "/" in name:
        raise InstallError(f"{env!r} is no id of the Environments Hub; write owner/name or owner/name@version")
    url = "/".join([hub, *(urllib.parse.quote(part, safe="") for part in (owner, name)), f"@{version}"])
    details = _fetch(url, env)
    index, wheel = details.get("simple_index_url"), details.get("wheel_url")
    if index:
        pinned = _module(name) if version == "latest" else f"{_module(name)}=={version}"
        return ["--upgrade", pinned, "--extra-index-url", index]
    if wheel and urllib.parse.urlparse(wheel).scheme in ("http", "https"):
        return ["--upgrade", wheel]
    if details.get("visibility") == "PRIVATE":
        raise InstallError(f"{env} is private; fetch it with `prime env pull`, then install it with `vf-install -p`")
    raise InstallError(f"the Environments Hub offers no package of {env}")


def repository_arguments(env: str, branch: str) -> list[str]:
    """What to install for an example environment of the repository of Verifiers."""
    folder = _module(env)
    name = folder.replace("_", "-")
    return [f"{name} @ git+{REPOSITORY}@{branch}#subdirectory=environments/{folder}"]


def is_hub_id(env: str) -> bool:
    return "/" in env and not env.startswith(("./", "/"))


def _module(env: str) -> str:
    return env.replace("-", "_").lower()


def _fetch(url: str, env: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError as error:
        reason = "does not know it" if error.code == 404 else f"answered {error.code} {error.reason}"
        raise InstallError(f"cannot install {env}: the Environments Hub {reason} ({url})") from error
    except (OSError, http.client.HTTPException) as error:
        raise InstallError(f"cannot install {env}: no connection to the Environments Hub: {error}") from error
    except ValueError as error:
        raise InstallError(f"cannot install {env}: the Environments Hub's answer is no JSON ({url})") from error
    details = body.get("data", body) if isinstance(body, dict) else None
    if not isinstance(details, dict):
        raise InstallError(f"cannot install {env}: the Environments Hub's answer has no details ({url})")
    return details


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vf-install",
        description="Install a Verifiers environment into the Python that runs this command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    parser.add_argument("env", help="name of a local environment, or owner/name[@version] of the Environments Hub")
    parser.add_argument(
        "-p", "--path", default="./environments", help="folder of local environments (default: %(default)s)"
    )
    parser.add_argument("-r", "--from-repo", action="store_true", help="install from the repository of Verifiers")
    parser.add_argument("-b", "--branch", default="main", help="branch for --from-repo (default: %(default)s)")
    return parser


def _installed(env: str) -> str:
    """Name and, where the distribution bears the name of its environment, version."""
    name = env.partition("@")[0].rpartition("/")[2].replace("_", "-").lower()
    importlib.invalidate_caches()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{name} {importlib.metadata.version(name)}"
    return name


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 where the environment was installed, 1 where not, 2 for wrong arguments."""
    args = _parser().parse_args(argv)
    try:
        if args.from_repo:
            wanted = repository_arguments(args.env, args.branch)
        elif is_hub_id(args.env):
            wanted = hub_arguments(args.env)
        else:
            wanted = local_arguments(args.env, Path(args.path))
        command = [*installer(), *wanted]
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Installing {args.env}: {' '.join(wanted)}", flush=True)
    if subprocess.run(command).returncode != 0:
        print(f"error: {args.env} was not installed; the command was: {' '.join(command)}", file=sys.stderr)
        return 1
    print(f"Installed {_installed(args.env)}. Try it: vf-eval {args.env.partition('@')[0].rpartition('/')[2]} --help")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
