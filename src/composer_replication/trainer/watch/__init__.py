"""Whether a run can work, and whether it still does.

planner         will a step fit into memory, and what to change if not
step_memory     the estimate behind it, part by part
metrics_file    `metrics.jsonl`: every set of figures that is logged
alarm           says that a run is falling apart, keeps the best checkpoint, can end the run
watched_metric  when a metric has fallen or risen too far
best            the best checkpoint, kept whatever the rotation does
diagnosis       why a run cannot learn, from its lines of metrics
run_diagnosis   the same while the run goes on
"""
