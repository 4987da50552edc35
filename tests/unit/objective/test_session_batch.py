"""Sessions in windows: everything is somewhere once or dropped for a reason, within the budget, and aligned."""

from __future__ import annotations

import json
import os
import random
import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from window_checks import HINT, Asked, asked, check_sites, conversation, of_channel, renderer_of

from chat_templates import SMALL_FAMILIES
from composer_replication.batch import hint_placement as taught_turns
from composer_replication.batch.hint_placement import PLACEMENTS, teacher_context
from composer_replication.batch.render.renderer import Renderer, TurnSpan
from composer_replication.batch.session_batch import Item, SiteHint, TokenPair, session_batches
from composer_replication.batch.tree_batch import SessionTargets, pack_batches
from composer_replication.errors import AlignmentError, InputError
from cpu_time import cpu_seconds
from refusals import refusal
from session_pieces import Session
from tokenizer_assets import FAMILIES, load

NUM_SITES = 1_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 160


def items_of(made):
    return [item for window in made.windows for item in window.items]


def check_whole(session, made, budget, placement="before_turn", max_length=None):
    """Every item once, whole and within the limits; rows of all channels where they belong. Counts the site rows."""
    channels = {"lm_ce": session.rendered.spans, "sdpo_jsd": session.sites, "trace_replay_dpo": session.pairs}
    everything = [Item(channel, number) for channel, given in channels.items() for number in range(len(given))]
    assert sorted([*items_of(made), *made.dropped]) == everything
    num_rows = 0
    for window in made.windows:
        tree = window.batch.tree
        assert len(tree) <= budget
        assert max_length is None or int(tree.position_ids.max()) < max_length
        num_rows += check_sites(session, window, placement)
        spans = [session.rendered.spans[number] for number in of_channel(window, "lm_ce")]
        targets = [token for span in spans for token in session.rendered.ids[span.start : span.end]]
        assert window.batch.response.targets.tolist() == targets
        check_pairs(session, window)
    return num_rows


def check_pairs(session, window):
    numbers, found = of_channel(window, "trace_replay_dpo"), window.batch.pairs
    assert (found is None) == (not numbers)
    if found is None:
        return
    pairs = [session.pairs[number] for number in numbers]
    responses = [pair.chosen_ids[pair.chosen_start :] for pair in pairs]
    responses += [pair.rejected_ids[pair.rejected_start :] for pair in pairs]
    assert found.targets.tolist() == [token for response in responses for token in response]
    assert found.response.tolist() == [number for number, each in enumerate(responses) for _ in each]
    assert found.chosen_reference.tolist() == [pair.references[0] for pair in pairs]


@given(
    st.sampled_from(["llama3", "gemma", "mistral", "mistral_tools", "thinker"]),
    st.integers(0, 10_000),
    st.integers(20, 600),
    st.integers(0, 200),
    st.sampled_from(PLACEMENTS),
    st.none() | st.integers(20, 400),
)
def test_random_sessions_are_whole_within_the_budget_and_aligned(family, seed, budget, overlap, placement, max_length):
    session = asked(family, seed)
    made = session.batches(budget=budget, overlap=overlap, placement=placement, max_length=max_length)
    check_whole(session, made, budget, placement, max_length)
    reasons = list(made.dropped.values())
    for reason in ("longer_than_window", "hint_has_no_place"):
        assert made.counts[reason] == reasons.count(reason)
    if made.windows:
        packed, batches = pack_batches(made.batches), made.batches
        assert len(packed.tree) == sum(len(batch.tree) for batch in batches)
        assert packed.response.targets.tolist() == [t for batch in batches for t in batch.response.targets.tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_sites_predict_the_same_token_on_both_sides_and_a_shift_is_caught(family, note):
    draw, num_sites, num_rows = random.Random(1), 0, 0
    while num_sites < NUM_SITES // len(FAMILIES) + 1:
        placement = draw.choice(PLACEMENTS)
        session = asked(family, draw.randrange(10**6), num_turns=draw.randint(1, 8), num_sites=12, num_pairs=1)
        budget = draw.choice([150, 300, 1_000])
        made = session.batches(budget=budget, overlap=draw.choice([0, 50, 200]), placement=placement)
        num_rows += check_whole(session, made, budget, placement)
        for window in made.windows:
            for number in of_channel(window, "sdpo_jsd"):
                num_sites += 1
                assert_shift_is_caught(session, session.sites[number], placement, window.first)
    note(f"session batches, {family}: {num_sites} random sites, {num_rows} pairs of rows aligned, each shift caught")


def assert_shift_is_caught(session, site, placement, first):
    span = site.span
    context = teacher_context(*session[:2], span, site.hint, placement=placement, first=first)
    trunk = session.rendered.ids[first : span.end]
    for shift in (-1, 1):
        with pytest.raises(AlignmentError):
            SessionTargets().add_site(trunk, span.start - first, span.end - first, context.ids, context.start + shift)


def test_a_shift_by_one_in_the_hinted_context_stops_the_session(monkeypatch):
    def shifted(*given, **options):
        context = teacher_context(*given, **options)
        return context._replace(start=context.start + 1)

    monkeypatch.setattr(taught_turns, "teacher_context", shifted)
    with pytest.raises(AlignmentError) as caught:
        asked("llama3").batches(budget=2_000)
    ours, theirs = (json.loads(ids) for ids in re.findall(r"\[[\d, ]+\]", caught.value.got))
    assert ours[1:] == theirs[:-1]


def coding_session(family):
    """Turns: a call and nothing else, a call, an answer, a call and nothing else again, an answer."""
    session = Session().user("Please look.")
    session.call("bash", "a.py\nb.py\n", command="ls")
    session.call("bash", "x = 1\n" * 12, command="cat a.py")
    session.says("It is b.py.").user("Then go on.")
    session.call("bash", "No such file", command="cat c.py")
    session.says("Done.")
    renderer = renderer_of(family)
    rendered = renderer.render(session.conversation())[-1]
    return renderer, rendered


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sites_at_the_first_turn_the_last_and_one_that_is_only_a_call(family, placement):
    renderer, rendered = coding_session(family)
    first, last = rendered.spans[0], rendered.spans[-1]
    only_calls = [span for span in rendered.spans if span.call_start is not None]
    sites = [SiteHint(span, HINT) for span in (first, last, *only_calls)]
    sites.append(SiteHint(last, "Another hint."))  # a turn may have several
    session = Asked(renderer, rendered, sites, [])
    whole = session.batches(budget=100_000, placement=placement)
    assert len(whole.windows) == 1
    assert check_whole(session, whole, 100_000, placement) == sum(site.span.end - site.span.start for site in sites)
    windowed = session.batches(budget=200, overlap=20, placement=placement)
    check_whole(session, windowed, 200, placement)
    if "longer_than_window" not in windowed.counts and len(rendered.spans) > 1:  # a thinker's turns stand alone
        assert len(windowed.windows) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_site_at_the_edge_of_the_window_has_its_header_and_one_token_less_drops_it(family):
    renderer, rendered = coding_session(family)
    span = rendered.spans[-1]
    session = Asked(renderer, rendered, [SiteHint(span, HINT)], [])

    def made(budget):
        return session_batches(renderer, rendered, sites=session.sites, responses=[], budget=budget, overlap=500)

    budget = next(budget for budget in range(1, 1_000) if made(budget).windows)
    (window,) = made(budget).windows
    assert window.end == span.end
    assert window.first <= min(span.header_start, span.start - 1)
    assert made(budget).counts["short_context"] == 1
    assert check_sites(session, window) == span.end - span.start
    assert made(budget - 1).dropped == {Item("sdpo_jsd", 0): "longer_than_window"}
    context = teacher_context(renderer, rendered, span, HINT, first=window.first)
    if context.placement == "before_turn":
        assert window.first == min(span.header_start, span.start - 1)


def test_pairs_are_cut_where_the_window_begins_and_references_of_the_whole_are_counted():
    session = asked("llama3", seed=8, num_turns=8, num_sites=0, num_pairs=6)
    made = session.batches(budget=220, overlap=30)
    late = [window for window in made.windows if window.first and of_channel(window, "trace_replay_dpo")]
    assert late
    num_late = sum(len(of_channel(window, "trace_replay_dpo")) for window in late)
    assert made.counts["reference_saw_more_context"] == num_late
    for window in late:
        sequences = [window.batch.tree.input_ids[rows].tolist() for rows in window.batch.tree.rows]
        for number in of_channel(window, "trace_replay_dpo"):
            pair = session.pairs[number]
            assert pair.chosen_ids[window.first :] in sequences
            assert pair.rejected_ids[window.first :] in sequences


def test_a_pair_whose_history_was_rewritten_is_cut_at_the_same_place_and_still_fits():
    session = asked("llama3", seed=8, num_turns=8, num_sites=0, num_pairs=1)
    (pair,) = session.pairs
    other = [7, *pair.chosen_ids[1:]]  # shares nothing with the trunk
    changed = TokenPair(
        chosen_ids=other, chosen_start=pair.chosen_start, rejected_ids=other[:-1], rejected_start=pair.rejected_start
    )
    for budget in (60, 120, 1_000):
        made = session_batches(*session[:2], responses=[], pairs=[changed], budget=budget, overlap=30)
        assert len(made.windows) + len(made.dropped) == 1
        assert all(len(batch.tree) <= budget for batch in made.batches)


def test_counts_say_what_was_dropped_and_what_was_done_otherwise():
    renderer, rendered = coding_session("gemma")
    spans = rendered.spans
    sites = [SiteHint(spans[0], " \n "), SiteHint(spans[1], HINT), SiteHint(spans[2], "long " * 400)]
    made = session_batches(renderer, rendered, sites=sites, budget=300, overlap=40)
    assert made.dropped == {
        Item("sdpo_jsd", 0): "hint_makes_no_tokens",
        Item("sdpo_jsd", 2): "longer_than_window",
    }
    assert made.counts["hint_makes_no_tokens"] == made.counts["longer_than_window"] == 1
    assert made.counts["placement:before_turn->in_last_message"] == 1
    assert all(made.counts.values())


def test_a_hint_whose_form_is_longer_in_a_late_window_still_fits():
    """At the head it begins the first question; after the last one, only a message before the turn is left."""
    strict = "{%- if messages[0].role == 'system' %}{{ raise_exception('not first') }}{%- endif %}"
    strict += "{%- for m in messages[1:] %}{%- if m.role == 'user' and messages[loop.index0].role == 'user' %}"
    strict += "{{ raise_exception('twice') }}{%- endif %}{%- endfor %}"
    renderer = Renderer(load("llama3"), chat_template=strict + SMALL_FAMILIES["llama3"].template)
    (rendered,) = renderer.render(Session().user("Go on with it. " * 9).says("Yes.").says("Done.").conversation())
    sites = [SiteHint(rendered.spans[-1], HINT)]
    assert teacher_context(renderer, rendered, sites[0].span, HINT, placement="head").placement == "head"
    all_made = [
        (budget, session_batches(renderer, rendered, sites=sites, responses=[], budget=budget, placement="head"))
        for budget in range(10, 150)
    ]
    assert all(len(batch.tree) <= budget for budget, made in all_made for batch in made.batches)
    assert any("placement:head->before_turn" in made.counts for _, made in all_made)


def test_a_turn_that_nothing_stands_before_is_dropped():
    renderer, rendered = coding_session("gemma")
    first = rendered.spans[0]
    bare = TurnSpan(**{name: getattr(first, name) for name in TurnSpan.__slots__} | {"header_start": 0, "start": 0})
    alone = type(rendered)(conversation_id="c", ids=rendered.ids, spans=[bare], notes={})
    made = session_batches(renderer, alone, sites=[SiteHint(bare, HINT)], budget=500)
    assert set(made.dropped.values()) == {"nothing_before_it"}
    assert made.batches == []


def test_a_hint_that_the_template_takes_nowhere_is_dropped():
    session = Session().says("Hello, what is it?").user("This.").says("Good.")
    renderer = renderer_of("llama3")
    (rendered,) = renderer.render(session.conversation())
    made = session_batches(renderer, rendered, sites=[SiteHint(span, HINT) for span in rendered.spans], budget=500)
    assert made.dropped == {Item("sdpo_jsd", 0): "hint_has_no_place"}
    assert Item("sdpo_jsd", 1) in items_of(made)


def test_a_hint_that_finds_no_place_in_its_window_is_dropped_and_an_empty_window_left_out(monkeypatch):
    renderer, rendered = coding_session("llama3")
    spans = rendered.spans
    cut = spans[-1].header_start

    def only_in_whole_sessions(*given, first, **options):
        if first > spans[1].end:
            raise InputError("nowhere")
        return teacher_context(*given, first=first, **options)

    sites = [SiteHint(spans[0], HINT), SiteHint(spans[-1], HINT)]
    made = session_batches(renderer, rendered, sites=sites, responses=[], budget=150, overlap=10, placement="head")
    assert [window.items for window in made.windows] == [(Item("sdpo_jsd", 0),), (Item("sdpo_jsd", 1),)]
    assert spans[1].end < made.windows[1].first <= cut
    monkeypatch.setattr(taught_turns, "teacher_context", only_in_whole_sessions)
    made = session_batches(renderer, rendered, sites=sites, responses=[], budget=150, overlap=10, placement="head")
    assert [window.items for window in made.windows] == [(Item("sdpo_jsd", 0),)]
    assert made.dropped == {Item("sdpo_jsd", 1): "hint_has_no_place"}
    assert made.counts["hint_has_no_place"] == 1


def test_a_long_session_is_planned_in_linear_time(note):
    draw, renderer, times = random.Random(0), renderer_of("llama3"), []
    for num_turns in (300, 1_200):
        (rendered,) = renderer.render(conversation(draw, num_turns))
        sites = [SiteHint(span, HINT) for span in rendered.spans[::4]]
        plan = partial(session_batches, renderer, rendered, sites=sites, budget=4_096, overlap=512)
        times.append(min(cpu_seconds(plan) for _ in range(3)))
    note(f"session batches: 300 turns {times[0]:.2f} s, 1,200 turns {times[1]:.2f} s")
    assert times[1] < 8 * times[0]


def test_what_does_not_belong_together_is_refused():
    session, other = asked("llama3"), asked("llama3", seed=1)
    without = TokenPair(chosen_ids=[1, 2], chosen_start=1, rejected_ids=[1, 3], rejected_start=1)
    bare = TokenPair(chosen_ids=[1, 2], chosen_start=2, rejected_ids=[1, 3], rejected_start=1)
    with refusal(InputError, got=other.rendered.spans[0].turn_id, expected=session.rendered.conversation_id):
        session_batches(*session[:2], responses=other.rendered.spans, budget=500)
    with pytest.raises(InputError, match="placement"):
        session.batches(budget=500, placement="after")
    with refusal(InputError, what="reference log-probs"):
        session_batches(*session[:2], pairs=[without, *session.pairs], budget=500)
    with refusal(InputError, what="response", got="2"):
        session_batches(*session[:2], pairs=[bare], budget=500)
    apart = [*session.batches(budget=500).batches, *session_batches(*session[:2], pairs=[without], budget=500).batches]
    with refusal(InputError, what="reference log-probs"):
        pack_batches(apart)
    with pytest.raises(InputError, match="trees"):
        pack_batches([])


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_only_the_calls_of_a_turn_may_be_taught(family):
    session = Session().user("Go.")
    session.call("Bash", "no such file", command="cat a.py")
    session.says("Then not.")
    renderer = renderer_of(family)
    rendered = renderer.render(session.conversation())[-1]
    calling = [span for span in rendered.spans if span.call_start is not None]
    sites = [SiteHint(span, HINT) for span in rendered.spans]
    made = session_batches(renderer, rendered, sites=sites, budget=2000, part="call")
    whole = session_batches(renderer, rendered, sites=sites, budget=2000)
    spans = [(s.call_start, s.call_end) if s in calling else (s.start, s.end) for s in rendered.spans]
    (batch,), (other,) = made.batches, whole.batches
    wanted = [rendered.ids[at] for start, end in spans for at in range(start, end)]
    for rows in (batch.student_rows, batch.teacher_rows):
        assert batch.tree.position_ids[rows].numel() == len(wanted)
    assert set(batch.student_rows.tolist()) <= set(other.student_rows.tolist())
    assert set(batch.teacher_rows.tolist()) <= set(other.teacher_rows.tolist())
    with pytest.raises(InputError, match="part"):
        session_batches(renderer, rendered, budget=2000, part="word")
