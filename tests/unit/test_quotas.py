from __future__ import annotations

import threading

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.quotas import Allowance


def refusal(allowance: Allowance, amount: int = 1) -> GradruleError:
    with pytest.raises(GradruleError) as caught:
        allowance.take(amount)
    return caught.value


def test_a_tenant_s_bound_lies_within_the_server_s() -> None:
    server = Allowance(5, "rules", "--max-rules")
    one, two = (Allowance(3, "rules", "--tenant-rules", within=server) for _ in range(2))
    one.take(3)
    found = refusal(one)
    assert reason_name(found.reason) == "QUOTA_EXCEEDED"
    assert "--tenant-rules" in found.message
    assert (one.used, server.used) == (3, 3)
    two.take(2)
    assert "--max-rules" in refusal(two).message
    assert (two.used, server.used, two.left) == (2, 5, 0)
    one.give_back(2)
    assert two.left == 1
    two.take()


def test_where_both_are_full_the_server_s_is_named() -> None:
    server = Allowance(1, "rules", "--max-rules")
    one = Allowance(1, "rules", "--tenant-rules", within=server)
    one.take()
    assert "--max-rules" in refusal(one).message


def test_what_is_there_already_counts_once() -> None:
    server = Allowance(10, "rules", "--max-rules", used=4)
    one = Allowance(5, "rules", "--tenant-rules", within=server)
    one.begin(4)
    assert (one.used, server.used, one.left) == (4, 4, 1)


def test_what_fails_takes_nothing() -> None:
    server = Allowance(10, "rules", "--max-rules")
    one = Allowance(10, "rules", "--tenant-rules", within=server)
    with pytest.raises(KeyError), one.taken(3):
        raise KeyError
    assert (one.used, server.used) == (0, 0)
    with one.taken(3):
        pass
    assert (one.used, server.used) == (3, 3)
    endless = Allowance.without_end()
    endless.take(1 << 60)


def test_what_grows_by_itself_may_pass_the_bound() -> None:
    server = Allowance(10, "bytes", "--max-bytes")
    one = Allowance(10, "bytes", "--tenant-bytes", within=server)
    one.adjust(12)
    assert (one.left, server.used) == (0, 12)
    one.adjust(-12)
    assert (one.left, server.used) == (10, 0)


def test_threads_count_right() -> None:
    server = Allowance(1000, "rules", "--max-rules")
    shares = [Allowance(1000, "rules", "--tenant-rules", within=server) for _ in range(4)]
    refused: list[int] = []

    def work(share: Allowance) -> None:
        for _ in range(400):
            try:
                share.take()
            except GradruleError:
                refused.append(1)

    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(share.used for share in shares) == server.used == 1000
    assert len(refused) == 600
