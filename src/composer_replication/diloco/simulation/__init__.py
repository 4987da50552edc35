"""Rounds of many replicas on paper: how long they take, what they move, what they cost. docs/concepts/diloco-scale.md

clock          events in the order of their time; processes that wait
settings       the work, the machines, the bucket, and what they cost
bucket_rounds  the protocol of `rounds/` as processes over a bucket
direct_rounds  the same work over machines that reach each other: a ring, as torchft's or Ray's
result         what came of it, in seconds, bytes and dollars
"""

from composer_replication.diloco.simulation.bucket_rounds import simulate_bucket
from composer_replication.diloco.simulation.direct_rounds import simulate_direct
from composer_replication.diloco.simulation.result import SimulatedRun
from composer_replication.diloco.simulation.settings import Bucket, Machine, Scenario, Spot, Work

__all__ = ["Bucket", "Machine", "Scenario", "SimulatedRun", "Spot", "Work", "simulate_bucket", "simulate_direct"]
