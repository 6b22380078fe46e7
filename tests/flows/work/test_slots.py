"""Slots of a workspace: order and yielding."""

import json
from random import Random
from threading import Thread

import pytest

from flows.cli import exit_code
from flows.commands.runs import slots as slots_command
from flows.work.runs import status_of
from flows.work.slots import HeldSlots, SlotRequest, Slots, SlotState
from rlcore.errors import ConfigError, DataError
from rlcore.storage.locks import RUN_LOCK, FileLock, HeldLock
from tests.flows.conftest import wait_until
from tests.storage.small_disk import fill, mounted

PAGE_BYTES = 4_096


def request(run_id: str, number: int = 1, priority: int = 0, since: float = 0.0) -> SlotRequest:
    return SlotRequest(run_id, number, priority, since, 1)


def take_later(slots: Slots, request: SlotRequest, held: list[tuple[str, HeldSlots]]) -> Thread:
    def take() -> None:
        held.append((request.run_id, slots.acquire(request, lambda reason: None)))

    thread = Thread(target=take, daemon=True)
    thread.start()
    wait_until(lambda: request in slots.read_state().waiting or not thread.is_alive(), "a change of the slots")
    return thread


def fail_on_wait(reason: str) -> None:
    raise AssertionError(reason)


def test_root_without_slots_limits_no_run(tmp_path):
    slots = Slots(tmp_path)
    for held in [slots.acquire(request(name), fail_on_wait) for name in "abc"]:
        assert (held.descriptors, held.must_yield()) == ([], False)
        held.release()
    assert not slots.folder.exists()


def test_order_is_by_priority_then_time(tmp_path):
    slots = Slots(tmp_path)
    slots.set_devices(["0", "0"])
    first = slots.acquire(request("first", 2), fail_on_wait)
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    requests = [request("late", since=3), request("wide", 2, since=2), request("urgent", priority=1, since=4)]
    held: list[tuple[str, HeldSlots]] = []
    threads = [take_later(slots, one, held) for one in requests]
    state = slots.read_state()
    assert [one.run_id for one in state.waiting] == ["urgent", "wide", "late"]
    assert "before it: urgent (priority 1), wide (priority 0)" in state.wait_reason(requests[0])
    first.release()
    wait_until(lambda: len(held) == 1, "a change of the slots")
    assert slots.read_state().num_free == 1
    for number in (2, 3):
        held[number - 2][1].release()
        wait_until(lambda number=number: len(held) == number, "a change of the slots")
    assert [name for name, _ in held] == ["urgent", "wide", "late"]
    held[-1][1].release()
    for thread in threads:
        thread.join()
    assert slots.read_state() == SlotState(("0", "0"), {}, ())


def test_must_yield_matches_a_naive_twin():
    random = Random(0)
    seen = set()
    for _ in range(500):
        num_slots, holders, at = random.randint(1, 6), {}, 0
        while at < num_slots and random.random() < 0.8:
            size = random.randint(1, num_slots - at)
            one = request(f"h{at}", size, random.randint(0, 3), random.random())
            holders |= dict.fromkeys(range(at, at + size), one)
            at += size
        numbers = range(random.randint(0, 3))
        waiting = [request(f"w{i}", random.randint(1, 2), random.randint(0, 4), random.random()) for i in numbers]
        state = SlotState(("",) * num_slots, holders, tuple(sorted(waiting, key=lambda one: one.order)))
        for holder in set(holders.values()):
            left = num_slots - len(holders)
            for one in state.waiting:
                left -= one.number if one.priority > holder.priority else 0
            assert state.must_yield(holder) == (left < 0)
            seen.add(left < 0)
    assert seen == {False, True}


def test_wait_reason():
    first, second = request("first", 2), request("second", 3, priority=1)
    mine = request("mine", 2, since=5)
    state = SlotState(("0", "0", "1", "1"), {0: first, 1: first, 2: second}, (mine, request("later", since=6)))
    empty = SlotState(("",), {}, (second, mine))
    for found, before, text in (
        (state, 0, "2 of 4 slots with priority 0: 1 free, held by first (priority 0), second (priority 1)"),
        (empty, 3, "2 of 1 slots with priority 0: 1 free, held by no run; before it: second (priority 1)"),
    ):
        assert found.num_requested_before(mine) == before
        assert found.wait_reason(mine) == f"waits for {text}"


def test_trainer_sees_devices_of_its_slots(tmp_path):
    slots = Slots(tmp_path)
    slots.set_devices(["0", "", "1", "1"])
    wanted = (request("first"), request("cpu"), request("wide", 2))
    first, cpu, wide = held = [slots.acquire(one, fail_on_wait) for one in wanted]
    assert [one.environment.get("CUDA_VISIBLE_DEVICES") for one in held] == ["0", None, "1"]
    assert [len(one.descriptors) for one in held] == [1, 1, 2]
    assert [one.run_id for _, one in sorted(slots.read_state().holders.items())] == ["first", "cpu", "wide", "wide"]
    first.release()
    cpu.release()
    both = slots.acquire(request("both", 2), fail_on_wait)
    assert both.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    for one in (both, wide, wide):
        one.release()


def test_holder_yields_to_higher_priority_only(tmp_path):
    slots = Slots(tmp_path)
    slots.set_devices([""])
    held = slots.acquire(request("low"), fail_on_wait)
    answers = []

    def look(reason: str) -> None:
        answers.append(held.must_yield())
        raise TimeoutError

    for priority in (1, 0):
        with pytest.raises(TimeoutError):
            slots.acquire(request("urgent", priority=priority), look)
    assert answers == [True, False]
    held.release()
    assert not held.must_yield()


def test_locked_slot_without_request_is_taken(tmp_path):
    slots = Slots(tmp_path)
    slots.set_devices(["", ""])
    lock = FileLock(slots.path(1))
    assert lock.try_acquire()
    assert slots.read_state().holders == {1: SlotRequest("a run that has just begun", 1, 0, 0.0, 0)}
    lock.release()
    assert slots.read_state().holders == {}
    assert slots.wait_reason("no-such-run") == ""
    slots.require(2)


def test_full_disk_leaves_no_slot_taken(tmp_path):
    with mounted(tmp_path) as disk:
        slots = Slots(disk)
        slots.set_devices(["", ""])
        held = slots.acquire(request("first"), fail_on_wait)
        ballast = fill(disk)
        held.release()
        for num_pages in (0, 1):  # too few for the waiting file, or for the second slot
            fill(disk, num_pages * PAGE_BYTES)
            with pytest.raises(OSError, match="No space left"):
                slots.acquire(request("second", 2), fail_on_wait)
            assert slots.read_state() == SlotState(("", ""), {}, ())
        ballast.unlink()
        slots.acquire(request("second", 2), fail_on_wait).release()


@pytest.mark.parametrize("number", [1, 0])
def test_slots_removed_during_a_wait(tmp_path, number):
    slots = Slots(tmp_path)
    slots.set_devices(["", ""])
    held = slots.acquire(request("first", 2), fail_on_wait)
    second = request("second", 2)
    reasons: list[str] = []

    def on_wait(reason: str) -> None:
        assert not reasons
        reasons.append(reason)
        slots.set_devices([""] * number)

    if number:
        with pytest.raises(ConfigError, match=r"at most the slots of .*, which has 1; got 2"):
            slots.acquire(second, on_wait)
    else:
        assert slots.acquire(second, on_wait).descriptors == []
    held.release()


def test_waiting_run_is_listed_with_reason(tmp_path):
    slots, run_dir = Slots(tmp_path), tmp_path / "runs" / "second"
    slots.set_devices([""])
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text("{}")
    held = slots.acquire(request("first"), fail_on_wait)
    with HeldLock(run_dir / RUN_LOCK, what="the run"):
        got: list[tuple[str, HeldSlots]] = []
        thread = take_later(slots, request("second"), got)
        status = status_of(run_dir)
        assert (status.state, "held by first (priority 0)" in status.note) == ("waiting", True)
        held.release()
        thread.join()
        assert status_of(run_dir).state == "running"
        got[0][1].release()
        slots.waiting_path("second").touch()
        slots.mutex().path.unlink()
        slots.mutex().path.mkdir()  # no write permission
        status = status_of(run_dir)
        assert (status.state, status.note) == ("waiting", "waits for slots")


def test_wrong_slot_settings_are_reported(tmp_path, capsys):
    slots_command(tmp_path, gpus="1,3", per_gpu=2, as_json=True)
    assert json.loads(capsys.readouterr().out)["devices"] == ["1", "1", "3", "3"]
    holder = Slots(tmp_path).acquire(request("first"), fail_on_wait)
    slots_command(tmp_path)
    first, *rows = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert first == ["0", "1", "taken", "first", "0", first[5], ""]
    assert rows == [[number, gpu, "free", "", "", "", ""] for number, gpu in (("1", "1"), ("2", "3"), ("3", "3"))]
    holder.release()
    for gpus in ("all", "0,0", "-1", ""):
        with pytest.raises(ConfigError, match="--gpus: must be different numbers"):
            slots_command(tmp_path, gpus=gpus, per_gpu=1)
    file = tmp_path / "slots" / "slots.json"
    file.unlink()
    file.mkdir()
    assert exit_code(Slots(tmp_path).read_state) == 1
    assert capsys.readouterr().err == f"{file}: is no ordinary file\n"
    file.rmdir()
    file.write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        Slots(tmp_path).read_state()
