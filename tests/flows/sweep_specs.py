"""Sweeps small enough for a test. A learning rate of 1 spoils the model in one step, so the scores differ for sure."""

UNTRACKED = ("tracking.enabled=false",)

SPECS = {
    "grid": """
name: grid
experiment: debug
overrides: [trainer.total_steps=1]
seeds: [1, 2]
grid:
  optim.lr: [3e-4, 1.0]
""",
    "list": """
name: list
experiment: debug
overrides: [trainer.total_steps=1]
seeds: [2, 1]
list:
  - {optim.lr: 1.0, algo: grpo}
  - {optim.lr: 3e-4, algo: grpo}
objective: {metric: reward/greedy, direction: minimize}
""",
    "random": """
name: random
experiment: debug
overrides: [trainer.total_steps=1]
random:
  num_points: 2
  seed: 3
  space:
    optim.lr: {low: 1e-4, high: 1e-2, log: true}
    rollout.samples_per_prompt: {low: 2, high: 8, step: 2}
""",
    "paired": """
name: paired
experiment: debug
overrides: [trainer.total_steps=2, validation.every_steps=1, name=pruned]
list:
  - {optim.lr: 1.0}
  - {optim.lr: 1e-4}
  - {optim.lr: 2.0}
pruning: {every_steps: 1, confidence: 0.5}
""",
    "optuna": """
name: optuna
experiment: debug
overrides: [validation.every_steps=1, name=tried]
optuna:
  num_points: 6
  startup_points: 4
  space:
    optim.lr: {low: 1e-5, high: 10.0, log: true}
    algo: [grpo, rloo]
pruning: {pruner: median, every_steps: 1, options: {n_startup_trials: 2}}
""",
    "stopped": """
name: stopped
experiment: debug
overrides: [name=stopped]
list:
  - {optim.lr: 3e-4}
  - {optim.lr: 1.0}
""",
    "on workers": """
name: on_workers
experiment: debug
overrides: [validation.every_steps=1, name=worked]
optuna:
  num_points: 4
  points_at_once: 2
  startup_points: 2
  seed: 25
  space:
    optim.lr: {low: 1e-5, high: 10.0, log: true}
    algo: [grpo, rloo]
pruning: {pruner: median, every_steps: 1, options: {n_startup_trials: 2}}
""",
    "alone": """
name: alone
experiment: debug
overrides: [trainer.total_steps=1, name=alone]
list: [{optim.lr: 1.0, algo: grpo}]
""",
    "spoiled": """
name: spoiled
experiment: debug
overrides: [trainer.total_steps=1, name=alone]
list: [{optim.lr: 1.0, algo: grpo}]
""",
    "tracked": """
name: tracked
experiment: debug
overrides: [trainer.total_steps=1, name=tracked]
list:
  - {optim.lr: 3e-4}
  - {optim.lr: 1.0}
""",
}
