"""Seeds that once failed, each with what was wrong. They stay, so that it stays right.

A seed means the same schedule only as long as options and world draw in the same order: new options are drawn
after all others. The behaviour itself is held by the unit test named beside it.
"""

from __future__ import annotations

#: seed -> what it found.
FIXED_SEEDS: dict[int, str] = {
    262: "the id of a worker killed twice within one probe was refused for good (test_newest_claim_stands)",
    59: "a frame that a stuck worker gave back was sent again after its deadline"
    " (test_frame_of_a_stuck_worker_expires_if_its_time_is_over)",
    73: "a copy of a poison frame took down one more worker"
    " (test_copy_of_poison_that_comes_back_is_not_run_again)",
    169: "the content of a poison frame that had expired before its worker was missed got a third worker"
    " (test_poison_that_expired_before_its_worker_was_missed_is_refused_too)",
    1796070767099: "a worker was refused its id for good because a message that its predecessor had sent"
    " before it was killed was read after its claim (test_only_the_number_of_the_probe_proves_life)",
    1796070766375: "the checker counted older aged frames of higher priorities as passes",
    1796078722081: "a frame that had inherited an age lost it when its batch came back"
    " (test_a_frame_that_comes_back_keeps_an_inherited_age)",
    1796078723100: "the same, after a partition (test_a_frame_that_comes_back_keeps_an_inherited_age)",
    1796078715059: "the checker took a frame that had ended overdue, and whose worker answered before"
    " its turn to be published, for one that ended too early",
    1796078717814: "a copy of a poison frame that a worker had was hedged when overdue"
    " (test_copy_of_poison_that_is_overdue_gets_no_second_worker)",
    1796078719594: "the same in another world: answered 11 ms after it had ended",
}
