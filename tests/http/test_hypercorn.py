"""The app runs on another ASGI server, too: Hypercorn's trio worker."""

from __future__ import annotations

import json

import httpx
import hypercorn.trio
import numpy as np
import trio
from hypercorn.config import Config

from flowserve.http.api.app import make_app
from flowserve.http.server.server import open_listeners
from flowserve.runtime.engine.engine import Engine


async def test_the_app_answers_under_hypercorn(engine: Engine) -> None:
    (listener,) = open_listeners("127.0.0.1", 0)
    port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    over = trio.Event()
    app = make_app(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: hypercorn.trio.serve(app, config, shutdown_trigger=over.wait, mode="asgi"))  # type: ignore[arg-type]
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            assert (await client.get("/v2/health/ready")).status_code == 200
            assert (await client.get("/v2/models/double")).json()["name"] == "double"
            assert (await client.get("/nope")).json()["error"].startswith("Not Found: ")
            array = np.arange(40_000, dtype=np.float32).reshape(-1, 4)[:16]
            header = json.dumps(
                {
                    "inputs": [
                        {
                            "name": "IN",
                            "datatype": "FP32",
                            "shape": list(array.shape),
                            "parameters": {"binary_data_size": array.nbytes},
                        }
                    ],
                    "parameters": {"binary_data_output": True},
                }
            ).encode()
            answer = await client.post(
                "/v2/models/double/infer",
                content=header + array.tobytes(),
                headers={"Inference-Header-Content-Length": str(len(header))},
            )
            assert answer.status_code == 200
            cut = int(answer.headers["inference-header-content-length"])
            assert answer.content[cut:] == (array * 2).tobytes()
        viewer = await trio.open_tcp_stream("127.0.0.1", port)
        await viewer.send_all(b"GET /live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = b""
        while b"double" not in seen:
            seen += await viewer.receive_some()
        await viewer.aclose()
        over.set()
