"""A server on loopback that speaks Modal's protocol to Modal's own client, as far as Sandboxes need it.

Images are not built: what they were asked for is kept, to be looked at. A Sandbox is a local process.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
import time
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

from executors.containers import Container

RESULT = api_pb2.GenericResult


def _unimplemented(name: str) -> Any:
    async def answer(self: Any, stream: Any) -> None:
        await stream.recv_message()
        raise GRPCError(Status.UNIMPLEMENTED, f"{name} is not part of this server")

    return answer


_Base = type("_Base", (ModalClientBase,), {name: _unimplemented(name) for name in ModalClientBase.__abstractmethods__})


class ModalService(_Base):
    """The state of an account."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, str]] = {"st-known": {}}
        self.images: dict[str, Any] = {}
        self.definitions: dict[str, Any] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.containers: dict[str, Container] = {}
        self.calls: list[str] = []
        self._numbers = itertools.count(1)

    def _new(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers):022d}"

    async def ClientHello(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse(image_builder_version="2024.10"))

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3600}).encode()).decode().rstrip("=")
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=f"e30.{claims}.x"))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version="2024.10")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def AppGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}"))

    async def SecretGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        if request.deployment_name:
            known = f"st-{request.deployment_name}"
            if known not in self.secrets:
                raise GRPCError(Status.NOT_FOUND, f"no secret {request.deployment_name}")
            await stream.send_message(api_pb2.SecretGetOrCreateResponse(secret_id=known))
            return
        name = self._new("st")
        self.secrets[name] = dict(request.env_dict)
        await stream.send_message(api_pb2.SecretGetOrCreateResponse(secret_id=name))

    async def ImageGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        name = self._new("im")
        self.images[name] = request.image
        done = RESULT(status=RESULT.GENERIC_STATUS_SUCCESS)
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id=name, result=done))

    async def SandboxCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        definition, name = request.definition, self._new("sb")
        environment: dict[str, str] = {}
        for secret in definition.secret_ids:
            environment |= self.secrets[secret]
        self.definitions[name] = definition
        self.tags[name] = {each.tag_name: each.tag_value for each in request.tags}
        self.containers[name] = Container(definition.entrypoint_args, environment, definition.timeout_secs)
        metadata = api_pb2.SandboxHandleMetadata(app_id=request.app_id)
        await stream.send_message(api_pb2.SandboxCreateResponse(sandbox_id=name, metadata=metadata))

    async def SandboxListV2(self, stream: Any) -> None:
        """Those that run and have all the tags, in one page: what came before the first of it is nothing."""
        request = await stream.recv_message()
        asked = {each.tag_name: each.tag_value for each in request.tags}.items()
        running = [
            name for name, each in self.containers.items() if each.code is None and asked <= self.tags[name].items()
        ]
        metadata = api_pb2.SandboxHandleMetadata(app_id=request.app_id)
        shown = [] if request.before_timestamp else running
        infos = [api_pb2.SandboxInfo(id=name, created_at=1.0, metadata=metadata) for name in shown]
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=infos))

    async def SandboxGetTaskId(self, stream: Any) -> None:
        request = await stream.recv_message()
        await stream.send_message(api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{request.sandbox_id}"))

    async def SandboxWait(self, stream: Any) -> None:
        request = await stream.recv_message()
        if request.sandbox_id not in self.containers:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {request.sandbox_id}")
        deadline = time.monotonic() + request.timeout
        while (code := self.containers[request.sandbox_id].code) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        response = api_pb2.SandboxWaitResponse(metadata=api_pb2.SandboxHandleMetadata(app_id="ap-crf-diloco"))
        if code is not None:
            response.result.CopyFrom(self._result(request.sandbox_id, code))
        await stream.send_message(response)

    def _result(self, name: str, code: int) -> Any:
        if self.containers[name].stopped:
            return RESULT(status=RESULT.GENERIC_STATUS_TERMINATED)
        status = RESULT.GENERIC_STATUS_SUCCESS if code == 0 else RESULT.GENERIC_STATUS_FAILURE
        return RESULT(status=status, exitcode=code)

    async def SandboxTerminate(self, stream: Any) -> None:
        request = await stream.recv_message()
        self.containers[request.sandbox_id].stop()
        await stream.send_message(api_pb2.SandboxTerminateResponse())

    async def AppFetchLogs(self, stream: Any) -> None:
        request = await stream.recv_message()
        lines = self.containers[request.task_id.removeprefix("ta-")].lines()[-request.limit :]
        items = [
            api_pb2.TaskLogs(data=f"{line}\n", timestamp=time.time(), file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT)
            for line in lines
        ]
        batch = api_pb2.TaskLogsBatch(task_id=request.task_id, items=items)
        await stream.send_message(api_pb2.AppFetchLogsResponse(batches=[batch]))

    async def AppClientDisconnect(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(Empty())


class ModalServer:
    """The service on a port of its own, in a thread of its own."""

    def __init__(self) -> None:
        self.service = ModalService()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    async def _start(self) -> int:
        self._server = Server([self.service])
        await self._server.start("127.0.0.1", 0)
        return self._server._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        for container in self.service.containers.values():
            container.close()

        async def stop() -> None:
            self._server.close()
            await self._server.wait_closed()
            await asyncio.sleep(0.2)  # connections that were told to close do

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
