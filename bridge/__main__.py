"""The command line: `python -m bridge serve MODEL` (vLLM servers and the bridge), `python -m bridge engine MODEL`
(one vLLM server alone, for a bridge elsewhere)."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import aiohttp
from aiohttp import web
from pydantic_config import cli

from bridge.capture import CaptureStore
from bridge.config import BridgeConfig, EngineServerConfig
from bridge.engine import check_model, server_command, server_environment
from bridge.gate import VersionGate
from bridge.observe import Metrics
from bridge.pool import Pool
from bridge.processes import port_in_use
from bridge.protocol import BridgeError
from bridge.server import Bridge
from bridge.storage import CallLog
from bridge.weights import Publisher, WeightDirectory

USAGE = """usage: python -m bridge serve MODEL [--port N] [--replicas N] [--engine.dtype float32] [@ FILE.toml]
       python -m bridge engine MODEL [--host HOST] [--port N] [--dtype float32] [@ FILE.toml]
(--help after either lists all settings)"""

logger = logging.getLogger("bridge")


async def serve(config: BridgeConfig) -> None:
    """Run the bridge until SIGTERM or SIGINT.

    Raises:
        BridgeError: the port is in use, a replica does not start, or all are lost while they should serve.
    """
    if config.port and port_in_use(config.host, config.port):
        raise BridgeError(f"port {config.port} on {config.host} is in use; choose another with --port (0 takes any)")
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    metrics, gate, directory = Metrics(), VersionGate(config.version), WeightDirectory()
    log = CallLog(config.capture_dir) if config.capture_dir else None
    store = CaptureStore(config.max_captured_calls, metrics, log)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    try:
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            publisher = Publisher(config, gate, directory, metrics)
            pool = publisher.pool = Pool(config, session, gate, publisher.give_current)
            try:
                stopping = asyncio.create_task(stop.wait())
                starting = asyncio.create_task(pool.start())
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    starting.cancel()
                    await asyncio.gather(starting, return_exceptions=True)
                    return
                starting.result()
                bridge = Bridge(config, pool, gate, store, publisher, directory, metrics)
                await _serve_http(config, bridge, stopping)
            finally:
                await pool.stop()
    finally:
        directory.close()
        if log:
            log.close()


async def _serve_http(config: BridgeConfig, bridge: Bridge, stopping: asyncio.Task[bool]) -> None:
    runner = web.AppRunner(bridge.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        for replica in bridge.pool.replicas:
            if replica.engine:
                logger.info("%s: vLLM %s, %s", replica.name, replica.engine.version, replica.state)
        logger.info("serving %s at %s/v1", config.engine.model, url)
        if config.ready_file:
            partial = config.ready_file.with_suffix(".partial")
            partial.write_text(url)
            partial.replace(config.ready_file)
        await asyncio.wait({bridge.pool.failed, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if bridge.pool.failed.done():
            raise BridgeError(bridge.pool.failed.result())
    finally:
        await runner.cleanup()


def run_engine(config: EngineServerConfig) -> None:
    """Become a vLLM server that a bridge can use."""
    check_model(config)
    if config.host not in ("127.0.0.1", "::1", "localhost") and not os.environ.get("BRIDGE_TOKEN"):
        raise BridgeError(
            f"host {config.host} opens the engine's weights to that network: set BRIDGE_TOKEN to a secret here, and "
            "give it to the bridge as --replica-token"
        )
    command = server_command(config, config.host, config.port)
    os.execvpe(command[0], command, {**os.environ, **server_environment(config)})


def main() -> None:
    args = sys.argv[1:]
    if args[:1] not in (["serve"], ["engine"]) or len(args) < 2:
        sys.exit(USAGE)
    kind, *args = args
    if not args[0].startswith(("-", "@")):
        args = ["--engine.model" if kind == "serve" else "--model", *args]
    sys.argv[1:] = _joined(args, "--replica-url")
    config = cli(  # pyright: ignore[reportCallIssue]
        BridgeConfig if kind == "serve" else EngineServerConfig, prog=f"python -m bridge {kind} MODEL"
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if isinstance(config, BridgeConfig):
            _run(serve(config))
        else:
            run_engine(config)
    except BridgeError as error:
        sys.exit(f"error: {error}")


def _joined(args: list[str], flag: str) -> list[str]:
    """`--flag A ... --flag B` as `--flag A B`, the only form that the parser takes for a list."""
    values, rest, taking = [], [], False
    for arg in args:
        if arg == flag:
            taking = True
        elif taking and not arg.startswith(("-", "@")):
            values.append(arg)
        else:
            taking = False
            rest.append(arg)
    return [*rest, flag, *values] if values else rest


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


if __name__ == "__main__":
    main()
