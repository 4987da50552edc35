"""Sessions with sites and pairs for the tests of windows, their flat sequences, and what a window's tree must hold."""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

import torch

from composer_replication import compose_loss
from composer_replication.batch.hint_placement import teacher_context
from composer_replication.batch.render.renderer import RenderedSequence, Renderer
from composer_replication.batch.session_batch import SiteHint, TokenPair, session_batches
from session_pieces import Session
from tiny_models import build
from tokenizer_assets import load

HINT = "Hint: the file is b.py, not a.py."
WORDS = ["the ", "file\n", "is ", "there. ", "look ", "again ", "ü🦜 ", "<b>", "return x\n\n", "{y} "]


@cache
def renderer_of(family):
    return Renderer(load(family))


class Asked(NamedTuple):
    """A rendered session and what its channels ask for."""

    renderer: Renderer
    rendered: RenderedSequence
    sites: list[SiteHint]
    pairs: list[TokenPair]

    def batches(self, **options):
        return session_batches(self.renderer, self.rendered, sites=self.sites, pairs=self.pairs, **options)


def conversation(draw: random.Random, num_turns: int):
    """Calls without text, calls with text, plain answers; questions between them."""
    session = Session(identity=f"c{draw.random()}")
    session.user("".join(draw.choices(WORDS, k=5)))
    for _ in range(num_turns):
        kind = draw.choice(["call", "says", "says", "ask"])
        text = "".join(draw.choices(WORDS, k=draw.randint(1, 9)))
        if kind == "call":
            session.call("bash", text, command=draw.choice(["ls", "cat a.py", "pytest -q"]))
        else:
            session.says(f"So {text}")
            session.user(f"And {text}")
    return session.says("Done.").conversation()


def asked(family, seed=0, num_turns=5, num_sites=3, num_pairs=2, hint=None) -> Asked:
    """A random session with hints before random turns (some twice) and other answers at random turns."""
    draw = random.Random(seed)
    renderer = renderer_of(family)
    rendered = draw.choice(renderer.render(conversation(draw, num_turns)))
    spans = rendered.spans
    hints = (f"H{''.join(draw.choices(WORDS, k=3))}" if hint is None else hint for _ in range(num_sites))
    sites = [SiteHint(draw.choice(spans), each) for each in hints]
    pairs = []
    for span in draw.choices(spans, k=num_pairs):
        other = renderer.encoder.encode(["Better: " + "".join(draw.choices(WORDS, k=draw.randint(1, 6)))])[0]
        context, own = rendered.ids[: span.start], rendered.ids[span.start : span.end]
        pairs.append(
            TokenPair(
                chosen_ids=[*context, *other, own[-1]],
                chosen_start=span.start,
                rejected_ids=context + own,
                rejected_start=span.start,
                references=(-draw.random() * 9, -draw.random() * 9),
            )
        )
    return Asked(renderer, rendered, sites, pairs)


def of_channel(window, channel):
    return [number for name, number in window.items if name == channel]


def flat_of(given: Asked, window, placement="before_turn"):
    """The mapping of the flat path for exactly what a window holds, each sequence cut where the window begins."""
    first, ids = window.first, given.rendered.ids[window.first : window.end]
    mask = torch.zeros(1, len(ids), dtype=torch.long)
    for number in of_channel(window, "lm_ce"):
        span = given.rendered.spans[number]
        mask[0, span.start - first : span.end - first] = 1
    batch = {"input_ids": torch.tensor([ids]), "response_mask": mask}
    teachers, student_rows, teacher_rows = [], [], []
    for number in of_channel(window, "sdpo_jsd"):
        span, hint, _ = given.sites[number]
        context = teacher_context(given.renderer, given.rendered, span, hint, placement=placement, first=first)
        size = span.end - span.start
        student_rows += [[0, span.start - first - 1 + j] for j in range(size)]
        teacher_rows += [[len(teachers), context.start - 1 + j] for j in range(size)]
        teachers.append(context.ids)
    if teachers:
        batch |= {"ctx_teacher_input_ids": _padded(teachers), "ctx_teacher_attention_mask": _mask(teachers)}
        batch |= {
            "sdpo_student_index": torch.tensor(student_rows),
            "sdpo_teacher_index": torch.tensor(teacher_rows),
        }
    pairs = [given.pairs[number] for number in of_channel(window, "trace_replay_dpo")]
    for index, side in enumerate(("chosen", "rejected") if pairs else ()):
        cut = [list(getattr(pair, f"{side}_ids"))[first:] for pair in pairs]
        starts = [getattr(pair, f"{side}_start") - first for pair in pairs]
        batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_attention_mask"] = _padded(cut), _mask(cut)
        batch[f"dpo_{side}_response_mask"] = _mask(cut, starts)
        references = [pair.references[index] for pair in pairs]
        batch[f"dpo_{side}_ref_logprobs"] = torch.tensor(references, dtype=torch.float64)
    return batch


def _padded(ids):
    width = max(map(len, ids))
    return torch.tensor([each + [0] * (width - len(each)) for each in ids])


def _mask(ids, starts=None):
    width, starts = max(map(len, ids)), starts or [0] * len(ids)
    rows = [[int(start <= at < len(each)) for at in range(width)] for each, start in zip(ids, starts, strict=True)]
    return torch.tensor(rows)


def check_sites(given: Asked, window, placement="before_turn"):
    """Each site's rows see what they should, and predict the same tokens on both sides. Returns their number."""
    tree, sees = window.batch.tree, window.batch.tree.dense_mask()
    follows = {pair for rows in tree.rows for pair in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True)}
    follows = {(row, int(tree.input_ids[after])) for row, after in follows}
    at, num_rows = 0, 0
    for number in of_channel(window, "sdpo_jsd"):
        span, hint, _ = given.sites[number]
        context = teacher_context(given.renderer, given.rendered, span, hint, placement=placement, first=window.first)
        targets, before = given.rendered.ids[span.start : span.end], given.rendered.ids[window.first : span.start]
        size = len(targets)
        sides = ((window.batch.student_rows, before), (window.batch.teacher_rows, context.ids[: context.start]))
        for rows, past in sides:
            own = rows[at : at + size].tolist()
            assert path(tree, sees, own[-1]) == past + targets[:-1]
            assert [int(tree.position_ids[row]) for row in own] == list(range(len(past) - 1, len(past) - 1 + size))
            assert all((row, token) in follows for row, token in zip(own, targets, strict=True))
        at, num_rows = at + size, num_rows + size
    assert window.batch.student_rows.numel() == window.batch.teacher_rows.numel() == num_rows
    return num_rows


def path(tree, sees, row):
    columns = sees[row].nonzero().flatten()
    return tree.input_ids[columns[tree.position_ids[columns].argsort()]].tolist()


def model_for(renderer: Renderer, family="qwen2-tied", dtype=torch.float64, checkpointing=False):
    model = build(family)
    model.resize_token_embeddings(len(renderer.tokenizer), mean_resizing=False)
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _in_double(model) if dtype == torch.float64 else model.to(dtype)


def _in_double(model):
    """Norms of these models round to fp32 whatever their weights are; torch's own do not, so 1e-10 can be asked for."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ("Qwen2RMSNorm", "LlamaRMSNorm"):
            exact = torch.nn.RMSNorm(module.weight.numel(), eps=module.variance_epsilon)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, exact)
    return model.double()


def losses(model, inputs, **options):
    """The components of one loss, and the gradient of its total as one vector."""
    model.zero_grad(set_to_none=True)
    components = compose_loss(model, inputs, alpha_sdpo=0.7, beta_replay=0.3, **options)
    components.total.backward()
    grads = [
        torch.zeros_like(each).flatten() if each.grad is None else each.grad.flatten() for each in model.parameters()
    ]
    return components, torch.cat(grads)
