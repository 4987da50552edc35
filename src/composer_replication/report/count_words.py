"""What the counts of a training mean, in one line each: notes on what is trained, and reasons why something is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MEANINGS = {
    "cut_in_message": "windows that begin inside a message, as none began where they could",
    "short_context": "targets with less than train.batch.overlap tokens before them, for want of room in their window",
    "no_wrong_hint": "sites without a wrong hint for train.switches.contrast: there is no other kind of error",
    "wrong_hint": "sites without their wrong hint, for the reason behind the colon",
    "placement": "hints that stand elsewhere than asked for, as the template does not take them there",
    "reference_saw_more_context": "pairs whose references were computed with more context than their window has",
    "whole_turn_without_call": "sites of turns without a call: with train.batch.part = call the whole turn is taught",
    "longer_than_window": "with the hint or the answers beside it, it is longer than train.batch.budget",
    "hint_has_no_place": "the template takes no hint before that turn",
    "hint_makes_no_tokens": "the hint is empty for this tokenizer",
    "nothing_before_it": "no token stands before the turn, so none can predict its first",
    "without_hint": "`crf sites` wrote no hint for the site",
    "hint_does_nothing": "its hint lowers the erring decision no more than that of another kind does",
    "hint_lowers_good_calls_too": "its hint lowers good calls of the session as much as the erring one",
    "no_hint_of_another_kind": "there is no other kind of error to compare its hint with",
    "not_rendered": "the template refused the messages, or there were none",
    "turn_not_in_rendering": "the turn is not in what the template shows",
    "pair_without_answer": "one side has neither text nor a call",
    "pair_of_equal_answers": "both sides are the same tokens",
    "pair_contexts_differ": "the template shows other messages before one side than before the other",
    "pair_of_no_such_turn": "the conversation has no such turn: `crf pairs` was run on another one",
    "failed_call": "a call of the turn failed",
    "refused_call": "the user or the permissions refused a call of the turn",
    "blocked_call": "a hook blocked a call of the turn",
    "interrupted": "the user stopped the agent",
    "call_failed_as_part_of_the_work": "tests, compilers or linters failed; train.channels.work_failures keeps it",
    "rejected_side_of_a_pair": "a pair teaches the opposite",
    "image_before_it": "the turn answers an image, which the student does not see",
    "unseen_context_before_it": "the turn answers something that is not in the log",
    "text_follows_call": "the turn speaks behind its call, an order that templates do not write",
    "thinking_comes_late": "the turn thinks behind its text or call, an order that templates do not write",
    "without_answer": "the turn has neither text nor a call",
}


def reason_of(name: str) -> str:
    """The part of a count's name that says why: of `channel: reason` the reason, of `note:details` the note."""
    _, colon, reason = name.partition(": ")
    return reason if colon else name.partition(":")[0]


def explained(counts: Iterable[str], drops: Iterable[str]) -> list[str]:
    """A line for each count and drop that its name does not explain, called as the tables call it, each once."""
    noted = {reason: reason.replace("_", " ") for reason in map(reason_of, sorted(counts))}
    left_out = {reason: reason for reason in map(reason_of, sorted(drops))}
    return [f"{label}: {MEANINGS[reason]}" for reason, label in (noted | left_out).items() if reason in MEANINGS]


def of_good_turns(counts: Mapping[str, int], drops: Mapping[str, int]) -> list[str]:
    """That good turns and those left out do not add up, where they do not: a good turn may find no window."""
    if "good_turns" not in counts:
        return []
    num_left_out = sum(number for name, number in drops.items() if name.startswith("lm_ce: "))
    both = num_left_out - (counts["model_turns"] - counts["good_turns"])
    return [f"{both:,} of the good turns are left out as well: no window holds them"] if both > 0 else []
