"""verl's hooks, its engine on the CPU and its workers under Ray, held to the recorded steps (`make test-verl`).

cpu_engine       verl's fsdp2 engine with the embedded student, and recorded rollouts as its batches
recorded_pairs   pairs made of recorded rollouts, as a column of their batch
scripted_server  a server that says what a script says, and verl's agent loop on it
training_run     a run of its own process: some steps, a checkpoint, and the rest from it
two_workers      verl's worker group under Ray, on two processes
"""
