"""Ablation experiments: arms times seeds with equal budgets, predictions frozen in advance, and intervals.

plan       arms.toml: question, arms, predictions, budget
job        one (arm, seed) in a folder and a process of its own; its result; JSON files, plain or packed
jobs       all jobs, resumable; predictions.json, results.json, and whether the budgets were equal
logs       the world of logged sessions: trainings on one run, evaluated on its held-out sessions
workspace  the world of the workspace: GRPO trainings, evaluated on tasks that they never saw
page       table.md and plots: metrics with intervals over seeds and units
"""
