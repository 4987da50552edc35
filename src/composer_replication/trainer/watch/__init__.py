"""Whether a run can work, and whether it still does.

step_memory      how much memory a step takes, part by part
memory_plan      whether it fits, and what to change if not
watched_metric   when a metric has fallen or risen too far
best_checkpoint  the best checkpoint, kept whatever the rotation does
collapse_alarm   says that a run is falling apart, keeps the best checkpoint, can end the run
logged_history   the lines of metrics that a run logged
hint_rules       the diagnosis about hints on rollouts
diagnosis        why a run cannot learn, from its lines of metrics
run_diagnosis    the same while the run goes on
"""
