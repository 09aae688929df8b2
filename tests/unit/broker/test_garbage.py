"""What a frame leaves behind when it has ended: nothing that only the collector of cycles could free."""

from __future__ import annotations

import gc

import hr_core as hr

from headrace.broker.process import GC_THRESHOLDS, collect_seldom


def test_frames_leave_no_reference_cycles_behind() -> None:
    """The broker lets the collector run seldom, so what ends must be freed by its last reference."""
    driver = hr.CoreDriver()
    driver.join_producer()
    driver.join_worker()
    gc.collect()
    gc.disable()
    try:
        for seq in range(200):
            driver.push(hr.frame(seq=seq))
            for sent in hr.batches(driver.tick()):
                driver.done(sent)
            driver.actions.clear()

        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_collector_runs_seldom_in_the_brokers_process() -> None:
    """It would walk everything that is kept for replay, every few seconds."""
    before = gc.get_threshold()
    try:
        collect_seldom()

        assert gc.get_threshold() == GC_THRESHOLDS
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
