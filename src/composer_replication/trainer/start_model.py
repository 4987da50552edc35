"""Prepare the model that a run trains: load, adapt, quantize or shard it, and find untrained rows in its head."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.model_folder import load_model
from composer_replication.errors import ConfigError, InputError, MissingExtraError, explain
from composer_replication.optional import available, require
from composer_replication.trainer.objective.distributed import is_sharded, without_trained_rows
from composer_replication.trainer.objective.model_head import get_causal_lm
from composer_replication.trainer.same_start import share_start_weights

Quantization = Literal["none", "4bit"]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "4bit")
_HALVES = (torch.bfloat16, torch.float16)
# "model.layers.3.mlp.gate.weight" and "…block_sparse_moe.router.weight"; not "…mlp.gate_proj.weight"
_ROUTER = re.compile(r"\.(router|gate)\.")


def loading_dtype(*, bf16: bool, has_adapter: bool) -> torch.dtype:
    """Return the dtype in which to load weights: fp32 for weights to train, even if autocast uses bf16.

    bf16 has 8 bits of precision, and most optimizer steps are too small to change a weight stored in it.
    """
    return torch.bfloat16 if bf16 and has_adapter else torch.float32


def prepare_model(
    model: str | nn.Module,
    args: Any,
    *,
    peft_config: Any | None,
    quantization: Quantization,
    adapter_follows: bool = False,
    token_rows: Callable[[nn.Module], Sequence[int]] | None = None,
) -> nn.Module:
    """Return the model that `OfflineTrainer` trains. A model given by name is loaded without running remote code.

    Raises ConfigError if weights to train are in half precision.

    Args:
        model: A loaded model, or a name.
        args: The training arguments.
        peft_config: The adapter to add, or None.
        quantization: "4bit" loads the base weights in four bits.
        adapter_follows: The caller adds an adapter later, so the weights are loaded as frozen base weights.
        token_rows: Returns, for the loaded model, the token ids whose embedding and head rows the adapter also trains.
    """
    if quantization not in QUANTIZATIONS:
        raise InputError(explain("quantization", got=repr(quantization), expected=f"one of {QUANTIZATIONS}"))
    if quantization == "4bit":
        _check_quantization(model, peft_config)
    has_adapter = adapter_follows or peft_config is not None
    dtype = loading_dtype(bf16=args.bf16, has_adapter=has_adapter)
    prepared_model = _load_model(model, quantization, dtype) if isinstance(model, str) else model
    # First, since ranks other than 0 may hold no weights until then.
    share_start_weights(prepared_model)
    if peft_config is not None:
        if token_rows is not None:
            peft_config = with_token_rows(peft_config, prepared_model, token_rows(prepared_model))
        prepared_model = _add_adapter(prepared_model, args, peft_config, quantization)
        share_start_weights(prepared_model)
    if not adapter_follows:
        _check_weights_to_train(prepared_model)
    return prepared_model


def shard_model(model: nn.Module, args: Any) -> None:
    """Shard the weights over all processes, layer by layer (FSDP2), on the training devices.

    With bf16 or fp16, a layer's weights are cast to half precision when they are gathered; autocast would keep a cast
    copy of every layer until the backward pass. Raises ConfigError for 4-bit weights, and for a model whose layer
    classes transformers does not list.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    causal_lm = get_causal_lm(model)
    # bitsandbytes packs 4-bit weights into uint8 tensors.
    if any(parameter.dtype == torch.uint8 for parameter in model.parameters()):
        fix = 'Set train.adapter.kind = "lora", or train.fsdp.on = false.'
        raise ConfigError(explain("train.fsdp.on", got="true, with 4-bit weights", expected="false", fix=fix))
    # The classes of decoder layers, such as "Qwen2DecoderLayer".
    names = set(getattr(causal_lm, "_no_split_modules", None) or ())
    layers = [module for module in causal_lm.modules() if type(module).__name__ in names]
    if not layers:
        fix = "Set train.fsdp.on = false, or shard the model with torch.distributed.fsdp.fully_shard first."
        got = f"{type(causal_lm).__name__}, whose layer classes transformers does not list (_no_split_modules)"
        raise ConfigError(explain("train.fsdp.on", got=got, expected="a model with known layer classes", fix=fix))
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=None if half is None else torch.float32)
    mesh = init_device_mesh(args.device.type, (args.world_size,))
    # Layers before the whole model, so that the root holds only the remaining weights, such as the embedding.
    for module in (*layers, causal_lm):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _check_weights_to_train(model: nn.Module) -> None:
    """Raise ConfigError if trainable weights are in half precision, since no fp32 master weights are kept."""
    trained = [(name, parameter.dtype) for name, parameter in model.named_parameters() if parameter.requires_grad]
    half = [f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in trained if dtype in _HALVES]
    if half:
        got = f"{len(half)} of {len(trained)} in half precision, such as {half[0]}"
        fix = (
            "Most updates would round to zero. Pass model.float() or the model's name, with bf16=True for half "
            "precision"
            " in autocast; or pass a peft_config to train an adapter on these weights."
        )
        raise ConfigError(explain("weights to train", got=got, expected="float32", fix=fix))


def check_router_loss(model: nn.Module) -> str | None:
    """Return a warning if routers are trained while the model's config disables their auxiliary loss.

    Raises ConfigError for a mixture of experts whose config enables that loss, because it is not computed here.
    """
    config: Any = get_causal_lm(model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = getattr(text, "router_aux_loss_coef", 0.0)
    if not hasattr(text, "output_router_logits") or not weight:
        return None
    if text.output_router_logits:
        fix = (
            'Set "output_router_logits": false in the config.json of train.model (or model.config), and train an'
            ' adapter on layers other than the routers; or train with rollouts (train.mode = "grpo"), where TRL adds'
            " that loss."
        )
        got = f"true, which enables the router's auxiliary loss (coefficient {weight:g})"
        raise ConfigError(explain("output_router_logits with logged sessions", got=got, expected="false", fix=fix))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and _ROUTER.search(name)]
    if not trained:
        return None
    return f"routers are trained without their auxiliary loss ({len(trained)} weights, such as {trained[0]})"


def _add_adapter(model: nn.Module, args: Any, peft_config: Any, quantization: Quantization) -> nn.Module:
    peft = require("peft", extra="train")
    if isinstance(model, peft.PeftModel):
        fix = "Pass the model without its adapter, or no peft_config."
        raise ConfigError(
            explain("peft_config", got="a config for a model that already has an adapter", expected="None", fix=fix)
        )
    if is_sharded(model):
        fix = "Add the adapter first, then shard the model."
        raise ConfigError(explain("peft_config", got="a config for a sharded model", expected="None", fix=fix))
    if quantization == "4bit":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=args.gradient_checkpointing)
    _check_targets(model, peft_config)
    try:
        adapted = peft.get_peft_model(model, peft_config)
    except ValueError as error:
        raise adapter_error(error, model) from error
    repair_token_rows(adapted)
    # PEFT keeps its own weights in fp32, but not the modules that it copies (`modules_to_save`).
    if args.bf16 or args.fp16:
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype in _HALVES:
                parameter.data = parameter.data.float()
    return adapted


def _check_targets(model: nn.Module, peft_config: Any) -> None:
    """Raise ConfigError if any of an adapter's targets matches no layer. PEFT only reports it if none matches."""
    targets = getattr(peft_config, "target_modules", None)
    if not isinstance(targets, list | tuple | set) or not targets:
        return
    names = [name for name, _ in model.named_modules()]
    # PEFT matches a target against the end of a layer's name, at a dot.
    unknown = sorted(target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names))
    if unknown:
        raise adapter_error(ValueError(f"targets that match no layer: {', '.join(unknown)}"), model)


def adapter_error(error: Exception, model: nn.Module) -> ConfigError:
    """Convert PEFT's error to a ConfigError that lists the names of the model's layers.

    Most of PEFT's errors are about unknown layer names.
    """
    got = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # PEFT's message does not list the valid names.
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = f"names of this model's layers: {', '.join(sorted(linear - {'lm_head'}))}, or all-linear"
    fix = "Set train.adapter.targets (target_modules of a peft_config) to some of these."
    return ConfigError(explain("train.adapter", got=got, expected=expected, fix=fix))


def _check_quantization(model: str | nn.Module, peft_config: Any | None) -> None:
    """Raise an error unless bitsandbytes is installed, the model is given by name, and only an adapter is trained."""
    if not available("bitsandbytes"):
        fix = 'Type: pip install bitsandbytes. Or train without quantization: LoRA alone, `quantization="none"`.'
        raise MissingExtraError(f'quantization="4bit": bitsandbytes is not installed. {fix}', name="bitsandbytes")
    if not isinstance(model, str):
        got = f"an already loaded {type(model).__name__}"
        raise ConfigError(explain('model with quantization="4bit"', got=got, expected="the model's name or folder"))
    if peft_config is None:
        fix = "4-bit weights cannot be trained; pass a peft.LoraConfig."
        raise ConfigError(explain('peft_config with quantization="4bit"', got=None, expected="an adapter", fix=fix))


def _load_model(name: str, quantization: Quantization, dtype: torch.dtype) -> nn.Module:
    options: dict[str, Any] = {"dtype": dtype}
    if quantization == "4bit":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return load_model(name, what=f"model {name!r}", **options)


def choose_token_rows(
    names: Sequence[str],
    model: nn.Module,
    tokenizer: Any,
    written_ids: Iterable[int],
    say: Callable[[str], None],
    *,
    why_not: str = "",
) -> list[int]:
    """Return the token ids whose embedding and head rows the adapter trains; `names` is `train.adapter.token_rows`.

    If `why_not` is a reason such as "with FSDP", no rows are trained. In any case, `say` is called with a message about
    tokens that have untrained rows among `written_ids`, the ids that the model has to write.
    """
    is_auto = tuple(names) == ("auto",)
    if why_not and names and not is_auto:
        expected = "auto, or an empty list"
        raise ConfigError(explain(f"train.adapter.token_rows {why_not}", got=list(names), expected=expected))
    chosen = [] if is_auto else _token_ids(tokenizer, names)
    untrained = untrained_rows(model, tokenizer, written_ids)
    if untrained is None or untrained.tokens.keys() <= set(chosen):
        return chosen
    is_trained = is_auto and not why_not
    consequence = (
        "their rows are trained with the adapter" if is_trained else f"their rows stay untrained {why_not}".strip()
    )
    say(f"{untrained.describe()}; {consequence} (train.adapter.token_rows)")
    return [*untrained.tokens] if is_trained else chosen


# "<|reserved_special_token_7|>", "[unused12]"; not "<|im_end|>"
_NAMED_UNUSED = re.compile(r"reserved|unused", re.IGNORECASE)
# Constants for `untrained_rows`: unreachable rows, sampled ordinary rows, and two fractions of `typical`.
_MIN_UNUSED, _MAX_SAMPLED, _LIMIT_SHARE, _MAX_SPREAD_SHARE = 4, 2048, 0.1, 0.5


class _UntrainedRows(NamedTuple):
    """The chat template's tokens whose rows in the model's head were never trained; `tokens` are their names by id.

    `distances` are these rows' distances from the center of `num_unused` unused rows, `typical` is the distance of a
    trained row from that center, and `limit` is the distance up to which a row counts as untrained.
    """

    tokens: dict[int, str]
    distances: list[float]
    typical: float
    limit: float
    num_unused: int

    def describe(self) -> str:
        token_names, share = ", ".join(self.tokens.values()), max(self.distances) / self.typical
        return (
            f"the model was never trained on {token_names}, which the chat template writes: in the head, its distance"
            f" from {self.num_unused} unused tokens is only {share:.1%} of a trained token's distance (limit"
            f" {self.limit / self.typical:.0%}), so any unused token may be sampled instead"
        )


@torch.no_grad()
def untrained_rows(model: nn.Module, tokenizer: Any, written_ids: Iterable[int]) -> _UntrainedRows | None:
    """Find the chat template's tokens that were never trained, among `written_ids`, the ids that the model has to
    write.

    Returns None if there are none, or if the rule below cannot decide. Rows that an adapter trains are ignored.

    A vocabulary has entries that never occurred in training. Their rows stay close together, where they were
    initialized. If one of the template's special tokens has such a row (the start of a call, the end of a turn), no
    hidden state can distinguish it from the others, and LoRA, which leaves the head unchanged, cannot learn it. The
    rule compares rows of the head:

        center    mean of rows that no text can reach: ids after the tokenizer's last id, tokens named reserved or
            unused
        typical   median distance of ordinary tokens' rows from the center, over a sample
        spread    largest distance of an unreachable row from the center
        limit     the larger of spread and a tenth of typical; a row within this distance was never trained

    The rule cannot decide with fewer than four unreachable rows, or if spread exceeds half of typical.
    """
    layer: Any = get_causal_lm(model).get_output_embeddings()
    head: Tensor = without_trained_rows(layer).weight
    by_adapter: dict[str, list[int]] = {} if without_trained_rows(layer) is layer else layer.token_adapter.token_indices
    trained = {number for ids in by_adapter.values() for number in ids}
    added = {number: text for text, number in tokenizer.get_added_vocab().items() if number < head.shape[0]}
    tokens = {number: added[number] for number in sorted((set(written_ids) & added.keys()) - trained)}
    unused = [
        *range(len(tokenizer), head.shape[0]),
        *(number for number in added if _NAMED_UNUSED.search(added[number])),
    ]
    unused = [number for number in unused if number not in tokens]
    ordinary = [number for number in range(min(len(tokenizer), head.shape[0])) if number not in added]
    if not tokens or len(unused) < _MIN_UNUSED or not ordinary or head.is_meta:
        return None
    center = _head_rows(head, unused).mean(0)

    def distances(ids: Sequence[int]) -> Tensor:
        return (_head_rows(head, ids) - center).norm(dim=1)

    # An evenly spaced sample: a vocabulary may have 150,000 rows.
    typical = float(distances(ordinary[:: max(1, len(ordinary) // _MAX_SAMPLED)]).median())
    spread = float(distances(unused).max())
    limit = max(spread, _LIMIT_SHARE * typical)
    # Written so that NaN does not pass the check.
    if not spread <= _MAX_SPREAD_SHARE * typical or not typical:
        return None
    near = {
        token: distance
        for token, distance in zip(tokens, distances([*tokens]).tolist(), strict=True)
        if distance <= limit
    }
    if not near:
        return None
    return _UntrainedRows({token: tokens[token] for token in near}, [*near.values()], typical, limit, len(unused))


def _head_rows(head: Tensor, ids: Sequence[int]) -> Tensor:
    return head[torch.tensor(ids, device=head.device)].float()


def with_token_rows(peft_config: Any, model: nn.Module, ids: Sequence[int]) -> Any:
    """Return the adapter's config, extended to train the embedding and head rows of these token ids."""
    if not ids:
        return peft_config
    causal_lm = get_causal_lm(model)
    wrapped = [causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()]
    # With tied weights, training the embedding's row also trains the head's.
    if wrapped[1].weight is wrapped[0].weight:
        wrapped = wrapped[:1]
    names = {module: name for name, module in causal_lm.named_modules()}
    peft_config.trainable_token_indices = {names[module]: sorted(ids) for module in wrapped}
    return peft_config


def repair_token_rows(model: nn.Module) -> None:
    """Repair the model after PEFT has wrapped its head in order to train single rows.

    The rows are converted to fp32, since in bf16 most updates would round to zero. If the head has no `bias`, the
    wrapper gets that attribute, because TRL's loss reads it.
    """
    head: Any = get_causal_lm(model).get_output_embeddings()
    if without_trained_rows(head) is head:
        return
    if "bias" not in head._parameters and without_trained_rows(head).bias is None:
        head.register_parameter("bias", None)
    for name, weight in model.named_parameters():
        if "trainable_tokens_delta" in name:
            weight.data = weight.data.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight.data


def _token_ids(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """Return the tokens' ids. Raises ConfigError for tokens that are not in the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        fix = 'Write tokens exactly as in the vocabulary, or use "auto".'
        got = f"{', '.join(unknown)}"
        raise ConfigError(
            explain("train.adapter.token_rows", got=got, expected="tokens in this model's vocabulary", fix=fix)
        )
    return [vocabulary[token] for token in tokens]
