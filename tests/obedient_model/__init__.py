"""A tiny world for tests: a model with bad habits that obeys a rule when one stands in its context."""

from obedient_model.environment import ToyEnvironment
from obedient_model.pretrain import Pretraining
from obedient_model.tasks import KINDS, Kind, ToySession
from obedient_model.world import World, build_world, one_thread

__all__ = ["KINDS", "Kind", "Pretraining", "ToyEnvironment", "ToySession", "World", "build_world", "one_thread"]
