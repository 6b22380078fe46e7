"""Compare the filter's speed with the speed of the usual row-by-row loop, on 327,680 countdown prompts in chat form.

    python benchmarks/data_filter.py                          # about three minutes on two cores
    python benchmarks/data_filter.py --rows=20000             # a smaller run
    python benchmarks/data_filter.py --check --write          # exit code 1 below ten times or over 2 s; writes JSON

The loop applies the chat template of a trained byte-level BPE tokenizer, tokenizes, counts, and keeps or drops each
row. Measurements of the loop alternate with whole runs of the filter, which include loading, reading and writing. Loop
and filter must give the same token ids. A second run of the filter in a new process must reuse the stored result.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from results import write_result

from data.filter import filter_dataset
from data.tasks import build_dataset
from rlcore.config import CountdownData, FilterConfig, RunConfig

ROOT = Path(__file__).resolve().parents[1]
MIN_RATIO, MAX_SECOND_S = 10.0, 2.0
VOCAB_SIZE = 32_768
CORPUS_BYTES = 6_000_000  # of Python source, which trains the tokenizer
# The tokenizers of Qwen and Llama split a text into these words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=327_680, help="rows of the training split")
    parser.add_argument("--block", type=int, default=4_096, help="rows of one block of the usual way")
    parser.add_argument("--turns", type=int, default=2, help="runs of the filter; a block before, between and after")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a limit is missed")
    parser.add_argument("--write", action="store_true", help="write build/results/data_filter.json")
    parser.add_argument("--second", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = CountdownData(train_size=arguments.rows, validation_size=1_024, template="chat")
    if arguments.second:
        print(json.dumps(second_run(settings, Path(arguments.second))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = trained_tokenizer(folder / "tokenizer")
        dataset = build_dataset(settings, seed=1, root=folder)
        figures = in_turn(arguments, dataset.directory, tokenizer, folder)
        figures["second_run"] = in_new_process(folder)
    slow, fast = figures["row_by_row"], figures["filter"]
    print(
        f"row by row {slow['rows_per_s']:,.0f} rows/s ({slow['rows_per_cpu_s']:,.0f} a processor second), filter "
        f"{fast['rows_per_s']:,.0f} rows/s ({fast['rows_per_cpu_s']:,.0f}): {figures['ratio']:.1f} times on the clock, "
        f"{figures['cpu_ratio']:.1f} times by processor time, {figures['peak_mb']:.0f} MB"
    )
    second = figures["second_run"]
    print(f"second run: {second['work_s']:.2f} s, {second['process_s']:.2f} s with the start of its process")
    if arguments.write:
        print(write_result("data_filter", figures))
    if arguments.check and (figures["ratio"] < MIN_RATIO or second["process_s"] > MAX_SECOND_S):
        sys.exit(f"below {MIN_RATIO:.0f} times, or the second run over {MAX_SECOND_S:.0f} s")


def trained_tokenizer(folder: Path) -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(WORDS), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    return folder


def corpus() -> list[str]:
    from data.countdown import build

    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if size < CORPUS_BYTES:
            texts.append(path.read_text(errors="replace"))
            size += len(texts[-1])
    rows = build(CountdownData(train_size=500, validation_size=10, template="chat"), seed=9).splits["train"]
    return [*texts, *(row.prompt[0].content for row in rows)]


def in_turn(arguments: argparse.Namespace, dataset: Path, tokenizer: Path, folder: Path) -> dict[str, Any]:
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    prompts = pq.read_table(dataset / "train.parquet", columns=["prompt"]).column("prompt")
    slow_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    limit = FilterConfig().max_prompt_tokens
    few = CountdownData(train_size=100, validation_size=10, template="chat")
    filter_dataset(build_dataset(few, seed=2, root=folder / "few").directory, tokenizer, settings_in(folder / "few"))
    slow_s, fast_s = np.zeros(2), np.zeros(2)
    slow_ids: list[list[int]] = []
    for turn in range(arguments.turns + 1):
        block = prompts.slice(turn * arguments.block, arguments.block).to_pylist()
        begun = seconds_used()
        found = [
            slow_tokenizer.apply_chat_template(row, tokenize=True, add_generation_prompt=True, return_dict=False)
            for row in block
        ]
        slow_ids += [ids for ids in found if len(ids) <= limit]
        slow_s += seconds_used() - begun
        if turn == arguments.turns:
            break
        # Each turn has a new root. The last root is for the second run.
        root = folder if turn == arguments.turns - 1 else folder / f"turn{turn}"
        begun = seconds_used()
        result = filter_dataset(dataset, tokenizer, settings_in(root))
        fast_s += seconds_used() - begun
    column = pq.read_table(result.directory / "train.parquet", columns=["prompt_ids"]).column("prompt_ids")
    if column.slice(0, len(slow_ids)).to_pylist() != slow_ids:
        raise SystemExit("the two ways give different token ids")
    num_slow, num_fast = arguments.block * (arguments.turns + 1), (arguments.rows + 1_024) * arguments.turns
    (slow, slow_cpu), (fast, fast_cpu) = num_slow / slow_s, num_fast / fast_s
    return {
        "row_by_row": {"rows": num_slow, "rows_per_s": round(slow), "rows_per_cpu_s": round(slow_cpu)},
        "filter": {"rows": num_fast, "rows_per_s": round(fast), "rows_per_cpu_s": round(fast_cpu)},
        "filter_run_s": round(fast_s[0] / arguments.turns, 2),
        "filter_run_cpu_s": round(fast_s[1] / arguments.turns, 2),
        "ratio": round(fast / slow, 1),
        "cpu_ratio": round(fast_cpu / slow_cpu, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024 / 1e6, 1),
    }


def settings_in(root: Path) -> RunConfig:
    return RunConfig(paths={"root": str(root)})


def seconds_used() -> np.ndarray:
    """Return the wall-clock time, and the processor time of this process and its ended children, in seconds."""
    return np.array([time.perf_counter(), sum(os.times()[:4])])


def in_new_process(folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--second", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return {"process_s": round(time.perf_counter() - start, 3), **json.loads(done.stdout)}


def second_run(settings: CountdownData, folder: Path) -> dict[str, float]:
    begun = time.perf_counter()
    dataset = build_dataset(settings, seed=1, root=folder)
    filtered = filter_dataset(dataset.directory, folder / "tokenizer", settings_in(folder))
    work_s = time.perf_counter() - begun
    if not (dataset.cached and filtered.cached):
        raise SystemExit("the second run did the work again")
    return {"work_s": round(work_s, 3)}


if __name__ == "__main__":
    main()
