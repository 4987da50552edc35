"""Log-probs of decisions under several weights: equal to plain passes, differenced right, kept as they come."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from evaluation_runs import TIMES, config, hold_out, write_sites

from composer_replication.envs.student import student_folder
from composer_replication.errors import InputError
from composer_replication.evaluation import scored_calls as forced
from composer_replication.evaluation.arms import digest_of_arm, load_each_model, load_tokenizers, resolve_arms
from composer_replication.evaluation.evaluate import PARTIAL, evaluate
from composer_replication.evaluation.verdict import CONTROL
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_evaluation, read_rows
from composer_replication.runs.split import read_split_rows


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    """An adapter on it, of random weights."""
    import peft
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("models") / "adapter"
    torch.manual_seed(8)
    settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), settings).save_pretrained(place)
    return place


def test_a_model_against_itself_moves_nothing(run, folder):
    model = str(folder / "model")
    record = evaluate(config(), run, before=model, after=model)
    assert record["verdict"]["word"] == "no_difference"
    assert {each["estimate"] for each in record["figures"]} == {0.0}
    assert record["models"]["before"]["digest"] == record["models"]["after"]["digest"]
    assert read_evaluation(run)["figures"] == json.loads(json.dumps(record["figures"]))
    assert not (run.root / PARTIAL).exists()


def test_rows_are_means_of_a_plain_pass_and_figures_are_made_of_them(run, folder, other):
    """The erring decision's own tokens, scored by a whole forward pass of transformers."""
    from transformers import AutoModelForCausalLM

    asked = []
    real = forced.score_groups
    before, after = str(folder / "model"), str(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "composer_replication.evaluation.questions.score_groups",
            lambda model, weights, groups, *rest, **named: (
                asked.append(groups) or real(model, weights, groups, *rest, **named)
            ),
        )
        record = evaluate(config(), run, before=before, after=after)
    rows = list(read_rows(run, "evaluated"))
    model = AutoModelForCausalLM.from_pretrained(other)
    flat = [response for group in asked[0] for response in group]
    erring = [row for row in rows if row["role"] == "erring"]
    assert len({row["id"] for row in rows}) == len(rows)
    group, row = asked[0][0], erring[0]
    num_stretches = {"first_argument": 2, "correction": 2, "name": 1, "call": 1}[row["basis"]]
    total = 0.0
    for ids, start in group[:num_stretches]:
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0].detach().log_softmax(-1)
        total += sum(float(logits[at - 1, ids[at]]) for at in range(start, len(ids)))
    assert row["after"] == pytest.approx(total / row["num_tokens"], abs=1e-4)
    assert len(flat) >= len(rows)

    def change(role):
        moved = {row["site_id"]: [] for row in erring}
        for row in rows:
            if row["role"] == role:
                moved[row["site_id"]].append(row["after"] - row["before"])
        return moved

    wrong, good = change("erring"), change("good")
    gaps = [sum(good[site]) / len(good[site]) - wrong[site][0] for site in good]
    primary = next(each for each in record["figures"] if each["is_primary"])
    assert primary["name"] == "forced_gap"
    assert primary["estimate"] == pytest.approx(sum(gaps) / len(gaps))
    assert all(1 <= len(each) <= 4 for each in good.values())


def test_an_adapter_is_scored_as_the_weights_it_makes_and_the_base_below_it_as_before(run, folder, adapter, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    base = str(folder / "model")
    merged = tmp_path / "merged"
    shutil.copytree(folder / "model", merged)
    peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter
    ).merge_and_unload().save_pretrained(merged)
    evaluate(config(), run, before=base, after=str(merged), control=base)
    whole = list(read_rows(run, "evaluated"))
    record = evaluate(config(), run, before=base, after=str(adapter), control=base)
    rows = list(read_rows(run, "evaluated"))
    assert [row["after"] for row in rows] == pytest.approx([row["after"] for row in whole], abs=1e-4)
    assert [row["control"] for row in rows] == [row["before"] for row in rows]
    assert [row["before"] for row in rows] == [row["before"] for row in whole]
    of_arm = {each["arm"]: each["estimate"] for each in record["figures"] if each["name"] == "forced_gap"}
    assert of_arm["control"] == 0.0
    assert of_arm["difference"] == pytest.approx(of_arm["after"])
    assert record["models"]["control"]["what"] == CONTROL


def test_a_control_of_several_shuffles_is_their_mean_and_only_the_first_is_asked_for_more(run, folder, other):
    base = str(folder / "model")
    few = "samples = 1\nstates = 1\nnew_tokens = 2\ngood_turns = 2\n"
    record = evaluate(config(few), run, before=base, after=str(other), control=[base, str(other), base])
    rows = list(read_rows(run, "evaluated"))
    for row in rows:
        assert row["controls"] == [row["before"], row["after"], row["before"]]
        assert row["control"] == pytest.approx((2 * row["before"] + row["after"]) / 3)
    figures = {(each["name"], each["arm"]): each for each in record["figures"] if each["kind"] is None}
    moved = figures["forced_gap", "after"]["estimate"]
    assert figures["forced_gap", "control"]["estimate"] == pytest.approx(moved / 3)
    assert figures["forced_gap", "difference"]["estimate"] == pytest.approx(moved * 2 / 3)
    shuffles = {key: each["shuffles"] for key, each in figures.items() if key[0] in ("forced_gap", "loss_good_turns")}
    assert shuffles == {
        ("forced_gap", "after"): None,
        ("forced_gap", "control"): 3,
        ("forced_gap", "difference"): 3,
        ("loss_good_turns", "after"): None,
        ("loss_good_turns", "control"): 1,
        ("loss_good_turns", "difference"): 1,
    }
    assert {row["arm"] for row in read_rows(run, "sampled")} == {"before", "after", "control"}
    assert [name for name in record["models"] if name.startswith("control")] == ["control", "control-2", "control-3"]
    assert record["models"]["control-2"]["digest"] == record["models"]["after"]["digest"]


def test_an_interrupt_loses_one_item_and_the_same_command_goes_on(run, folder, other, monkeypatch):
    before, after = str(folder / "model"), str(other)
    scored, real = [], forced.response_logprobs

    def counted(model, responses):
        if len(scored) == 4:
            raise KeyboardInterrupt
        scored.append(len(responses))
        return real(model, responses)

    monkeypatch.setattr(forced, "response_logprobs", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config(), run, before=before, after=after)
    assert not run.path("evaluation").exists()
    monkeypatch.setattr(forced, "response_logprobs", lambda *given: scored.append(0) or real(*given))
    record = evaluate(config(), run, before=before, after=after)
    sites = record["split"]["sites"]["test"]
    assert len(scored) == 2 * sites
    again = evaluate(config(), run, before=before, after=after)
    assert {**again, **TIMES} == {**record, **TIMES}


def test_near_duplicates_of_learnt_states_are_left_out_and_counted(run, folder):
    rows = read_split_rows(run)
    test = next(row for row in rows if row.side == "test")
    site = next(row for row in run.read_jsonl("sites", schema="error_site") if row["conversation_id"] == test[0])
    changed = [row._replace(near_duplicates=(site["turn_id"],)) if row is test else row for row in rows]
    listed = [{**row._asdict(), "near_duplicates": list(row.near_duplicates)} for row in changed]
    sites = list(run.read_jsonl("sites", schema="error_site"))
    run.write_jsonl("split", listed, schema="split", version=1, sources=["conversations"])
    write_sites(run, sites)
    model = str(folder / "model")
    record = evaluate(config(), run, before=model, after=model)
    assert record["split"]["near_duplicates"] == 1
    assert record["drops"]["near_duplicate"] == 1
    assert site["id"] not in {row["site_id"] for row in read_rows(run, "evaluated")}


def test_nothing_held_out_and_no_errors_are_verdicts_and_no_model_is_loaded(run, folder, monkeypatch):
    monkeypatch.setattr("composer_replication.evaluation.evaluate.load_each_model", None)
    model = str(folder / "model")
    hold_out(run, 0.0)
    record = evaluate(config(), run, before=model, after=model)
    assert record["verdict"]["word"] == "too_thin"
    assert record["split"]["sessions"]["test"] == 0
    assert not re.search(r"\d", record["verdict"]["sentences"][0])
    assert record["figures"] == []
    hold_out(run, 0.5, with_sites=False)
    record = evaluate(config(), run, before=model, after=model)
    number = record["split"]["sessions"]["test"]
    assert number > 0
    assert re.search(rf"\b{number}\b.*\bsessions\b", record["verdict"]["sentences"][0])  # and no error in them


def test_few_sessions_are_too_thin_whatever_the_interval_says(run, folder, other):
    record = evaluate(config("fewest_sessions = 50\n"), run, before=str(folder / "model"), after=str(other))
    assert record["verdict"]["word"] == "too_thin"
    assert re.search(r"\b50\b.*\bsessions\b", record["verdict"]["sentences"][1])
    assert record["power"]["smallest_effect"] is None  # so few do not show the spread that it would come from


@pytest.mark.parametrize("name", ["empty", "pickled", "broken"])
def test_weights_that_cannot_be_read_are_a_sentence(run, folder, tmp_path, name):
    place = tmp_path / name
    place.mkdir()
    if name != "empty":
        (place / "adapter_config.json").write_text("{" if name == "broken" else '{"base_model_name_or_path": "x"}')
    if name == "broken":
        (place / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InputError) as raised:
        evaluate(config(), run, before=str(folder / "model"), after=str(place))
    assert name != "pickled" or "safetensors" in str(raised.value)


def test_of_models_with_other_tokens_only_what_they_draw_is_compared(run, folder, tmp_path):
    from offline_pieces import renderer, tiny

    place = tmp_path / "other-tokens"
    tiny().save_pretrained(place)
    renderer().tokenizer.save_pretrained(place)
    more = "samples = 1\nstates = 2\nnew_tokens = 3\ngood_turns = 2\n"
    record = evaluate(config(more), run, before=str(folder / "model"), after=str(place))
    assert record["verdict"]["word"] == "too_thin"
    assert re.search(r"\btokenizers\b.*\bevaluation\.primary\b", record["verdict"]["sentences"][0])
    assert "tokenizers" in record["not_run"]["forced"]
    assert record["damage"] == []
    rows = list(read_rows(run, "sampled"))
    assert [row["arm"] for row in rows].count("before") == [row["arm"] for row in rows].count("after") == 4
    named = evaluate(
        config(f'primary = "sampled_failures"\n{more}'), run, before=str(folder / "model"), after=str(place)
    )
    assert next(each for each in named["figures"] if each["is_primary"])["n"] == 4


def test_a_run_that_was_never_split_is_a_sentence(folder, tmp_path):
    model = str(folder / "model")
    with pytest.raises(InputError, match="crf split"):
        evaluate(config(), RunDir.open(folder / "run"), before=model, after=model)


def test_log_probs_token_by_token_add_up_to_those_of_the_response(folder):
    from transformers import AutoModelForCausalLM

    from composer_replication.trainer.objective.reference import response_logprobs, token_logprobs

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    responses = [(list(range(3, 15)), 7), ([*range(3, 9), 20, 21], 2)]
    single = token_logprobs(model, responses)
    assert [len(each) for each in single] == [5, 6]
    assert torch.stack([each.sum() for each in single]).tolist() == pytest.approx(
        response_logprobs(model, responses).tolist(), abs=1e-5
    )
    logits = model(input_ids=torch.tensor([responses[1][0]])).logits[0].detach().log_softmax(-1)
    expected = [float(logits[at - 1, responses[1][0][at]]) for at in range(2, 8)]
    assert single[1].tolist() == pytest.approx(expected, abs=1e-4)


def test_an_adapter_on_another_base_than_before_is_refused_by_name(tmp_path):
    place = tmp_path / "adapter"
    place.mkdir()
    (place / "adapter_model.safetensors").write_bytes(b"")

    def base(own, before="org/model"):
        (place / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": own}))
        return resolve_arms(before, str(place))[1].base

    with pytest.raises(InputError, match=r"--after.*'org/other'.*'org/model'"):
        base("org/other")
    assert base("org/model") == "org/model"
    assert base("/gone/since/then") == "org/model"
    kept = "/cache/models--org--model/snapshots/1"
    assert base("org/model", kept) == kept


def test_what_an_adapter_keeps_whole_does_not_stay_in_the_base(folder, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), settings)
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if "modules_to_save" in name:
                each.add_(1.0)
    adapted.save_pretrained(tmp_path / "adapter")
    arms = resolve_arms(str(folder / "model"), str(tmp_path / "adapter"), [str(folder / "model")])
    ids = torch.tensor([[3, 4, 5]])
    logits = {arm.name: model(input_ids=ids).logits.detach() for arm, model in load_each_model(arms, "float32")}
    assert torch.equal(logits["control"], logits["before"])
    assert not torch.allclose(logits["after"], logits["before"])


def test_one_adapter_with_two_scales_is_two_sets_of_weights(folder, adapter, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 4 * settings["lora_alpha"]}))
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    (moved / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "/gone/since"}))
    digests = [
        digest_of_arm(arm, model)
        for place in (adapter, other, moved)
        for arm, model in load_each_model(resolve_arms(str(folder / "model"), str(place))[1:], "float32")
    ]
    assert digests[0] == digests[2] != digests[1]


def test_the_student_is_weights_to_compare_and_the_base_of_an_adapter_by_its_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "student"}))
    (tmp_path / "adapter_model.safetensors").touch()
    before, after = resolve_arms("student", str(tmp_path))
    assert before.base == after.base == str(student_folder())
    assert load_tokenizers([before, after])[1]
