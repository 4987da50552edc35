"""verl's hooks, its engine on the CPU and its workers under Ray, held to the recorded steps (`make test-verl`).

cpu_engine     verl's fsdp2 engine with the embedded student, and recorded rollouts as its batches
training_run   a run of its own process: some steps, a checkpoint, and the rest from it
two_workers    verl's worker group under Ray, on two processes
"""
