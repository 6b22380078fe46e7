"""The job and the report of one trainer in `benchmarks.vs_trl`. Processes exchange both as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SAMPLER_CLIP = 0.2
WEIGHT_DECAY = 0.01
GRAD_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one trainer. `folder`: contains the prompts in the order of the steps. If `evaluated_steps` is not
    empty, the folder also contains the held-out problems and the weights.

    `precision`: the type of the weights, fp32 or bf16 (TRL only). On a GPU, matrix products are always in bfloat16.
    `lengths`: the number of tokens of each response in a step, or () if the model ends the responses itself.
    `micro_batch`: the number of responses in one forward pass of TRL."""

    name: str
    device: str
    engine: str
    precision: str
    model: str
    folder: str
    experiment: str
    scorer: str
    num_scorers: int
    prompts: int
    samples: int
    updates: int
    warm_up: int
    steps: int
    max_prompt_tokens: int
    max_response_tokens: int
    lengths: tuple[int, ...]
    micro_batch: int
    engine_share: float
    beta: float
    lr: float
    seed: int
    threads: int
    evaluated_steps: tuple[int, ...]
    overrides: tuple[str, ...]

    @property
    def is_trl(self) -> bool:
        return self.name.startswith("trl")

    @property
    def num_steps(self) -> int:
        return self.warm_up + self.steps

    def weights(self, step: int) -> Path:
        return Path(self.folder) / f"step-{step}"

    def write(self) -> Path:
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> "Job":
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        values |= {name: tuple(values[name]) for name in ("lengths", "evaluated_steps", "overrides")}
        return cls(**(values | {"folder": str(Path(path).parent)}))


@dataclass(frozen=True, slots=True)
class Row:
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str


PROMPTS, HELD_OUT = "prompts.jsonl", "held_out.jsonl"


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


def read_rows(file: Path) -> list[Row]:
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Row(line["text"], tuple(line["token_ids"]), line["ground_truth"]) for line in lines]


def write_report(job: Job, report: dict[str, Any]) -> None:
    (Path(job.folder) / "report.json").write_text(json.dumps(report), encoding="utf-8")
