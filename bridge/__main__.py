"""The command line: `python -m bridge serve MODEL --port 8000`."""

import asyncio
import logging
import signal
import sys

import aiohttp
from aiohttp import web
from pydantic_config import cli

from bridge.config import BridgeConfig
from bridge.engine import Engine
from bridge.processes import port_in_use
from bridge.protocol import BridgeError
from bridge.server import Bridge
from bridge.weights import WeightDirectory

USAGE = "usage: python -m bridge serve MODEL [--port N] [--engine.dtype float32] [@ FILE.toml] (--help lists all)"

logger = logging.getLogger("bridge")


async def serve(config: BridgeConfig) -> None:
    """Run the bridge until SIGTERM or SIGINT.

    Raises:
        BridgeError: the port is in use, the engine does not start, or it ends while it should serve.
    """
    if config.port and port_in_use(config.host, config.port):
        raise BridgeError(f"port {config.port} on {config.host} is in use; choose another with --port (0 takes any)")
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    log = config.log_dir / "vllm_0.log" if config.log_dir else None
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    directory = WeightDirectory()
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            starting = asyncio.create_task(Engine.start(config.engine, session, log))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            engine = starting.result()
            try:
                await _serve_engine(config, engine, directory, stopping)
            finally:
                await engine.stop()
    finally:
        directory.close()


async def _serve_engine(
    config: BridgeConfig, engine: Engine, directory: WeightDirectory, stopping: asyncio.Task[bool]
) -> None:
    bridge = Bridge(config, engine, directory)
    runner = web.AppRunner(bridge.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        logger.info("serving %s (vLLM %s) at %s/v1", engine.config.model, engine.version, url)
        if config.ready_file:
            partial = config.ready_file.with_suffix(".partial")
            partial.write_text(url)
            partial.replace(config.ready_file)
        watching = asyncio.create_task(engine.child.process.wait())
        await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            raise BridgeError(engine.child.failure())
        watching.cancel()
    finally:
        await runner.cleanup()


def main() -> None:
    args = sys.argv[1:]
    if args[:1] != ["serve"] or len(args) < 2:
        sys.exit(USAGE)
    args = args[1:]
    if not args[0].startswith(("-", "@")):
        args = ["--engine.model", *args]
    sys.argv[1:] = args
    config = cli(BridgeConfig, prog="python -m bridge serve MODEL", description=__doc__)  # pyright: ignore[reportCallIssue]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(config))
    except BridgeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
