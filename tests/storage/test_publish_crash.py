"""Kill -9 during a publication: at every operation on a file, and at random moments."""

import json
import random
import subprocess
import sys
import time

import pytest

from rlcore.storage.manifest import verify_directory
from rlcore.storage.publish import remove_stale_temporaries

# For k = 1, 2, ...: a forked child publishes and kills itself at its k-th operation on a file, until one gets through.
EVERY_OPERATION = """
import json, os, signal, sys
from pathlib import Path
from rlcore.storage.manifest import verify_directory
from rlcore.storage.publish import published_directory, remove_stale_temporaries

root, replace = Path(sys.argv[1]), sys.argv[2] == "replace"

def publish(content):
    with published_directory(root / "x", {"content": content}, replace=replace) as folder:
        (folder / "a").write_text(content)
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text(content * 1000)

def die_at(k):
    left = k
    def hook(event, args):
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "fcntl.flock",
                     "os.truncate", "os.scandir", "ctypes.dlsym"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

seen = []
for k in range(1, 1000):
    if replace:
        publish("old")
    child = os.fork()
    if child == 0:
        die_at(k)
        publish("new")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    whole = (root / "x").exists()
    content = verify_directory(root / "x").values["content"] if whole else None
    remains = [path.name for path in root.iterdir() if path.name != "x"]
    remove_stale_temporaries(root)
    left = sorted(path.name for path in root.iterdir() if path.name != "x")
    seen.append({"content": content, "remains": len(remains), "left": left})
    if content == "new":
        import shutil
        shutil.rmtree(root / "x")
    if os.WIFEXITED(status):
        break
print(json.dumps(seen))
"""

ENDLESS = """
import itertools, sys
from pathlib import Path
from rlcore.storage.publish import published_directory, write_json_atomically

root = Path(sys.argv[1])
print("ready", flush=True)
for number in itertools.count():
    with published_directory(root / f"{number:05d}", {"number": number}) as folder:
        for part in range(3):
            (folder / f"{part}").write_bytes(bytes([number % 256]) * 50_000)
    write_json_atomically(root / "latest.json", {"number": number})
"""


@pytest.mark.parametrize("mode", ["first", "replace"])
def test_kill_at_every_operation_leaves_old_or_new(tmp_path, mode):
    done = subprocess.run(
        [sys.executable, "-c", EVERY_OPERATION, str(tmp_path), mode], capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert len(seen) > 12, "the child must have died at many places"
    assert all(one["left"] == [] for one in seen), "what a dead process leaves is removed"
    assert any(one["remains"] for one in seen), "some child must have died with a temporary on disk"
    before = "old" if mode == "replace" else None
    contents = [one["content"] for one in seen]
    assert set(contents) == {before, "new"}
    assert contents == sorted(contents, key=lambda content: content == "new"), "old until one moment, new from then on"


@pytest.mark.lengthy
def test_kill_at_random_moments_leaves_whole_directories(tmp_path):
    moments = random.Random(20)
    for number in range(10):
        writer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        while not (tmp_path / f"{3 * number:05d}").exists():
            assert writer.poll() is None
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.05))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        remove_stale_temporaries(tmp_path)
        assert not list(tmp_path.glob(".tmp-*"))
        for folder in sorted(path for path in tmp_path.iterdir() if path.is_dir()):
            assert verify_directory(folder).values["number"] == int(folder.name)
            assert (folder / "2").stat().st_size == 50_000
        latest = tmp_path / "latest.json"
        if latest.exists():
            assert (tmp_path / f"{json.loads(latest.read_text())['number']:05d}").is_dir()


def test_two_processes_publish_the_same_directories(tmp_path):
    both = [
        subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.DEVNULL) for _ in range(2)
    ]
    last = tmp_path / f"{20:05d}"
    while not last.exists():
        assert all(writer.poll() is None for writer in both), "no writer may fail because of the other"
        time.sleep(0.02)
    for writer in both:
        writer.kill()
        writer.wait()
    folders = sorted(path for path in tmp_path.iterdir() if path.is_dir() and not path.name.startswith("."))
    assert len(folders) > 20
    for folder in folders:
        verify_directory(folder)
