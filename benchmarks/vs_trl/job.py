"""What both sides of `benchmarks.vs_trl` are told, and what each reports: JSON, since each has its own process."""

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
    """One side's work. Everything about it lies in `folder`, which may be moved: the prompts, in the order in which the
    steps take them, and with `judged_steps` the held-out problems and the weights at the start and after these steps.

    `precision`: fp32 (master weights; on a GPU products in bfloat16) or bf16 (weights and optimizer too, TRL alone).
    `lengths`: tokens of each answer of a step; empty: answers end by themselves. `micro_batch`: answers of one of
    TRL's forward passes.
    """

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
    watch_memory: bool
    judged_steps: tuple[int, ...]
    overrides: tuple[str, ...]

    @property
    def is_trl(self) -> bool:
        """Whether TRL does it."""
        return self.name.startswith("trl")

    @property
    def num_steps(self) -> int:
        """Steps in all."""
        return self.warm_up + self.steps

    def weights(self, step: int) -> Path:
        """Folder of the weights after a step; 0: at the start."""
        return Path(self.folder) / f"step-{step}"

    def write(self) -> Path:
        """Write it where the side reads it."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> "Job":
        """What `write` wrote."""
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        told |= {name: tuple(told[name]) for name in ("lengths", "judged_steps", "overrides")}
        return cls(**(told | {"folder": str(Path(path).parent)}))


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt: its text, the ids that the text is for the model's tokenizer, what its answers are judged by."""

    text: str
    token_ids: tuple[int, ...]
    ground_truth: str


PROMPTS, HELD_OUT = "prompts.jsonl", "held_out.jsonl"


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Keep prompts in their order."""
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


def read_rows(file: Path) -> list[Row]:
    """What `write_rows` wrote."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Row(told["text"], tuple(told["token_ids"]), told["ground_truth"]) for told in map(json.loads, lines)]


def write_report(job: Job, figures: dict[str, Any]) -> None:
    """What a side found, for the script that started it."""
    (Path(job.folder) / "report.json").write_text(json.dumps(figures), encoding="utf-8")
