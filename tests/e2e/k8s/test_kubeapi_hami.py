"""The node's side of HAMi over the real kube-apiserver, with the scheduler's part written by the tests: the same tests
that tests/serve runs over the one in memory. The scheduler itself is in test_hami.py."""

from __future__ import annotations

from typing import Any, cast

import pytest

from amdvgpud.serve.kubeapi import KubeApi
from tests.e2e.k8s.test_kubeapi import RealKubeApi, api, least, server  # noqa: F401
from tests.fakes import MemoryJournal
from tests.serve.fake_kubeapi import FakeKubeApi
from tests.serve.stage import Stage
from tests.serve.test_hami import (  # noqa: F401
    test_a_call_that_comes_twice_between_two_containers_does_not_take_the_seconds,
    test_a_call_that_comes_twice_gives_the_same_slice_and_takes_nothing_more,
    test_a_lock_of_a_pod_that_is_gone_is_released_and_the_pod_that_waits_is_served,
    test_a_lock_that_a_crash_left_behind_is_released_when_its_pod_is_past_it,
    test_a_pod_gets_its_slice_and_all_books_say_so,
    test_a_pod_that_ended_makes_room_at_once_for_the_one_that_the_scheduler_sent_in_its_place,
    test_a_whole_gpu_brings_neither_mask_nor_library,
    test_containers_get_what_is_theirs_in_both_shapes,
    test_devices_of_an_init_container_that_ends_serve_the_next_container,
    test_gpus_with_different_quotas_are_told_in_full_and_not_by_name,
    test_ids_of_a_pod_that_ended_serve_the_pod_that_the_lock_names,
    test_the_node_is_registered_and_written_again_whoever_changed_it,
    test_the_pod_that_the_lock_names_is_served_whatever_order_the_kubelet_asks_in,
    test_what_cannot_be_served_fails_that_pod_and_frees_the_node,
    test_without_a_lock_the_oldest_binding_that_fits_the_call_is_served,
)
from tests.serve.test_pods import (  # noqa: F401
    test_a_pod_that_is_not_over_keeps_its_slice,
    test_a_pod_that_is_over_gives_its_slice_back_after_a_grace,
    test_a_watch_that_is_behind_releases_nothing_that_the_api_still_has,
    test_the_kubelets_word_about_a_pod_that_came_again_is_not_about_the_first,
)


@pytest.fixture
async def stage(server: RealKubeApi, api: KubeApi) -> Any:  # noqa: F811
    """Not the cluster of the programs: a Node in memory, over the real API server."""
    made = await Stage.around(cast("FakeKubeApi", server), api, (0, 1), None, MemoryJournal())
    await made.side.keep()
    return made
