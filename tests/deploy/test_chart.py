"""The Helm chart: linted and rendered with many values; every object is valid, and services understand their settings."""

import copy
import functools
import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import helm_python as helm
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml
from wooly_bus import contracts, leadership, web
from wooly_bus.contract_types import Log, WorkQueue
from wooly_compiler.actor import BUCKET_MAX_BYTES
from wooly_scheduler import actor as scheduler

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "wooly"
#: Kinds without a schema in Kubernetes: the operator's (checked against its CRDs), and the Prometheus operator's.
FILES_OF_KEYS = {"nats.conf", "service.creds", "signing.seed", "channel.seed", "channel.public", "checkpoint.key"}
OWN = {"ClusterGPUPolicy", "ServiceMonitor"}

VALUES = {
    "defaults": {},
    "everything": {
        "image": {"registry": "registry.example.org/ml", "pullSecrets": [{"name": "pull"}]},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"a": "b"}}, "dashboard": {"enabled": True}},
        "networkPolicies": {"clientCidrs": ["10.0.0.0/8"]},
        "tracing": {"otlpEndpoint": "http://collector:4318", "keep": True},
        "priorityClassName": "high",
        "podAnnotations": {"x": "y"},
        "nodeSelector": {"pool": "control"},
        "tolerations": [{"operator": "Exists"}],
        "nats": {"storageClass": "fast"},
        "postgresql": {"storageClass": "fast"},
        "executors": {
            "pools": [
                {
                    "name": "h100",
                    "image": "wooly-executor-cuda",
                    "executorsPerNode": 8,
                    "gpuResource": "nvidia.com/gpu",
                    "memory": 80 << 30,
                    "nodeSelector": {"gpu": "h100"},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                    "resources": {"limits": {"memory": "64Gi"}},
                    "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "4"}],
                },
                {"name": "cpu", "image": "wooly-executor-cpu", "executorsPerNode": 1},
            ]
        },
    },
    "external": {
        "existingSecret": "mine",
        "nats": {"enabled": False, "externalUrl": "nats://nats.example.org:4222"},
        "postgresql": {"enabled": False, "external": {"host": "db.example.org"}},
        "operator": {"admission": {"existingSecret": "tls", "caBundle": "Q0E="}},
    },
    "keys": {"keysSecret": "installation", "nats": {"replicas": 1}},
    "small": {
        "nats": {"replicas": 1},
        "scheduler": {"enabled": False},
        "compiler": {"enabled": False},
        "operator": {"enabled": False},
        "networkPolicies": {"enabled": False},
    },
}


OPEN = "everyone who reaches this address is administrator"


def rendered(values):
    """All objects of a release `w` in the namespace `ns`."""
    if "keysSecret" not in values:
        values = {"openToNetwork": OPEN, **values}
    return copy.deepcopy(_rendered(json.dumps(values)))


@functools.cache
def _rendered(values):
    given = json.loads(values)
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(given)
        files = chart.render(given, name="w", namespace="ns")
    return [
        o
        for name, text in files.items()
        if name.endswith(".yaml")
        for o in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if o
    ]


@pytest.fixture(scope="module", params=sorted(VALUES))
def objects(request):
    return rendered(VALUES[request.param])


def of_kind(objects, *kinds):
    return [o for o in objects if o["kind"] in kinds]


def pods(objects):
    return [o["spec"]["template"]["spec"] for o in of_kind(objects, "Deployment", "StatefulSet", "DaemonSet")]


def containers(objects):
    return [c for pod in pods(objects) for c in pod["containers"]]


def crds():
    return [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").iterdir())]


#: Kubernetes's schemas are megabytes large, so each is read once.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def check(obj):
    """Validate strictly: unknown fields are errors, too."""
    _check(json.dumps(obj, sort_keys=True))


@functools.cache
def _check(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own warnings about its resources
        kubernetes_validate.validate(json.loads(text), "1.35", strict=True)


def test_chart_passes_helm_lint():
    findings = helm.lint(str(CHART))
    assert findings["errors"] == []
    assert [m for m in findings["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize(
    ("resources", "images"),
    [
        ([""], ["wooly-compiler"]),
        (["", "nvidia.com/gpu", "nvidia.com/gpu"], ["wooly-compiler", "wooly-compiler-cuda"]),
        (["amd.com/gpu"], ["wooly-compiler", "wooly-compiler-rocm"]),
    ],
)
def test_chart_pool_of_gpus_gets_a_compiler_for_them(resources, images):
    pools = [
        {"name": f"p{i}", "image": "x", "executorsPerNode": 1, "gpuResource": resource}
        for i, resource in enumerate(resources)
    ]
    found = of_kind(rendered({"executors": {"pools": pools}}), "Deployment")
    compilers = {o["metadata"]["name"]: pod["containers"][0]["image"] for o in found if "compiler" in o["metadata"]["name"]
                 for pod in pods([o])}  # fmt: skip
    assert [image.split(":")[0] for image in compilers.values()] == images
    selectors = [json.dumps(o["spec"]["selector"]) for o in found]
    assert len(set(selectors)) == len(selectors)  # no Deployment takes another's pods


def test_chart_default_claim_of_sessions_reaches_the_router():
    found = rendered({"controller": {"defaultVramClaim": 8 << 30}})
    values = {e["name"]: e.get("value") for c in containers(found) for e in c.get("env", [])}
    assert values["CONTROLLER_DEFAULT_VRAM_CLAIM"] == str(8 << 30)


@pytest.mark.parametrize("said", ["", "true"])
def test_chart_with_open_rest_requires_confirmation(said):
    with pytest.raises(Exception, match="REST asks nobody for a token: set keysSecret"):
        rendered({"openToNetwork": said})
    env = {e["name"]: e.get("value") for c in containers(rendered({})) for e in c["env"]}
    assert env["WOOLY_ROUTER_OPEN_TO_NETWORK"] == env["WOOLY_METERING_OPEN_TO_NETWORK"] == web.OPEN == OPEN
    keyed = {e["name"] for c in containers(rendered(VALUES["keys"])) for e in c["env"]}
    assert not any("OPEN_TO_NETWORK" in name for name in keyed)


def test_objects_match_kubernetes_schemas(objects):
    for obj in objects:
        if obj["kind"] not in OWN:
            check(obj)
        assert len(obj["metadata"]["name"]) <= 63
    ids = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(ids) == len(set(ids))


def test_crds_are_valid_and_watched_by_operator():
    from wooly_operator.core import names

    for crd in crds():
        check(crd)
        assert crd["spec"]["group"] == names.GROUP and crd["spec"]["scope"] == "Cluster"
    handlers = (ROOT / "deploy/operator/src/wooly_operator/handlers.py").read_text()
    client = (ROOT / "deploy/operator/src/wooly_operator/kubernetes.py").read_text()
    for crd in crds():
        assert crd["spec"]["names"]["plural"] in handlers + client


def test_custom_objects_match_their_crds():
    import jsonschema
    from wooly_operator.core.objects import cluster_policy

    policy = of_kind(rendered({"controller": {"clusterOvercommitPercent": 130}}), "ClusterGPUPolicy")[0]
    schemas = {c["spec"]["names"]["kind"]: c["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for c in crds()}
    jsonschema.validate(policy, schemas["ClusterGPUPolicy"])
    assert cluster_policy(policy).overcommit == 130
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**policy, "spec": {"defaultVramOvercommitPercent": 1001}}, schemas["ClusterGPUPolicy"])


def test_operator_status_matches_crd():
    import jsonschema
    from wooly_operator.core.fleet import FleetDevice, KubernetesNode
    from wooly_operator.core.plan import World, WriteStatus, plan

    todo = plan(
        World(nodes=[KubernetesNode("n")], devices=[FleetDevice("n-0", "n", 1 << 34, name="H100", vendor="nvidia")])
    )
    status = next(a.status for a in todo.actions if isinstance(a, WriteStatus))
    schema = next(c for c in crds() if c["spec"]["names"]["kind"] == "NodeGPUStatus")["spec"]["versions"][0]["schema"]
    properties = schema["openAPIV3Schema"]["properties"]["status"]
    jsonschema.validate(dict(status), properties)
    # An API server drops fields that are not in the schema.
    assert set(status) == set(properties["properties"])
    assert set(status["gpus"][0]) == set(properties["properties"]["gpus"]["items"]["properties"])


def test_chart_with_wrong_values_is_refused():
    with helm.Chart.load(str(CHART)) as chart:
        for wrong in (
            {"controller": {"clusterOvercommitPercent": 1001}},
            {"nats": {"replicas": 2}},
            {"executors": {"pools": [{"name": "a", "image": "b", "executorsPerNode": 1, "gpus": 2}]}},
            {"operator": {"placement": "maybe"}},
        ):
            with pytest.raises(helm.HelmError):
                chart.validate_schema(wrong)


def test_containers_have_minimal_rights(objects):
    for pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        operator = pod.get("serviceAccountName")
        assert operator or pod["automountServiceAccountToken"] is False
    for container in containers(objects):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
        ports = {p["name"] for p in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = (container[probe].get("httpGet") or container[probe].get("tcpSocket") or {}).get("port")
            assert port is None or port in ports


def settings_of(service):
    """The variables that a service reads, and how to parse them."""
    from wooly_bus.health import HealthSettings
    from wooly_compiler.settings import CompilerSettings
    from wooly_executor.settings import ExecutorSettings
    from wooly_metering.settings import MeteringSettings
    from wooly_operator.settings import OperatorSettings
    from wooly_router.settings import RouterSettings
    from wooly_scheduler.settings import SchedulerSettings

    return {
        "ROUTER": RouterSettings,
        "SCHEDULER": SchedulerSettings,
        "METERING": MeteringSettings,
        "COMPILER": CompilerSettings,
        "EXECUTOR": ExecutorSettings,
        "OPERATOR": OperatorSettings,
        "HEALTH": HealthSettings,
    }[service]


def test_container_variables_are_service_settings(objects, monkeypatch):
    """A service would ignore a misspelled name, and would end at a wrong value."""
    seen = 0
    for container in containers(objects):
        for service in ("ROUTER", "SCHEDULER", "METERING", "COMPILER", "EXECUTOR", "OPERATOR", "HEALTH"):
            prefix = f"WOOLY_{service}_"
            env = {
                e["name"]: e.get("value", "something of at least 32 characters")
                for e in container["env"]
                if e["name"].startswith(prefix)
            }
            if not env:
                continue
            model = settings_of(service)
            assert {name.removeprefix(prefix).lower() for name in env} <= set(model.model_fields)
            with monkeypatch.context() as patch:
                for name, value in env.items():
                    patch.setenv(name, value)
                model()
            seen += 1
    assert seen >= 4


def test_chart_has_one_executor_per_gpu():
    sets = of_kind(rendered(VALUES["everything"]), "DaemonSet")
    assert [s["metadata"]["name"] for s in sets] == ["w-executor-h100", "w-executor-cpu"]
    gpus = sets[0]["spec"]["template"]["spec"]["containers"]
    assert len(gpus) == 8
    assert all(c["resources"]["limits"]["nvidia.com/gpu"] == 1 for c in gpus)
    for name in ("WOOLY_EXECUTOR_ID", "WOOLY_EXECUTOR_LISTEN", "WOOLY_EXECUTOR_ADVERTISE", "WOOLY_HEALTH_PORT"):
        assert len({e["value"] for c in gpus for e in c["env"] if e["name"] == name}) == 8
    mounts = [m["name"] for c in gpus for m in c["volumeMounts"]]
    assert mounts.count("checkpoints") == 8  # sessions go on from there in another of them
    own = [m for m in mounts if m != "checkpoints"]
    assert len(own) == len(set(own)) == len(sets[0]["spec"]["template"]["spec"]["volumes"]) - 1


def test_checkpoints_lie_where_the_values_say_and_have_their_key():
    def found(**values):
        (pods,) = of_kind(rendered({"executors": values}), "DaemonSet")
        pod = pods["spec"]["template"]["spec"]
        env = {e["name"]: e for e in pod["containers"][0]["env"]}
        return env, [m["name"] for m in pod["containers"][0]["volumeMounts"]], {v["name"]: v for v in pod["volumes"]}

    env, mounts, volumes = found()
    assert env["WOOLY_EXECUTOR_CHECKPOINTS"]["value"] == "/checkpoints" and "checkpoints" in mounts
    assert volumes["checkpoints"]["emptyDir"] == {} and "WOOLY_EXECUTOR_CHECKPOINT_KEY" not in env
    env, mounts, volumes = found(checkpointsClaim="shared", checkpointsKeySecret="installation")
    assert volumes["checkpoints"]["persistentVolumeClaim"] == {"claimName": "shared"}
    key = env["WOOLY_EXECUTOR_CHECKPOINT_KEY"]["valueFrom"]["secretKeyRef"]
    assert key == {"name": "installation", "key": "checkpoint.key"} and key["key"] in FILES_OF_KEYS
    env, mounts, volumes = found(checkpointsUrl="s3://bucket/wooly")
    assert env["WOOLY_EXECUTOR_CHECKPOINTS"]["value"] == "s3://bucket/wooly"
    assert "checkpoints" not in mounts and "checkpoints" not in volumes


def test_overcommit_value_is_set_in_router_and_policy():
    objects = rendered({"controller": {"clusterOvercommitPercent": 55}})
    env = {e["name"]: e.get("value") for c in containers(objects) for e in c["env"]}
    assert env["CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT"] == "55"
    assert of_kind(objects, "ClusterGPUPolicy")[0]["spec"] == {"defaultVramOvercommitPercent": 55}


def test_secrets_are_in_expected_objects_only(objects):
    made = of_kind(objects, "Secret")
    keys = {k for s in made for k in s["data"]}
    for container in containers(objects):
        for entry in container["env"]:
            reference = (entry.get("valueFrom") or {}).get("secretKeyRef")
            if reference and reference["name"] == "installation":
                assert reference["key"] in FILES_OF_KEYS
            elif reference and reference["name"] != "mine":
                assert reference["key"] in keys
            assert not re.search("PASSWORD$", entry["name"]) or reference or entry["value"].startswith('"$(')


def test_keys_are_mounted_only_where_needed():
    objects = rendered(VALUES["keys"])
    wanted = {
        "w-nats": {"nats.conf"},
        "w-controller": {"service.creds", "signing.seed", "channel.seed"},
        **{name: {"service.creds"} for name in ("w-scheduler", "w-metering", "w-compiler", "w-executor-cpu")},
        **{name: set() for name in ("w-operator", "w-postgresql")},
    }
    found = {}
    for obj in of_kind(objects, "Deployment", "StatefulSet", "DaemonSet"):
        pod = obj["spec"]["template"]["spec"]
        secrets = [v["secret"] for v in pod["volumes"] if v.get("secret", {}).get("secretName") == "installation"]
        found[obj["metadata"]["name"]] = {item["path"] for secret in secrets for item in secret["items"]}
        names = {e["name"] for c in pod["containers"] for e in c["env"]}
        assert not names & {"NATS_PASSWORD", "SERVICES_PASSWORD", "CLIENT_PASSWORD"}
        mounted = [m for c in pod["containers"] for m in c["volumeMounts"] if m["name"] == "keys"]
        assert bool(mounted) == bool(secrets) and all(m["readOnly"] for m in mounted)
    assert found == wanted and set().union(*wanted.values()) <= FILES_OF_KEYS
    env = {e["name"]: e for c in containers(objects) for e in c["env"]}
    assert env["WOOLY_ROUTER_AUTH"]["value"] == "tokens" and env["WOOLY_NATS_CREDS"]["value"].endswith("service.creds")


def test_selectors_match_pods(objects):
    labels = [
        o["spec"]["template"]["metadata"]["labels"] for o in of_kind(objects, "Deployment", "StatefulSet", "DaemonSet")
    ]

    def found(wanted):
        return [have for have in labels if wanted.items() <= have.items()]

    for obj in of_kind(objects, "Service"):
        assert found(obj["spec"]["selector"])
        ports = {p["name"] for pod in pods(objects) for c in pod["containers"] for p in c["ports"]}
        assert {p["targetPort"] for p in obj["spec"]["ports"]} <= ports
    for obj in of_kind(objects, "PodDisruptionBudget"):
        assert found(obj["spec"]["selector"]["matchLabels"])
    for obj in of_kind(objects, "NetworkPolicy"):
        assert found(obj["spec"]["podSelector"].get("matchLabels", {}))


def test_admission_webhooks_select_our_pods_and_handlers():
    handlers = (ROOT / "deploy/operator/src/wooly_operator/handlers.py").read_text()
    hooks = of_kind(rendered({}), "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    assert len(hooks) == 2
    for hook in (w for h in hooks for w in h["webhooks"]):
        assert hook["objectSelector"] == {"matchLabels": {"gpu-runtime": "woolyai"}}
        assert f'id="{hook["clientConfig"]["service"]["path"].strip("/")}"' in handlers
        assert hook["clientConfig"]["caBundle"]


def test_metrics_of_all_tenants_require_token_with_tenants():
    monitored = {"metrics": {"serviceMonitor": {"enabled": True}}}
    objects = rendered({"keysSecret": "wooly-keys", **monitored})
    guarded = {}
    for container in containers(objects):
        variables = {v["name"]: v.get("value") for v in container["env"]} if "env" in container else {}
        guarded |= {name: container for name in variables if name.endswith("_METRICS_TOKEN")}
    assert set(guarded) == {"WOOLY_SCHEDULER_METRICS_TOKEN", "WOOLY_METERING_METRICS_TOKEN"}
    for container in guarded.values():
        assert "/etc/wooly/metrics" in {m["mountPath"] for m in container["volumeMounts"]}
    (credentials,) = [o for o in of_kind(objects, "Secret") if "admin-token" in o.get("data", {})]
    shown = {"name": credentials["metadata"]["name"], "key": "metrics-token"}
    assert "metrics-token" in credentials["data"]
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert [e["authorization"]["credentials"] for e in monitor["spec"]["endpoints"]] == [shown]
    (free,) = of_kind(rendered(monitored), "ServiceMonitor")  # without tokens, every caller is an administrator
    assert "authorization" not in free["spec"]["endpoints"][0]


def test_dashboard_queries_exported_metrics():
    from wooly_metering.exporter import CreditsCollector
    from wooly_scheduler.exporter import families

    # Both services define all metric families, even without any values.
    ledger = SimpleNamespace(by_tenant=dict, budgets=list)
    metering = SimpleNamespace(reader=ledger, entries=0, duplicates=0, quarantined=0)
    exported = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in (*families([]), *CreditsCollector(metering).collect())
    }
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    asked = {m for p in dashboard["panels"] for t in p["targets"] for m in re.findall(r"wooly_\w+", t["expr"])}
    assert len(asked) > 5 and asked <= exported
    assert [p["title"] for p in dashboard["panels"]][:2] == ["Utilization", "Starvation"]


@pytest.mark.parametrize("name", ["chart", "chart with keys", "single.conf", "cluster.conf"])
def test_nats_accepts_rendered_configuration(name, tmp_path):
    import subprocess
    import sysconfig

    from wooly_bus.authority import make_authority

    if name.startswith("chart"):
        secret = {"keysSecret": "installation"} if "keys" in name else {}
        config = of_kind(rendered({"existingSecret": "mine", **secret}), "ConfigMap")[0]["data"]["nats.conf"]
    else:
        config = (ROOT / "deploy" / "compose" / "nats" / name).read_text()
    assert ("nats-keys" in config) == (name != "chart")
    make_authority(tmp_path / "nats-keys")
    path = tmp_path / "nats" / "nats.conf"
    path.parent.mkdir()
    path.write_text(config.replace("/data", str(tmp_path)))
    quoted = {f"{user}_PASSWORD": '"1secret"' for user in ("SERVICES", "CLIENT", "CLUSTER")}
    server = Path(sysconfig.get_path("scripts")) / "nats-server"
    environment = {**quoted, "POD_NAME": "w-nats-0", "SERVER_NAME": "nats"}
    ran = subprocess.run([server, "-t", "-c", path], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_default_storage_of_nats_holds_all_that_streams_and_buckets_reserve():
    streams = [getattr(c, "stream", None) for c in vars(contracts).values()]
    made = {s.name: s.max_bytes for s in streams if isinstance(s, Log | WorkQueue)}
    assert len(made) >= 6
    reserved = sum(made.values()) + BUCKET_MAX_BYTES + scheduler.BUCKET_BYTES + leadership.BUCKET_BYTES
    storage = yaml.safe_load((CHART / "values.yaml").read_text())["nats"]["storage"]
    assert reserved <= 0.75 * int(storage.removesuffix("Gi")) * 10**9


def test_traces_are_kept_as_configured_in_chart():
    def keepers(values):
        found = {}
        for o in of_kind(rendered(values), "Deployment", "StatefulSet", "DaemonSet"):
            for container in o["spec"]["template"]["spec"]["containers"]:
                env = {e["name"]: e.get("value") for e in container.get("env", ())}
                if any(name.endswith("_NATS_URL") and name.startswith("WOOLY_") for name in env):
                    found[container["name"]] = env.get("WOOLY_TRACES")
        return found

    on, off = keepers({"tracing": {"keep": True}}), keepers({})
    assert set(on.values()) == {"router"} and set(off.values()) == {None}
    assert on.keys() == off.keys() and len(on) >= 5
