"""Implement the replicas of `crf diloco`: one training run on several rented machines that share a bucket.

request           the request for a launch: what the replicas train, and the files that they get
preflight         the checks before anything is uploaded or started
launches          a launch: its public notice in the bucket, and the launch file on the operator's machine
launch_status     the state of a launch: its replicas and its rounds; starts and cancels replicas
supervision       restarts failed replicas, collects weights and logs, and contains what each replica runs
replica_training  `crf train` as one replica
"""
