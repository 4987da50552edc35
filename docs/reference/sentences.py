"""What the reference says that the code has no place for: one sentence a name, and which records an artefact holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from composer_replication import tensor_file, types
from composer_replication.cli import replay
from composer_replication.ingestion import session_sources
from composer_replication.ingestion import session_sources as last_ingest
from composer_replication.pairs import export
from composer_replication.pairs.extract import PairRecord
from composer_replication.runs import files as conversations
from composer_replication.runs import files as evaluation
from composer_replication.runs import files as pairs
from composer_replication.runs import files as sites
from composer_replication.runs import files as tools
from composer_replication.runs import split
from composer_replication.trainer import warmup
from composer_replication.trainer.checkpoints import manifest
from composer_replication.trainer.from_config import training as results
from composer_replication.trainer.objective.fingerprint import Fingerprint
from composer_replication.trainer.objective.hint_proof import HintProof
from composer_replication.trainer.sessions import proof, reference

CONFIG = """\
A config is a TOML file (`crf train --config FILE`); `--set a.b=c` wins over the file. A key that is not here is an
error, and the message names the nearest one. `--set a.b=none` unsets a key that may be unset.

`train.preset` names a preset, `composer` unless you say otherwise. A preset stands between the defaults and your file:
where the column *presets* names a value, that value holds under that preset until the file or `--set` gives another.

`crf train --options` prints the same list. Bounds are intervals: `[0, 1)` holds 0 and not 1."""

COMPOSE_LOSS = """\
`from composer_replication import compose_loss`: the loss of one batch, for a training loop of your own.

```text
total = lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo
```

What the three channels teach: [channels](../concepts/channels.md). Most parameters are also keys of
[`[loss]`](config.md#loss), and the trainers pass those on."""

PARAMETERS: Mapping[str, str] = {
    "model": "A Hugging Face causal language model; one that DDP or FSDP2 wraps works too.",
    "inputs": "The batch: a mapping with the keys below, or a TreeBatch, which gives the same numbers from one pass.",
    "denominators": "By channel, what its sum is divided by in place of its own count: parts then add up to the whole.",
    "sdpo_teachers": "Who teaches channel 2, as shares of logits that add up to 1; None is the model itself.",
    "sdpo_weighting": "Switches that say how much each row of channel 2 counts; None counts all alike.",
}

BATCH = """\
`B` sequences of `T` tokens, `P` pairs, `N` target tokens. A *mask* holds 1 on the tokens that count. An *index* names
the row that predicts a token, as (sequence, position): the row at a position predicts the token after it. Channel 2
takes both index keys; where plain and hinted context have one shape, `sdpo_loss_mask` may stand in their place.

A channel is off if its weight is 0, or if all of its keys are absent or empty. With a weight, half of its keys is an
error."""

BATCH_KEYS: Mapping[str, tuple[str, str]] = {
    "input_ids": ("(B, T)", "The student's tokens; never with a hint in them."),
    "response_mask": ("(B, T)", "Tokens that channel 1 learns, such as those of good turns."),
    "attention_mask": ("(B, T)", "Optional: 0 on padding."),
    "ctx_teacher_input_ids": ("(B', T')", "The teacher's contexts, each with one hint; as many as there are sites."),
    "ctx_teacher_attention_mask": ("(B', T')", "Optional: 0 on padding."),
    "sdpo_loss_mask": ("(B, T)", "The erring turns' tokens, in place of the two indices."),
    "sdpo_student_index": ("(N, 2)", "The student's row that predicts each token of an erring turn."),
    "sdpo_teacher_index": (
        "(N, 2)",
        "The teacher's row that predicts the same token; another token is an AlignmentError.",
    ),
    "ctx_contrast_input_ids": ("(B'', T'')", "The same sites with a wrong hint; read where the contrast is on."),
    "ctx_contrast_attention_mask": ("(B'', T'')", "Optional: 0 on padding."),
    "sdpo_contrast_index": (
        "(N, 2)",
        "The row with the wrong hint for each row of channel 2; -1, -1 where there is none.",
    ),
    "dpo_chosen_input_ids": ("(P, T)", "Context and chosen answer."),
    "dpo_chosen_response_mask": ("(P, T)", "The chosen answer's tokens."),
    "dpo_rejected_input_ids": ("(P, T)", "Context and rejected answer."),
    "dpo_rejected_response_mask": ("(P, T)", "The rejected answer's tokens."),
    "dpo_chosen_ref_logprobs": (
        "(P,)",
        "Log-probability of the chosen answer under the start weights; SimPO needs none.",
    ),
    "dpo_rejected_ref_logprobs": ("(P,)", "The same of the rejected answer."),
    "dpo_chosen_attention_mask": ("(P, T)", "Optional: 0 on padding."),
    "dpo_rejected_attention_mask": ("(P, T)", "Optional: 0 on padding."),
}

COMPONENTS: Mapping[str, str] = {
    "lm_ce": "Channel 1: mean cross-entropy of the response tokens.",
    "sdpo_jsd": "Channel 2: mean divergence of student and teacher over the target tokens.",
    "trace_replay_dpo": "Channel 3: mean preference loss of the pairs.",
    "total": "The weighted sum, to call backward() on.",
    "active": "Channels that ran. One that is not named here holds an exact 0.",
    "counts": "How many items each channel is the mean of: response tokens, target tokens, pairs.",
    "ran_as": "Flat sequences, a tree and by which attention, or why a tree was not run as one.",
}

RUN_DIRECTORY = """\
A run directory is a folder with `run.json` in it. Each step reads what an earlier one left there and adds its own.

- `records`: JSONL, every line with the same fields, written whole or not at all; a sidecar `<name>.meta.json` beside it
  holds schema, version and checksum.
- `journal`: JSONL that grows while a run goes on. Every line begins with its own checksum, `crc32`.
- `file`, `folder`: in a format of their own."""

ARTEFACTS: Mapping[str, str] = {
    "config": "The config as it was understood; it loads to the same run. `crf train` writes it too.",
    "conversations": "One conversation a row, with all its turns.",
    "session_sources": "One log with its companion files a row: sizes, times, and what came of it.",
    "forgotten": "Marks of what `crf forget` removed, so that no ingest brings it back.",
    "tools": "One tool a row, with the schema of its arguments.",
    "elsewhere": "What was made from the run outside of it, so that `crf forget` can name it.",
    "split": "One conversation a row, with the side it stands on: train, validation or test.",
    "sites": "One failing call a row, with its hint or the reason why it has none.",
    "conventions": "Rules that users named when they refused a call; the owner of the run keeps or drops each.",
    "struck_hints": "Ids of sites whose hints somebody struck out, or took back.",
    "teacher_calls": "One answer of one adviser at one state a row, failed calls too.",
    "teacher_cache": "Every answer that was paid for, and what was spent: an SQLite file.",
    "pairs": "One preference pair a row: what advisers agreed on, or a session put right, against what was done.",
    "ref_logprobs": "Log-probabilities of the pairs' answers under the start weights, with a fingerprint.",
    "hint_proof": "One site a row: what its hint does to the erring decision and to good calls; may it teach.",
    "asked_tools": "With which tools teachers were asked about each session; they are asked with the same again.",
    "metrics": "Every line of figures that training logs, with its step.",
    "checkpoints": "All that a run needs to go on: a folder `checkpoint-N` is complete when it holds `manifest.json`.",
    "adapter": "The trained adapter, with a record of what it was made from.",
    "model": "The trained weights where there is no adapter, with the same record.",
    "control": "What any training does: hints of other kinds, pairs turned by a coin; more shuffles in folders of it.",
    "earlier": "Trainings that `crf run` set aside, each in a folder of its own, as other files or options came.",
    "evaluation": "Before against after on held-out sessions: figures with intervals, and a verdict.",
    "evaluated": "One decision of a held-out session a row: an error, the right call in its place, or a good call.",
    "sampled": "One action a row that a model drew at a held-out state, and what would become of it.",
    "token_gaps": "One site a row: by token, how much likelier its turn is with the hint, before and after training.",
    "report_html": "The report of a run, to look at.",
    "report_md": "The same as Markdown.",
    "report_sessions": "A page a session, where there are too many for one file.",
}

SIDECAR = "`<name>.meta.json` beside every file of records: what it is, what it was made from, and its checksum."


class Record(NamedTuple):
    """What a row of an artefact is: the fields of a type, less some, with some more; and the types inside it."""

    schema: str
    version: int
    sentence: str
    kind: Any = None
    without: tuple[str, ...] = ()
    more: tuple[tuple[str, str], ...] = ()
    inside: tuple[Any, ...] = ()


_CONVERSATION_PARTS = (types.Turn, types.ToolCall, types.ToolResult, types.Usage, types.Provenance, types.Link)
_SAID_OF_PAIRS = tuple((name, kind) for name, kind in PairRecord.__annotations__.items() if name != "pair")
RECORDS: Mapping[str, Record] = {
    "conversations": Record(
        conversations.CONVERSATIONS_SCHEMA,
        conversations.CONVERSATIONS_VERSION,
        "One context as a model saw it: a session, the part after a compaction, a sub-agent, or a branch.",
        types.Conversation,
        inside=_CONVERSATION_PARTS,
    ),
    "session_sources": Record(
        session_sources.SCHEMA,
        session_sources.VERSION,
        "A second ingest reads these rows to know what is new.",
        session_sources.SessionSource,
    ),
    "forgotten": Record(
        last_ingest.FORGOTTEN_SCHEMA,
        last_ingest.FORGOTTEN_VERSION,
        "A mark is a hash; the text it was made from cannot be read from it.",
        more=(("mark", "str"),),
    ),
    "tools": Record(
        tools.TOOLS_SCHEMA,
        tools.TOOLS_VERSION,
        "`source` is `file` where `--tools` gave the schema, else `inferred` from calls that worked. `format` says "
        "whose tool it is: that of the agent's logs; null where a file gave the schema, which then is every agent's.",
        more=(
            ("name", "str"),
            ("format", "str | None"),
            ("parameters", "Mapping[str, Any]"),
            ("source", "str"),
            ("num_calls", "int"),
        ),
    ),
    "split": Record(
        split.SCHEMA,
        split.VERSION,
        "All parts and sub-agents of a session stand on one side. `near_duplicates` are turns of a test session before "
        "which stands, nearly word for word, what stands in a session that is learnt from.",
        split.SplitRow,
    ),
    "sites": Record(
        sites.SITES_SCHEMA,
        sites.SITES_VERSION,
        "What looked like a failure and is none has the kind `no_failure`.",
        types.ErrorSite,
        more=(("hint", "Hint | None"),),
        inside=(types.Hint,),
    ),
    "teacher_calls": Record(
        replay.SCHEMA,
        replay.VERSION,
        "An adviser that was not asked, because its vote could not matter, has no row.",
        types.TeacherCallResult,
        without=("is_cached",),
        more=(("conversation_id", "str"),),
    ),
    "pairs": Record(
        pairs.PAIRS_SCHEMA,
        pairs.PAIRS_VERSION,
        "The messages before the turn are those of its conversation, and are not copied.",
        types.DPOPair,
        without=("state_messages",),
        more=(
            ("conversation_id", "str"),
            ("turn_number", "int"),
            *_SAID_OF_PAIRS,
            ("metadata", "Mapping[str, Any]"),
        ),
    ),
    "hint_proof": Record(
        proof.SCHEMA,
        proof.VERSION,
        "Log-probs are means a token over the tokens that decide the call: the tool's name, and in the arguments the "
        "first token that differs from the right call (`basis` `correction`) or the first few (`first_argument`); all "
        "of the `call` or `turn` where no name is found. Words before a call are left out where turns are taught. "
        "`good_*` are means over as many tokens of good calls before the error in its session, or of other sessions "
        "(`num_good_elsewhere`) where it has none. "
        "`advantage` is how many nats a token more its own hint lowers the erring decision than a hint of another kind "
        "does, `advantage_over_good` how many more than it lowers good calls; a site is kept where both are above the "
        "margin.",
        HintProof,
        more=(
            ("advantage", "float | None"),
            ("advantage_over_good", "float | None"),
            ("conversation_id", "str"),
            ("turn_id", "str"),
            ("kind", "str"),
        ),
    ),
    "evaluated": Record(
        "evaluated",
        evaluation.ROWS_VERSION,
        "`before`, `after` and `control` are mean log-probs a token at the decision, as in `hint_proof`, with no "
        "hint. "
        "`controls` has one for each shuffle of the control, `control` is their mean. "
        "`site_id` of a good call is the site it is compared with.",
        more=(
            ("id", "str"),
            ("conversation_id", "str"),
            ("session", "str"),
            ("turn", "int"),
            ("turn_id", "str"),
            ("site_id", "str"),
            ("kind", "str"),
            ("role", "Literal['erring', 'correction', 'good']"),
            ("basis", "str"),
            ("num_tokens", "int"),
            ("before", "float"),
            ("after", "float"),
            ("control", "float | None"),
            ("controls", "Sequence[float] | None"),
        ),
    ),
    "sampled": Record(
        "sampled",
        evaluation.ROWS_VERSION,
        "`verdict`, `rule` and `kind` are the judge's, of the worst call of the action; a call of a tool that is not "
        "there fails (`unknown_tool`). Without a call that can be read the rule is `no_call`, `unparsed` or `cut_off`; "
        "the last two count as failures.",
        more=(
            ("id", "str"),
            ("conversation_id", "str"),
            ("session", "str"),
            ("turn", "int"),
            ("turn_id", "str"),
            ("site_id", "str"),
            ("state", "Literal['erring', 'good']"),
            ("arm", "Literal['before', 'after', 'control']"),
            ("sample", "int"),
            ("text", "str"),
            ("action", "Mapping[str, Any] | None"),
            ("tool", "str | None"),
            ("parsed", "bool"),
            ("known_tool", "bool"),
            ("only_looks", "bool"),
            ("verdict", "Literal['ok', 'fails', 'risky', 'unknown']"),
            ("rule", "str"),
            ("kind", "str | None"),
            ("same_as_logged", "bool"),
            ("same_as_correction", "bool | None"),
            ("tokens", "int"),
        ),
    ),
    "token_gaps": Record(
        "token_gaps",
        evaluation.ROWS_VERSION,
        "`before` and `after` are, for each of the `tokens` that channel 2 would teach, log p with the hint less log p "
        "without it, in nats, under the two sets of weights.",
        more=(
            ("site_id", "str"),
            ("conversation_id", "str"),
            ("turn", "int"),
            ("side", "Literal['train', 'validation', 'test']"),
            ("tokens", "list[str]"),
            ("before", "list[float]"),
            ("after", "list[float]"),
        ),
    ),
}


class Written(NamedTuple):
    """A file with a schema of its own: the function that writes it has its fields, as the keys of a dict."""

    file: str
    schema: str
    version: object
    writer: Any
    more: tuple[str, ...] = ()
    sentence: str = ""


WRITTEN: tuple[Written, ...] = (
    Written(
        "ref_logprobs.safetensors",
        reference._SCHEMA,
        reference._VERSION,
        reference.ReferenceLogprobs.save,
        Fingerprint._fields,
        "These are its metadata; the tensors are `keys`, a hash of each answer's tokens, and `logprobs`.",
    ),
    Written(
        "checkpoints/checkpoint-N/manifest.json",
        manifest._SCHEMA,
        manifest._VERSION,
        manifest.write_manifest,
        ("about",),
        "`files` has the size and SHA-256 of every other file; `about` says which model, data and process.",
    ),
    Written(
        "checkpoints/checkpoint-N/NAME.json",
        tensor_file._SCHEMA,
        tensor_file._VERSION,
        tensor_file.save_tree,
        (),
        "Optimiser, scheduler, random numbers and the like; tensors are in `NAME.safetensors` beside it.",
    ),
    Written(
        f"checkpoints/warmup/{warmup.FINISHED}",
        warmup._SCHEMA,
        warmup._VERSION,
        warmup.warm_up,
        tuple(warmup.FinishedWarmUp.__dataclass_fields__),
        "Which checkpoint a warm-up ended with, after how many steps; `held_out` are losses of good turns by step. "
        "`start_weights` is the digest of what it began with, `settings` what else its weights depend on.",
    ),
    Written(
        f"adapter/{results.RECORD}",
        results._SCHEMA,
        results._VERSION,
        results._write_record,
        (),
        "What the weights in this folder were made from, and what each channel did.",
    ),
)
ROUND = (
    "Keys of `--round NAME=VALUE`, of the outer loop first, then of the rounds. `train.optimiser.steps` has to be a "
    "multiple of `sync_every / num_fragments`. With `--trainer-module` those of the outer loop go to the trainer, as "
    "arguments, and their defaults are its own."
)
EXPORT = (
    f"`crf pairs --export FILE` writes JSONL of schema `{export.SCHEMA}`, self-contained, for TRL's `DPOTrainer`: "
    "`prompt`, `chosen` and `rejected` as messages, `tools` as JSON text, and `state_id`. "
    "`crf export` writes ATIF documents."
)
