"""Known import path of teacher replay; the code lives in `teacher_replay/` and `pairs/`."""

from composer_replication.teacher_replay import DPOPair, TeacherCallResult, extract_dpo_pairs, replay_trace

__all__ = ["DPOPair", "TeacherCallResult", "extract_dpo_pairs", "replay_trace"]
