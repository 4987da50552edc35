"""The replicas of `crf diloco`: one training on several rented machines that share a bucket.

launches          a launch in the bucket (a public notice), and in the operator's own launch file
asking            the request for a launch: what the replicas train, and the files that they get
checking          what is refused before anything is uploaded or started
looking           the state of a launch: its replicas and its rounds; starting and canceling replicas
tending           restart failed replicas; collect weights and logs; what each replica runs
replica_training  `crf train` as one replica
"""
