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
    who = RawCredentials(me["credentials"])
    nc = await nats.connect(me["nats_url"], user_credentials=who, inbox_prefix=me["inbox"])

    async def ask(what, **message):
        subject, data = f"wooly.v1.{what}.{me['tenant']}", json.dumps(message).encode()
        return json.loads((await nc.request(subject, data, timeout=20)).data)

    for blob in [*Path(folder).iterdir(), Path(path)]:  # of at most 512 KiB each; larger ones go in pieces
        data, upload = blob.read_bytes(), uuid.uuid4().hex
        digest, text = hashlib.blake2b(data, digest_size=32).hexdigest(), base64.b64encode(data).decode()
        await ask("rpc.router.blob.put", digest=digest, nbytes=len(data), upload=upload, data=text)
    events = await nc.subscribe(f"wooly.v1.evt.router.task.changed.{me['tenant']}")
    name, inputs = uuid.uuid4().hex, [{"name": "x", "digest": digest}]
    await ask("cmd.router.job.submit", job_id=name, module=module, inputs=inputs)
    event = {}
    while event.get("task_id") != name or event["state"] in ("pending", "started"):
        event = json.loads((await events.next_msg(60)).data)
    print(event["state"], event["reason"])
    for output in event["outputs"]:
        piece = await ask("rpc.router.blob.get", digest=output["digest"])
        print(output["name"], output["dtype"], output["sizes"], base64.b64decode(piece["data"])[:16].hex())


asyncio.run(main(*sys.argv[1:]))
