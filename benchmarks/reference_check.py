"""Measure the seconds that `data.references` needs to check three kinds of references.

    python -m benchmarks.reference_check GSM8K       # the folder of GSM8K's train.jsonl and test.jsonl; prints JSON

The first kind is the rows of GSM8K, which are scored on their solutions and references. The second kind is 30,000 whole
numbers, as in DAPO-Math-17k. The third kind is 30,000 references in the readable forms of
tests/data/math_references.txt, as in MATH.
"""

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from data.math import read_reference
from data.references import check_references
from rlcore.config import RewardConfig
from rlcore.config.data import Gsm8kData, MappedData

NUM_ROWS = 30_000
FORMS = Path(__file__).parents[1] / "tests" / "data" / "math_references.txt"


def main() -> None:
    lines = FORMS.read_text(encoding="utf-8").splitlines()
    forms = [form for line in lines if not read_reference(form := line.partition("\t")[0]).problem]
    kinds = {
        "integers": [str(n) for n in range(NUM_ROWS)],
        "forms of MATH": [forms[n % len(forms)] for n in range(NUM_ROWS)],
    }
    with TemporaryDirectory() as name:
        root, tasks = Path(name), {}
        for kind, references in kinds.items():
            source = root / kind
            source.mkdir()
            for split in ("train", "test"):
                rows = ({"question": f"{split} {n}", "answer": answer} for n, answer in enumerate(references))
                (source / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
                references = references[:10]
            tasks[kind] = MappedData(source=str(source), scorer="data.math:score")
        tasks["GSM8K"] = Gsm8kData(source=sys.argv[1])
        for kind, data in tasks.items():
            seconds = []
            for _ in range(2):
                begun = time.perf_counter()
                report = check_references(data, 1, RewardConfig(num_processes=2), root)
                seconds.append(round(time.perf_counter() - begun, 2))
            print(json.dumps({"rows": kind, "first_s": seconds[0], "kept_s": seconds[1], "report": report}), flush=True)


if __name__ == "__main__":
    main()
