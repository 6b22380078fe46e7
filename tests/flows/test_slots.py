"""Slots of a root: whose turn it is, and who yields."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from threading import Thread

import pytest

from flows.cli import exit_code
from flows.commands.runs import slots as slots_command
from flows.work.open_run import FLOW_LOCK
from flows.work.slots import Claim, HeldSlots, Slots, State, Wish
from flows.work.status import status_of
from rlcore.errors import ConfigError, DataError
from rlcore.storage.locks import FileLock, HeldLock
from tests.flows.test_trainer_client import wait_until
from tests.storage.small_disk import fill, mounted

PAGE_BYTES = 4_096


def wish(run_id: str, number: int = 1, priority: int = 0, since: float = 0.0) -> Wish:
    return Wish(run_id, number, priority, "chunk", since, 1)


def take_later(claim: Claim, held: list[tuple[str, HeldSlots]]) -> Thread:
    def take() -> None:
        held.append((claim.wish.run_id, claim.take(lambda reason: None)))

    thread = Thread(target=take, daemon=True)
    thread.start()
    wait_until(lambda: claim.wish in claim.slots.look().waiting or not thread.is_alive())
    return thread


def nobody_waits(reason: str) -> None:
    raise AssertionError(reason)


def test_a_root_without_slots_lets_every_run_train(tmp_path: Path) -> None:
    slots = Slots(tmp_path)
    assert [Claim(slots, wish(name)).take(nobody_waits).descriptors for name in "abc"] == [[], [], []]
    held = Claim(slots, wish("d")).take(nobody_waits)
    assert not held.must_yield()
    held.release()
    assert not slots.folder.exists()


def test_the_order_is_by_priority_then_by_who_asked_first(tmp_path: Path) -> None:
    slots = Slots(tmp_path)
    slots.set_devices(["0", "0"])
    first = Claim(slots, wish("first", 2)).take(nobody_waits)
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    wishes = [wish("late", since=3), wish("wide", 2, since=2), wish("urgent", priority=1, since=4)]
    held: list[tuple[str, HeldSlots]] = []
    threads = [take_later(Claim(slots, one), held) for one in wishes]
    state = slots.look()
    assert [one.run_id for one in state.waiting] == ["urgent", "wide", "late"]
    assert "before it in line: urgent (priority 1), wide (priority 0)" in state.reason(wishes[0])
    first.release()
    wait_until(lambda: len(held) == 1)
    assert slots.look().num_free == 1, "'late' does not pass 'wide', which waits for both"
    for number in (2, 3):
        held[number - 2][1].release()
        wait_until(lambda number=number: len(held) == number)
    assert [name for name, _ in held] == ["urgent", "wide", "late"]
    held[-1][1].release()
    for thread in threads:
        thread.join()
    assert slots.look() == State(("0", "0"), {}, ())
    log = [json.loads(line) for line in (slots.folder / "log.jsonl").read_text().splitlines()]
    assert [line["run_id"] for line in log if line["what"] == "took"] == ["first", "urgent", "wide", "late"]


def naive_yields(state: State) -> set[str]:
    """The fewest, lowest, last holders whose slots are enough for those that wait above them; by trying all sets."""
    holders = sorted(set(state.holders.values()), key=lambda one: one.order, reverse=True)
    best: set[str] = set()
    for top in sorted({one.priority for one in state.waiting}):
        short = sum(one.number for one in state.waiting if one.priority >= top) - state.num_free
        below = [one for one in holders if one.priority < top]
        for size in range(1, len(below) + 1):
            if short <= 0:
                break
            prefix = next(iter(combinations(below, size)))
            if sum(one.number for one in prefix) >= short or size == len(below):
                best |= {one.run_id for one in prefix}
                break
    return best


def test_the_lowest_yield_and_no_more_than_are_needed() -> None:
    random = Random(0)
    num_yielding = []
    for _ in range(500):
        num_slots, holders, at = random.randint(1, 6), {}, 0
        while at < num_slots and random.random() < 0.8:
            size = random.randint(1, num_slots - at)
            one = wish(f"h{at}", size, random.randint(0, 3), random.random())
            holders |= dict.fromkeys(range(at, at + size), one)
            at += size
        waiting = [
            wish(f"w{i}", random.randint(1, 2), random.randint(0, 4), random.random())
            for i in range(random.randint(0, 3))
        ]
        state = State(("",) * num_slots, holders, tuple(sorted(waiting, key=lambda one: one.order)))
        yielding = {one.run_id for one in holders.values() if state.must_yield(one.run_id)}
        assert yielding == naive_yields(state)
        assert all(
            any(w.priority > one.priority for w in waiting) for one in holders.values() if one.run_id in yielding
        )
        num_yielding.append(len(yielding))
    assert {0, 1, 2} <= set(num_yielding)


def test_how_soon_a_run_yields_is_what_one_of_those_above_it_asks_for() -> None:
    low, lower = wish("low", priority=1), wish("lower", since=1)
    patient = wish("patient", priority=2)
    hurried = replace(wish("hurried", priority=3), preempt="now")

    def yields(*waiting: Wish, num_slots: int = 2) -> list[str | None]:
        state = State(("",) * num_slots, {0: low, 1: lower}, waiting)
        return [state.must_yield(run_id) for run_id in ("low", "lower", "another")]

    assert yields() == [None, None, None]
    assert yields(patient) == [None, "chunk", None]
    assert yields(patient, num_slots=3) == [None, None, None], "a slot is free"
    assert yields(hurried, patient) == ["now", "now", None]
    assert yields(wish("equal", 2)) == [None, None, None]
    assert yields(replace(patient, priority=1)) == [None, "chunk", None]


def test_why_a_run_waits_is_told_with_who_holds_and_who_is_before_it() -> None:
    first, second = wish("first", 2), wish("second", 3, priority=1)
    mine = wish("mine", 2, since=5)
    state = State(("0", "0", "1", "1"), {0: first, 1: first, 2: second}, (mine, wish("later", since=6)))
    assert (state.num_free, state.num_wanted_before(mine)) == (1, 0)
    assert state.reason(mine) == (
        "waits for 2 of 4 slots with priority 0: 1 free, held by first (priority 0), second (priority 1)"
    )
    empty = State(("",), {}, (second, mine))
    assert empty.num_wanted_before(mine) == 3
    assert empty.reason(mine) == (
        "waits for 2 of 1 slots with priority 0: 1 free, held by nobody; before it in line: second (priority 1)"
    )


def test_a_trainer_sees_the_devices_of_its_slots_and_the_log_who_had_them(tmp_path: Path) -> None:
    slots = Slots(tmp_path)
    slots.set_devices(["0", "", "1", "1"])
    first = Claim(slots, wish("first")).take(nobody_waits)
    cpu = Claim(slots, wish("cpu")).take(nobody_waits)
    wide = Claim(slots, wish("wide", 2)).take(nobody_waits)
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    assert cpu.environment == {}
    assert wide.environment == {"CUDA_VISIBLE_DEVICES": "1"}
    assert [len(one.descriptors) for one in (first, cpu, wide)] == [1, 1, 2]
    assert slots.look().holders == {0: wish("first"), 1: wish("cpu"), 2: wish("wide", 2), 3: wish("wide", 2)}
    first.release()
    cpu.release()
    both = Claim(slots, wish("both", 2)).take(nobody_waits)
    assert both.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    for held in (both, wide, wide):
        held.release()
    log = [json.loads(line) for line in (slots.folder / "log.jsonl").read_text().splitlines()]
    assert [(line["what"], line["run_id"], line["number"], line["slots"]) for line in log] == [
        ("took", "first", 1, [0]),
        ("took", "cpu", 1, [1]),
        ("took", "wide", 2, [2, 3]),
        ("ended", "first", 1, [0]),
        ("ended", "cpu", 1, [1]),
        ("took", "both", 2, [0, 1]),
        ("ended", "both", 2, [0, 1]),
        ("ended", "wide", 2, [2, 3]),
    ]
    waited = [line["waited_s"] for line in log if line["what"] == "took"]
    assert waited == [round(seconds, 3) for seconds in waited]
    assert min(waited) >= 0
    assert [len(line["at"]) for line in log] == [len("2026-01-01T00:00:00.000+00:00")] * len(log)


def test_one_that_cannot_wait_is_looked_for_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(tmp_path)
    slots.set_devices([""])
    held = Claim(slots, wish("low")).take(nobody_waits)
    answers = []

    def look(reason: str) -> None:
        answers.append((held.must_yield(), held.must_yield(at_once=True)))
        raise TimeoutError

    for preempt, every_s in (("chunk", 0.0), ("now", 0.0), ("now", 1e9)):
        monkeypatch.setattr("flows.work.slots.LOOK_EVERY_S", every_s)
        with pytest.raises(TimeoutError):
            Claim(slots, Wish("urgent", 1, 1, preempt, 0.0, 1)).take(look)
    assert answers == [(True, False), (True, True), (True, False)]
    held.release()
    assert not held.must_yield()


def test_a_slot_that_says_nothing_yet_is_taken_all_the_same(tmp_path: Path) -> None:
    slots = Slots(tmp_path)
    slots.set_devices(["", ""])
    lock = FileLock(slots.path(1))
    assert lock.try_acquire()
    assert slots.look().holders == {1: Wish("a run that has just begun", 1, 0, "chunk", 0.0, 0)}
    lock.release()
    assert slots.look().holders == {}
    assert slots.reason_of("nobody") == ""
    slots.require(2)


def test_on_a_full_disk_no_slot_stays_taken(tmp_path: Path) -> None:
    with mounted(tmp_path) as disk:
        slots = Slots(disk)
        slots.set_devices(["", ""])
        held = Claim(slots, wish("first")).take(nobody_waits)
        log = slots.folder / "log.jsonl"
        log.write_bytes(b"x" * PAGE_BYTES)  # the next line needs another page
        ballast = fill(disk)
        held.release()
        assert log.stat().st_size == PAGE_BYTES
        for num_pages in (0, 1):  # too few for the waiting run's file; too few for the second slot's
            fill(disk, num_pages * PAGE_BYTES)
            with pytest.raises(OSError, match="No space left"):
                Claim(slots, wish("second", 2)).take(nobody_waits)
            assert slots.look() == State(("", ""), {}, ())
        ballast.unlink()
        Claim(slots, wish("second", 2)).take(nobody_waits).release()


def test_what_a_wait_raises_ends_it(tmp_path: Path) -> None:
    slots = Slots(tmp_path)
    slots.set_devices([""])
    held = Claim(slots, wish("first")).take(nobody_waits)
    with pytest.raises(AssertionError, match="held by first"):
        Claim(slots, wish("second")).take(nobody_waits)
    assert slots.look().waiting == ()
    held.release()


@pytest.mark.parametrize("number", [1, 0])
def test_a_run_does_not_wait_for_slots_that_are_taken_away_meanwhile(tmp_path: Path, number: int) -> None:
    slots = Slots(tmp_path)
    slots.set_devices(["", ""])
    held = Claim(slots, wish("first", 2)).take(nobody_waits)
    second = Claim(slots, wish("second", 2))
    reasons: list[str] = []

    def on_wait(reason: str) -> None:
        assert not reasons
        reasons.append(reason)
        slots.set_devices([""] * number)

    if number:
        with pytest.raises(ConfigError, match=r"at most the slots of .*, which are 1; got 2"):
            second.take(on_wait)
    else:
        assert second.take(on_wait).descriptors == []
    held.release()


def test_a_run_that_waits_is_listed_with_the_reason(tmp_path: Path) -> None:
    slots, run_dir = Slots(tmp_path), tmp_path / "runs" / "second"
    slots.set_devices([""])
    run_dir.mkdir(parents=True)
    (run_dir / "settings.json").write_text("{}")
    held = Claim(slots, wish("first")).take(nobody_waits)
    with HeldLock(run_dir / FLOW_LOCK, what="the run"):
        got: list[tuple[str, HeldSlots]] = []
        thread = take_later(Claim(slots, wish("second")), got)
        status = status_of(run_dir)
        assert (status.state, "held by first (priority 0)" in status.note) == ("waiting", True)
        held.release()
        thread.join()
        assert status_of(run_dir).state == "running"
        got[0][1].release()
        slots.waiting_path("second").touch()
        slots.mutex().path.unlink()
        slots.mutex().path.mkdir()  # it cannot be opened for writing, as by a user who may only read
        status = status_of(run_dir)
        assert (status.state, status.note) == ("waiting", "waits for slots")


def test_wrong_numbers_of_slots_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slots_command(tmp_path, number=None, gpus="1,3", per_gpu=2, as_json=True)
    assert json.loads(capsys.readouterr().out)["devices"] == ["1", "1", "3", "3"]
    slots_command(tmp_path, number=None, gpus=None, per_gpu=None, as_json=False)
    assert "slot 2, GPU 3: free" in capsys.readouterr().out
    for gpus in ("all", "0,0", "-1", ""):
        with pytest.raises(ConfigError, match="--gpus: must be different numbers"):
            slots_command(tmp_path, number=None, gpus=gpus, per_gpu=1, as_json=False)
    with pytest.raises(ConfigError, match=r"runtime.num_workers: must be at most the slots of .*, which are 4; got 5"):
        Slots(tmp_path).require(5)
    (tmp_path / "slots" / "slots.json").unlink()
    (tmp_path / "slots" / "slots.json").mkdir()
    assert exit_code(Slots(tmp_path).look) == 1
    assert capsys.readouterr().err == f"{tmp_path}/slots/slots.json: is no ordinary file\n"
    (tmp_path / "slots" / "slots.json").rmdir()
    (tmp_path / "slots" / "slots.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        Slots(tmp_path).look()
