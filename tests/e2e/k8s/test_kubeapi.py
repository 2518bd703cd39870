"""The client of the Kubernetes API, its role, and the node's side of HAMi against the real kube-apiserver.

The same tests that tests/serve runs against the one in memory, so that what that one promises is what the real one
does. The scheduler's part is written by the tests; the scheduler itself is in test_hami.py.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, cast

import pytest

from amdvgpud.core.errors import HostFailure
from amdvgpud.serve.kube.api import VERBS, Access, KubeApi
from tests.e2e.k8s.api import Api, Refused, eventually
from tests.e2e.k8s.cluster import Cluster
from tests.fakes import MemoryJournal
from tests.serve.kube.fake_kubeapi import FakeKubeApi
from tests.serve.kube.stage import Stage
from tests.serve.kube.test_api import (  # noqa: F401
    test_a_node_is_read_and_its_annotations_are_set_and_removed,
    test_a_patch_of_another_version_is_stale_and_changes_nothing,
    test_a_pod_that_took_anothers_name_is_not_patched,
    test_a_watch_tells_all_pods_and_then_each_change,
    test_an_event_about_the_node_is_written,
    test_pods_are_those_of_the_node,
)
from tests.serve.kube.test_hami import (  # noqa: F401
    test_a_call_that_comes_twice_between_two_containers_does_not_take_the_seconds,
    test_a_call_that_comes_twice_gives_the_same_slice_and_takes_nothing_more,
    test_a_lock_of_a_pod_that_is_gone_is_released_and_the_pod_that_waits_is_served,
    test_a_lock_that_a_crash_left_behind_is_released_when_its_pod_is_past_it,
    test_a_pod_gets_its_slice_and_all_books_say_so,
    test_a_pod_that_ended_makes_room_at_once_for_the_one_that_the_scheduler_sent_in_its_place,
    test_a_whole_gpu_brings_neither_mask_nor_library,
    test_containers_get_what_is_theirs_in_both_shapes,
    test_devices_of_an_init_container_that_ends_serve_the_next_container,
    test_gpus_with_different_quotas_come_by_name_like_all_others,
    test_ids_of_a_pod_that_ended_serve_the_pod_that_the_lock_names,
    test_the_node_is_registered_and_written_again_whoever_changed_it,
    test_the_pod_that_the_lock_names_is_served_whatever_order_the_kubelet_asks_in,
    test_what_cannot_be_served_fails_that_pod_and_frees_the_node,
    test_without_a_lock_the_oldest_binding_that_fits_the_call_is_served,
)
from tests.serve.kube.test_pods import (  # noqa: F401
    test_a_pod_that_is_not_over_keeps_its_slice,
    test_a_pod_that_is_over_gives_its_slice_back_after_a_grace,
    test_a_watch_that_is_behind_releases_nothing_that_the_api_still_has,
    test_the_kubelets_word_about_a_pod_that_came_again_is_not_about_the_first,
)

Json = dict[str, Any]


class RealKubeApi:
    """What tests/serve/kube/fake_kubeapi.py has for a scheduler's and a user's part, on the real server."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def add_node(self, name: str, **annotations: str) -> None:
        self.api.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "annotations": annotations}})

    def change_node(self, name: str, patch: Mapping[str, Any]) -> None:
        self.api.patch(f"/api/v1/nodes/{name}", patch)

    def add_pod(self, pod: Json) -> Json:
        """A pod of a node that has no kubelet: nobody touches it, nor does HAMi's webhook, which refuses bound pods."""
        metadata = {**pod["metadata"], "labels": {"hami.io/webhook": "ignore"}}
        made: Json = self.api.call("POST", "/api/v1/namespaces/default/pods", {**pod, "metadata": metadata})
        return made

    def change_pod(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self.api.patch(f"{path}/status" if "status" in patch else path, patch)

    def delete_pod(self, namespace: str, name: str) -> None:
        self.api.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", {"gracePeriodSeconds": 0})

    def annotations(self, kind: str, *key: str) -> dict[str, str]:
        path = f"/api/v1/nodes/{key[0]}" if kind == "node" else f"/api/v1/namespaces/{key[0]}/pods/{key[1]}"
        return dict(self.api.get(path)["metadata"].get("annotations") or {})

    @property
    def events(self) -> list[Json]:
        found = self.api.get("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name=n1")["items"]
        keys = ("reason", "message", "type", "source", "firstTimestamp", "lastTimestamp", "count")
        return [
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"generateName": event["metadata"]["generateName"], "namespace": "default"},
                "involvedObject": event["involvedObject"],
                **{key: event[key] for key in keys},
            }
            for event in found
        ]

    def clear(self) -> None:
        for pod in self.api.get("/api/v1/namespaces/default/pods")["items"]:
            if pod["spec"].get("nodeName") in ("n1", "n2"):
                self.delete_pod("default", pod["metadata"]["name"])
        self.api.call("DELETE", "/api/v1/nodes/n1")
        eventually("no pod", lambda: not self.api.get("/api/v1/pods?fieldSelector=spec.nodeName=n1")["items"])


ROLE = "amdvgpud-least"


@pytest.fixture(scope="session")
def least(cluster: Cluster) -> Api:
    """Somebody with the documented role and nothing else."""
    account = {"metadata": {"name": ROLE, "namespace": "default"}}
    rules = [{"apiGroups": [""], "resources": [what], "verbs": list(verbs)} for what, verbs in VERBS.items()]
    group = "/apis/rbac.authorization.k8s.io/v1"
    subject = {"kind": "ServiceAccount", "name": ROLE, "namespace": "default"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ROLE}
    binding = {"metadata": {"name": ROLE}, "subjects": [subject], "roleRef": reference}
    cluster.api.call("POST", "/api/v1/namespaces/default/serviceaccounts", account)
    cluster.api.call("POST", f"{group}/clusterroles", {"metadata": {"name": ROLE}, "rules": rules})
    cluster.api.call("POST", f"{group}/clusterrolebindings", binding)
    asked = cluster.api.call("POST", f"/api/v1/namespaces/default/serviceaccounts/{ROLE}/token", {"spec": {}})
    return Api(cluster.api.port, cluster.api.ca, asked["status"]["token"])


@pytest.fixture
def server(cluster: Cluster) -> Iterator[RealKubeApi]:
    real = RealKubeApi(cluster.api)
    real.add_node("n1", here="yes")
    yield real
    real.clear()


@pytest.fixture
async def api(least: Api) -> AsyncIterator[KubeApi]:
    tls = ssl.create_default_context(cafile=str(least.ca))
    client = KubeApi(Access(f"https://127.0.0.1:{least.port}", tls, token=least.token))
    yield client
    await client.close()


async def test_the_role_allows_no_more(server: RealKubeApi, api: KubeApi, least: Api) -> None:
    with pytest.raises(Refused, match="403"):
        least.call("DELETE", "/api/v1/nodes/n1")
    with pytest.raises(HostFailure, match="403"):
        await api._ask("GET", "/api/v1/secrets")


@pytest.fixture
async def stage(server: RealKubeApi, api: KubeApi) -> Any:
    """Not the cluster of the programs: a Node in memory, over the real API server."""
    made = await Stage.around(cast("FakeKubeApi", server), api, (0, 1), None, MemoryJournal())
    await made.side.keep()
    return made
