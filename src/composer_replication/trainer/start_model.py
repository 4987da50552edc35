"""The model an offline run trains: loaded or given, with an adapter or without, its weights whole or in 4 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.model_folder import load_model
from composer_replication.errors import (
    ConfigError,
    InputError,
    MissingExtraError,
    explain,
)
from composer_replication.optional import available, require
from composer_replication.trainer.objective.distributed import below_rows, is_sharded
from composer_replication.trainer.objective.model_head import causal_lm_of
from composer_replication.trainer.same_start import share_start_weights

Quantization = Literal["none", "4bit"]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "4bit")
_HALVES = (torch.bfloat16, torch.float16)
_ROUTER = re.compile(r"\.(router|gate)\.")


def weight_dtype(*, bf16: bool, has_adapter: bool) -> torch.dtype:
    """What weights are loaded in: whole where they are trained, and `bf16` is then what autocast computes in.

    bf16 keeps 8 bits of a weight, and most steps of an optimiser are smaller than that.
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
    """What `OfflineTrainer` trains. A name is loaded as `load_model` does it, without running anybody's code.

    With `adapter_follows` the caller puts an adapter on later, and the weights are loaded as those below one. Weights
    to train in half precision are refused. `token_rows` says of the loaded model which rows of embedding and head the
    adapter trains as well.
    """
    if quantization not in QUANTIZATIONS:
        raise InputError(explain("quantization", got=repr(quantization), expected=f"one of {QUANTIZATIONS}"))
    if quantization == "4bit":
        _check_quantization(model, peft_config)
    has_adapter = adapter_follows or peft_config is not None
    dtype = weight_dtype(bf16=args.bf16, has_adapter=has_adapter)
    prepared_model = _load(model, quantization, dtype) if isinstance(model, str) else model
    share_start_weights(prepared_model)  # before anything is copied or computed from them
    if peft_config is not None:
        if token_rows is not None:
            peft_config = with_token_rows(peft_config, prepared_model, token_rows(prepared_model))
        prepared_model = _adapted(prepared_model, args, peft_config, quantization)
        share_start_weights(prepared_model)
    if not adapter_follows:
        _check_weights_to_train(prepared_model)
    return prepared_model


def shard_model(model: nn.Module, args: Any) -> None:
    """Spread the weights over all processes, a layer at a time (FSDP2), on the devices that they train on.

    Half precision is what a layer's weights are cast to as they are gathered: autocast would keep a copy of every layer
    until the backward pass. Raise ConfigError for weights in 4 bits and for a model whose layers nobody names.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    causal_lm = causal_lm_of(model)
    if any(parameter.dtype == torch.uint8 for parameter in model.parameters()):
        fix = 'Set train.adapter.kind = "lora", or train.fsdp.on = false.'
        raise ConfigError(explain("train.fsdp.on", got="true, with weights in 4 bits", expected="false", fix=fix))
    names = set(getattr(causal_lm, "_no_split_modules", None) or ())
    layers = [module for module in causal_lm.modules() if type(module).__name__ in names]
    if not layers:
        fix = "Set train.fsdp.on = false, or shard the model with torch.distributed.fsdp.fully_shard before."
        got = f"{type(causal_lm).__name__}, whose layers transformers does not name (_no_split_modules)"
        raise ConfigError(explain("train.fsdp.on", got=got, expected="a model of layers", fix=fix))
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=None if half is None else torch.float32)
    mesh = init_device_mesh(args.device.type, (args.world_size,))
    for module in (*layers, causal_lm):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _check_weights_to_train(model: nn.Module) -> None:
    """Those that an optimiser changes are in fp32 or better: none here keeps whole copies of halves."""
    trained = [(name, parameter.dtype) for name, parameter in model.named_parameters() if parameter.requires_grad]
    half = [f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in trained if dtype in _HALVES]
    if half:
        got = f"{len(half)} of {len(trained)} in half precision, the first {half[0]}"
        fix = (
            "Most steps would round to nothing. Give model.float(), or its name, and compute in half precision with"
            " bf16=True; or give a peft_config, and train an adapter on these weights."
        )
        raise ConfigError(explain("weights to train", got=got, expected="float32", fix=fix))


def check_router_loss(model: nn.Module) -> str | None:
    """Refuse a mixture of experts whose config asks for its router's auxiliary loss, which is not added here.

    A sentence where the routers are trained without it because the config does not ask.
    """
    config: Any = causal_lm_of(model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = getattr(text, "router_aux_loss_coef", 0.0)
    if not hasattr(text, "output_router_logits") or not weight:
        return None
    if text.output_router_logits:
        fix = (
            'Set "output_router_logits": false in the config.json of train.model (or model.config), and keep the'
            ' routers as they are with an adapter on other layers; or train with rollouts (train.mode = "grpo"): TRL'
            " adds it."
        )
        got = f"true, which asks for the router's auxiliary loss ({weight:g} times)"
        raise ConfigError(explain("output_router_logits on logged sessions", got=got, expected="false", fix=fix))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and _ROUTER.search(name)]
    if not trained:
        return None
    return f"routers are trained without their auxiliary loss ({len(trained)} weights, the first {trained[0]})"


def _adapted(model: nn.Module, args: Any, peft_config: Any, quantization: Quantization) -> nn.Module:
    peft = require("peft", extra="train")
    if isinstance(model, peft.PeftModel):
        fix = "Give the model without its adapter, or no peft_config."
        raise ConfigError(explain("peft_config", got="one, and a model that has an adapter", expected="one", fix=fix))
    if is_sharded(model):
        fix = "Put the adapter on first, then shard."
        raise ConfigError(explain("peft_config", got="one, and a sharded model", expected="a whole model", fix=fix))
    if quantization == "4bit":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=args.gradient_checkpointing)
    check_targets(model, peft_config)
    try:
        adapted = peft.get_peft_model(model, peft_config)
    except ValueError as error:
        raise adapter_refused(error, model) from error
    settle_token_rows(adapted)
    if args.bf16 or args.fp16:  # PEFT makes its own weights whole, but not its copies (`modules_to_save`)
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype in _HALVES:
                parameter.data = parameter.data.float()
    return adapted


def check_targets(model: nn.Module, peft_config: Any) -> None:
    """PEFT says so where no target is a layer's name; of one among others it says nothing."""
    targets = getattr(peft_config, "target_modules", None)
    if not isinstance(targets, list | tuple | set) or not targets:
        return
    names = [name for name, _ in model.named_modules()]
    unknown = sorted(target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names))
    if unknown:
        raise adapter_refused(ValueError(f"targets that no layer has: {', '.join(unknown)}"), model)


def adapter_refused(error: Exception, model: nn.Module) -> ConfigError:
    """What PEFT refuses: mostly layers by names that the model does not have."""
    got = (str(error).strip().splitlines() or [type(error).__name__])[0]
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = f"names of this model's layers: {', '.join(sorted(linear - {'lm_head'}))}, or all-linear"
    fix = "Set train.adapter.targets to some of them (target_modules of a peft_config)."
    return ConfigError(explain("train.adapter", got=got, expected=expected, fix=fix))


def _check_quantization(model: str | nn.Module, peft_config: Any | None) -> None:
    """4 bits can be had where bitsandbytes is, for weights that are loaded here and stay as they are."""
    if not available("bitsandbytes"):
        fix = 'Type: pip install bitsandbytes. Or train without quantization: LoRA alone, `quantization="none"`.'
        raise MissingExtraError(f'quantization="4bit": bitsandbytes is not installed. {fix}', name="bitsandbytes")
    if not isinstance(model, str):
        got = f"a {type(model).__name__} that is loaded already"
        raise ConfigError(explain('model with quantization="4bit"', got=got, expected="its name or folder"))
    if peft_config is None:
        fix = "Weights in 4 bits cannot be trained; give a peft.LoraConfig."
        raise ConfigError(explain('peft_config with quantization="4bit"', got=None, expected="an adapter", fix=fix))


def _load(name: str, quantization: Quantization, dtype: torch.dtype) -> nn.Module:
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


# Tokens of the chat template whose rows of the head were never trained, and how an adapter trains them.
#
# A model's vocabulary has entries that no text of its training held: such rows stay where they began, near one another.
# Where a template's own token (the mark of a call, the end of a turn) is one of them, no hidden state can say it apart
# from all the others, and LoRA, which leaves the head as it is, cannot teach it. The rule, over rows of the head:
#
#     centre    the mean of rows that no text can reach: ids behind the tokenizer's last, tokens named reserved or
#               unused
#     typical   the median distance from it of ordinary tokens' rows, a sample of them
#     spread    the largest distance from it among those rows themselves
#     limit     the larger of spread and a tenth of typical; a row no farther from the centre was never trained
#
# With fewer than four such rows, or where they spread as far as half of typical, nothing can be told apart.

_NAMED_UNUSED = re.compile(r"reserved|unused", re.IGNORECASE)
_FEWEST_UNUSED, _SAMPLED, _NEAR, _SPREAD = 4, 2048, 0.1, 0.5


class _UntrainedRows(NamedTuple):
    """Tokens with rows that were never trained, by id; how far each is from the centre of `num_unused` unused rows, how
    far trained ones are, and the distance up to which a row counts as untrained."""

    tokens: dict[int, str]
    distances: list[float]
    typical: float
    limit: float
    num_unused: int

    def in_words(self) -> str:
        token_names, share = ", ".join(self.tokens.values()), max(self.distances) / self.typical
        return (
            f"these weights never learnt {token_names}, which the chat template writes: the row of the head is within"
            f" {share:.1%} (limit {self.limit / self.typical:.0%}) of a trained token's distance from those of"
            f" {self.num_unused} unused entries, so what it draws has any of those in their place"
        )


@torch.no_grad()
def untrained_rows(model: nn.Module, tokenizer: Any, said: Iterable[int]) -> _UntrainedRows | None:
    """Which of the template's own tokens among `said`, ids that a model is to write, were never trained; None where
    none is, or nobody can tell. Rows that an adapter trains are not looked at."""
    layer: Any = causal_lm_of(model).get_output_embeddings()
    head: Tensor = below_rows(layer).weight
    by_adapter: dict[str, list[int]] = {} if below_rows(layer) is layer else layer.token_adapter.token_indices
    trained = {number for ids in by_adapter.values() for number in ids}
    added = {number: text for text, number in tokenizer.get_added_vocab().items() if number < head.shape[0]}
    tokens = {number: added[number] for number in sorted((set(said) & added.keys()) - trained)}
    unused = [
        *range(len(tokenizer), head.shape[0]),
        *(number for number in added if _NAMED_UNUSED.search(added[number])),
    ]
    unused = [number for number in unused if number not in tokens]
    ordinary = [number for number in range(min(len(tokenizer), head.shape[0])) if number not in added]
    if not tokens or len(unused) < _FEWEST_UNUSED or not ordinary or head.is_meta:
        return None
    centre = _rows(head, unused).mean(0)

    def distances(ids: Sequence[int]) -> Tensor:
        return (_rows(head, ids) - centre).norm(dim=1)

    typical = float(distances(ordinary[:: max(1, len(ordinary) // _SAMPLED)]).median())
    spread = float(distances(unused).max())
    limit = max(spread, _NEAR * typical)
    if not spread <= _SPREAD * typical or not typical:  # so that NaN fails too
        return None
    near = {number: far for number, far in zip(tokens, distances([*tokens]).tolist(), strict=True) if far <= limit}
    if not near:
        return None
    return _UntrainedRows({number: tokens[number] for number in near}, [*near.values()], typical, limit, len(unused))


def _rows(head: Tensor, ids: Sequence[int]) -> Tensor:
    return head[torch.tensor(ids, device=head.device)].float()


def with_token_rows(peft_config: Any, model: nn.Module, ids: Sequence[int]) -> Any:
    """The adapter's settings with these rows of embedding and head trained too, one row for both if they are tied."""
    if not ids:
        return peft_config
    causal_lm = causal_lm_of(model)
    wrapped = [causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()]
    if wrapped[1].weight is wrapped[0].weight:
        wrapped = wrapped[:1]
    names = {module: name for name, module in causal_lm.named_modules()}
    peft_config.trainable_token_indices = {names[module]: sorted(ids) for module in wrapped}
    return peft_config


def settle_token_rows(model: nn.Module) -> None:
    """After PEFT has wrapped the head: trained rows are whole, since in bf16 most steps would round to nothing; and
    whoever reads the head's bias, as TRL's loss does, finds that it has none."""
    head: Any = causal_lm_of(model).get_output_embeddings()
    if below_rows(head) is head:
        return
    if "bias" not in head._parameters and below_rows(head).bias is None:
        head.register_parameter("bias", None)
    for name, weight in model.named_parameters():
        if "trainable_tokens_delta" in name:
            weight.data = weight.data.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight.data


def ids_of_tokens(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """The ids of tokens by their texts."""
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        fix = 'Name tokens as the vocabulary has them, or "auto".'
        got = f"{', '.join(unknown)}, not in the vocabulary"
        raise ConfigError(explain("train.adapter.token_rows", got=got, expected="tokens of this model", fix=fix))
    return [vocabulary[token] for token in tokens]
