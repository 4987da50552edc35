"""Ablation experiments: arms times seeds with equal budgets, predictions frozen in advance, and intervals.

plan       arms.toml: question, arms, predictions, budget
job        runs one (arm, seed) in its own folder and process; also its result, and JSON files, plain or packed
jobs       runs all jobs and can resume; predictions.json, results.json, and a check that budgets were equal
logs       the world of logged sessions: training on one run, evaluation on its held-out sessions
workspace  the world of the toy workspace: GRPO training, evaluation on unseen tasks
page       table.md and plots: metrics with intervals over seeds and units
"""
