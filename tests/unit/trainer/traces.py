"""Traces for the collator's tests: a session that errs twice, pairs, and random ones."""

from __future__ import annotations

from render_checks import decode

from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from tokenizer_assets import load

HINT = "Hint: the file is b.py."


def hinting(kind, meta):
    return HINT


def collator_of(family, *, reference=None, **options):
    config = CollatorConfig(**{"hint_generator": hinting, **options})
    return ComposerDataCollator(load(family), config, reference=reference)


def session(**fields):
    """Four assistant turns; the first and the third made a call that failed."""
    turns = [
        {"role": "user", "content": "The test fails."},
        {"role": "assistant", "tool_call": {"name": "bash", "arguments": {"command": "cat a.py"}}},
        {"role": "tool", "content": "No such file: a.py", "tool_error": True, "error_meta": {"error_kind": "first"}},
        {
            "role": "assistant",
            "content": "I look again.",
            "tool_call": {"name": "bash", "arguments": {"command": "ls"}},
        },
        {"role": "tool", "content": "b.py"},
        {"role": "assistant", "tool_call": {"name": "edit", "arguments": '{"path": "b.py", '}},
        {"role": "tool", "content": "not JSON", "tool_error": True, "error_meta": {"error_kind": "second"}},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Done, I think."},
    ]
    return {"trace_id": "s", "turns": turns, "final_reward": 0.5, **fields}


def pair(chosen='[TOOL_USE] name=bash input={"command":"ls"}', rejected="I give up.", question="Which file?"):
    return {
        "state_id": f"state of {question}",
        "state_messages": [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": question}],
        "chosen": chosen,
        "rejected": rejected,
        "n_teachers_agreeing": 2,
    }


def marked_runs(collator, ids, mask):
    """The texts of the stretches of tokens that a mask marks."""
    runs, at = [], 0
    while at < len(ids):
        end = at
        while end < len(ids) and mask[end] == 1:
            end += 1
        if end > at:
            runs.append(decode(collator.renderer, ids[at:end].tolist()))
        at = end + 1
    return runs


def random_trace(draw, number):
    """A few exchanges of random words; each call may fail."""
    words = ["file", " b.py", "\n", "ü🦜", "<|im_end|>", "[/INST]", '{"x": 1}', "  "]

    def text(most):
        return "".join(draw.choices(words, k=draw.randrange(1, most)))

    turns = []
    for _ in range(draw.randrange(1, 6)):
        if draw.random() < 0.6 or not turns:
            turns.append({"role": "user", "content": text(20)})
        made = {"role": "assistant", "content": text(6) if draw.random() < 0.5 else ""}
        if draw.random() < 0.7:
            arguments = {"command": text(6)} if draw.random() < 0.8 else text(4)
            made["tool_call"] = {"name": "bash", "arguments": arguments}
        turns.append(made)
        if "tool_call" in made:
            turns.append({"role": "tool", "content": text(30), "tool_error": draw.random() < 0.7})
    return {"trace_id": f"r{number}", "turns": turns, "final_reward": draw.random()}
