"""The tables of the steps before training, [ingest], [sites], [replay] and [pairs]; and that of all steps, [run]."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, table


@table("ingest")
class IngestConfig:
    """Which logs are read, and how."""

    paths: tuple[str, ...] = option((), "Logs, project folders, or all of ~/.claude/projects.")
    exclude: tuple[str, ...] = option(
        (), "Patterns of files to leave out: by path, name or folder, as a .crfignore in one of the paths has them."
    )
    follow_links: bool = option(False, "Also read what links lead to outside of the paths.")
    tools: str | None = option(None, "File with a JSON list of tool schemas; unset infers them from the calls.")
    workers: int | None = option(None, "Processes; unset is one per MiB, at most one per core and 8.", at_least=1)
    kingfisher: bool = option(False, "Add kingfisher's rules for secrets, of the extra privacy.")
    people: bool = option(False, "Also replace e-mail addresses, phone numbers and names beside them.")


@table("sites")
class SitesConfig:
    """Which failures may be taught."""

    min_confidence: float = option(0.5, "Keep a site from this confidence on.", at_least=0, at_most=1)
    writer: str | None = option(
        None, "File of teachers with prices, the first of which writes the hints; unset takes templates alone."
    )
    max_usd: float = option(5.0, "Hard cap in US dollars for such hints, over all that the run has spent.", at_least=0)


@table("replay")
class ReplayConfig:
    """Who is asked about which states, and at what cost."""

    teachers: str | None = option(None, "File of teachers with prices, as `crf teachers -o FILE` writes it.")
    max_usd: float = option(5.0, "Hard cap in US dollars over all restarts.", at_least=0)
    states: Literal["all", "failed", "sites"] = option(
        "sites", "Ask about turns that erred and may be taught (sites), that failed or were refused (failed), or all."
    )
    limit: int | None = option(None, "Ask about the first so many of these states alone.", at_least=1)
    gate: Literal["exact", "agree", "none"] = option(
        "exact", "Ask the next teacher while its vote can change a pair, stop where the first agrees, or ask everyone."
    )
    threshold: int = option(2, "Votes that make a consensus.", at_least=1)
    order: Literal["longest_first", "in_order"] = option(
        "longest_first", "Of a session the longest state first and then the others, or one after the other: slower."
    )
    concurrency: int = option(64, "Requests at a time.", at_least=1)
    max_tokens: int = option(1024, "Longest answer.", at_least=1)
    max_history_tokens: int | None = option(
        None, "About how many tokens of history are sent; the oldest turns go first.", at_least=1
    )
    timeout_s: float = option(120.0, "Seconds to wait for an answer.", above=0)
    send_tools: bool = option(True, "Send the schemas of the session's tools.")


@table("pairs")
class PairsConfig:
    """Which answers become preference pairs."""

    threshold: int | None = option(None, "Votes that make a consensus; unset is the replay's.", at_least=1)
    where_it_worked: bool = option(False, "Also make pairs that reject an action which worked.")
    thinking: bool = option(False, "Leave thinking in the texts, where a side has any.")
    words: bool = option(True, "Leave the words beside calls in the texts; false compares calls with calls alone.")
    corrections: bool = option(
        True, "Also make pairs of calls that their session put right, and as many of calls that acted at once."
    )
    recipe: str | None = option(None, "File with filters as a data-juicer recipe; unset is ours.")
    filters: Literal["native", "data_juicer", "none"] = option(
        "native", "Run the filters here, by data-juicer's own operators (extra replaysim), or keep every pair."
    )


@table("run")
class RunConfig:
    """All steps, one after the other."""

    control: bool = option(
        False, "Also train the control (train.control), so that the evaluation says what any training would have done."
    )
    shuffles: int = option(
        1,
        "How many such controls, each with a shuffle of its own; with three or more the control's interval holds the "
        "luck of a shuffle, too.",
        at_least=1,
    )
    fewest: int = option(
        10, "Fewest error sites and pairs to learn from with which a training begins; 0 always begins.", at_least=0
    )
    without_verdict: bool = option(
        False, "Train although too few held-out sessions hold a mistake for the evaluation to say whether it helped."
    )
