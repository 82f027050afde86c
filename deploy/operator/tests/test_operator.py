"""The whole operator, against a simulated API server and a simulated controller."""

import asyncio
import base64
import contextlib
import json
import socket
import threading

import aiohttp
import jsonpatch
import kopf
import pytest
from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from wooly_operator import handlers, reconciler
from wooly_operator.app import serve
from wooly_operator.core import names
from wooly_operator.errors import UnreachableError
from wooly_operator.reconciler import Reconciler
from wooly_operator.settings import OperatorSettings

GIB = 1 << 30
GROUP = f"{names.GROUP}/{names.VERSION}"
RESOURCES = ("clustergpupolicies", "woolynodepolicies", "gpuclasses", "nodegpustatuses")


class FakeController:
    """The router's REST with one executor."""

    def __init__(self):
        self.percent, self.own, self.down = 0, {}, False
        self.writes = []
        self.traceparent = ""

    def app(self):
        app = web.Application()
        app.router.add_get("/api/v1/nodes", self.nodes)
        app.router.add_get("/api/v1/config", self.config)
        app.router.add_put("/api/v1/config", self.put_config)
        app.router.add_put("/api/v1/nodes/{node}/config", self.put_node)
        return app

    async def nodes(self, request):
        if self.down:
            return web.json_response({"code": "internal", "message": "away", "retryable": True}, status=503)
        device = {"name": "NVIDIA L40S", "vendor": "nvidia", "runtime": "cuda", "total_memory": 48 * GIB, "cores": 142}
        own = self.own.get("n1")
        gpu = {
            "executor_id": "n1-0", "node": "n1", "state": "alive", "age_s": 0.5, "device": device, "sessions": 1,
            "memory_used": GIB, "utilization": 0.5, "wish": "active", "groups": [],
        }  # fmt: skip
        return web.json_response({
            "nodes": [{
                "node_id": "n1", "state": "active", "wish": "active", "groups": [], "tasks": 1, "gpus": [gpu],
                "overcommit_vram_percent": own, "effective_overcommit_vram_percent": self.percent if own is None else own,
            }]
        })  # fmt: skip

    async def config(self, request):
        return web.json_response({"default_vram_overcommit_percent": self.percent, "job_attempts": 5})

    async def put_config(self, request):
        assert request.headers["Authorization"] == "Bearer secret"
        body = await request.json()
        assert list(body) == ["default_vram_overcommit_percent"]
        self.traceparent = request.headers.get("traceparent", "")
        self.percent = body["default_vram_overcommit_percent"]
        self.writes.append(("cluster", self.percent))
        return await self.config(request)

    async def put_node(self, request):
        body = await request.json()
        assert list(body) == ["overcommit_vram_percent"]
        self.own[request.match_info["node"]] = body["overcommit_vram_percent"]
        self.writes.append((request.match_info["node"], body["overcommit_vram_percent"]))
        return web.json_response(body)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


class Running:
    def __init__(self, task, cluster, controller, webhook, health):
        self.task, self.cluster, self.controller, self.webhook, self.health = task, cluster, controller, webhook, health

    def node(self):
        return self.cluster.objects["v1/nodes", None, "n1"].last.raw

    async def until(self, condition):
        """Wait for a condition, until the timeout of the test."""
        while True:
            if self.task.done():
                self.task.result()
            with contextlib.suppress(KeyError, TypeError):
                if condition():
                    return
            await asyncio.sleep(0.02)

    async def review(self, handler, pod, operation="CREATE", old=None):
        """The answer to the API server's admission request for a pod."""
        request = {
            "uid": "u", "operation": operation, "object": pod, "oldObject": old, "userInfo": {"username": "x"},
            "kind": {"group": "", "version": "v1", "kind": "Pod"}, "dryRun": False,
            "resource": {"group": "", "version": "v1", "resource": "pods"}, "namespace": "d", "name": "p",
        }  # fmt: skip
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        async with aiohttp.ClientSession() as session, session.post(f"{self.webhook}/{handler}", json=body) as answer:
            return (await answer.json())["response"]


def pod(annotations, **spec):
    meta = {"name": "p", "namespace": "d", "labels": {names.RUNTIME_LABEL: names.RUNTIME}, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [{"name": "c"}], **spec}}


def patched(body, response):
    return jsonpatch.apply_patch(body, json.loads(base64.b64decode(response["patch"])))


@pytest.fixture
def interval():
    return 0.2


@pytest.fixture
async def running(kmock, interval):
    everything = ("get", "list", "watch", "patch")
    kmock.resources["v1/nodes"] = {"kind": "Node", "verbs": everything, "namespaced": False}
    kmock.resources["v1/pods"] = {"kind": "Pod", "verbs": everything, "namespaced": True}
    crds = "apiextensions.k8s.io/v1/customresourcedefinitions"
    for name in ("v1/namespaces", crds):
        kmock.resources[name] = {"kind": name.rsplit("/", 1)[1], "verbs": everything, "namespaced": False}
    for plural in RESOURCES:
        kmock.resources[f"{GROUP}/{plural}"] = {
            "kind": plural,
            "verbs": everything,
            "namespaced": False,
            "subresources": {"status"},
        }
    kmock.objects["v1/nodes", None, "n1"] = {"metadata": {"name": "n1", "labels": {"disk": "ssd"}}}
    kmock.objects[f"{GROUP}/gpuclasses", None, "big"] = {
        "metadata": {"name": "big"}, "spec": {"selector": {"vendor": "nvidia", "minVram": "40Gi"}, "defaults": {"priority": 1}}
    }  # fmt: skip
    controller = FakeController()
    runner = web.AppRunner(controller.app())
    await runner.setup()
    rest, hook, health = free_port(), free_port(), free_port()
    await web.TCPSite(runner, "127.0.0.1", rest).start()
    settings = OperatorSettings(
        controller_url=f"http://127.0.0.1:{rest}", token="secret", client_url="nats://nats:4222", reconcile_s=interval,
        webhook_port=hook, health_url=f"http://127.0.0.1:{health}/healthz",
    )  # fmt: skip
    stop = threading.Event()
    server = str(kmock.url)
    # kopf gets its own event loop, because it ends only when its loop has no other tasks.
    operator = asyncio.to_thread(lambda: asyncio.run(serve(settings, lambda: kopf.ConnectionInfo(server=server), stop)))
    task = asyncio.create_task(operator)
    result = Running(task, kmock, controller, f"http://127.0.0.1:{hook}", f"http://127.0.0.1:{health}/healthz")
    try:
        await result.until(lambda: result.node()["metadata"]["labels"][names.GPU] == "true")
        yield result
    finally:
        stop.set()
        await task
        await runner.cleanup()


@pytest.mark.connected
async def test_operator_labels_nodes_and_writes_their_status(running):
    labels = running.node()["metadata"]["labels"]
    assert (
        labels["disk"] == "ssd"
        and labels[names.VRAM_FIT] == str(47 << 10)
        and labels["woolyai.com/class.big"] == "true"
    )
    status = (f"{GROUP}/nodegpustatuses", None, "n1")
    await running.until(lambda: running.cluster.objects[status].last.raw["status"]["gpus"][0]["model"] == "NVIDIA L40S")


@pytest.mark.connected
async def test_operator_applies_and_reverts_policies(running):
    objects = running.cluster.objects
    objects[f"{GROUP}/clustergpupolicies", None, "default"] = {
        "metadata": {"name": "default"}, "spec": {"defaultVramOvercommitPercent": 50}
    }  # fmt: skip
    await running.until(lambda: running.controller.percent == 50)
    objects["v1/nodes", None, "n1"].patch({"metadata": {"labels": {names.OVERCOMMIT_LABEL: "120"}}})
    await running.until(lambda: running.controller.own == {"n1": 120})
    await running.until(lambda: running.node()["metadata"]["labels"][names.VRAM_FIT] == str(48 << 10))
    objects["v1/nodes", None, "n1"].patch({"metadata": {"labels": {names.OVERCOMMIT_LABEL: None}}})
    await running.until(lambda: running.controller.own == {"n1": None})
    assert running.controller.writes == [("cluster", 50), ("n1", 120), ("n1", None)]


@pytest.mark.connected
@pytest.mark.parametrize("interval", [3600.0])
async def test_operator_cluster_change_triggers_reconciliation(running):
    async with aiohttp.ClientSession() as session:  # change the object through the API, so that the watch gets an event
        change = {"metadata": {"labels": {names.OVERCOMMIT_LABEL: "120"}}}
        await session.patch(f"{running.cluster.url}/api/v1/nodes/n1", json=change)
    await running.until(lambda: running.controller.own == {"n1": 120})


@pytest.mark.connected
async def test_operator_unreachable_controller_is_retried(running):
    running.controller.down = True
    running.cluster.objects[f"{GROUP}/clustergpupolicies", None, "default"] = {
        "metadata": {"name": "default"}, "spec": {"defaultVramOvercommitPercent": 50}
    }  # fmt: skip
    await asyncio.sleep(0.5)
    assert running.node()["metadata"]["labels"][names.GPU] == "true" and running.controller.writes == []
    running.controller.down = False
    await running.until(lambda: running.controller.percent == 50)


@pytest.fixture
def spans(monkeypatch):
    """The ended spans of the operator."""
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    for module in (handlers, reconciler):
        monkeypatch.setattr(module, "tracer", provider.get_tracer("test"))
    return memory


@pytest.mark.connected
async def test_operator_traces_changes_and_admissions_and_passes_the_trace_to_the_controller(spans, running):
    running.cluster.objects[f"{GROUP}/clustergpupolicies", None, "default"] = {
        "metadata": {"name": "default"}, "spec": {"defaultVramOvercommitPercent": 50}
    }  # fmt: skip
    await running.until(lambda: running.controller.percent == 50)
    assert (await running.review("mutate-pod", pod({names.BESIDE_GPU: "true"})))["allowed"]
    await running.until(
        lambda: {"operator.SetClusterOvercommit", "operator.admit"} <= {s.name for s in spans.get_finished_spans()}
    )
    by_name = {s.name: s for s in spans.get_finished_spans()}
    assert by_name["operator.admit"].attributes["placement"] == "require"
    assert f"{by_name['operator.SetClusterOvercommit'].context.trace_id:032x}" in running.controller.traceparent


@pytest.mark.connected
async def test_admission_sets_environment_and_placement(running):
    asked = pod({names.POD_VRAM: "8Gi", names.GPU_CLASS: "big", names.SWAP: "false", names.BESIDE_GPU: "true"})
    response = await running.review("mutate-pod", asked)
    assert response["allowed"]
    made = patched(asked, response)
    variables = made["spec"]["containers"][0]["env"]
    assert [e["name"] for e in variables if "valueFrom" in e] == ["WOOLYAI_NODE"]
    env = {e["name"]: e["value"] for e in variables if "value" in e}
    assert env == {
        "WOOLYAI_CONTROLLER_URL": "nats://nats:4222", "WOOLYAI_REQUIRED_VRAM": str(8 * GIB), "WOOLYAI_PRIORITY": "1",
        "WOOLYAI_SWAP_FROM_VRAM": "0",
    }  # fmt: skip
    required = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert {"key": names.VRAM_FIT_PHYSICAL, "operator": "Gt", "values": ["8191"]} in required["nodeSelectorTerms"][0][
        "matchExpressions"
    ]
    assert (await running.review("validate-pod", made))["allowed"]


@pytest.mark.connected
@pytest.mark.parametrize(
    ("annotations", "spec", "word"),
    [
        ({names.PRIORITY: "9"}, {}, "0 (highest) to 4"),
        ({names.POD_VRAM: "49Gi"}, {}, "but the largest GPU"),
        ({names.GPU_CLASS: "none"}, {}, "does not exist; existing classes"),
        (
            {names.PRIORITY: "1"},
            {"containers": [{"name": "c", "env": [{"name": "WOOLYAI_PRIORITY", "value": "2"}]}]},
            "remove one of them",
        ),
    ],
)
async def test_admission_invalid_pod_is_refused_with_reason(running, annotations, spec, word):
    response = await running.review("validate-pod", pod(annotations, **spec))
    assert not response["allowed"] and word in response["status"]["message"] and response["status"]["code"] == 422


@pytest.mark.connected
async def test_admission_changed_annotation_of_pod_is_refused(running):
    old, new = pod({names.PRIORITY: "1"}), pod({names.PRIORITY: "2"})
    response = await running.review("validate-pod", new, "UPDATE", old)
    assert not response["allowed"] and names.PRIORITY in response["status"]["message"]
    assert (await running.review("validate-pod", old, "UPDATE", old))["allowed"]


@pytest.mark.connected
async def test_admission_unknown_annotation_is_a_warning(running):
    response = await running.review("validate-pod", pod({"woolyai.com/pod-vrm": "1Gi"}))
    assert response["allowed"] and "pod-vrm" in response["warnings"][0]


@pytest.mark.connected
async def test_operator_serves_health(running):
    async with aiohttp.ClientSession() as session, session.get(running.health) as answer:
        assert answer.status == 200


async def test_reconciler_cancelled_while_a_change_arrives_ends():
    """Its process ends only when all tasks have ended."""

    class Unreachable:
        async def list_objects(self):
            raise UnreachableError("nobody answers")

    reconciler = Reconciler(Unreachable(), None, 3600.0)
    task = asyncio.create_task(reconciler.run())
    await asyncio.sleep(0.05)  # it waits for a change
    reconciler.changed()
    await asyncio.sleep(0)  # the change has arrived, and the task has not run yet
    task.cancel()
    await asyncio.wait((task,), timeout=10)
    assert task.cancelled()
