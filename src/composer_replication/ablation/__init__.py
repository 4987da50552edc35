"""Arms x seeds of one experiment, with equal budgets, predictions that were written first, and intervals.

In reading order:

    plan       arms.toml: question, arms, predictions, budget
    job        one (arm, seed) in a folder and a process of its own; its result
    logs       the world of logged sessions: trainings on one run, evaluated on its held-out sessions
"""
