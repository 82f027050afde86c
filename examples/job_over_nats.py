"""Submit a job and read its result with nats-py alone. Before: `wooly up`, and `wooly export examples/job.py:build --blobs job/`.

Run: python examples/job_over_nats.py NATS_URL CREDS job/ MODULE_DIGEST input.bin

CREDS is a .creds file for a NATS that asks for credentials (nats-py wants `nkeys` for it); "" for one that does not.
"""

import asyncio
import hashlib
import json
import pathlib
import sys
import uuid

import nats


async def main(url, creds, folder, module, path):
    client = await nats.connect(url, user_credentials=creds or None)
    js = client.jetstream()
    blobs = await js.object_store("WOOLY_BLOBS_default")
    for blob in [*pathlib.Path(folder).iterdir(), pathlib.Path(path)]:
        content = blob.read_bytes()
        await blobs.put(hashlib.blake2b(content, digest_size=32).hexdigest(), content)
    events = await js.subscribe("wooly.v1.evt.router.task.changed.default", ordered_consumer=True)
    job = {"job_id": uuid.uuid4().hex, "module": module}
    job["inputs"] = [{"name": "x", "digest": hashlib.blake2b(content, digest_size=32).hexdigest()}]
    await js.publish("wooly.v1.cmd.router.job.submit", json.dumps(job).encode())
    state = "pending"
    while state in ("pending", "started"):
        event = json.loads((await events.next_msg(60)).data)
        if event["task_id"] == job["job_id"]:
            state = event["state"]
            print(state, event["reason"])
    for output in event["outputs"]:
        result = await blobs.get(output["digest"])
        print(output["name"], output["dtype"], output["sizes"], result.data[:16].hex())
    await client.close()


asyncio.run(main(*sys.argv[1:]))
