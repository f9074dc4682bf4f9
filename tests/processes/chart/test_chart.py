"""Operator chart: installed objects and refused values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.schema import field_shapes, snake_name, spell_name
from rlrun.defaults.team_defaults import ALLOWED, read_defaults
from rlrun_operator.render import api_key_secret, render_prerequisites, render_workloads
from rlrun_operator.restrictions import Installation, RunPolicy
from rlrun_operator.runtime.preflight import missing_rights
from rlrun_operator.settings import NetworkSettings, RenderSettings, from_environment
from tests.processes.chart.rendering import CHART, RefusedError, Render
from tests.support.programs import run_program
from tests.unit.operator.build.examples import KEY, example

CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
ROLES, BINDINGS = ("Role", "ClusterRole"), ("RoleBinding", "ClusterRoleBinding")
PLURALS = {"NetworkPolicy": "networkpolicies"}


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] in kinds]


def get_operator_container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = of_kind(documents, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    result: dict[str, Any] = container
    return result


def get_environment(documents: list[dict[str, Any]]) -> dict[str, str | None]:
    return {variable["name"]: variable.get("value") for variable in get_operator_container(documents)["env"]}


def run_roles(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the roles for runs: roles with rights on RLRuns."""
    return [role for role in of_kind(documents, *ROLES) if any("rlruns" in rule["resources"] for rule in role["rules"])]


def collect_verbs(role: dict[str, Any], group: str, resource: str) -> set[str]:
    return {
        verb
        for rule in role["rules"]
        if group in rule["apiGroups"] and resource in rule["resources"] and "resourceNames" not in rule
        for verb in rule["verbs"]
    }


def test_chart_passes_lint(helm: Path) -> None:
    answer = run_program([helm, "lint", "--strict", CHART, "--set", "watchNamespaces={team-a}"])
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_default_chart_has_no_cluster_or_own_namespace_rights(render: Render) -> None:
    documents = render()
    assert get_environment(documents)["RLRUN_WATCH_NAMESPACES"] == "team-a"
    cluster_wide = (*CLUSTER_WIDE, "ServiceMonitor")
    assert of_kind(documents, *cluster_wide) == []
    assert [role["metadata"]["namespace"] for role in run_roles(documents)] == ["team-a"]


def test_own_namespace_is_served_only_on_request(render: Render) -> None:
    own = {"watchNamespaces": ["team-a", "rlrun-system"]}
    with pytest.raises(RefusedError, match=r"rlrun-system is the namespace of this release.*serveOwnNamespace"):
        render(own)
    served = get_environment(render({**own, "serveOwnNamespace": True}))["RLRUN_WATCH_NAMESPACES"]
    assert served == "team-a,rlrun-system"


def test_policy_values_reach_operator_with_operator_defaults(render: Render) -> None:
    def told(values: dict[str, Any]) -> Installation:
        variables = {name: value or "" for name, value in get_environment(render(values)).items()}
        return from_environment(variables).render.installation

    assert told({}).policy == RunPolicy()
    policy = {"podTemplate": "Any", "secrets": ["a", "b-*"], "images": ["registry.example.com/x/*"], "claims": []}
    expected = RunPolicy.model_validate(policy)
    assert told({"policy": policy}).policy == expected
    assert told({"policy": None, "admissionPolicy": None}).policy == RunPolicy(), "values of an older release"
    identity = [v for v in get_operator_container(render())["env"] if v["name"] == "POD_SERVICE_ACCOUNT"]
    assert identity[0]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.serviceAccountName"}}


def test_network_of_runs_is_discovered_or_configured(render: Render) -> None:
    def told(values: dict[str, Any]) -> NetworkSettings:
        variables = {name: value or "" for name, value in get_environment(render(values)).items()}
        return from_environment(variables).render.network

    def rights(values: dict[str, Any]) -> list[Any]:
        roles = [role for role in of_kind(render(values), "Role") if role["metadata"]["namespace"] == "default"]
        return [(rule["resources"], rule["resourceNames"], rule["verbs"]) for role in roles for rule in role["rules"]]

    names = (["endpointslices"], ["services"])
    assert rights({}) == [(resources, ["kubernetes"], ["get"]) for resources in names]
    assert told({}) == told({"networkPolicy": None}) == NetworkSettings()
    rule = {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "ports": [{"protocol": "TCP", "port": 6443}]}
    dns = {"to": [{"namespaceSelector": {}}], "ports": [{"protocol": "UDP", "port": 5353}]}
    given = {"networkPolicy": {"apiServer": [rule], "dns": [dns]}}
    assert told(given) == NetworkSettings((dns,), (rule,), given=True)
    assert rights(given) == [], "the operator need not ask"


@pytest.mark.parametrize(
    ("values", "ingress"),
    [
        ({}, []),
        ({"networkPolicy": None}, []),
        ({"serviceMonitor": {"enabled": True}}, [{"ports": [{"protocol": "TCP", "port": 8080}]}]),
        (
            {"networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}},
            [
                {
                    "from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}],
                    "ports": [{"protocol": "TCP", "port": 8080}],
                }
            ],
        ),
        ({"networkPolicy": {"operator": False}}, None),
    ],
)
def test_network_policy_limits_readers_of_operator_metrics(
    render: Render, values: dict[str, Any], ingress: Any
) -> None:
    documents = render(values)
    found = [policy["spec"] for policy in of_kind(documents, "NetworkPolicy")]
    (deployment,) = of_kind(documents, "Deployment")
    selector = deployment["spec"]["selector"]
    expected = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    assert found == ([] if ingress is None else [expected])


def test_each_watched_namespace_gets_role_and_binding(render: Render) -> None:
    documents = render({"watchNamespaces": ["a", "b"]})
    assert get_environment(documents)["RLRUN_WATCH_NAMESPACES"] == "a,b"
    roles = run_roles(documents)
    assert [role["metadata"]["namespace"] for role in roles] == ["a", "b"]
    bindings = [b for b in of_kind(documents, "RoleBinding") if b["metadata"]["namespace"] in ("a", "b")]
    account = of_kind(documents, "ServiceAccount")[0]["metadata"]["name"]
    for role, binding in zip(roles, bindings, strict=True):
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "rlrun-system"}]


def test_cluster_wide_has_one_cluster_role_with_same_rights(render: Render) -> None:
    wide, narrow = render({"clusterWide": True}), render()
    assert get_environment(wide)["RLRUN_WATCH_NAMESPACES"] == ""
    (cluster_role,) = run_roles(wide)
    assert cluster_role["kind"] == "ClusterRole"
    assert cluster_role["rules"] == run_roles(narrow)[0]["rules"]


def test_nodes_are_read_only_if_allowed(render: Render) -> None:
    documents = render({"readNodes": True})
    assert get_environment(documents)["RLRUN_READ_NODES"] == "true"
    (role,) = of_kind(documents, "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    assert get_environment(render())["RLRUN_READ_NODES"] == "false"


def test_queue_is_off_and_reads_pods_with_nodes_only(render: Render) -> None:
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    assert "RLRUN_QUEUE" not in get_environment(render())
    assert not from_environment({}).queue.enabled
    queue = {"enabled": True, "weights": {"team-a": 2}, "capacity": {"nvidia.com/gpu": 64}, "passSeconds": 60}
    documents = render({"readNodes": True, "queue": queue})
    (role,) = of_kind(documents, "ClusterRole")
    assert pods in role["rules"]
    told = from_environment({"RLRUN_QUEUE": get_environment(documents)["RLRUN_QUEUE"]}).queue
    assert (told.enabled, told.weights, told.capacity) == (True, {"team-a": 2.0}, {"nvidia.com/gpu": 64.0})
    assert (told.pass_seconds, told.preemption, told.reserve_seconds) == (60.0, "PriorityAndShare", 86400.0)
    assert not of_kind(render({"queue": queue}), "ClusterRole")


def test_assigned_users_leave_user_ids_to_namespace(render: Render) -> None:
    def user(documents: list[dict[str, Any]]) -> tuple[object, bool]:
        (deployment,) = of_kind(documents, "Deployment")
        variables = {name: value or "" for name, value in get_environment(documents).items()}
        spec = deployment["spec"]["template"]["spec"]
        return spec["securityContext"].get("runAsUser"), from_environment(variables).render.assigned_users

    assert user(render()) == (1000, False)
    assert user(render({"assignedUsers": True})) == (None, True)


def test_run_defaults_are_mounted_if_configured(render: Render) -> None:
    assert from_environment({k: v or "" for k, v in get_environment(render()).items()}).defaults_folder is None
    values = {
        "runDefaults": {
            "all": {"spec": {"trainer": {"image": "x:1"}}, "locked": ["trainer.image"]},
            "namespaces": {"team-a": {}},
        }
    }
    documents = render(values)
    (config_map,) = of_kind(documents, "ConfigMap")
    told = from_environment({k: v or "" for k, v in get_environment(documents).items()})
    (mount,) = (
        m for m in get_operator_container(documents)["volumeMounts"] if m["mountPath"] == str(told.defaults_folder)
    )
    (deployment,) = of_kind(documents, "Deployment")
    volumes = {v["name"]: v for v in deployment["spec"]["template"]["spec"]["volumes"]}
    assert volumes[mount["name"]]["configMap"] == {"name": config_map["metadata"]["name"], "optional": True}
    assert told.defaults_name == config_map["metadata"]["name"]
    found = read_defaults(config_map["data"]["defaults.yaml"], "a/b", "defaults.yaml")
    assert (found.problems, found.values, found.locked) == ("", {"trainer.image": "x:1"}, {"trainer.image"})
    assert set(config_map["data"]) == {"defaults.yaml", "defaults.team-a.yaml"}
    own = {"runDefaults": {"configMap": "mine"}}
    assert (get_environment(render(own))["RLRUN_DEFAULTS_NAME"], of_kind(render(own), "ConfigMap")) == ("mine", [])
    with pytest.raises(RefusedError, match=r"runDefaults\.configMap \(mine\) contradicts"):
        render({"runDefaults": {"configMap": "mine", **values["runDefaults"]}})


def test_kueue_rights_need_kueue_queue_and_cluster_rights(render: Render) -> None:
    def kueues(values: dict[str, Any]) -> dict[str, set[str]]:
        role = run_roles(render(values))[0]
        named = {
            resource
            for rule in role["rules"]
            if "kueue.x-k8s.io" in rule["apiGroups"]
            for resource in rule["resources"]
        }
        return {resource: collect_verbs(role, "kueue.x-k8s.io", resource) for resource in named}

    assert kueues({}) == kueues({"queue": {"enabled": True}}) == {}
    flavors = {"h100": {"nodeLabels": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}
    values = {"queue": {"provider": "kueue", "name": "team-a", "flavors": flavors}}
    namespaced = {"workloads": {"get", "list", "create", "patch", "delete"}, "workloads/status": {"update"}}
    assert kueues(values) == namespaced
    assert not of_kind(render(values), "ClusterRole")
    told = from_environment({"RLRUN_QUEUE": get_environment(render(values))["RLRUN_QUEUE"]}).queue
    assert (told.kind, told.name, told.flavors["h100"].node_labels) == ("kueue", "team-a", {"gpu": "h100"})
    wide = kueues({**values, "clusterWide": True, "watchNamespaces": []})
    assert wide == namespaced | {"resourceflavors": {"get"}, "workloadpriorityclasses": {"get"}}
    nodes = of_kind(render({**values, "readNodes": True}), "ClusterRole")[0]
    assert collect_verbs(nodes, "", "pods") == set(), "the own queue alone counts pods"


def test_volcano_rights_need_volcano_queue_and_queues_cluster_wide(render: Render) -> None:
    def volcanos(values: dict[str, Any]) -> dict[str, set[str]]:
        role = run_roles(render(values))[0]
        return {each: collect_verbs(role, "scheduling.volcano.sh", each) for each in ("podgroups", "queues")}

    assert volcanos({}) == volcanos({"queue": {"provider": "kueue"}}) == {"podgroups": set(), "queues": set()}
    values = {"queue": {"provider": "volcano", "name": "team-a"}}
    namespaced = {"get", "list", "create", "patch", "delete"}
    assert volcanos(values) == {"podgroups": namespaced, "queues": set()}
    assert not of_kind(render(values), "ClusterRole")
    told = from_environment({"RLRUN_QUEUE": get_environment(render(values))["RLRUN_QUEUE"]}).queue
    assert (told.kind, told.name) == ("volcano", "team-a")
    assert volcanos({**values, "clusterWide": True, "watchNamespaces": []})["queues"] == {"get"}


def test_two_releases_have_distinct_role_names(render: Render) -> None:
    def names(release: str) -> set[tuple[str, str | None, str]]:
        documents = of_kind(render({"watchNamespaces": ["a"], "readNodes": True}, release=release), *ROLES, *BINDINGS)
        return {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents}

    assert not names("one") & names("two")


def test_operator_has_each_right_of_a_run(render: Render) -> None:
    (role,) = run_roles(render())
    ctx = example("gpu")
    create, apply = render_prerequisites(ctx)
    needed = [(child, {"create"}) for child in (*create, api_key_secret(ctx, KEY))]
    needed += [(child, {"create", "patch"}) for child in apply]
    needed += [(child, {"get", "list", "watch", "create", "patch", "delete"}) for child in render_workloads(ctx)]
    for child, wanted in needed:
        group = child["apiVersion"].rpartition("/")[0]
        plural = PLURALS.get(child["kind"], child["kind"].lower() + "s")
        assert wanted <= collect_verbs(role, group, plural), child["kind"]


def test_operator_rights_check_passes(render: Render) -> None:
    (role,) = run_roles(render())
    assert missing_rights(role["rules"]) == []
    assert missing_rights(role["rules"][1:]), "the check sees what is missing"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"clusterWide": True, "readNodes": True, "logLevel": "debug", "logFormat": "json"},
        {"watchNamespaces": ["a", "b"], "imagePullPolicy": "Always", "clusterDomain": "example.org"},
        {"operatorName": "team-a"},
    ],
)
def test_operator_parses_chart_environment(render: Render, values: dict[str, Any]) -> None:
    documents = render(values)
    told = from_environment({name: value or "" for name, value in get_environment(documents).items()})
    expected = () if "clusterWide" in values else tuple(values.get("watchNamespaces", ["team-a"]))
    assert told.namespaces == expected
    assert (told.name, told.read_nodes) == (values.get("operatorName", ""), values.get("readNodes", False))
    assert (told.log_level, told.log_format) == (values.get("logLevel", "info"), values.get("logFormat", "plain"))
    assert told.render.image_pull_policy == values.get("imagePullPolicy")
    assert told.render.cluster_domain == values.get("clusterDomain", "cluster.local")
    (deployment,) = of_kind(documents, "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] == told.http_port


def test_operator_has_each_right_that_it_grants(render: Render) -> None:
    (role,) = run_roles(render())
    (handed_on,) = of_kind([dict(child) for child in render_prerequisites(example("quickstart")).apply], "Role")
    for rule in handed_on["rules"]:
        for resource in rule["resources"]:
            assert set(rule["verbs"]) <= collect_verbs(role, rule["apiGroups"][0], resource)


def test_operator_rights_exclude_secrets_spec_and_wildcards(render: Render) -> None:
    documents = render({"readNodes": True})
    (role,) = run_roles(documents)
    assert collect_verbs(role, "", "secrets") == {"create"}
    assert collect_verbs(role, "rlrun.io", "rlruns") == {"get", "list", "watch"}
    assert collect_verbs(role, "rlrun.io", "rlruns/status") == {"patch"}
    assert collect_verbs(role, "rlrun.io", "rlruns/finalizers") == {"update"}
    rules = [rule for one in of_kind(documents, *ROLES) for rule in one["rules"]]
    assert "*" not in str(rules)


def test_operator_pod_meets_the_restricted_standard(render: Render) -> None:
    documents = render()
    pod = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    own = get_operator_container(documents)["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_images_default_to_chart_version_and_trainer_image(render: Render) -> None:
    defaults = get_environment(render())
    images = RenderSettings().images
    for role in ("trainer", "orchestrator", "inference"):
        assert defaults[f"RLRUN_{role.upper()}_IMAGE"] == images[role]
    own = render({"image": "op:1", "images": {"trainer": "t:1"}, "imagePullPolicy": "Never"})
    assert get_environment(own)["RLRUN_ORCHESTRATOR_IMAGE"] == "t:1"
    assert get_environment(own)["RLRUN_IMAGE_PULL_POLICY"] == "Never"
    assert (get_operator_container(own)["image"], get_operator_container(own)["imagePullPolicy"]) == ("op:1", "Never")
    assert "RLRUN_IMAGE_PULL_POLICY" not in defaults


def test_service_and_monitor_select_operator_port(render: Render) -> None:
    documents = render({"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}})
    (service,), (monitor,), (deployment,) = (of_kind(documents, k) for k in ("Service", "ServiceMonitor", "Deployment"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    # Without honorLabels, Prometheus replaces the run's `namespace` label with the operator's.
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert service["spec"]["ports"][0]["targetPort"] in [
        port["name"] for port in get_operator_container(documents)["ports"]
    ]


def test_pod_labels_cannot_break_deployment_selector(render: Render) -> None:
    documents = render({"podLabels": {"team": "a", "app.kubernetes.io/name": "mine"}})
    spec = of_kind(documents, "Deployment")[0]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels["team"] == "a"
    assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_admission_policy_covers_served_namespaces_with_values(render: Render) -> None:
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    on = {"admissionPolicy": {"enabled": True}, "policy": {"secrets": ["a", 'b"*']}}
    documents = render({**on, "watchNamespaces": ["a", "b"]})
    policy, binding = of_kind(documents, *kinds)
    assert {v["name"]: v["expression"] for v in policy["spec"]["variables"]}["secrets"] == '["a","b\\"*"]'
    (chosen,) = binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert (chosen["operator"], chosen["values"]) == ("In", ["a", "b"])
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    anywhere = of_kind(render({**on, "clusterWide": True}), *kinds)[1]
    assert "matchResources" not in anywhere["spec"]
    free = of_kind(render({"admissionPolicy": {"enabled": True}, "policy": {"podTemplate": "Any"}}), *kinds)[0]
    assert len(free["spec"]["validations"]) < len(policy["spec"]["validations"])
    assert any("policy.secrets" in v["message"] for v in free["spec"]["validations"]), "the lists count all the same"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"watchNamespaces": "a"}, "/watchNamespaces.*got string, want array"),
    ({"watchNamespaces": ["a", "a"]}, "/watchNamespaces.*equal"),
    ({"watchNamespaces": ["Team_A"]}, 'watchNamespaces: "Team_A" is not a namespace'),
    ({"watchNamespaces": []}, "watchNamespaces is empty"),
    ({"policy": {"podTemplate": "Loose"}}, "/policy/podTemplate.*'Restricted', 'Any'"),
    ({"policy": {"secrets": None}}, "/policy.*missing property 'secrets'"),
    ({"policy": {"secret": ["a"]}}, "'secret' not allowed"),
    ({"policy": {"secrets": ["a*b"]}}, "/policy/secrets/0"),
    ({"policy": {"images": ["registry.example.com*"]}}, "/policy/images/0"),
    ({"watchNamespaces": ["a"], "clusterWide": True}, "contradict each other: remove one"),
    ({"image": {"repository": "x"}}, "/image.*got object, want string"),
    ({"images": {"trainer": "a b"}}, 'images.trainer: "a b" holds white space'),
    ({"images": {"trainr": "a"}}, "'trainr' not allowed"),
    ({"imagPullPolicy": "Never"}, "'imagPullPolicy' not allowed"),
    ({"imagePullPolicy": "Sometimes"}, "/imagePullPolicy.*one of '', 'Always'"),
    ({"logLevel": "verbose"}, "/logLevel.*'debug', 'info'"),
    ({"replicas": -1}, "/replicas.*minimum"),
    ({"replicas": "two"}, "/replicas.*got string, want integer"),
    ({"readNodes": "yes"}, "/readNodes.*want boolean"),
    ({"queue": {"preemption": "Always"}}, "/queue/preemption"),
    ({"queue": {"provider": "slurm"}}, "/queue/provider.*'kueue', 'volcano'"),
    ({"queue": {"flavors": {"h100": {"labels": {}}}}}, "/queue/flavors/h100.*'labels' not allowed"),
    ({"serviceMonitor": {"interval": "soon"}}, "/serviceMonitor/interval"),
    ({"extraEnv": [{"value": "x"}]}, "/extraEnv/0.*name"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_invalid_chart_values_are_refused_by_name(render: Render, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        render(values)


def test_helm_test_pod_has_operator_rights_and_settings(render: Render) -> None:
    documents = render({"image": "registry.example.com/operator:1", "watchNamespaces": ["team-a", "team-b"]})
    (pod,) = of_kind(documents, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (deployment,) = of_kind(documents, "Deployment")
    template = deployment["spec"]["template"]
    assert pod["spec"]["serviceAccountName"] == template["spec"]["serviceAccountName"]
    assert pod["spec"]["securityContext"] == template["spec"]["securityContext"]
    (check,), of_operator = pod["spec"]["containers"], get_operator_container(documents)
    assert (check["image"], check["command"]) == (of_operator["image"], ["rlrun-operator", "--check"])
    assert check["securityContext"] == of_operator["securityContext"]
    told = {variable["name"]: variable for variable in of_operator["env"]}
    assert all(told[variable["name"]] == variable for variable in check["env"])
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items(), "no endpoint of the operator's Service"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"trainer": {"imag": "x"}}, "imag"),
        ({"optimizer": {}}, "optimizer"),
        ({"storage": {"claimTemplate": {"size": "1Gi"}}}, "size"),
        ({"placement": {"gpuproduct": "x"}}, "gpuproduct"),
        ({"failurePolicy": {"maxRestart": 1}}, "maxRestart"),
        ({"tracking": {"wandbb": {}}}, "wandbb"),
    ],
)
@pytest.mark.parametrize("where", ["all", "team-a"])
def test_unknown_fields_of_run_defaults_are_refused_by_name(
    render: Render, spec: dict[str, Any], field: str, where: str
) -> None:
    given = {"all": {"spec": spec}} if where == "all" else {"namespaces": {where: {"spec": spec}}}
    with pytest.raises(RefusedError, match=field):
        render({"runDefaults": given})


def test_run_defaults_accept_each_field_with_a_default(render: Render) -> None:
    """The schema of the values and the operator list the same fields."""
    schema = json.loads((CHART / "values.schema.json").read_text())["definitions"]

    def paths(block: Any, above: str) -> set[str]:
        if isinstance(block, dict) and "$ref" in block:
            block = schema[block["$ref"].rpartition("/")[2]]
        inner = block.get("properties", {}) if isinstance(block, dict) else {}
        if not inner or above in ("failurePolicy", "tracking"):
            return {above}
        return {path for name, each in inner.items() for path in paths(each, f"{above}.{name}".lstrip("."))}

    assert paths(schema["runDefaultsSpec"], "") == set(ALLOWED)
    for block in ("failurePolicy", "tracking"):
        model = field_shapes(RLRunSpec)[snake_name(block)].model
        assert model is not None
        named = schema["runDefaultsSpec"]["properties"][block]["properties"]
        assert set(named) == {spell_name(model, name, "camel") for name in field_shapes(model)}


def test_notes_name_images_and_warn_of_unpublished_ones() -> None:
    notes = (CHART / "templates/NOTES.txt").read_text()
    assert "images of this chart's version are not published" in notes
    assert "make images REGISTRY=" in notes
