"""What came of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

from composer_replication.diloco.simulation.settings import HOUR_S, Scenario

GB = 1e9


@dataclass(kw_only=True)
class SimulatedRun:
    """Sums over all replicas and rounds."""

    scenario: Scenario
    wall_s: float = 0.0
    rounds: int = 0
    offers: int = 0
    """Rounds of training of one replica that got into a committed mean."""
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    puts: float = 0.0
    gets: float = 0.0
    kills: int = 0
    lost_rounds: int = 0
    """Rounds that all replicas trained for and that were not committed."""

    @property
    def round_s(self) -> float:
        return self.wall_s / max(1, self.rounds)

    @property
    def waiting_s(self) -> float:
        """Of a round: everything that is not training."""
        return self.round_s - self.scenario.work.train_s

    @property
    def useful_share(self) -> float:
        """Training that counted, of the time that all machines were paid for."""
        return self.offers * self.scenario.work.train_s / (self.scenario.replicas * self.wall_s)

    @property
    def bytes_per_replica_and_round(self) -> tuple[float, float]:
        parts = self.scenario.replicas * max(1, self.rounds)
        return self.sent_bytes / parts, self.received_bytes / parts

    @property
    def machine_dollars(self) -> float:
        return self.scenario.replicas * self.wall_s / HOUR_S * self.scenario.machine.dollars_per_hour

    @property
    def bucket_dollars(self) -> float:
        bucket = self.scenario.bucket
        requests = self.puts * bucket.dollars_per_million_puts + self.gets * bucket.dollars_per_million_gets
        return requests / 1e6 + self.received_bytes / GB * bucket.dollars_per_gb_out
