"""Submit a job and read its result with nats-py alone, as a tenant.

Before: `wooly up`, `wooly export examples/job.py:build --blobs job/`, and credentials from the REST that `wooly up` prints:
curl -d '{}' -H 'Content-Type: application/json' -H "Authorization: Bearer $TOKEN" $REST/api/v1/credentials > me.json
(TOKEN is an API token; a stack that asks for none needs no such header). nats-py wants `nkeys` for credentials.

Run: python examples/job_over_nats.py me.json job/ MODULE_DIGEST input.bin
"""

import asyncio
import base64
import hashlib
import json
import sys
import uuid
from pathlib import Path

import nats
from nats.aio.client import RawCredentials


async def main(me, folder, module, path):
    me = json.loads(Path(me).read_text())
    shown = RawCredentials(me["credentials"])
    nc = await nats.connect(me["nats_url"], user_credentials=shown, inbox_prefix=me["inbox"])

    async def ask(what, **message):
        reply = await nc.request(f"wooly.v1.{what}.{me['tenant']}", json.dumps(message).encode(), timeout=20)
        return json.loads(reply.data)

    for blob in [*Path(folder).iterdir(), Path(path)]:  # of at most 512 KiB each; larger ones go in pieces
        content = blob.read_bytes()
        about = {"digest": hashlib.blake2b(content, digest_size=32).hexdigest(), "nbytes": len(content)}
        await ask("rpc.router.blob.put", **about, upload=uuid.uuid4().hex, data=base64.b64encode(content).decode())
    events = await nc.subscribe(f"wooly.v1.evt.router.task.changed.{me['tenant']}")
    inputs = [{"name": "x", "digest": about["digest"]}]
    job = await ask("cmd.router.job.submit", job_id=uuid.uuid4().hex, module=module, inputs=inputs)
    state = "pending"
    while state in ("pending", "started"):
        event = json.loads((await events.next_msg(60)).data)
        if event["task_id"] == job["job_id"]:
            state = event["state"]
            print(state, event["reason"])
    for output in event["outputs"]:
        piece = await ask("rpc.router.blob.get", digest=output["digest"])
        print(output["name"], output["dtype"], output["sizes"], base64.b64decode(piece["data"])[:16].hex())
    await nc.close()


asyncio.run(main(*sys.argv[1:]))
