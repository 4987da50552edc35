"""Split a Hugging Face causal LM into a body that returns hidden states and a head that returns logits.

Models scale or cap their logits after the head, each in its own way and under its own config keys. Rather than trust a
list of keys, this module tries all candidates once per model. Random rows, large enough that any cap bends them, are
fed into the head, and the only combination that reproduces the model's own logits is used. If no candidate does, or
more than one, `UnsupportedModelError` is raised: an *almost* correct head would silently train on wrong numbers.
"""

from __future__ import annotations

import math
import warnings
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from composer_replication.errors import UnsupportedModelError, explain
from composer_replication.loss.linear.head import LinearHead
from composer_replication.loss.rows import check_finite_rows
from composer_replication.trainer.objective.distributed import eval_mode, unwrapped, without_trained_rows

_PROBE_TOKENS = 4


class _Transform(NamedTuple):
    """The transformation of a model's logits after its head: a scale and a soft-cap."""

    scale: float
    softcap: float | None


class _ProbeResult(NamedTuple):
    """The logit transform found for a model, with the head and the candidates from which it was determined."""

    head_id: int
    candidates: list[_Transform]
    transform: _Transform


# Keyed by model, with weak references so that a model can be freed. A new head or config is probed again.
_probed: WeakKeyDictionary[nn.Module, _ProbeResult] = WeakKeyDictionary()
_warned: set[int] = set()


def get_causal_lm(model: nn.Module) -> Any:
    """Return the Hugging Face model inside DDP, torch.compile and PEFT.

    Raises UnsupportedModelError for any other kind of model, and for adapters that act outside the layers.
    """
    model = unwrapped(model)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        # The virtual tokens are added by PEFT's forward, which is never called here.
        fix = "Use LoRA or another adapter inside the layers."
        raise UnsupportedModelError(explain("PEFT model", got="prompt learning", expected="an adapter", fix=fix))
    configs: Any = getattr(model, "peft_config", None) or {}
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs.values()):
        # An aLoRA is active after an invocation token, for which PEFT's forward searches.
        fix = "Use plain LoRA or another adapter without invocation tokens."
        raise UnsupportedModelError(explain("PEFT model", got="aLoRA", expected="another kind of adapter", fix=fix))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    if not (hasattr(inner, "get_decoder") and hasattr(inner, "get_output_embeddings")):
        fix = "Pass the model inside the wrapper: model.module." if hasattr(model, "module") else ""
        expected = "a Hugging Face causal LM (get_decoder, LM head)"
        raise UnsupportedModelError(explain("model", got=type(model).__name__, expected=expected, fix=fix))
    return inner


def embedding_count(model: nn.Module) -> int:
    """Return the number of token ids for which the model has an input embedding."""
    return without_trained_rows(get_causal_lm(model).get_input_embeddings()).weight.shape[0]


def hidden_states(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the last hidden states (B, T, H), after the final norm, without computing any logits.

    The real tokens of each sequence are moved to the front for the pass, and the resulting rows are moved back. In a
    causal model, padding after a token changes nothing, whether the model uses attention, convolutions or a recurrent
    state. Padding before a token changes the result in many models, even with a mask.
    """
    decoder = get_body(get_causal_lm(model))
    if attention_mask is None:
        return decoder(input_ids=input_ids, use_cache=False).last_hidden_state
    real_BT = attention_mask.bool()
    order_BT = real_BT.int().argsort(dim=1, descending=True, stable=True)
    front_BTH = decoder(input_ids=input_ids.gather(1, order_BT), use_cache=False).last_hidden_state
    back_BT = order_BT.argsort(dim=1)
    return front_BTH.gather(1, back_BT[..., None].expand_as(front_BTH))


def get_body(causal_lm: Any) -> Any:
    """Return the body of a causal LM."""
    # For some models `get_decoder` returns a head named "decoder", or the causal LM itself.
    decoder = causal_lm.get_decoder()
    if decoder is causal_lm or decoder is causal_lm.get_output_embeddings():
        return getattr(causal_lm, "model", decoder)
    return decoder


def get_linear_head(model: nn.Module, probe_ids: Tensor) -> LinearHead:
    """Return the model's head with its logit scale and soft-cap, checked once against the model's own logits.

    Rows of the head that an adapter trains are part of the returned weight, and receive their gradient through it.
    """
    causal_lm = get_causal_lm(model)
    layer = causal_lm.get_output_embeddings()
    linear = without_trained_rows(layer)
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise UnsupportedModelError(
            explain(
                f"LM head of {type(causal_lm).__name__}",
                got=f"{type(linear).__module__}.{type(linear).__qualname__}",
                expected="a plain torch.nn.Linear",
                fix="Leave lm_head out of the adapter's target modules and modules_to_save.",
            )
        )
    if layer is not linear and linear.bias is not None:
        fix = "Set train.adapter.token_rows = []: PEFT ignores the bias of such a head."
        got = "both a bias and rows that an adapter trains"
        raise UnsupportedModelError(
            explain(f"LM head of {type(causal_lm).__name__}", got=got, expected="at most one of the two", fix=fix)
        )
    if hasattr(linear.weight, "device_mesh"):
        fix = "Shard the whole model as its root (fully_shard(model)), not lm_head by itself."
        got = "sharded weights"
        raise UnsupportedModelError(
            explain(f"LM head of {type(causal_lm).__name__}", got=got, expected="whole weights", fix=fix)
        )
    _warn_of_cast(model)
    candidates = _candidate_transforms(causal_lm.config)
    probe = _probed.get(causal_lm)
    if probe is None or (probe.head_id, probe.candidates) != (id(layer), candidates):
        probe = _ProbeResult(id(layer), candidates, _find_transform(causal_lm, layer, candidates, probe_ids))
        _probed[causal_lm] = probe
    weight, bias = layer.weight, linear.bias
    if torch.is_autocast_enabled(weight.device.type):
        # Cast once for all channels; otherwise each channel would make and keep its own copy of the head.
        weight = weight.to(torch.get_autocast_dtype(weight.device.type))
    return LinearHead(weight, bias, *probe.transform)


def _warn_of_cast(model: nn.Module) -> None:
    """Warn once if accelerate's mixed precision has no effect.

    It has no effect without autocast, because it wraps the model's own forward, which is never called here.
    """
    inner, device = unwrapped(model), next(model.parameters()).device.type
    wrapped = getattr(inner, "_original_forward", None) is not None
    if wrapped and not torch.is_autocast_enabled(device) and id(inner) not in _warned:
        _warned.add(id(inner))
        warnings.warn(
            "accelerate's mixed precision has no effect on compose_loss: call it inside `accelerator.autocast()`",
            stacklevel=2,
        )


def _find_transform(causal_lm: Any, layer: Any, candidates: list[_Transform], probe_ids: Tensor) -> _Transform:
    ids, weight, bias = probe_ids[:1, :_PROBE_TOKENS], layer.weight.detach(), without_trained_rows(layer).bias
    received: list[Tensor] = []
    with torch.no_grad(), eval_mode(causal_lm), torch.autocast(ids.device.type, enabled=False):
        rows = _rows_with_large_logits(weight, candidates)

        def put_rows_in_front(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            received.append(inputs[0])
            return (rows.expand(*inputs[0].shape[:-1], -1).contiguous(),)

        hook = layer.register_forward_pre_hook(put_rows_in_front)
        try:
            # The forward of the class, without the hooks and casts of wrappers.
            got = type(causal_lm).forward(causal_lm, input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        body_feeds_head = bool(received) and _is_close(hidden_states(causal_lm, ids, None), received[0])
        heads = [LinearHead(weight, bias, *candidate) for candidate in candidates]
        # Some models return logits in single precision after rounding them to the head's own precision.
        got_rows = got[0, :1].to(weight.dtype)
        fitting = [c for c, head in zip(candidates, heads, strict=True) if _is_close(head.logits(rows[None]), got_rows)]
    check_finite_rows(got.flatten(), f"{type(causal_lm).__name__}'s own logits, before any loss")
    if body_feeds_head and len(fitting) == 1:
        return fitting[0]
    finding = (
        f"{len(fitting)} matches among {len(candidates)} known scales and soft-caps"
        if body_feeds_head
        else "a head that does not read the body's last hidden states"
    )
    raise UnsupportedModelError(
        explain(
            f"logits of {type(causal_lm).__name__}",
            got=finding,
            expected="softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), with exactly one match",
            fix="If the weights of the head are all zero, initialize them first." if len(fitting) > 1 else "",
        )
    )


def _rows_with_large_logits(weight: Tensor, candidates: list[_Transform]) -> Tensor:
    """Return one random row, scaled so that its logits reach twice the largest soft-cap under every candidate scale.

    Logits that large differ from candidate to candidate.
    """
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(weight.shape[1], generator=generator).to(weight)
    largest = (weight.float() @ row.float()).abs().max().item()
    target = 2.0 * max((c.softcap or 5.0) / min(abs(c.scale), 1.0) for c in candidates)
    return row * (target / largest) if largest > 0.0 else row


def _is_close(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding in the narrower dtype.

    A wrong scale or cap makes a far larger difference.
    """
    narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in (got, want))
    got, want = got.float().expand_as(want), want.float()
    return bool(((got - want).abs() <= (2e-2 if narrow else 1e-4) * want.abs().max()).all())


def _candidate_transforms(config: Any) -> list[_Transform]:
    """Return every combination of scale and soft-cap that is consistent with the config."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def value_of(*names: str) -> list[float]:
        values = [getattr(text_config, name, None) for name in names]
        return [float(v) for v in values if isinstance(v, int | float) and v and math.isfinite(v)]

    # Some models multiply by their scale (Cohere), others divide by it (Granite): both are candidates.
    scales = {1.0}
    for value in value_of("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier"):
        scales |= {value, 1.0 / value}
    softcaps: list[float | None] = [
        None,
        *value_of("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
    ]
    return [_Transform(*pair) for pair in product(sorted(scales), softcaps)]


def cast_to_head_dtype(hidden: Tensor, head: LinearHead) -> Tensor:
    """Cast hidden states to the dtype that the head multiplies in."""
    # Outside autocast that is the head's own dtype; some models have an fp32 final norm before a bf16 head.
    return hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(head.weight.dtype)
