"""Arms x seeds of one experiment, with equal budgets, predictions that were written first, and intervals.

In reading order:

    plan          arms.toml: question, arms, predictions, budget
    record_files  JSON files that are named where they are damaged
    predictions   frozen before the first job
    job           one (arm, seed) in a folder and a process of its own; its result
    jobs          all of them, killed and gone on with; results.json
    logs          the world of logged sessions: trainings on one run, evaluated on its held-out sessions
    episodes      the workspace played by a model: held-out tasks, and rollouts of a training
    workspace     the world of the workspace: GRPO trainings, judged on tasks that they never saw
    budgets       whether every job spent the same, on the same units
    table         figures with intervals over seeds and units
    plots         the same as SVG
    page          table.md
"""
