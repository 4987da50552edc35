"""The replicas of `crf diloco`: one training on several rented machines that share a bucket.

request           the request for a launch: what the replicas train, and the files that they get
preflight         the checks before anything is uploaded or started
launches          a launch: its public notice in the bucket, and the launch file on the operator's machine
launch_status     the state of a launch: its replicas and its rounds; starting and canceling replicas
supervision       restart failed replicas; collect weights and logs; what each replica runs
replica_training  `crf train` as one replica
"""
