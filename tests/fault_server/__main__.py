"""The server's process: reads its settings as one line of JSON, prints its port, serves until its input closes."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from fault_server.connection import connection_factory
from fault_server.ledger import Ledger
from fault_server.service import FaultService
from fault_server.settings import Settings


async def serve(record: dict[str, Any]) -> int:
    """Returns the exit status: 1 if the server itself made a mistake, which is no fault that a test asked for."""
    loop = asyncio.get_running_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    ledger = Ledger(Path(record["ledger_path"]))
    make, connections = connection_factory(FaultService(Settings.from_json(record["settings"]), ledger))
    server = await loop.create_server(make, "127.0.0.1", record["port"], backlog=1024)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    # Also when the test is killed: the kernel closes the pipe, and no server is left behind.
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    await over.wait()
    loop.remove_reader(sys.stdin.fileno())
    server.close()
    for connection in list(connections):
        connection.close()
    await asyncio.sleep(0)
    ledger.close()
    for failure in failures:
        print(failure.get("message"), file=sys.stderr)
        if error := failure.get("exception"):
            traceback.print_exception(error)
    return 1 if failures else 0


if __name__ == "__main__":
    gc.freeze()  # the modules stay; only what requests leave behind is looked at again
    sys.exit(asyncio.run(serve(json.loads(sys.stdin.readline()))))
