"""Tinker's API over HTTP: requests are answered with a promise, whose result the client fetches.

https://tinker-docs.thinkingmachines.ai/api-reference; the messages are those of the package `tinker`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import signal
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any

import attrs
import click
from aiohttp import web
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as messages

from rlsdk.errors import EnvironmentFault, ValueFault
from rlsdk_tinker.data import RequestError
from rlsdk_tinker.service import TinkerService

KEPT = 4096
"""Number of results that are kept: a client whose connection breaks asks again."""
WAIT = 20.0
"""Seconds after which a client that waits for a result is told to ask again; it gives up after 45."""
GRACE = 2.0
"""Seconds for the client to learn of a failure before the server ends."""
MOST_BYTES = 256 * 2**20
"""Maximum bytes of a request; clients send at most 5 MB of training data at once."""
CLIENT_CONFIG = {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "custom_loss_server_side": False}
"""Chunks of a batch come one after the other, so that requests are executed in the order in which they arrive."""
Work = Callable[[], Awaitable[Any]]


@attrs.define(eq=False)
class Promises:
    """Results of requests, by id: a request that is sent twice is executed once.

    Attributes:
        ended: Completes when the server should end, with an exception if engines or learner have failed.
    """

    ended: asyncio.Future[None]
    _results: OrderedDict[str, asyncio.Future[Any]] = attrs.field(factory=OrderedDict)
    _tasks: set[asyncio.Task[None]] = attrs.field(factory=set)
    _order: asyncio.Lock = attrs.field(factory=asyncio.Lock)

    def begin(self, request: str, work: Work, *, in_order: bool) -> None:
        """Start a request, unless it has been sent before.

        Args:
            request: Id of the request.
            work: Executes it.
            in_order: True to wait for all earlier requests of this kind.
        """
        if request in self._results:
            return
        found = self._results[request] = asyncio.get_running_loop().create_future()
        while len(self._results) > KEPT and next(iter(self._results.values())).done():
            self._results.popitem(last=False)

        async def run() -> None:
            try:
                async with self._order if in_order else nullcontext():  # the lock is fair: first come, first served
                    result = await work()
            except (RequestError, ValueFault) as error:
                result = {"error": str(error), "category": "user"}
            except Exception as error:  # noqa: BLE001 - the client gets it, and the server ends
                result = {"error": f"the server ends: {error}", "category": "server"}
                asyncio.get_running_loop().call_later(GRACE, self._end, error)
            found.set_result(result)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    async def result(self, request: str) -> Any:
        """Wait for a result: JSON or the bytes of a protobuf message.

        Raises:
            KeyError: There is no such request, or its result was dropped.
        """
        done, _ = await asyncio.wait([self._results[request]], timeout=WAIT)
        if not done:
            return {"type": "try_again", "request_id": request, "queue_state": "active"}
        return self._results[request].result()


class Api:
    """Handlers of the API's routes."""

    def __init__(self, service: TinkerService, key: str | None, ended: asyncio.Future[None]) -> None:
        """Serve a service; with a key, requests must carry it."""
        self._service, self._key, self._promises = service, key, Promises(ended)

    def application(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._checked])
        posts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "client/config": lambda body: CLIENT_CONFIG,
            "client/dynamic_config": lambda body: {},
            "create_session": self._create_session,
            "session_heartbeat": lambda body: {"type": "session_heartbeat"},
            "sessions/{session}/finish": lambda body: {},
            "telemetry": lambda body: {"status": "accepted"},
            "create_model": self._create_model,
            "get_info": self._info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
        }
        for name, handler in posts.items():
            app.router.add_post(f"/api/v1/{name}", _json_handler(handler))
        app.router.add_post("/api/v1/forward_backward", self._forward_backward)
        app.router.add_post("/api/v1/retrieve_future", self._retrieve)
        app.router.add_get("/api/v1/healthz", _json_handler(lambda body: {"status": "ok"}))
        app.router.add_get("/api/v1/get_server_capabilities", _json_handler(self._capabilities))
        app.router.add_get("/api/v1/samplers/{sampler}", self._sampler)
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests without a key, such as those of web pages, or with another key, and give faults a reason."""
        given = request.headers.get("X-API-Key", "")
        if not given or (self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode())):
            return web.json_response({"detail": "this server expects another TINKER_API_KEY"}, status=401)
        try:
            found: web.StreamResponse = await handler(request)
        except RequestError as error:
            return web.json_response({"detail": str(error)}, status=422)
        except web.HTTPNotFound:
            return web.json_response({"detail": f"rlsdk-tinker does not serve {request.path}"}, status=404)
        return found

    def _create_session(self, body: Mapping[str, Any]) -> dict[str, Any]:
        service = self._service
        trained = "an adapter" if service.lora_rank else "all weights, whatever LoRA settings the client has,"
        told = f"rlsdk trains {trained} of {service.model_name}, one client at a time"
        return {"type": "create_session", "session_id": uuid.uuid4().hex, "info_message": told}

    def _capabilities(self, body: Mapping[str, Any]) -> dict[str, Any]:
        service = self._service
        model = {"model_name": service.model_name, "max_context_length": service.longest}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    def _create_model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model = f"{body['session_id']}:train:{body['model_seq_id']}"
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise RequestError(f"the client asked for the optimiser {kind!r}; this server has AdamW")

        def work() -> Awaitable[Any]:
            return self._service.create_model(model, body["base_model"], body.get("lora_config"))

        return self._promise(f"{model}:0", work, model)

    def _info(self, body: Mapping[str, Any]) -> dict[str, Any]:
        service = self._service
        name, rank = service.model_name, service.lora_rank
        return {
            "type": "get_info",
            "model_id": body["model_id"],
            "model_name": name,
            "model_data": {"model_name": name, "tokenizer_id": service.tokenizer_name},
            "is_lora": rank is not None,
            "lora_rank": rank,
        }

    def _optim_step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if "adam_params" not in body:
            raise RequestError("the client asked for another optimiser than AdamW, which this server has")
        return self._trained(body, lambda: self._service.optim_step(body["adam_params"]))

    def _save_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = body.get("path") or f"{body.get('seq_id', 0):06d}"
        return self._trained(body, lambda: self._service.save(name))

    def _load_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        known = body.get("model_id")
        model = known or f"{body['session_id']}:train:{body['model_seq_id']}"

        def work() -> Awaitable[Any]:
            if known is not None:
                self._service.check_model(known)
            return self._service.load(body["path"], optimizer=body["optimizer"], model_id=model)

        return self._promise(f"{model}:{body.get('seq_id') or 0}", work, model)

    def _save_for_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        session = f"{body['model_id'].partition(':')[0]}:sample:{body.get('sampling_session_seq_id')}"
        name, kind = body.get("path"), body.get("kind", "snapshot")
        return self._trained(body, lambda: self._service.save_for_sampler(name, session, kind))

    def _create_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        session = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        self._service.create_sampler(session, body.get("base_model"), body.get("model_path"))
        return {"type": "create_sampling_session", "sampling_session_id": session}

    def _sample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        session = body.get("sampling_session_id")
        if session not in self._service.samplers:
            raise RequestError(f"unknown sampling session {session!r}; create another sampling client")
        request = f"{session}:{body['seq_id']}"
        # The learner computes the logprobs of a prompt, in its turn.
        in_order = bool(body.get("prompt_logprobs"))
        self._promises.begin(request, lambda: self._service.sample(session, body), in_order=in_order)
        ids = [f"{request}:{i}" for i in range(body.get("num_samples", 1))]
        return {"request_id": request, "sample_sequence_ids": ids}

    async def _sampler(self, request: web.Request) -> web.Response:
        session = request.match_info["sampler"]
        found = self._service.samplers.get(session)
        if found is None:
            raise web.HTTPNotFound
        base = self._service.model_name
        return web.json_response({"sampler_id": session, "base_model": base, "model_path": found.path})

    async def _forward_backward(self, request: web.Request) -> web.Response:
        message = messages.ForwardBackwardRequest()
        try:
            message.ParseFromString(await request.read())
        except DecodeError as error:
            raise RequestError("the body cannot be read as a ForwardBackwardRequest") from error
        body = {"model_id": message.model_id, "seq_id": message.seq_id}
        return web.json_response(self._trained(body, lambda: self._service.forward_backward(message)))

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            found = await self._promises.result(body["request_id"])
        except KeyError:
            return web.json_response({"detail": f"unknown request {body.get('request_id')}"}, status=410)
        if isinstance(found, bytes):
            return web.Response(body=found, content_type="application/x-protobuf")
        return web.json_response(found)

    def _trained(self, body: Mapping[str, Any], work: Work) -> dict[str, Any]:
        """Promise the result of a request about the model in training."""
        model = body["model_id"]

        def checked() -> Awaitable[Any]:
            self._service.check_model(model)
            return work()

        return self._promise(f"{model}:{body.get('seq_id')}", checked, model)

    def _promise(self, request: str, work: Work, model: str) -> dict[str, Any]:
        self._promises.begin(request, work, in_order=True)
        return {"request_id": request, "model_id": model}


def _json_handler(handler: Callable[[dict[str, Any]], Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            body = await request.json() if request.can_read_body else {}
            return web.json_response(handler(body))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"the body is not what {request.path} expects: {error!r}") from error

    return handle


def check_key(host: str, key: str | None) -> None:
    """Refuse to serve other machines without a key.

    Raises:
        click.UsageError: Other machines reach the address, and there is no key.
    """
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and key is None:
        raise click.UsageError(f"other machines may reach {host}: set TINKER_API_KEY, which clients must then send")


async def serve(service: TinkerService, host: str, port: int, key: str | None) -> None:
    """Serve until SIGINT or SIGTERM, or until engines or learner fail, whose exception is raised."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    runner = web.AppRunner(Api(service, key, ended).application(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            fault = f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
            raise EnvironmentFault(fault) from error
        settings = f"TINKER_BASE_URL=http://{host}:{runner.addresses[0][1]}"
        if key is None:
            settings += " TINKER_API_KEY=tml-local"  # the client demands one
        click.echo(f"serving {service.model_name}; for clients: export {settings}")
        await ended
    finally:
        await runner.cleanup()
