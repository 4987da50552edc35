"""The layer table of the architecture page, and a checker that reads import statements with `ast`.

A unit is a folder or a file directly under the package, or a folder below with a row of its own. An import counts
wherever it is: at module level, in a function, under TYPE_CHECKING, or as a dotted name in a string that is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

PACKAGE = "composer_replication"


@dataclass(frozen=True, kw_only=True)
class Layer:
    ours: Set[str] = frozenset()  # units it may import from
    at_import: Set[str] = frozenset()  # third-party packages it may load when it is imported
    on_use: Set[str] = frozenset()  # third-party packages it may load inside a function


# Atomic files and canonical JSON are the ground that runs and config stand on.
GROUND = {"types", "errors", "optional", "version", "atomic", "canonical_json", "messages", "action_text"}
SOURCES = GROUND | {"runs", "privacy"}
LEARNING = {"trainer.objective", "batch", "loss", "sites", "hint_generator", "tensor_file"} | GROUND
TRAINING = LEARNING | {"trainer.sessions", "trainer.rollouts", "runs", "config"}
# Recipes are adapters of other engines: they use rollouts and the objective, never a trainer of ours.
RECIPES = LEARNING | {"trainer.rollouts", "runs", "config"}

LAYERS = {
    "errors": Layer(),
    "version": Layer(),
    "types": Layer(ours={"errors"}),
    "optional": Layer(ours={"errors"}),
    "canonical_json": Layer(ours={"errors"}, at_import={"orjson"}),
    "atomic": Layer(ours={"errors", "canonical_json"}),
    "tensor_file": Layer(ours={"errors", "atomic", "canonical_json"}, at_import={"torch"}, on_use={"safetensors"}),
    "messages": Layer(ours={"errors", "types"}, at_import={"orjson"}),
    "action_text": Layer(ours={"errors", "types", "messages"}, at_import={"orjson"}),
    "runs": Layer(ours=GROUND),
    "config": Layer(ours=GROUND),
    "privacy": Layer(ours=GROUND | {"runs"}, at_import={"orjson"}, on_use={"kingfisher_sdk"}),
    "ingestion": Layer(ours=SOURCES, at_import={"orjson"}, on_use={"atif"}),
    # What a call did, which turn erred, and what would become of a call.
    "sites": Layer(ours=SOURCES, at_import={"orjson"}),
    # Whether another teacher is worth asking depends on how those asked so far voted; whether they acted alike, and on
    # what the session had shown, is for `sites` to say.
    "teacher_replay": Layer(ours=SOURCES | {"ingestion", "sites"}, at_import={"orjson"}, on_use={"httpx"}),
    # A hint is about a site; a teacher may write it, under the one budget that `teacher_replay` keeps.
    "hint_generator": Layer(ours=SOURCES | {"sites", "teacher_replay"}, at_import={"orjson"}),
    "pairs": Layer(
        ours=SOURCES | {"hint_generator", "ingestion", "sites", "teacher_replay"},
        at_import={"orjson"},
        on_use={"data_juicer", "yaml"},
    ),
    "loss": Layer(ours={"types", "errors"}, at_import={"torch"}, on_use={"triton"}),
    # A model's name may be that of the embedded student, which lies in `envs`.
    "batch": Layer(
        ours={"types", "errors", "optional", "messages", "action_text", "hint_generator", "envs"},
        at_import={"torch"},
        on_use={"huggingface_hub", "peft", "transformers"},
    ),
    "trainer.objective": Layer(
        ours={"batch", "loss", "types", "errors", "runs"}, at_import={"torch"}, on_use={"transformers"}
    ),
    # A run's conversations as batches.
    "trainer.sessions": Layer(ours=LEARNING | {"runs"}, at_import={"torch"}, on_use={"safetensors"}),
    # No TRL: what an engine has to do itself is passed in.
    "trainer.rollouts": Layer(ours=LEARNING, at_import={"torch"}, on_use={"openenv", "transformers", "verifiers"}),
    # transformers is a dependency of the core; its Trainer and callbacks are classes to derive from.
    "trainer": Layer(
        ours=TRAINING | {"diloco", "envs"},
        at_import={"torch", "transformers"},
        on_use={"accelerate", "bitsandbytes", "datasets", "huggingface_hub", "numpy", "peft", "safetensors", "trl"},
    ),
    # Held-out sessions under several sets of weights; what right calls are, and what would fail, others say.
    "evaluation": Layer(
        ours=TRAINING | {"pairs", "trainer"},
        at_import={"torch", "numpy"},
        on_use={"peft", "transformers", "vllm"},
    ),
    # Reads a run's files; what the kinds of failure mean is for `sites` to say.
    "evaluation.report": Layer(
        ours=GROUND | {"runs", "config", "sites"}, on_use={"jinja2", "markupsafe", "matplotlib"}
    ),
    # Whole experiments: each job is a training and an evaluation; plans, tables and plots load no tensors.
    "evaluation.ablation": Layer(
        ours=TRAINING | {"trainer", "evaluation", "envs", "pairs"},
        at_import={"numpy"},
        on_use={"matplotlib", "torch", "transformers", "trl"},
    ),
    # Episodes are handed out in formats that `ingestion` knows: it writes the ATIF document.
    "envs": Layer(ours={"types", "errors", "ingestion"}, on_use={"transformers", "trl"}),
    "diloco": Layer(
        ours={"errors", "types", "optional", "atomic", "canonical_json", "runs", "config"},
        at_import={"torch"},
        on_use={"torchft", "obstore", "safetensors", "modal", "huggingface_hub", "ray"},
    ),
    "recipes": Layer(),
    "recipes.prime_rl": Layer(ours=RECIPES, at_import={"torch"}, on_use={"prime_rl"}),
    "recipes.verl": Layer(ours=RECIPES, at_import={"torch"}, on_use={"verl"}),
    # Of its four actors one asks teachers, under the one budget that `teacher_replay` keeps: there is no other way to.
    "recipes.monarch": Layer(
        ours=RECIPES | {"teacher_replay"},
        at_import={"torch"},
        on_use={"monarch", "safetensors", "transformers", "vllm"},
    ),
    "opsd": Layer(ours={"loss"}),
    "distillation": Layer(ours={"loss"}),
    "replaysim": Layer(ours={"teacher_replay", "pairs"}),
    "": Layer(ours={"optional", "version"}),  # the package itself
}
# One file a verb, and the pipeline as a table: it brings the stages together, and nothing below knows it. Only the verb
# that was typed is imported.
LAYERS["cli"] = Layer(
    ours=set(LAYERS) - {"", "opsd", "distillation", "replaysim"},
    on_use={"rich", "torch", "huggingface_hub", "jinja2", "packaging", "peft", "shtab", "transformers"},
)
LAYERS["__main__"] = Layer(ours={"cli"})

# One module is written in a language of its own. Only functions may import it.
MODULE_LAYERS = {"loss.linear.triton_kernels": Layer(ours={"types", "errors"}, at_import={"torch", "triton"})}
ONLY_IN_FUNCTIONS = {f"{PACKAGE}.{module}" for module in MODULE_LAYERS}
# Verbs that cannot do without a model.
for _name in ("chat", "export_weights"):
    MODULE_LAYERS[f"cli.{_name}"] = Layer(ours=LAYERS["cli"].ours, at_import={"torch"}, on_use=LAYERS["cli"].on_use)
# A subclass of TRL's trainer, and a class that says what to install where there is no TRL.
MODULE_LAYERS["trainer.composer_trainer"] = Layer(ours=TRAINING, at_import={"torch", "transformers", "trl"})
# Actors of Monarch, and classes that say what to install where there is none; what they do is loaded where they run.
MODULE_LAYERS["recipes.monarch.actors"] = Layer(ours={"optional", "types"}, at_import={"monarch"})
# Classes of two other engines, in modules that only those engines import.
MODULE_LAYERS["envs.trl_environment"] = Layer(ours={"errors", "optional"}, on_use={"datasets"})
MODULE_LAYERS["envs.verifiers_environment"] = Layer(ours={"errors", "optional"}, at_import={"verifiers", "httpx"})
MODULE_LAYERS["envs.openenv_server"] = Layer(ours={"errors", "optional"}, at_import={"openenv", "uvicorn"})
# Subclasses and registrations of verl's, in modules that only its processes import.
for _name in ("agent_loop", "cpu_platform", "engine", "registered", "trainer"):
    MODULE_LAYERS[f"recipes.verl.{_name}"] = Layer(ours=RECIPES, at_import={"torch", "verl", "ray", "omegaconf"})


# Known paths: names that are resolved on first use by a module that does not load their home.
LAZY_ALIASES = {
    "": {
        "types",
        "batch",
        "diloco",
        "ingestion",
        "pairs.extract",
        "teacher_replay.replay",
        "teacher_replay.teachers",
        "loss.jsd",
        "trainer.objective.compose",
        "trainer.composer_trainer",
    },
    "loss": {"trainer.objective.compose"},
    "batch": {"trainer.objective.smoke_chat"},
    "teacher_replay": {"types", "pairs.extract", "teacher_replay.replay", "teacher_replay.teachers"},
}

Place = Literal["module", "function", "typing", "string"]
_LOADERS = {"import_module", "require", "__import__"}


class Import(NamedTuple):
    target: str
    line: int
    place: Place


@dataclass
class _Collector(ast.NodeVisitor):
    module: str
    is_package: bool
    known: Set[str]
    imports: list[Import] = field(default_factory=list)
    place: Place = "module"

    def visit_Import(self, node: ast.Import) -> None:
        self.imports += [Import(name.name, node.lineno, self.place) for name in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node)
        for name in node.names:
            full = f"{base}.{name.name}"
            self.imports.append(Import(full if full in self.known else base, node.lineno, self.place))

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in _LOADERS and node.args and isinstance(node.args[0], ast.Constant):
            self.imports.append(Import(str(node.args[0].value), node.lineno, self.place))
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in self.known and node.value != PACKAGE:
            self.imports.append(Import(str(node.value), node.lineno, "string"))

    def visit_If(self, node: ast.If) -> None:
        guarded = getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING"
        self._visit_all(node.body, "typing" if guarded else self.place)
        self._visit_all(node.orelse, self.place)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all([*node.decorator_list, *node.args.defaults], self.place)
        self._visit_all(node.body, "typing" if self.place == "typing" else "function")

    visit_AsyncFunctionDef = visit_FunctionDef

    def _visit_all(self, nodes: list, place: Place) -> None:
        before, self.place = self.place, place
        for node in nodes:
            self.visit(node)
        self.place = before

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        kept = len(parts) - node.level + int(self.is_package)
        return ".".join([*parts[:kept], *([node.module] if node.module else [])])


def collect_imports(source: str, module: str, known: Set[str], *, is_package: bool = False) -> list[Import]:
    """Every import in `source`, each resolved to the module it loads."""
    collector = _Collector(module, is_package, known)
    collector.visit(ast.parse(source))
    return collector.imports


def unit_of(module: str) -> str:
    """`composer_replication.loss.jsd` -> `loss`; `composer_replication.recipes.verl.x` -> `recipes.verl`."""
    parts = module.split(".")[1:]
    inner = ".".join(parts[:2])
    return inner if len(parts) > 1 and inner in LAYERS else ".".join(parts[:1])


def violations(source: str, module: str, known: Set[str], *, is_package: bool = False) -> Iterator[str]:
    """One sentence per import that the tables do not allow."""
    for each in collect_imports(source, module, known, is_package=is_package):
        ours = each.target == PACKAGE or each.target.startswith(f"{PACKAGE}.")
        complaint = _wrong_among_ours(module, each) if ours else _wrong_third_party(module, each)
        if complaint:
            yield f"{module}:{each.line}: {complaint}"


def _layer_of(module: str) -> Layer | None:
    return MODULE_LAYERS.get(module.removeprefix(f"{PACKAGE}."), LAYERS.get(unit_of(module)))


def _wrong_among_ours(module: str, each: Import) -> str:
    layer, unit, target = _layer_of(module), unit_of(module), unit_of(each.target)
    if layer is None:
        return f"unit {unit!r} is not in the layer table"
    if each.target in ONLY_IN_FUNCTIONS and each.place == "module":
        return f"{each.target} may be imported only inside a function"
    alias = each.target.removeprefix(f"{PACKAGE}.") in LAZY_ALIASES.get(module.removeprefix(PACKAGE).lstrip("."), ())
    if target == unit or (alias and each.place in ("typing", "string")):
        return ""
    if target not in layer.ours:
        return f"{unit or PACKAGE} may not import {target or PACKAGE} ({each.target}, in a {each.place})"
    return ""


def _wrong_third_party(module: str, each: Import) -> str:
    layer, top = _layer_of(module), each.target.partition(".")[0]
    if top in sys.stdlib_module_names:
        return ""
    if layer is None:
        return f"unit {unit_of(module)!r} is not in the layer table"
    if each.place == "module" and top not in layer.at_import:
        return f"{top} may not be loaded when this module is imported"
    if top not in layer.at_import | layer.on_use:
        return f"{top} is not a package that this unit uses"
    return ""
