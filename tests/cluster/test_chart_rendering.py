"""Objects that the real helm renders from the chart, without a cluster."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from collections import defaultdict
from typing import Any

import pytest
import yaml
from charts import CHART, ROOT, HelmError, helm, one, program, rendered, settings
from cryptography import x509

from dsv4_operator.api import ClusterPolicy
from dsv4_operator.builders import names

MONITORS = {"serviceMonitor": "ServiceMonitor", "podMonitors": "PodMonitor", "prometheusRule": "PrometheusRule"}
MODES = {
    "default": (),
    "two namespaces": ("watchNamespaces={team-a,team-b}",),
    "two operators": ("replicas=2",),
    "monitored": (
        *(f"metrics.{name}.{value}" for name in MONITORS for value in ("enabled=true", "renderMode=alwaysRender")),
        "metrics.dashboards.enabled=true",
    ),
    "bare": (
        "crds.enabled=false",
        "rbac.create=false",
        "rbac.aggregate=false",
        "serviceAccount.create=false",
        "serviceAccount.name=mine",
        "networkPolicy.enabled=false",
    ),
    "everything": (
        "watchNamespaces={team-a}",
        "replicas=3",
        f"image.digest=sha256:{'0' * 64}",
        "imagePullSecrets[0].name=registry",
        "nodeSelector.role=control",
        "tolerations[0].operator=Exists",
        "priorityClassName=system-cluster-critical",
        "podAnnotations.note=one",
        "podLabels.team=models",
        "serviceAccount.annotations.owner=me",
        "networkPolicy.from[0].namespaceSelector.matchLabels.name=monitoring",
        "metrics.port=9090",
        "webhook.enabled=true",
    ),
}

# The operator's rights with their reasons. A new right must be added here with its reason.
IN_ITS_NAMESPACES = {
    ("dsv4.dev", "dsv4deployments"): {"get", "list", "watch"},  # read; only users write it
    ("dsv4.dev", "dsv4deployments/status"): {"update"},
    ("dsv4.dev", "dsv4deployments/finalizers"): {"update"},  # owner references that block the owner's deletion
    # `get` everywhere: the owner of an object is read before the object is written or deleted.
    ("", "pods"): {"get", "list", "watch", "create", "delete"},  # members; they are never changed
    ("", "pods/eviction"): {"create"},  # a gateway that moves to another node, within the disruption budget
    ("", "services"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "configmaps"): {"get", "list", "watch", "create", "patch", "delete"},  # plans, routes, evidence
    ("", "secrets"): {"get", "create", "delete"},  # tokens and their keys, by name
    ("apps", "deployments"): {"get", "list", "watch", "create", "patch", "delete"},  # gateways
    ("networking.k8s.io", "networkpolicies"): {"get", "list", "watch", "create", "patch"},
    ("policy", "poddisruptionbudgets"): {"get", "list", "watch", "create", "patch"},  # of gateways
    ("events.k8s.io", "events"): {"get", "create", "patch"},
}
EVERYWHERE = {("", "nodes"): {"get", "list", "watch"}}
LEASE = {("coordination.k8s.io", "leases"): {"get", "create", "update"}}


def rights(*roles: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    found = defaultdict(set)
    for role in roles:
        for rule in role["rules"]:
            assert set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}, rule
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    found[group, resource] |= set(rule["verbs"])
    return dict(found)


@pytest.mark.parametrize("values", MODES.values(), ids=MODES)
def test_no_rule_of_any_mode_has_a_wildcard(values: tuple[str, ...]) -> None:
    for role in rendered(*values):
        if role["kind"] in {"Role", "ClusterRole"}:
            for rule in role["rules"]:
                assert "*" not in str(rule), role["metadata"]["name"]
                # Rights by which an account can give itself others.
                assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
                assert not {"rbac.authorization.k8s.io", "admissionregistration.k8s.io"} & set(rule["apiGroups"])


def test_the_operator_has_these_rights_and_no_others() -> None:
    objects = rendered()
    assert rights(one(objects, "ClusterRole", "dsv4-operator")) == IN_ITS_NAMESPACES | EVERYWHERE
    assert rights(one(objects, "Role")) == LEASE
    assert one(objects, "Role")["metadata"]["namespace"] == "dsv4-system"


@pytest.mark.parametrize(
    ("scheduler", "more"),
    [
        ("Volcano", {("scheduling.volcano.sh", "podgroups"): {"get", "list", "create", "delete"}}),
        ("Coscheduling", {("scheduling.x-k8s.io", "podgroups"): {"get", "list", "create", "delete"}}),
        ("Kueue", {("kueue.x-k8s.io", "localqueues"): {"get"}, ("kueue.x-k8s.io", "workloads"): {"get"}}),
    ],
)
def test_an_allowed_scheduler_gives_the_rights_for_its_objects(
    scheduler: str, more: dict[tuple[str, str], set[str]]
) -> None:
    objects = rendered(f"policy.schedulers={{{scheduler}}}")
    assert rights(one(objects, "ClusterRole", "dsv4-operator")) == IN_ITS_NAMESPACES | EVERYWHERE | more
    policy = json.loads(one(objects, "ConfigMap")["data"]["policy.json"])
    assert policy["schedulers"] == [scheduler]


def test_kuberay_gives_the_rights_for_its_objects_and_for_the_finalizers_of_its_pods() -> None:
    objects = rendered("policy.backends={KubeRay}")
    wanted = IN_ITS_NAMESPACES | EVERYWHERE
    wanted |= {("ray.io", "rayclusters"): {"get", "list", "watch", "create", "patch", "delete"}}
    wanted |= {("", "pods"): IN_ITS_NAMESPACES["", "pods"] | {"patch"}}
    assert rights(one(objects, "ClusterRole", "dsv4-operator")) == wanted
    policy = json.loads(one(objects, "ConfigMap")["data"]["policy.json"])
    assert ClusterPolicy.model_validate(policy, by_alias=True, by_name=False).backends == ("KubeRay",)


def test_rights_on_the_lease_are_limited_to_its_name() -> None:
    for rule in one(rendered(), "Role")["rules"]:
        assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["dsv4-operator"]


@pytest.mark.parametrize(("values", "given"), [((), set()), (("rbac.aggregateToEdit=true",), {"edit", "admin"})])
def test_aggregation_to_the_edit_roles_is_optional(values: tuple[str], given: set[str]) -> None:
    editor = one(rendered(*values), "ClusterRole", "dsv4-operator-editor")
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert {key.removeprefix(prefix) for key in editor["metadata"]["labels"] if key.startswith(prefix)} == given


def test_with_namespaces_the_rights_end_at_them() -> None:
    objects = rendered("watchNamespaces={team-a,team-b}", "rbac.aggregate=false")
    assert rights(one(objects, "ClusterRole")) == EVERYWHERE
    roles = {this["metadata"]["namespace"]: this for this in objects if this["kind"] == "Role"}
    assert set(roles) == {"team-a", "team-b", "dsv4-system"}
    assert rights(roles["team-a"]) == rights(roles["team-b"]) == IN_ITS_NAMESPACES
    arguments = container(objects)["args"]
    assert [word for word in arguments if "namespace=" in word] == [
        "--namespace=team-a",
        "--namespace=team-b",
        "--lease-namespace=dsv4-system",
    ]


def test_every_binding_is_for_the_account_of_the_pod() -> None:
    for values in ((), ("watchNamespaces={team-a}",), ("serviceAccount.create=false", "serviceAccount.name=mine")):
        objects = rendered(*values)
        pod = one(objects, "Deployment")["spec"]["template"]["spec"]
        for binding in (this for this in objects if this["kind"].endswith("RoleBinding")):
            assert binding["subjects"] == [
                {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "dsv4-system"}
            ]
            kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
            home = binding["metadata"].get("namespace")
            assert [
                role
                for role in objects
                if (role["kind"], role["metadata"]["name"], role["metadata"].get("namespace")) == (kind, name, home)
            ]


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found: list[dict[str, Any]] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert len(found) == 1
    return found[0]


def test_the_image_by_tag_or_by_digest() -> None:
    digest = f"sha256:{'a' * 64}"
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(rendered())["image"] == f"dsv4-operator:{version}"
    assert container(rendered("image.tag=v2"))["image"] == "dsv4-operator:v2"
    named = rendered("image.repository=example.com:5000/a/b", f"image.digest={digest}", "image.tag=v2")
    assert container(named)["image"] == f"example.com:5000/a/b@{digest}"


def test_json_logs_and_traces_are_asked_for() -> None:
    arguments = [
        one(rendered(*values), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
        for values in ((), ("logFormat=text",), ("logFormat=json",), ("traces=http://c:4317",))
    ]
    assert arguments[0] == arguments[1]
    assert [each for each in arguments[2] if each not in arguments[0]] == ["--log-format=json"]
    assert [each for each in arguments[3] if each not in arguments[0]] == ["--traces=http://c:4317"]
    with pytest.raises(HelmError, match="traces"):
        rendered("traces=c:4317")


def test_the_definition_is_kept_by_default() -> None:
    name = "dsv4deployments.dsv4.dev"
    kept = one(rendered(), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert kept["spec"] == yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())["spec"]
    assert "annotations" not in one(rendered("crds.keep=false"), "CustomResourceDefinition", name)["metadata"]
    assert not [this for this in rendered("crds.enabled=false") if this["kind"] == "CustomResourceDefinition"]


def test_a_budget_for_disruptions_only_where_a_pod_can_be_spared() -> None:
    assert not [this for this in rendered() if this["kind"] == "PodDisruptionBudget"]
    objects = rendered("replicas=2")
    assert one(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert "podAntiAffinity" in one(objects, "Deployment")["spec"]["template"]["spec"]["affinity"]


@pytest.mark.parametrize("values", MODES.values(), ids=MODES)
def test_every_selector_finds_the_pod_and_no_member(values: tuple[str, ...]) -> None:
    objects = rendered(*values)
    template = one(objects, "Deployment")["spec"]["template"]
    selectors = [
        one(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        *(this["spec"]["selector"] for this in objects if this["kind"] == "Service"),
    ]
    selectors += [this["spec"]["podSelector"]["matchLabels"] for this in objects if this["kind"] == "NetworkPolicy"]
    selectors += [this["spec"]["selector"]["matchLabels"] for this in objects if this["kind"] == "PodDisruptionBudget"]
    for selector in selectors:
        assert selector.items() <= template["metadata"]["labels"].items()
        assert selector["app.kubernetes.io/name"] == "dsv4-operator"
    # The operator finds its objects by this label, so it must not have the label itself.
    for this in [*objects, template]:
        assert "app.kubernetes.io/managed-by" not in this["metadata"].get("labels", {})


@pytest.mark.parametrize(("name", "kind"), MONITORS.items())
def test_monitors_are_rendered_only_where_their_kind_exists_or_is_forced(name: str, kind: str) -> None:
    asked = f"metrics.{name}.enabled=true"
    assert not [this for this in rendered(asked) if this["kind"] == kind]
    assert not [this for this in rendered(f"metrics.{name}.renderMode=alwaysRender") if this["kind"] == kind]
    with pytest.raises(HelmError, match=f"metrics.{name}.enabled: .* no {kind}; install the Prometheus Operator first"):
        rendered(asked, f"metrics.{name}.renderMode=failIfMissing")
    for values in ((f"metrics.{name}.renderMode=alwaysRender",), ()):
        known = () if values else (f"--api-versions=monitoring.coreos.com/v1/{kind}",)
        text = helm("template", "dsv4", CHART, *settings(asked, f"metrics.{name}.labels.release=p", *values), *known)
        found = [this for this in yaml.safe_load_all(text) if this and this["kind"] == kind]
        assert found
        assert all(this["metadata"]["labels"]["release"] == "p" for this in found)


def test_the_monitors_find_the_service_and_the_pods() -> None:
    objects = rendered(*MODES["monitored"])
    monitor, service = one(objects, "ServiceMonitor"), one(objects, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    # Otherwise the operator's namespace would replace that of the deployment.
    assert endpoint["honorLabels"] is True
    for component, port, scraped in (
        ("member", "agent", {"deployment", "group", "rank"}),
        ("gateway", "http", {"deployment", "gateway_group"}),
    ):
        pods = one(objects, "PodMonitor", f"dsv4-operator-{component}s")["spec"]
        made = names.labels("flash", component=component, group=0, rank=0)
        assert pods["selector"]["matchLabels"].items() <= made.items()
        assert pods["namespaceSelector"] == {"any": True}
        (endpoint,) = pods["podMetricsEndpoints"]
        assert endpoint["port"] == port
        assert {relabeling["targetLabel"] for relabeling in endpoint["relabelings"]} == scraped
        for relabeling in endpoint["relabelings"]:
            (source,) = relabeling["sourceLabels"]
            assert source.removeprefix("__meta_kubernetes_pod_label_") in {re.sub(r"\W", "_", label) for label in made}
    only = one(rendered(*MODES["monitored"], "watchNamespaces={a,b}"), "PodMonitor", "dsv4-operator-gateways")
    assert only["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_the_rule_has_the_alerts_of_the_file_and_the_addresses_of_their_pages() -> None:
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    assert one(rendered(*MODES["monitored"]), "PrometheusRule")["spec"] == {"groups": groups}
    base = "metrics.prometheusRule.runbooks=https://example.com/docs/"
    moved = one(rendered(*MODES["monitored"], base), "PrometheusRule")["spec"]["groups"]
    for group in moved:
        for rule in group["rules"]:
            page = rule["annotations"]["runbook_url"]
            assert page.startswith("https://example.com/docs/alerts.md#")
            rule["annotations"]["runbook_url"] = page.removeprefix("https://example.com/")
    assert moved == groups


def test_the_dashboards_are_those_of_the_files() -> None:
    assert not [this for this in rendered() if "grafana_dashboard" in this["metadata"]["labels"]]
    objects = rendered(*MODES["monitored"], "metrics.dashboards.labels.team=a")
    found = [this for this in objects if this["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert all(this["metadata"]["labels"]["team"] == "a" for this in found)
    made = {name: json.loads(text) for this in found for name, text in this["data"].items()}
    files = (CHART / "files" / "dashboards").glob("*.json")
    assert made == {f"dsv4-{file.name}": json.loads(file.read_text()) for file in files}


def test_the_webhook_is_optional_and_its_failures_are_ignored() -> None:
    assert not [this for this in rendered() if "webhook" in str(this).lower()]
    objects = rendered("webhook.enabled=true", "watchNamespaces={team-a}")
    (hook,) = one(objects, "ValidatingWebhookConfiguration")["webhooks"]
    assert hook["failurePolicy"] == "Ignore"
    assert hook["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a"]
    service = one(objects, "Service", hook["clientConfig"]["service"]["name"])
    ports = {port["name"]: port["containerPort"] for port in container(objects)["ports"]}
    assert f"--webhook-port={ports[service['spec']['ports'][0]['targetPort']]}" in container(objects)["args"]
    secret = one(objects, "Secret")
    host = f"{service['metadata']['name']}.dsv4-system.svc"
    made = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
    valid_for = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert valid_for.get_values_for_type(x509.DNSName) == [host]
    authority = x509.load_pem_x509_certificate(base64.b64decode(hook["clientConfig"]["caBundle"]))
    made.verify_directly_issued_by(authority)


def test_the_policy_is_passed_to_the_operator_and_the_api_server() -> None:
    """A change of the policy restarts the operator, which reads it once."""

    def stamp(objects: list[dict[str, Any]]) -> str:
        return str(one(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]["dsv4.dev/policy"])

    objects = rendered("policy.hostNetworkNamespaces={models}", "watchNamespaces={models,team-a}")
    policy = json.loads(one(objects, "ConfigMap", "dsv4-operator-policy")["data"]["policy.json"])
    assert ClusterPolicy.model_validate(policy, by_alias=True, by_name=False).host_network_namespaces == ("models",)
    assert "--policy=/etc/dsv4/policy/policy.json" in container(objects)["args"]
    rules = one(objects, "ValidatingAdmissionPolicy")["spec"]
    assert rules["failurePolicy"] == "Fail"
    assert rules["matchConditions"][0]["expression"] == 'request.namespace in ["models","team-a"]'
    assert '["models"]' in str(rules["variables"])
    assert one(objects, "ValidatingAdmissionPolicyBinding")["spec"]["validationActions"] == ["Deny"]
    assert stamp(objects) != stamp(rendered("watchNamespaces={models,team-a}"))


def test_the_status_page_is_served_with_the_keys_of_a_secret_alone() -> None:
    assert not [this for this in rendered() if "page-port" in str(this)]
    peers = "networkPolicy.pageFrom[0].podSelector.matchLabels.app=proxy"
    objects = rendered("page.enabled=true", "page.keysSecret=mine", "page.keysEntry=open", "page.port=9000", peers)
    found = container(objects)
    assert {"--page-port=9000", "--page-keys=/etc/dsv4/page/keys"} <= set(found["args"])
    (mount,) = [this for this in found["volumeMounts"] if this["name"] == "page"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/etc/dsv4/page", True)
    volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    (volume,) = [this for this in volumes if this["name"] == "page"]
    assert volume["secret"] == {"secretName": "mine", "items": [{"key": "open", "path": "keys"}]}
    ingress = one(objects, "NetworkPolicy")["spec"]["ingress"]
    assert ingress[-1] == {
        "ports": [{"protocol": "TCP", "port": "page"}],
        "from": [{"podSelector": {"matchLabels": {"app": "proxy"}}}],
    }


def test_a_certificate_of_the_users_own_for_the_webhook() -> None:
    annotation = "webhook.annotations.cert-manager\\.io/inject-ca-from=dsv4-system/webhook"
    objects = rendered("webhook.enabled=true", "webhook.certSecret=mine", annotation)
    configuration = one(objects, "ValidatingWebhookConfiguration")
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": "dsv4-system/webhook"}
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]
    assert not [this for this in objects if this["kind"] == "Secret"]
    volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert [volume["secret"]["secretName"] for volume in volumes if "secret" in volume] == ["mine"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("replica=2", "additional properties 'replica' not allowed"),
        ("image.digest=sha256:12", "at '/image/digest'"),
        ("metrics.port=80", "at '/metrics/port'"),
        ("metrics.podMonitors.renderMode=never", "at '/metrics/podMonitors/renderMode'"),
        ("metrics.prometheusRule.runbooks=docs", "at '/metrics/prometheusRule/runbooks'"),
        ("metrics.dashboards.interval=1s", "additional properties 'interval' not allowed"),
        ("policy.storageRoots={/a/../b}", "at '/policy/storageRoots/0'"),
        ("policy.modelRoots={/}", "at '/policy/modelRoots/0'"),
        ("policy.schedulers={KAI}", "at '/policy/schedulers/0'"),
        ("policy.backends={Pods}", "at '/policy/backends/0'"),
    ],
)
def test_wrong_values_are_named(value: str, said: str) -> None:
    with pytest.raises(HelmError, match=said):
        rendered(value)


@pytest.mark.parametrize("odd", ["2024", "on", "null", "1e3", "0x1f", "true"])
def test_names_that_yaml_reads_as_other_types_are_quoted(odd: str) -> None:
    values = (
        f"priorityClassName={odd}",
        f"serviceAccount.name={odd}",
        f"imagePullSecrets[0].name={odd}",
        "webhook.enabled=true",
    )
    text = (
        "--set-string",
        f"watchNamespaces={{{odd}}}",
        *(word for value in values[:3] for word in ("--set-string", value)),
    )
    out = helm("template", "dsv4", CHART, "--namespace", odd, *text, "--set", values[3])
    made = [document for document in yaml.safe_load_all(out) if document]
    namespaces = {this["metadata"]["namespace"] for this in made if "namespace" in this["metadata"]}
    assert namespaces == {odd}
    pod = one(made, "Deployment")["spec"]["template"]["spec"]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == (odd, odd)
    assert f"--namespace={odd}" in pod["containers"][0]["args"]
    for this in made:
        for subject in this.get("subjects", ()):
            assert (subject["name"], subject["namespace"]) == (odd, odd)
    hook = one(made, "ValidatingWebhookConfiguration")["webhooks"][0]
    assert hook["namespaceSelector"]["matchExpressions"][0]["values"] == [odd]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("webhook.enabled=true", "webhook.port=8080"), "webhook.port: 8080 is also metrics.port; choose another one"),
        (("page.enabled=true",), "page.keysSecret: name a Secret with the keys that open the status page"),
        (
            ("page.enabled=true", "page.keysSecret=k", "webhook.enabled=true", "page.port=9443"),
            "page.port: 9443 is also metrics.port or webhook.port; choose another one",
        ),
        (("serviceAccount.create=false",), "serviceAccount"),
        (("fullnameOverride=1x",), "fullnameOverride"),
    ],
)
def test_values_that_do_not_go_together_are_named(values: tuple[str, ...], said: str) -> None:
    with pytest.raises(HelmError) as told:
        rendered(*values)
    assert said in str(told.value)


@pytest.mark.parametrize("release", ["1x", "a.b"])
def test_a_release_name_that_is_invalid_for_a_service_is_refused_with_the_remedy(release: str) -> None:
    with pytest.raises(HelmError, match="fullnameOverride"):
        rendered(release=release)
    assert rendered("fullnameOverride=blue", release=release)


def test_names_follow_the_release() -> None:
    for release, name in (
        ("dsv4", "dsv4-operator"),
        ("blue", "blue-dsv4-operator"),
        ("dsv4-operator", "dsv4-operator"),
    ):
        assert one(rendered(release=release), "Deployment")["metadata"]["name"] == name
    long = rendered(release="a" * 53)
    assert max(len(this["metadata"]["name"]) for this in long) <= 63


@pytest.mark.parametrize("values", MODES.values(), ids=MODES)
def test_helm_finds_nothing_wrong(values: tuple[str, ...]) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, *settings(*values))


def test_the_plain_manifest_is_fresh() -> None:
    found = importlib.util.spec_from_file_location("generate", ROOT / "manifests" / "generate.py")
    assert found
    assert found.loader
    generate = importlib.util.module_from_spec(found)
    found.loader.exec_module(generate)
    assert generate.INSTALL.read_text() == generate.install(program()), "make manifests"
