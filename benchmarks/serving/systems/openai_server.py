"""Any server with OpenAI's completions API that takes and gives token ids, over HTTP: vLLM's, for one.

Requests run in a thread with an event loop; the driver only puts requests in and takes events out. Prompts
are token ids; `return_token_ids` (vLLM 0.10.2 or newer) brings the answer's ids, which the next prompt must
repeat.
"""

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import httpx2
import numpy as np

from benchmarks.serving.clock import RunClock
from benchmarks.serving.systems.base import (
    Ended,
    Event,
    FirstToken,
    ServingError,
    SystemFacts,
    SystemUnavailableError,
    TurnRequest,
)
from benchmarks.serving.systems.vllm_engine import counts_of, gpu_memory_in_use

CONNECTIONS = 2048
"""More than run at once."""


class OpenAIServerSystem:
    """A server at an address."""

    def __init__(self, url: str, clock: RunClock, *, transport: Any = None) -> None:
        """Args:
        url: up to and without `/v1`.
        clock: the driver's.
        transport: of httpx2, for tests; None: the network.

        Raises:
            SystemUnavailableError: nothing answers there, or it serves no model.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        self._clock = clock
        self._events: SimpleQueue[Event | BaseException] = SimpleQueue()
        self._tasks: set[asyncio.Task] = set()
        self._salt = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-client", daemon=True)
        self._thread.start()
        limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        self._client = httpx2.AsyncClient(
            base_url=self._url, timeout=None, limits=limits, transport=transport
        )
        try:
            models = self._call(self._get_json("/v1/models"))
            self._model = models["data"][0]["id"]
        except (httpx2.HTTPError, KeyError, IndexError, ValueError) as error:
            self.close()
            raise SystemUnavailableError(f"{self._url}: {error!r}") from error
        self.facts = SystemFacts(
            name="openai-server",
            versions={"server": self._version()},
            settings={"model": self._model},
            tells_tiers=False,
        )

    def warm_up(self) -> None:
        """The server is as warm as whoever started it has made it."""

    def submit(self, request: TurnRequest) -> None:
        """See `System.submit`."""
        self._loop.call_soon_threadsafe(self._start, request)

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """See `System.poll`."""
        events: list[Event] = []
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            while True:
                if isinstance(event, BaseException):
                    raise ServingError(f"{self._url}: {event!r}") from event
                events.append(event)
                event = self._events.get_nowait()
        except Empty:
            return events

    def settle(self) -> None:
        """Nothing goes on behind answers that it could be asked to finish."""

    def reset(self) -> None:
        """Break off what runs. From now on prompts have another `cache_salt`, so that nothing cached is
        found; `serve` notices a server that doesn't heed it."""
        self._call(self._break_off())
        while not self._events.empty():
            self._events.get_nowait()
        self._salt += 1

    def counters(self) -> Mapping[str, float]:
        """None are read."""
        return {}

    def memory_bytes(self) -> int | None:
        """What this machine's GPU has in use; None where it has none."""
        return gpu_memory_in_use()

    def close(self) -> None:
        """See `System.close`. The server goes on."""
        self._call(self._break_off())
        self._call(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- in the thread ---------------------------------------------------------------------------

    def _start(self, request: TurnRequest) -> None:
        task = self._loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: TurnRequest) -> None:
        try:
            await self._stream(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (goes to the driver, which raises it)
            self._events.put(error)

    async def _stream(self, request: TurnRequest) -> None:
        prompt = request.prompt()
        body = {
            "model": self._model,
            "prompt": prompt.tolist(),
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": f"run {self._salt}",
        }
        name, output, cached = request.conversation_id, [], 0
        end_s = self._clock()
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx2.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise ServingError(f"status {response.status_code}: {text[:500]}")
            async for chunk in _chunks(response.aiter_lines()):
                cached = _cached_tokens(chunk, cached)
                ids = chunk["choices"][0].get("token_ids") if chunk.get("choices") else None
                if not ids:
                    continue
                end_s = self._clock()
                if not output:
                    self._events.put(FirstToken(conversation_id=name, time_s=end_s))
                output.extend(ids)
        if not output:
            raise ServingError("the server gave no token ids: `return_token_ids` needs vLLM 0.10.2 or newer")
        counts = counts_of(prompt=len(prompt), history=len(prompt) - len(request.new), cached=cached)
        ids = np.asarray(output, np.int32)
        self._events.put(Ended(conversation_id=name, time_s=end_s, output=ids, counts=counts))

    async def _break_off(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _get_json(self, path: str) -> Any:
        response = await self._client.get(path)
        response.raise_for_status()
        return response.json()

    def _version(self) -> str:
        try:
            return str(self._call(self._get_json("/version"))["version"])
        except (httpx2.HTTPError, KeyError, ValueError, TypeError):
            return "unknown"

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _chunks(lines: Any) -> Any:
    """The JSON values of a stream of server-sent events."""
    async for line in lines:
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data and data != "[DONE]":
            yield json.loads(data)


def _cached_tokens(chunk: Mapping[str, Any], before: int) -> int:
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    return max(before, details.get("cached_tokens") or 0)
