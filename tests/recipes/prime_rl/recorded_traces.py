"""The recorded rollouts as traces: by our records of verifiers' graph, and by its own classes where it is installed."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import torch

from composer_replication.evaluation.ablation.workspace import SCHEMAS
from recipes.prime_rl.engine_records import Branch, Node, Trace, trainer_logprobs
from recipes.recorded_episodes import played
from recipes.recorded_steps import Batch

HEADER = "<|im_start|>assistant\n"


def own_traces(tokenizer: Any, batch: Batch) -> list[Trace]:
    return [own_trace(tokenizer, batch, row) for row in range(len(batch.prompt_ids))]


def own_trace(tokenizer: Any, batch: Batch, row: int) -> Trace:
    """A prompt, then a node for each turn (its header first) and for what stands between turns."""
    episode = played(tokenizer, batch, row)
    messages = iter(episode.prompt + episode.messages)
    nodes: list[Node] = []
    for ids, mask in _pieces(tokenizer, batch, row):
        nodes.append(Node(_message(next(messages)), ids, mask))
    tools = [SimpleNamespace(name=each["name"], parameters=each["parameters"]) for each in SCHEMAS]
    return Trace(f"row-{row}", [Branch(nodes, tools)], float(batch.rewards[row]), {})


def _pieces(tokenizer: Any, batch: Batch, row: int) -> list[tuple[list[int], list[bool]]]:
    ids = batch.row_ids(row)
    prompt = batch.prompt_length(row)
    sampled = [False] * prompt + batch.loss_mask[row][: len(ids) - prompt].tolist()
    header = tokenizer.encode(HEADER, add_special_tokens=False)
    starts = [at for at in range(1, len(ids)) if sampled[at] and not sampled[at - 1]]
    ends = [at for at in range(1, len(ids) + 1) if sampled[at - 1] and (at == len(ids) or not sampled[at])]
    edges = [0]
    for start, end in zip(starts, ends, strict=True):
        assert ids[start - len(header) : start] == header
        edges += [start - len(header), end]
    edges += [len(ids)] if edges[-1] != len(ids) else []
    return [(ids[one:other], sampled[one:other]) for one, other in itertools.pairwise(edges)]


def _message(message: dict[str, Any]) -> Any:
    calls = [
        SimpleNamespace(id="call", name=each["function"]["name"], arguments=json.dumps(each["function"]["arguments"]))
        for each in message.get("tool_calls", [])
    ]
    known = {"role": message["role"], "content": message["content"]}
    known |= {"tool_calls": calls} if message["role"] == "assistant" else {}
    return SimpleNamespace(**known, name=message.get("name"), tool_call_id="call")


def verifiers_trace(vf: Any, own: Trace) -> Any:
    """The same trace in verifiers' own classes."""
    from verifiers.v1 import graph, trace, types

    tools = [types.Tool(name=each.name, description="", parameters=each.parameters) for each in own.branches[0].tools]
    nodes = []
    for number, node in enumerate(own.branches[0].nodes):
        nodes.append(
            graph.MessageNode(
                parent=number - 1 if number else None,
                tools=[] if number else tools,  # from 0.4 on
                message=_typed(types, node.message),
                sampled=any(node.mask),
                token_ids=node.token_ids,
                mask=node.mask,
                logprobs=node.logprobs,
                advantages=node.advantages,
            )
        )
    data = vf.TaskData(idx=0, name=own.id, prompt="-")
    return vf.Trace(
        task={"type": "Task", "data": data},
        agent=trace.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        tools=tools,
        rewards={"reward": trace.Reward(score=own.reward)},
        info=own.info,
        is_completed=True,
        ok=True,
    )


def _typed(types: Any, message: Any) -> Any:
    if message.role == "assistant":
        calls = [types.ToolCall(id="call", name=each.name, arguments=each.arguments) for each in message.tool_calls]
        return types.AssistantMessage(content=message.content, tool_calls=calls or None)
    if message.role == "tool":
        return types.ToolMessage(tool_call_id="call", content=message.content, name=message.name)
    return types.UserMessage(content=message.content)


def give_logprobs(traces: list[Trace], scores: list[list[float]]) -> None:
    """As the inference server would: of every token of a trace's one branch, those of the weights that sampled."""
    for trace, own in zip(traces, scores, strict=True):
        (branch,) = trace.branches
        place = 0
        for node in branch.nodes:
            end = place + len(node.mask)
            pairs = zip(own[place:end], node.mask, strict=True)
            node.logprobs = [each for each, is_sampled in pairs if is_sampled]
            place = end


class Pool:
    """An inference pool over a model in this process; `asked` are the ids it was given."""

    def __init__(self, model: Any, name: str = "policy") -> None:
        self.model, self.model_name, self.asked = model, name, list[list[int]]()

    async def score(self, token_ids: list[int]) -> list[float]:
        self.asked.append(token_ids)
        with torch.no_grad():
            return trainer_logprobs(self.model, token_ids).tolist()
