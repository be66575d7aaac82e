from __future__ import annotations

import threading

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.quotas import Quota


def refusal(quota: Quota, amount: int = 1) -> GradruleError:
    with pytest.raises(GradruleError) as caught:
        quota.reserve(amount)
    return caught.value


def test_tenant_quota_counts_towards_server_quota() -> None:
    server = Quota(5, "rules", "--max-rules")
    one, two = (Quota(3, "rules", "--tenant-rules", within=server) for _ in range(2))
    one.reserve(3)
    found = refusal(one)
    assert reason_name(found.reason) == "QUOTA_EXCEEDED"
    assert "--tenant-rules" in found.message
    assert (one.used, server.used) == (3, 3)
    two.reserve(2)
    assert "--max-rules" in refusal(two).message
    assert (two.used, server.used, two.available) == (2, 5, 0)
    one.release(2)
    assert two.available == 1
    two.reserve()


def test_error_names_server_setting_if_both_quotas_are_full() -> None:
    server = Quota(1, "rules", "--max-rules")
    one = Quota(1, "rules", "--tenant-rules", within=server)
    one.reserve()
    assert "--max-rules" in refusal(one).message


def test_initial_usage_counts_once() -> None:
    server = Quota(10, "rules", "--max-rules", used=4)
    one = Quota(5, "rules", "--tenant-rules", within=server)
    one.set_used(4)
    assert (one.used, server.used, one.available) == (4, 4, 1)


def test_failed_reservation_uses_nothing() -> None:
    server = Quota(10, "rules", "--max-rules")
    one = Quota(10, "rules", "--tenant-rules", within=server)
    with pytest.raises(KeyError), one.reserved(3):
        raise KeyError
    assert (one.used, server.used) == (0, 0)
    with one.reserved(3):
        pass
    assert (one.used, server.used) == (3, 3)
    unlimited = Quota.unlimited()
    unlimited.reserve(1 << 60)


def test_adjust_may_exceed_the_limit() -> None:
    server = Quota(10, "bytes", "--max-bytes")
    one = Quota(10, "bytes", "--tenant-bytes", within=server)
    one.adjust(12)
    assert (one.available, server.used) == (0, 12)
    one.adjust(-12)
    assert (one.available, server.used) == (10, 0)


def test_quota_counts_correctly_from_several_threads() -> None:
    server = Quota(1000, "rules", "--max-rules")
    shares = [Quota(1000, "rules", "--tenant-rules", within=server) for _ in range(4)]
    refused: list[int] = []

    def work(share: Quota) -> None:
        for _ in range(400):
            try:
                share.reserve()
            except GradruleError:
                refused.append(1)

    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(share.used for share in shares) == server.used == 1000
    assert len(refused) == 600
