"""Blobs in pieces: abandoned uploads do not count against their tenant for long."""

import pytest
from wooly_bus.blobs import BlobStore
from wooly_router.blobs import AbandonedUploads
from wooly_testkit.nats import nats_server as start_nats_server

pytestmark = pytest.mark.connected


@pytest.mark.on_both
async def test_duties_round_removes_abandoned_uploads_of_all_tenants(rig):
    with start_nats_server() as url:
        async with rig(url=url) as r:
            js = r.app.jetstream()
            stores = [BlobStore(js, t) for t in ("mine", "yo urs")]
            for store in stores:
                kept = await store.put(b"whole")
                await store.append("u" * 32, 0, b"x" * 1000, 0)
                assert (await store.held())[0] > 1000
            duties, uploads = r.duties(), AbandonedUploads(r.app, 0.0)
            await duties.round()  # these uploads may still be in progress
            assert [(await s.held())[0] > 1000 for s in stores] == [True, True]
            duties._uploads = uploads
            r.clock.now += 3600
            await duties.round()
            assert [(await s.held())[0] < 1000 for s in stores] == [True, True]
            assert await stores[0].get(kept, 5) == b"whole"
            # A bucket without uploads is examined again after a new piece.
            await stores[0].append("v" * 32, 0, b"y" * 1000, 0)
            await uploads.drop()
            assert (await stores[0].held())[0] < 1000
