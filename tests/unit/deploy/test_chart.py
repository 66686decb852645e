"""deploy/chart, rendered by helm with each file of values in its folder `ci`."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

import kubernetes_validate
import pytest

from pawl.settings import (
    AdaptersSettings,
    ConsoleSettings,
    ControllerSettings,
    DoctorSettings,
    read_settings,
    refuse_unknown_settings,
)
from proxy.settings import ProxySettings
from proxy.upstreams.file import parse_upstreams
from proxy.upstreams.upstreams import check_upstreams
from scripts.reference import CHART_SETTINGS, chart_settings
from scripts.release import unpack_helm
from store import __version__
from store.browsers import why_foreign
from store.policy_table import open_policies
from store.settings import Settings, parse_address
from tests.conftest import ROOT
from tests.support.docs.documents import split_blocks
from tests.support.yaml_text import parse_yaml, parse_yaml_documents
from tests.unit.deploy.test_compose import compose
from tests.unit.docs.test_docs import PAGES
from trainer.policies import chosen_policies, load_recipes
from trainer.settings import TrainerSettings

CHART: Final = ROOT / "deploy" / "chart"
RULES: Final = ROOT / "dashboards" / "rules" / "pawl.yml"
VALUES: Final = {path.stem.removesuffix("-values"): path for path in CHART.glob("ci/*-values.yaml")}
# The oldest Kubernetes that the chart takes, and the newest whose schemas there are.
KUBERNETES: Final = ("1.29", "1.37")
# Of the Prometheus operator: Kubernetes' own schemas have nothing of it.
OPERATOR: Final = "monitoring.coreos.com/v1"
ROLES: Final[Mapping[str, type[Settings]]] = {
    "proxy": ProxySettings,
    "controller": ControllerSettings,
    "trainer": TrainerSettings,
    "console": ConsoleSettings,
}
Object = dict[str, Any]
Render = Callable[..., list[Object]]


class Pod(NamedTuple):
    """A pod of the chart: its role, its labels and annotations, and what it runs."""

    role: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: Object

    @property
    def container(self) -> Object:
        """The one that is named as its role."""
        return self.containers[self.role]

    @property
    def containers(self) -> dict[str, Object]:
        """By name."""
        return {one["name"]: one for one in self.spec["containers"]}

    @property
    def environment(self) -> dict[str, str]:
        """Its container's variables."""
        return environment(self.container)

    @property
    def ports(self) -> dict[str, int]:
        """All of its ports, by name."""
        ports = [x for one in self.containers.values() for x in one.get("ports", [])]
        return {one["name"]: one["containerPort"] for one in ports}


def environment(container: Object) -> dict[str, str]:
    """A container's variables, each of which is given once."""
    named = {one["name"]: one.get("value", "") for one in container["env"]}
    assert len(named) == len(container["env"])
    return named


def mounts(container: Object) -> dict[str, tuple[str, bool]]:
    """A container's volumes: where they are, and whether it may write."""
    return {
        one["name"]: (one["mountPath"], not one.get("readOnly", False))
        for one in container["volumeMounts"]
    }


def pods(objects: list[Object]) -> dict[str, Pod]:
    """By role."""
    templates = [x["spec"]["template"] for x in objects if "template" in x.get("spec", {})]
    found = {}
    for one in templates:
        labels = one["metadata"]["labels"]
        role = labels["app.kubernetes.io/component"]
        found[role] = Pod(role, labels, one["metadata"].get("annotations", {}), one["spec"])
    return found


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    """By name."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[int, str]]:
    """Run helm, and return its status and what it printed, or its error."""
    path = unpack_helm(tmp_path_factory.mktemp("helm"))

    def run(*words: object) -> tuple[int, str]:
        ran = subprocess.run([path, *map(str, words)], capture_output=True, text=True, check=False)
        return ran.returncode, ran.stderr if ran.returncode else ran.stdout

    return run


@pytest.fixture(scope="module")
def render(helm: Callable[..., tuple[int, str]]) -> Render:
    """Return the chart's objects with a file of values, and some more."""

    @cache
    def rendered(values: str, *more: str) -> list[Object]:
        words = [word for one in more for word in ("--set", one)]
        status, text = helm("template", "pawl", CHART, "--values", VALUES[values], *words)
        assert status == 0, text
        return parse_yaml_documents(text)

    return rendered


def test_chart_is_tested_with_at_least_ten_values_files() -> None:
    assert len(VALUES) >= 10


def test_objects_are_valid_by_kubernetes_own_schemas(render: Render) -> None:
    every = [one for values in VALUES for one in render(values) if one["apiVersion"] != OPERATOR]
    # Files of values have most objects in common.
    for text in dict.fromkeys(json.dumps(one, sort_keys=True) for one in every):
        for version in KUBERNETES:
            assert kubernetes_validate.validate(json.loads(text), version, strict=True) == version


@pytest.mark.parametrize("values", VALUES)
def test_pods_run_without_root_privileges_host_access_or_service_account_token(
    render: Render, values: str
) -> None:
    for pod in pods(render(values)).values():
        user = pod.spec["securityContext"]
        assert user["runAsNonRoot"] is True
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        # Group 0 is the images': any user of it may run them.
        assert (user.get("runAsUser"), user.get("runAsGroup")) == (
            (None, None) if values == "openshift" else (2000, 0)
        )
        for container in pod.containers.values():
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert pod.spec["automountServiceAccountToken"] is False
        assert not any(key.startswith("host") for key in pod.spec)
        assert not any("hostPath" in volume for volume in pod.spec["volumes"])


@pytest.mark.parametrize("values", VALUES)
def test_chart_uses_the_same_images_and_versions_as_compose(render: Render, values: str) -> None:
    services = compose()["services"]
    images = {name: service["image"] for name, service in services.items()}
    images["migrate"] = images["adapters"] = images["proxy"]
    for pod in pods(render(values)).values():
        for name, container in pod.containers.items():
            assert container["image"] == images[name]


def test_chart_has_the_current_version_of_pawl() -> None:
    chart = parse_yaml((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {__version__}


@pytest.mark.parametrize("values", VALUES)
def test_volumes_config_maps_and_pods_that_chart_objects_refer_to_exist(
    render: Render, values: str
) -> None:
    objects = render(values)
    claims = {"adapters", "models"} | of_kind(objects, "PersistentVolumeClaim").keys()
    for pod in pods(objects).values():
        made = of_kind(objects, "StatefulSet").get(f"pawl-{pod.role}")
        made_volumes = made["spec"].get("volumeClaimTemplates", []) if made else []
        volumes = {one["name"] for one in pod.spec["volumes"]}
        volumes |= {one["metadata"]["name"] for one in made_volumes}
        assert {name for one in pod.containers.values() for name in mounts(one)} == volumes
        for volume in pod.spec["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or claim in claims
            file = volume.get("configMap", {}).get("name")
            # One is a user's own.
            assert file in {None, "ca-bundle", *of_kind(objects, "ConfigMap")}
    for service in of_kind(objects, "Service").values():
        chosen = [
            p for p in pods(objects).values() if selects(service["spec"]["selector"], p.labels)
        ]
        assert chosen
        for pod in chosen:
            # The migration's has no port, and has ended before a Service looks for any; those of
            # vLLM and the console are not among the metrics.
            wanted = {port["targetPort"] for port in service["spec"]["ports"]}
            assert wanted <= pod.ports.keys() or pod.role in ("migrate", "vllm", "console")


@pytest.mark.parametrize("values", VALUES)
def test_each_process_accepts_the_settings_rendered_by_the_chart(
    render: Render, values: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With Secrets, and files beside the working directory, as in the pod."""
    monkeypatch.chdir(tmp_path)
    objects = render(values)
    config, secrets = tmp_path / "config", tmp_path / "secrets"
    config.mkdir()
    secrets.mkdir()
    for name, text in of_kind(objects, "ConfigMap")["pawl-config"]["data"].items():
        (config / name).write_text(text)
    for name, content in {
        "DATABASE_URL": "postgresql://app:secret@pg-rw:5432/app",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_API_KEY": "key",
    }.items():
        (secrets / name).write_text(content)
    for role, kind in ROLES.items():
        pod = pods(objects).get(role)
        if pod is None:
            continue
        # `config` is in the images' WORKDIR.
        assert mounts(pod.container)["config"] == ("/var/lib/pawl/config", False)
        assert mounts(pod.container)["secrets"] == (pod.environment["PAWL_SECRETS_DIR"], False)
        told = {
            name: value.replace("/etc/pawl", str(tmp_path))
            for name, value in pod.environment.items()
        }
        refuse_unknown_settings(told)
        with monkeypatch.context() as inside:
            for name, value in told.items():
                inside.setenv(name, value)
            settings = kind()
        assert isinstance(settings, ProxySettings | ControllerSettings | TrainerSettings)
        assert settings.database_url is not None
        told_listens = [x for name, x in settings.model_dump().items() if name.endswith("listen")]
        listens = {parse_address(listen) for listen in told_listens}
        wanted = {("0.0.0.0", port) for port in pod.ports.values()}
        # The console has the addresses of all others, too.
        assert {one for one in listens if role != "console" or one[0] == "0.0.0.0"} == wanted
        if isinstance(settings, ProxySettings):
            check_upstreams(settings)
        if isinstance(settings, TrainerSettings):
            load_recipes(chosen_policies(settings, open_policies(settings.policies)))


@pytest.mark.parametrize("values", VALUES)
def test_pods_get_no_environment_variables_about_kubernetes_services(
    render: Render, values: str
) -> None:
    """PAWL_PROXY_PORT, say, of a Service `pawl-proxy`: Pawl refuses settings it does not know."""
    assert all(pod.spec["enableServiceLinks"] is False for pod in pods(render(values)).values())


@pytest.mark.parametrize("values", VALUES)
def test_proxys_drain_delay_and_stop_grace_end_before_kubernetes_kills_its_pod(
    render: Render, values: str
) -> None:
    pod = pods(render(values))["proxy"]
    takes_s = [float(pod.environment[f"PAWL_{name}_S"]) for name in ("DRAIN_DELAY", "STOP_GRACE")]
    assert takes_s[0] > 0
    assert sum(takes_s) < pod.spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("values", VALUES)
def test_volume_of_a_spool_is_retained_when_its_proxy_replica_is_deleted(
    render: Render, values: str
) -> None:
    proxies = of_kind(render(values), "StatefulSet")["pawl-proxy"]
    [claim] = proxies["spec"]["volumeClaimTemplates"]
    pod = pods(render(values))["proxy"]
    spool = mounts(pod.container)[claim["metadata"]["name"]]
    assert spool == (pod.environment["PAWL_SPOOL_DIR"], True)
    kept = {"whenScaled": "Retain", "whenDeleted": "Retain"}
    assert proxies["spec"]["persistentVolumeClaimRetentionPolicy"] == kept


def test_autoscaler_alone_says_how_many_proxies_run(render: Render) -> None:
    objects = render("autoscaling")
    [proxies] = of_kind(objects, "StatefulSet").values()
    [scaler] = of_kind(objects, "HorizontalPodAutoscaler").values()
    assert "replicas" not in proxies["spec"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == proxies["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 20)


def test_shared_adapter_volume_has_a_single_path_and_only_the_trainer_writes_to_it(
    render: Render,
) -> None:
    found = pods(render("monitoring"))
    path = found["trainer"].environment["PAWL_ADAPTER_DIR"]
    assert mounts(found["trainer"].container)["adapters"] == (path, True)
    for role in ("controller", "vllm"):
        assert mounts(found[role].container)["adapters"] == (path, False)
    assert "adapters" not in found["vllm"].containers
    servers = {found[role].environment["PAWL_UPSTREAM_URL"] for role in ROLES if role in found}
    assert servers == {"http://pawl-vllm-0.pawl-vllm-pods:8000/v1"}


@pytest.mark.parametrize(
    ("values", "replicas"),
    [
        ("vllm", ["http://pawl-vllm-0.pawl-vllm-pods:8104/v1"]),
        ("providers", ["http://vllm-0.models:8104/v1", "http://vllm-1.models:8104/v1"]),
    ],
)
def test_adapters_that_are_not_shared_are_fetched_from_the_trainer(
    render: Render, values: str, replicas: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(values)
    found = pods(objects)
    [claim] = of_kind(objects, "PersistentVolumeClaim").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    source = "http://pawl-trainer:8102/adapters"
    assert (found["trainer"].ports["metrics"], "pawl-trainer" in of_kind(objects, "Service")) == (
        8102,
        True,
    )
    for role in ("trainer", "controller"):
        told = found[role].environment
        assert told["PAWL_ADAPTER_SOURCE"] == source
        servers = [told["PAWL_UPSTREAM_URL"], *told["PAWL_REPLICA_URLS"].split(",")]
        assert [one for one in servers if one] == replicas
        assert mounts(found[role].container)["adapters"] == (told["PAWL_ADAPTER_DIR"], True)
    assert found["proxy"].environment["PAWL_UPSTREAM_URL"].endswith(":8000/v1")
    if values == "vllm":
        beside = found["vllm"].containers["adapters"]
        with monkeypatch.context() as inside:
            for name, value in environment(beside).items():
                inside.setenv(name, value)
            settings = AdaptersSettings()
        assert (settings.adapter_source, settings.upstream_url.port) == (source, 8000)
        assert parse_address(settings.adapters_listen) == (
            "0.0.0.0",
            found["vllm"].ports["adapters"],
        )
        folder = str(settings.adapter_dir)
        assert mounts(beside)["adapters"] == (folder, True)
        assert mounts(found["vllm"].container)["adapters"] == (folder, False)
        assert "secrets" not in mounts(beside)


@pytest.mark.parametrize(
    ("source", "port"), [("", 8000), ("settings.PAWL_ADAPTER_SOURCE=http://t:8102/adapters", 8104)]
)
def test_charts_vllm_without_a_trainer_fetches_adapters_only_with_an_adapter_source(
    render: Render, source: str, port: int
) -> None:
    objects = render("vllm", "trainer.enabled=false", *filter(None, [source]))
    found = pods(objects)
    fetches = port == 8104
    assert ("adapters" in found["vllm"].containers) == fetches
    service = of_kind(objects, "Service")["pawl-vllm"]
    named = {one["targetPort"] for one in service["spec"]["ports"]}
    assert named == set(found["vllm"].ports) == {"http", *(["adapters"] if fetches else [])}
    controller = found["controller"].environment
    assert controller["PAWL_UPSTREAM_URL"] == f"http://pawl-vllm-0.pawl-vllm-pods:{port}/v1"


# Several vLLM servers


def servers(port: int, *numbers: int) -> list[str]:
    """The addresses of the chart's vLLM servers, or of `pawl adapters` beside them."""
    return [f"http://pawl-vllm-{number}.pawl-vllm-pods:{port}/v1" for number in numbers]


@pytest.mark.parametrize(("adapters", "port"), [("fetched", 8104), ("shared", 8000)])
def test_each_vllm_server_is_addressed_by_its_pods_host_name(
    render: Render, adapters: str, port: int
) -> None:
    shared = ["adapters.existingClaim=adapters"] if adapters == "shared" else []
    objects = render("replicas", *shared)
    for role in ("trainer", "controller"):
        told = pods(objects)[role].environment
        assert [told["PAWL_UPSTREAM_URL"], told["PAWL_REPLICA_URLS"]] == servers(port, 0, 1)
    proxy = pods(objects)["proxy"].environment
    folder, _, name = proxy["PAWL_UPSTREAMS"].partition("/")
    assert folder == "config"
    for config in ("pawl-config", "pawl-migrate"):
        text = of_kind(objects, "ConfigMap")[config]["data"][name]
        [upstream] = parse_upstreams(text, name)
        assert ([*upstream.urls], upstream.default) == (servers(8000, 0, 1), True)
    # Of `pawl doctor` in the proxy's pod, too.
    assert proxy["PAWL_UPSTREAM_URL"] == servers(8000, 0)[0]


def test_rolling_update_restarts_a_single_vllm_server_at_a_time(render: Render) -> None:
    objects = render("replicas")
    spec = of_kind(objects, "StatefulSet")["pawl-vllm"]["spec"]
    assert (spec["replicas"], spec.get("updateStrategy")) == (2, None)
    # A server that never gets ready must not keep the next attempt from replacing it.
    assert spec["podManagementPolicy"] == "Parallel"
    # The controller loads versions once the server answers.
    assert spec["minReadySeconds"] == 60
    service = of_kind(objects, "Service")[spec["serviceName"]]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert selects(service["selector"], pods(objects)["vllm"].labels)


@pytest.mark.parametrize("role", ["proxy", "vllm"])
def test_node_drain_evicts_at_most_a_single_proxy_or_vllm_pod_at_a_time(
    render: Render, role: str
) -> None:
    objects = render("replicas")
    budget = of_kind(objects, "PodDisruptionBudget")[f"pawl-{role}"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert selects(budget["selector"]["matchLabels"], pods(objects)[role].labels)
    # A node must not wait for a pod that serves nobody.
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_added_vllm_replica_restarts_only_the_pods_that_call_vllm(render: Render) -> None:
    scaled = render("replicas", "vllm.replicas=3")
    assert restarted(render("replicas"), scaled) == {"proxy", "trainer", "controller"}
    told = pods(scaled)["trainer"].environment
    assert told["PAWL_REPLICA_URLS"].split(",") == servers(8104, 1, 2)


def test_users_upstreams_file_replaces_the_charts_own(render: Render) -> None:
    objects = render(
        "replicas", "settings.PAWL_UPSTREAMS=config/own.toml", "config.own\\.toml=default = true"
    )
    assert pods(objects)["proxy"].environment["PAWL_UPSTREAMS"] == "config/own.toml"
    assert [*of_kind(objects, "ConfigMap")["pawl-config"]["data"]] == ["own.toml"]


def test_users_allowed_hosts_are_added_to_the_charts_own(
    render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = pods(render("replicas"))["vllm"].containers["adapters"]
    for name, value in environment(beside).items():
        monkeypatch.setenv(name, value)
    hosts = AdaptersSettings().allowed_hosts
    called = [urlsplit(url).netloc for url in servers(8104, 0, 1)]
    for host in (*called, "pawl.example.com", "pawl-vllm.default:8104"):
        assert why_foreign("POST", [(b"host", host.encode())], hosts) is None
    assert why_foreign("POST", [(b"host", b"pawl-vllm-0.example.com")], hosts)


def test_chart_and_compose_start_vllm_with_the_same_arguments(render: Render) -> None:
    settings = {
        "PAWL_MODEL": "Qwen/Qwen3-8B",
        "PAWL_POLICY": "qwen3-8b",
        "PAWL_MAX_MODEL_LEN": "1048576",
        "PAWL_TOOL_PARSER": "hermes",
        # Its GPUs are its own.
        "PAWL_SERVE_GPU_SHARE": "0.9",
        "PAWL_VLLM_ARGS": "--tensor-parallel-size=2",
    }
    wanted = shlex.split(compose(**settings)["services"]["vllm"]["command"])
    # There it is in a file, with the rank of the recipes.
    file = wanted.index("--config")
    wanted[file : file + 2] = ["--max-lora-rank=16"]
    found = pods(render("vllm"))["vllm"].container["args"]
    assert sorted(found) == sorted(wanted)
    # What a user adds comes last, and so wins.
    assert found[-1] == "--tensor-parallel-size=2"


def test_packaged_chart_contains_the_prometheus_rules_of_the_dashboards(
    helm: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    status, text = helm("package", CHART, "--destination", tmp_path)
    assert status == 0, text
    [package] = tmp_path.iterdir()
    status, text = helm("template", "pawl", package, "--values", VALUES["monitoring"])
    assert status == 0, text
    [rule] = of_kind(parse_yaml_documents(text), "PrometheusRule").values()
    assert {"groups": rule["spec"]["groups"][:1]} == parse_yaml(RULES.read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_service_monitors_set_the_job_labels_that_the_alert_selects(render: Render) -> None:
    objects = render("monitoring")
    jobs = set()
    for monitor in of_kind(objects, "ServiceMonitor").values():
        [endpoint] = monitor["spec"]["endpoints"]
        [relabel] = endpoint["relabelings"]
        wanted = monitor["spec"]["selector"]["matchLabels"]
        [service] = [
            one
            for one in of_kind(objects, "Service").values()
            if selects(wanted, one["metadata"]["labels"])
        ]
        named = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
        target = named[endpoint["port"]]
        for pod in pods(objects).values():
            if selects(service["spec"]["selector"], pod.labels) and target in pod.ports:
                jobs.add(relabel["replacement"].replace("$1", pod.role))
                # vLLM asks for no key, and is shown none.
                assert ("authorization" in endpoint) == (pod.role != "vllm")
    [down] = [
        rule["expr"]
        for group in parse_yaml(RULES.read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] == "PawlDown"
    ]
    [asked] = re.findall(r'job=~"([^"]*)"', down)
    assert jobs == set(asked.split("|"))


@pytest.mark.parametrize(
    "options",
    [
        ("monitoring",),
        ("monitoring", "trainer.enabled=false", "controller.enabled=false"),
        ("minimal", "monitoring.enabled=true", "networkPolicy.enabled=false"),
    ],
)
def test_alert_pawl_down_covers_missing_targets_of_each_role_in_the_chart(
    render: Render, options: tuple[str, ...]
) -> None:
    objects = render(*options)
    [rule] = of_kind(objects, "PrometheusRule").values()
    _, missing = rule["spec"]["groups"]
    assert {one["alert"] for one in missing["rules"]} == {"PawlDown"}
    assert {one["expr"] for one in missing["rules"]} == {
        f'absent(up{{job="pawl-{role}", namespace="default"}})'
        for role in pods(objects).keys() - {"migrate"}
    }
    assert "{{ $labels.job }}" in missing["rules"][0]["annotations"]["summary"]


def test_each_alert_links_its_runbook_if_the_runbook_base_url_is_set(render: Render) -> None:
    base = "https://git.example.com/pawl/"
    [rule] = of_kind(
        render("monitoring", f"monitoring.runbookBase={base}"), "PrometheusRule"
    ).values()
    links = {
        one["alert"]: one["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for one in group["rules"]
    }
    assert links == {name: f"{base}docs/howto/operate.md#{name.lower()}" for name in links}


def test_strict_network_policy_allows_only_own_pods_named_peers_dns_and_listed_egress(
    render: Render,
) -> None:
    [policy] = of_kind(render("network"), "NetworkPolicy").values()
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert all(
        selects(policy["spec"]["podSelector"]["matchLabels"], pod.labels)
        for pod in pods(render("network")).values()
    )
    *others, own_pods = policy["spec"]["ingress"]
    assert own_pods == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
    told = {json.dumps(rule["ports"]): rule["from"] for rule in others}
    given = parse_yaml(VALUES["network"].read_text())["networkPolicy"]
    assert told == {
        '[{"port": 8100}]': given["clients"],
        '[{"port": "metrics"}]': given["monitoring"],
        '[{"port": 8102}]': given["adapters"],
    }
    own, dns, *listed = policy["spec"]["egress"]
    assert own["to"] == [{"podSelector": policy["spec"]["podSelector"]}]
    ways = {(port["port"], port["protocol"]) for port in dns["ports"]}
    assert ways == {(number, way) for number in (53, 5353) for way in ("UDP", "TCP")}
    assert listed == given["egress"]


@pytest.mark.parametrize(
    ("values", "more", "ports"),
    [
        ("minimal", [], []),
        ("monitoring", [], ["metrics", 8000]),
        ("monitoring", ["monitoring.enabled=false"], ["metrics"]),
    ],
)
def test_network_policy_opens_scraped_ports_only_if_prometheus_is_named(
    render: Render, values: str, more: list[str], ports: list[str | int]
) -> None:
    [policy] = of_kind(render(values, *more), "NetworkPolicy").values()
    _clients, *rules, _own_pods = policy["spec"]["ingress"]
    assert [port["port"] for rule in rules for port in rule["ports"]] == ports


def test_trainers_progress_deadline_is_longer_than_the_guides_helm_timeout(render: Render) -> None:
    commands = re.findall(
        r"^helm (?:install|upgrade) .*", (ROOT / "docs/howto/kubernetes.md").read_text(), re.M
    )
    assert len(commands) == 2
    assert all("--wait --timeout 30m" in command for command in commands)
    waits = {
        name: one["spec"].get("progressDeadlineSeconds")
        for name, one in of_kind(render("vllm"), "Deployment").items()
    }
    assert waits == {"pawl-trainer": 3600, "pawl-controller": None}


# A pod restarts only by what it reads


def templates(objects: list[Object]) -> dict[str, Object]:
    """Each pod's template, by role; a change of it starts the pod anew."""
    return {
        one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"][
            "template"
        ]
        for one in objects
        if one["kind"] in ("Deployment", "StatefulSet")
    }


def restarted(before: list[Object], after: list[Object]) -> set[str]:
    """The roles whose pods start anew."""
    old, new = templates(before), templates(after)
    assert old.keys() == new.keys()
    return {role for role in old if old[role] != new[role]}


@pytest.mark.parametrize("values", VALUES)
def test_new_chart_version_changes_only_two_labels_of_each_object_and_no_pod_template(
    helm: Callable[..., tuple[int, str]], render: Render, values: str, tmp_path: Path
) -> None:
    newer = tmp_path / "chart"
    shutil.copytree(CHART, newer)
    about = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(about.replace(__version__, "9.9.9"))
    status, text = helm("template", "pawl", newer, "--values", VALUES[values])
    assert status == 0, text
    objects = parse_yaml_documents(text)
    versions = {"app.kubernetes.io/version": "9.9.9", "helm.sh/chart": "pawl-9.9.9"}
    older = deepcopy(render(values))
    for one in older:
        one["metadata"]["labels"] |= versions
    assert objects == older


@pytest.mark.parametrize("values", VALUES)
def test_new_proxy_and_trainer_images_restart_every_pod_but_vllm(
    render: Render, values: str
) -> None:
    newer = (f"{role}.image=pawl-{role}:0.2.0" for role in ("proxy", "trainer"))
    objects = render(values, "adapters.image=pawl-proxy:0.1.0", *newer)
    assert restarted(render(values), objects) == templates(objects).keys() - {"vllm"}


@pytest.mark.parametrize(
    ("values", "setting", "value"),
    [
        *((values, "PAWL_KEEP_DAYS", "7") for values in VALUES),
        # All containers read it, and these values have each of them.
        ("console", "PAWL_LOG_LEVEL", "error"),
    ],
)
def test_setting_restarts_only_the_pods_that_read_it(
    render: Render, values: str, setting: str, value: str
) -> None:
    objects = render(values, f"settings.{setting}={value}")
    reads = {role for role, names in json.loads(chart_settings()).items() if setting in names}
    assert restarted(render(values), objects) == {
        role for role, pod in pods(objects).items() if reads & pod.containers.keys()
    }


@pytest.mark.parametrize(
    ("values", "change", "roles"),
    [
        ("console", "settings.PAWL_SEED=7", {"trainer", "console"}),
        ("console", "settings.PAWL_CONTROLLER_POLL_S=2", {"controller", "console"}),
        ("console", "settings.PAWL_MAX_MODEL_LEN=4096", {"vllm", "console"}),
        (
            "console",
            "settings.PAWL_ADAPTER_DISK_GB=5",
            {"vllm", "trainer", "controller", "console"},
        ),
        ("console", "proxy.env[0].name=HTTPS_PROXY", {"proxy"}),
        ("console", "console.ingress.host=other.example.com", {"console"}),
        ("console", "proxy.ingress.host=other.example.com", {"proxy"}),
        ("console", "proxy.image=pawl-proxy:0.1.1", {"proxy", "controller", "console"}),
        ("monitoring", "proxy.image=pawl-proxy:0.1.1", {"proxy", "controller"}),
        ("providers", "config.recipe\\.toml=", {"trainer"}),
        ("providers", "config.upstreams\\.toml=", {"proxy"}),
        ("providers", "config.policies\\.toml=", {"proxy", "trainer"}),
        # No setting names it, so any may.
        ("providers", "config.other\\.toml=", {"proxy", "trainer", "controller"}),
    ],
)
def test_changed_chart_value_restarts_only_the_pods_that_read_it(
    render: Render, values: str, change: str, roles: set[str]
) -> None:
    assert restarted(render(values), render(values, change)) == roles


def test_charts_file_of_settings_by_role_is_up_to_date() -> None:
    assert CHART_SETTINGS.read_text() == chart_settings()


# Claims that an upgrade cannot change


class Cluster(BaseHTTPRequestHandler):
    """Kubernetes' API, as far as helm asks it for `objects` of the namespace `default`."""

    objects: ClassVar[list[Object]] = []

    def do_GET(self) -> None:
        found = self.answers().get(self.path.partition("?")[0])
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found or {"kind": "Status", "reason": "NotFound"}).encode())

    def answers(self) -> dict[str, Object]:
        found: dict[str, Object] = {
            "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "groups": []},
        }
        for one in self.objects:
            version, kind, plural = one["apiVersion"], one["kind"], f"{one['kind'].lower()}s"
            group = "/api/v1" if version == "v1" else f"/apis/{version}"
            if group not in found:
                found[group] = {"kind": "APIResourceList", "groupVersion": version, "resources": []}
                named = {"groupVersion": version, "version": version.rpartition("/")[2]}
                known = {"name": version.partition("/")[0], "versions": [named]}
                found["/apis"]["groups"] += [known] if version != "v1" else []
            resource = {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"]}
            found[group]["resources"].append(resource)
            found[f"{group}/namespaces/default/{plural}/{one['metadata']['name']}"] = one
        return found

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upgrade(helm: Callable[..., tuple[int, str]]) -> Iterator[Callable[..., tuple[int, str]]]:
    """Render an upgrade of a cluster's `objects`, with values that are set."""

    def upgraded(objects: list[Object], change: str) -> tuple[int, str]:
        Cluster.objects = objects
        asked = ("--is-upgrade", "--dry-run=server", "--disable-openapi-validation")
        where = ("--kube-apiserver", f"http://127.0.0.1:{server.server_port}", "--set", change)
        return helm("template", "pawl", CHART, "--values", VALUES["providers"], *asked, *where)

    with ThreadingHTTPServer(("127.0.0.1", 0), Cluster) as server:
        Thread(target=server.serve_forever).start()
        yield upgraded
        server.shutdown()


@pytest.mark.parametrize("change", ["proxy.spool.size=20Gi", "proxy.spool.storageClass=fast"])
def test_upgrade_that_changes_the_spools_volume_claims_is_refused(
    render: Render, upgrade: Callable[..., tuple[int, str]], change: str
) -> None:
    status, error = upgrade(render("providers"), change)
    assert status != 0
    assert 'have size 10Gi and storageClass ""' in error
    command = "kubectl -n default delete statefulset pawl-proxy --cascade=orphan"
    assert command in error
    guide = (ROOT / "docs/howto/kubernetes.md").read_text()
    assert command.replace(" -n default", "") in guide.partition("\n## Another spool\n")[2]


@pytest.mark.parametrize(
    ("live", "given"), [("10Gi", "10Gi"), ("1536Mi", "1.5Gi"), ("2G", "2000M")]
)
def test_upgrade_with_the_same_spool_size_in_another_unit_is_accepted(
    render: Render, upgrade: Callable[..., tuple[int, str]], live: str, given: str
) -> None:
    # Kubernetes writes sizes in its own way.
    objects = render("providers", f"proxy.spool.size={live}")
    status, text = upgrade(objects, f"proxy.spool.size={given}")
    assert status == 0, text


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ("adapters.size=10Gi", "smaller"),
        ("adapters.storageClass=fast", "smaller"),
        ("adapters.size=40Gi", None),
        ("adapters.storageClass=standard", None),
    ],
)
def test_upgrade_that_shrinks_or_moves_the_adapters_volume_claim_is_refused(
    render: Render, upgrade: Callable[..., tuple[int, str]], change: str, wrong: str | None
) -> None:
    # The class is the cluster's default.
    objects = [
        {**one, "spec": {**one["spec"], "storageClassName": "standard"}}
        if one["kind"] == "PersistentVolumeClaim"
        else one
        for one in render("providers")
    ]
    status, text = upgrade(objects, change)
    assert (status != 0) == (wrong is not None), text
    if wrong is None:
        [kept] = of_kind(parse_yaml_documents(text), "PersistentVolumeClaim").values()
        assert kept["spec"]["storageClassName"] == "standard"
    else:
        assert wrong in text


# What a workload is given


def test_each_pod_gets_the_users_variables_volumes_labels_and_annotations(render: Render) -> None:
    given = parse_yaml(VALUES["env"].read_text())
    inherited = ("env", "envFrom", "volumes", "volumeMounts")
    given["migrate"] |= {name: given["proxy"][name] for name in inherited}
    for pod in pods(render("env")).values():
        has = {
            **pod.container,
            "volumes": pod.spec["volumes"],
            "podAnnotations": pod.annotations,
            "podLabels": pod.labels,
        }
        for name, wanted in given[pod.role].items():
            if isinstance(wanted, dict):
                assert selects(wanted, has[name])
            else:
                assert all(one in has[name] for one in wanted)


@pytest.mark.parametrize(
    ("role", "container"), [("vllm", "vllm"), ("adapters", "adapters"), ("console", "console")]
)
def test_vllm_adapters_and_console_containers_get_the_users_variables_and_mounts(
    render: Render, role: str, container: str
) -> None:
    objects = render(
        "console",
        f"{role}.env[0].name=HTTPS_PROXY",
        f"{role}.env[0].value=http://proxy",
        f"{role}.envFrom[0].secretRef.name=aws",
        f"{role}.volumeMounts[0].name=ca",
        f"{role}.volumeMounts[0].mountPath=/ca",
    )
    [found] = [
        x
        for pod in pods(objects).values()
        for x in pod.spec["containers"]
        if x["name"] == container
    ]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy"} in found["env"]
    assert found["envFrom"] == [{"secretRef": {"name": "aws"}}]
    assert mounts(found)["ca"] == ("/ca", True)


# Commands that are typed in a pod


@pytest.mark.parametrize("role", ["proxy", "controller", "trainer", "console"])
def test_doctor_in_any_pod_knows_the_metrics_address_of_every_process(
    render: Render, role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    objects = render("console", "settings.PAWL_SEED=7")
    pod = pods(objects)[role]
    monkeypatch.chdir(tmp_path)
    for name, text in mounted(objects, pod).items():
        (tmp_path / name).write_text(text)
    for name, value in pod.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PAWL_SECRETS_DIR", str(tmp_path))
    settings = read_settings(DoctorSettings)
    services = {
        (name, port["port"]): (port["targetPort"], one["spec"]["selector"])
        for name, one in of_kind(objects, "Service").items()
        for port in one["spec"]["ports"]
    }
    for asked, listen in {
        "proxy": settings.admin_listen,
        "trainer": settings.trainer_listen,
        "controller": settings.controller_listen,
    }.items():
        if asked == role:
            assert listen.startswith("0.0.0.0:")
            continue
        target, selector = services[parse_address(listen)]
        others = pods(objects)[asked]
        assert (target, selects(selector, others.labels)) == ("metrics", True)
    assert (settings.seed, settings.keep_days, settings.model) == (7, 90, "Qwen/Qwen3-8B")


def mounted(objects: list[Object], pod: Pod) -> dict[str, str]:
    """The settings that a pod has as files beside its secrets."""
    [secrets] = [one for one in pod.spec["volumes"] if one["name"] == "secrets"]
    [name] = [x["configMap"]["name"] for x in secrets["projected"]["sources"] if "configMap" in x]
    data: dict[str, str] = of_kind(objects, "ConfigMap")[name]["data"]
    return data


# Ingress


@pytest.mark.parametrize(("role", "port"), [("proxy", 8100), ("console", 8105)])
def test_ingress_uses_its_tls_secret_and_its_host_is_among_pawls_allowed_hosts(
    render: Render, role: str, port: int
) -> None:
    objects = render("console")
    wanted = parse_yaml(VALUES["console"].read_text())[role]["ingress"]
    one = of_kind(objects, "Ingress")[f"pawl-{role}"]
    assert one["metadata"].get("annotations") == wanted.get("annotations", {})
    assert one["spec"]["ingressClassName"] == "nginx"
    assert one["spec"]["tls"] == [{"hosts": [wanted["host"]], "secretName": wanted["tlsSecret"]}]
    [rule] = one["spec"]["rules"]
    [path] = rule["http"]["paths"]
    assert (rule["host"], path["path"], path["pathType"]) == (wanted["host"], "/", "Prefix")
    assert path["backend"]["service"] == {"name": f"pawl-{role}", "port": {"number": port}}
    service = of_kind(objects, "Service")[f"pawl-{role}"]["spec"]
    assert [one["port"] for one in service["ports"]] == [port]
    pod = pods(objects)[role]
    assert wanted["host"] in pod.environment["PAWL_ALLOWED_HOSTS"].split(",")
    assert pod.ports["http"] == port


def test_ingress_controller_reaches_proxies_and_console(render: Render) -> None:
    [policy] = of_kind(render("console"), "NetworkPolicy").values()
    _clients, ingress, _own_pods = policy["spec"]["ingress"]
    assert ingress["from"] == parse_yaml(VALUES["console"].read_text())["networkPolicy"]["ingress"]
    assert ingress["ports"] == [{"port": 8100}, {"port": 8105}]


@pytest.mark.parametrize("values", VALUES)
def test_network_policy_opens_only_the_proxys_call_port_to_unnamed_pods(
    render: Render, values: str
) -> None:
    [policy] = of_kind(render(values), "NetworkPolicy").values()
    spec = policy["spec"]
    assert selects(spec["podSelector"]["matchLabels"], pods(render(values))["proxy"].labels)
    clients, *others = spec["ingress"]
    given = parse_yaml(VALUES[values].read_text()).get("networkPolicy", {})
    assert clients["from"] == given.get("clients", [{"namespaceSelector": {}}])
    assert clients["ports"] == [{"port": 8100}]
    assert all(peer not in ({}, {"namespaceSelector": {}}) for x in others for peer in x["from"])
    assert ("Egress" in spec["policyTypes"]) == ("egress" in given)


@pytest.mark.parametrize(
    ("values", "change", "peer"),
    [
        ("console", "networkPolicy.ingress=null", "ingress"),
        ("minimal", "proxy.ingress.enabled=true,proxy.ingress.host=a.example.com", "ingress"),
        ("minimal", "monitoring.enabled=true", "monitoring"),
        ("providers", "networkPolicy.adapters=null", "adapters"),
        ("minimal", "proxy.service.type=LoadBalancer", "clients"),
    ],
)
def test_unset_network_policy_peer_that_the_chart_needs_is_refused(
    helm: Callable[..., tuple[int, str]], values: str, change: str, peer: str
) -> None:
    options = ("template", "pawl", CHART, "--values", VALUES[values], "--set", change)
    status, error = helm(*options)
    assert status != 0
    assert f"networkPolicy.{peer}" in error
    assert "networkPolicy.enabled" in error
    status, text = helm(*options, "--set", "networkPolicy.enabled=false")
    assert status == 0, text


def test_load_balancer_admits_the_client_addresses_named_in_the_network_policy(
    render: Render,
) -> None:
    anybody = "networkPolicy.clients[0].ipBlock.cidr=0.0.0.0/0"
    objects = render("minimal", "proxy.service.type=LoadBalancer", anybody)
    [policy] = of_kind(objects, "NetworkPolicy").values()
    assert policy["spec"]["ingress"][0]["from"] == [{"ipBlock": {"cidr": "0.0.0.0/0"}}]


def test_external_traffic_policy_is_set_only_on_a_service_outside_the_cluster(
    render: Render,
) -> None:
    services = of_kind(render("autoscaling"), "Service")
    assert services["pawl-proxy"]["spec"]["externalTrafficPolicy"] == "Local"
    # Kubernetes refuses it of a Service within the cluster.
    local = render("minimal", "proxy.service.externalTrafficPolicy=Local")
    assert "externalTrafficPolicy" not in of_kind(local, "Service")["pawl-proxy"]["spec"]


# Checks


@pytest.mark.parametrize("values", VALUES)
def test_migration_job_checks_each_enabled_role_with_the_new_config_files(
    render: Render, values: str
) -> None:
    objects = render(values)
    pod = pods(objects)["migrate"]
    # Six more attempts, as by default, would take ten minutes until a mistake fails the upgrade.
    assert of_kind(objects, "Job")["pawl-migrate"]["spec"]["backoffLimit"] == 3
    roles = {word.partition("=")[2] for word in pod.container["args"][1:]}
    assert roles == pods(objects).keys() - {"migrate", "vllm"}
    [config] = [one["configMap"] for one in pod.spec["volumes"] if one["name"] == "config"]
    files = of_kind(objects, "ConfigMap")
    to_come = files[config["name"]]
    assert to_come["data"] == files["pawl-config"]["data"]
    hooks = [
        one["metadata"]["annotations"] for one in (to_come, of_kind(objects, "Job")["pawl-migrate"])
    ]
    assert {one["helm.sh/hook"] for one in hooks} == {"pre-install,pre-upgrade"}
    assert int(hooks[0]["helm.sh/hook-weight"]) < int(hooks[1].get("helm.sh/hook-weight", 0))
    proxy = pods(objects)["proxy"]
    assert proxy.container.get("envFrom") == pod.container.get("envFrom")


def test_helm_test_requests_the_proxys_healthz(render: Render) -> None:
    [pod] = of_kind(render("minimal"), "Pod").values()
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [container] = pod["spec"]["containers"]
    [program] = container["command"][2:]
    assert '"pawl-proxy", 8100' in program
    assert "/healthz" in program
    assert pod["spec"]["restartPolicy"] == "Never"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_autoscaling_minimum_above_its_maximum_is_refused(
    helm: Callable[..., tuple[int, str]],
) -> None:
    scaled = ("--values", VALUES["autoscaling"], "--set", "proxy.autoscaling.minReplicas=21")
    status, error = helm("template", "pawl", CHART, *scaled)
    assert status != 0
    assert "minReplicas is 21, and maxReplicas is 20: lower" in error


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ("minimal", "s3://pawl/adapters"),
        ("providers", "gs://pawl"),
        ("vllm", "az://pawl/adapters"),
    ],
)
def test_adapter_source_that_no_pawl_image_can_read_is_refused(
    helm: Callable[..., tuple[int, str]], values: str, source: str
) -> None:
    given = ("--values", VALUES[values], "--set", f"settings.PAWL_ADAPTER_SOURCE={source}")
    status, error = helm("template", "pawl", CHART, *given)
    assert status != 0
    assert f"settings.PAWL_ADAPTER_SOURCE is {source}, and no image of Pawl has" in error


def test_helms_install_notes_show_the_first_kubectl_commands(
    helm: Callable[..., tuple[int, str]],
) -> None:
    options = ("--values", VALUES["minimal"], "--dry-run=client", "--namespace", "agents")
    status, text = helm("install", "pawl", CHART, *options)
    assert status == 0, text
    notes = text.partition("NOTES:")[2]
    commands = re.findall(r"^  (.+)", notes, re.MULTILINE)
    assert [shlex.split(one)[:3] for one in commands] == [
        ["kubectl", "-n", "agents"],
        ["kubectl", "-n", "agents"],
        ["kubectl", "-n", "agents"],
    ]
    assert "pawl keys create agent" in commands[0]
    assert commands[2].endswith("-- pawl doctor")


def test_helm_values_of_all_doc_pages_together_render_the_chart(
    helm: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    found = [
        block
        for page in PAGES
        for block in split_blocks(page, page.read_text())[1]
        if block.language == "yaml"
    ]
    options: list[object] = []
    for number, block in enumerate(found):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block.text)
        options += ["--values", path]
    assert options
    status, text = helm("template", "pawl", CHART, *options)
    assert status == 0, text


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ("database.secret=", "/database/secret"),
        ("database.url=postgresql://pg/pawl", "/database"),
        ("settings.PAWL_UPSTREAM_URL=null", "/settings/PAWL_UPSTREAM_URL"),
        ("settings.PAWL_LISTEN=0.0.0.0:80", "/settings/PAWL_LISTEN"),
        ("settings.PAWL_ACCESS=loopback", "/settings/PAWL_ACCESS"),
        ("settings.PAWL_STOP_GRACE_S=null", "'PAWL_STOP_GRACE_S'"),
        ("settings.PAWL_VLLM_ARGS=--seed=1", "set vllm.args"),
        ("settings.PAWL_VLLM_DTYPE=auto", "set --dtype in vllm.args"),
        ("settings.PAWL_SERVE_GPUS=0", "set vllm.resources"),
        ("settings.PAWL_VLLM_PORT=9000", "not used by the chart"),
        ("settings.PAWL_LOG_DIR=/logs", "not used by the chart"),
        ("settings.workers=2", "settings.workers: Pawl has no such setting"),
        ("proxy.image=pawl-proxy:latest", "the tag of a version"),
        ("proxy.image=registry:5000/pawl-proxy", "/proxy/image"),
        ("proxy.replica=3", "'replica'"),
        ("proxy.spool.size=ten", "/proxy/spool/size"),
        ("proxy.spool.size=10K", "/proxy/spool/size"),
        ("proxy.pod.hostNetwork=true", "'hostNetwork'"),
        ("trainer.env[0].name=PAWL_SEED", "/trainer/env/0/name"),
        ("migrate.env[0].name=PAWL_API_KEY", "a key into a Secret"),
        ("adapters.volumes[0].name=ca", "'volumes'"),
        ("trainer.volumes[0].name=models", "/trainer/volumes/0/name"),
        ("proxy.podLabels.app\\.kubernetes\\.io/name=gateway", "podLabels/app.kubernetes.io~1name"),
        ("settings.PAWL_API_KEY=k", "put it into a Secret"),
        ("settings.PAWL_TEACHER_API_KEY=k", "put it into a Secret"),
        ("settings.OPENAI_API_KEY=k", "keys into a Secret"),
        ("settings.PAWL_KEEP_DAY=9", "settings.PAWL_KEEP_DAY: Pawl has no such setting"),
        ("proxy.ingress.enabled=true", "/proxy/ingress/host"),
        ("console.ingress.hosts[0]=a", "'hosts'"),
        ("user=0", "/user"),
        ("adapters.existingClaim=", "unless adapters.existingClaim is shared"),
        ("adapters.servers[0]=http://vllm:8104", "/adapters/servers/0"),
        ("adapters.servers[0]=http://vllm:8104/v1", "/adapters/servers"),
        ("vllm.enabled=true", "'PAWL_MODEL'"),
        ("vllm.enabled=true", "/settings/PAWL_UPSTREAM_URL"),
        ("vllm.enabled=true,adapters.servers[0]=http://vllm:8104/v1", "/adapters/servers"),
        ("vllm.enabled=true,settings.PAWL_REPLICA_URLS=http://a/v1", "set vllm.replicas"),
        ("vllm.replicas=0", "/vllm/replicas"),
    ],
)
def test_wrong_chart_value_is_refused_by_its_name(
    helm: Callable[..., tuple[int, str]], wrong: str, where: str
) -> None:
    minimal = ("template", "pawl", CHART, "--values", VALUES["minimal"])
    status, error = helm(*minimal, "--set", wrong)
    assert status != 0
    assert where in error
