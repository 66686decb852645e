"""`pawl plan`: how much memory training a model takes, and how long its calls may be."""

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.table import Table

from pawl.commands.common import AsJson, fail, make_table, require_torch, write_lines
from pawl.settings import refuse_unknown_settings
from pawl.stack.vllm import (
    CPU_CACHE_GIB,
    CPU_CONTEXT,
    SHARE_ALONE,
    SHARE_BESIDE_TRAINER,
    lacks_lora,
)
from store.records import Record
from trainer.errors import TrainerError
from trainer.recipes.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from trainer.learners.memory import Footprint

GIB: Final = 2**30
MIB: Final = 2**20
# Size of the rows that are also computed one by one, which takes long and much memory.
COMPARED_TURNS: Final = 4
COMPARED_TOKENS: Final = 256
# The least value of PAWL_MAX_MODEL_LEN.
SHORTEST_CONTEXT: Final = 128
# GPUs of one machine.
MOST_GPUS: Final = 8


class Rehearsal(Record, frozen=True, kw_only=True):
    """Measurements of a real update on two episodes of one task.

    The rows have `unique_tokens` distinct tokens, for which `computed_tokens` were computed.
    `gradient_distance` is the distance of the log-probabilities' gradient from that of rows
    computed one by one, as a share of its largest entry.
    """

    layout: str
    unique_tokens: int
    computed_tokens: int
    seconds: float
    peak_gib: float
    gradient_distance: float


class MemoryPlan(Record, frozen=True, kw_only=True):
    """The plan of one model on a CPU, or on one GPU of the trainer's `gpus`.

    Sizes are in GiB, or in MiB for each token. `longest` and `longest_plain` are the tokens of the
    longest trainable call, with and without gradient checkpointing. An episode of `turns` calls
    whose last call has `context` tokens has `unique_tokens` tokens, and `row_tokens` if each call
    were computed by itself.
    """

    model: str
    family: str
    layout: str
    parameters: int
    device: str
    gpus: int
    memory_gib: float
    server_gib: float
    weights_gib: float
    optimizer_gib: float
    head_gib: float
    overhead_gib: float
    plain_mib: float
    checkpointed_mib: float
    longest: int
    longest_plain: int
    micro_batch_tokens: int
    context: int
    context_gib: float
    turns: int
    unique_tokens: int
    row_tokens: int
    advice: tuple[str, ...]
    rehearsal: Rehearsal | None = None


def plan(
    model: Annotated[
        str, typer.Argument(help="Folder or hub name of the base model, or a config.json.")
    ],
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of an episode's longest call; default: the model's own context."
        ),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Calls of an episode.")] = 20,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Memory of the GPU, in GiB; default: what this machine's GPU has, or its CPU.",
        ),
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of the trainer, which share the model's weights.")
    ] = 1,
    serve_share: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the memory for vLLM; 0: vLLM has other GPUs. Default: 0.5 of a GPU, and"
            " on a CPU its weights and 2 GiB.",
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe: name of a packaged one, or path of a TOML file.")
    ] = "default",
    is_rehearsed: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Load the model where this runs, and do an update of that shape."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what memory it takes to train a model, and how long its calls may be.

    Reads the model's configuration alone: no GPU and no weights are needed. With --rehearse the
    model is loaded, and an update is made on two made-up episodes, in which each call extends the
    call before.

    Status 2: there is no such model or recipe, or the model cannot be planned.
    """
    refuse_unknown_settings()
    require_torch()
    import torch

    from trainer.learners.kernels.process import total_memory
    from trainer.learners.memory import footprint

    device = "cuda" if gpu_gib is not None or torch.cuda.is_available() else "cpu"
    if gpus > 1 and device == "cpu":
        fail("there is no GPU here: say with --gpu-gib how much memory each of --gpus has")
    memory_gib = total_memory(device) / GIB if gpu_gib is None else gpu_gib
    try:
        chosen = load_recipe(recipe)
        takes = footprint(model, chosen, device)
    except TrainerError as error:
        fail(str(error))
    made = memory_plan(
        takes,
        chosen,
        model=model,
        device=device,
        memory_gib=memory_gib,
        gpus=gpus,
        serve_share=serve_share,
        context=context or _default_context(takes, chosen, device),
        turns=turns,
    )
    if lacks_lora(takes.architecture):
        why = f"the vLLM installed here has no LoRA for {takes.architecture}: train another model"
        made = msgspec.structs.replace(made, advice=(why, *made.advice))
    if is_rehearsed:
        try:
            rehearsal = rehearse(model, chosen, context=made.context, turns=turns)
        except TrainerError as error:
            fail(f"the rehearsal failed: {error}")
        made = msgspec.structs.replace(made, rehearsal=rehearsal)
    write_lines([made], _table, as_json=as_json)


def rehearse(model: str, recipe: Recipe, *, context: int, turns: int) -> Rehearsal:
    """Make an update on two episodes of `turns` calls that grow to `context` tokens; measure it.

    Raises:
        LearnerError: the model cannot be trained, or memory ran out.
    """
    import torch
    from transformers import AutoConfig

    from trainer.batches import computed_tokens, with_logprobs
    from trainer.learners.budget import report_short_memory
    from trainer.learners.layouts import compare_layout
    from trainer.learners.learner import Learner
    from trainer.learners.model import Base
    from trainer.learners.self_test import growing_rows

    words = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    ids = torch.randint(words, (4096,), generator=torch.Generator().manual_seed(0)).tolist()
    with TemporaryDirectory() as scratch:
        base = Base(model, recipe)
        learner = Learner(base, recipe, seed=0, scratch=Path(scratch))
        rows = growing_rows(ids, turns, context)
        sampled = zip([row.key for row in rows], learner.version_logprobs(None, rows), strict=True)
        rows = with_logprobs(rows, dict(sampled))
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            # Without the peak of the learner's start, which computed the model's whole context.
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        metrics = learner.update(rows)
        seconds = time.perf_counter() - began
        # Linux gives a process's peak memory in KiB.
        of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.cuda.max_memory_allocated() if on_gpu else of_process
        few = growing_rows(ids, min(turns, COMPARED_TURNS), min(context, COMPARED_TOKENS))
        with report_short_memory("while gradients were compared"):
            adapted = base.attach(learner, recipe, None, seed=0)
            difference = compare_layout(adapted, few, learner.layout)
        return Rehearsal(
            layout=learner.layout,
            unique_tokens=computed_tokens(rows),
            computed_tokens=metrics["computed_tokens"],
            seconds=round(seconds, 3),
            peak_gib=round(peak / GIB, 3),
            gradient_distance=difference.largest,
        )


def _default_context(takes: "Footprint", recipe: Recipe, device: str) -> int:
    """Return the longest call to plan for if none is given, in tokens: the server's default."""
    context = takes.context or recipe.batch.micro_batch_tokens
    return min(context, CPU_CONTEXT) if device == "cpu" else context


class _Space(Record, frozen=True, kw_only=True):
    """Memory in bytes: of the device, vLLM's share (`server`) and need (`serving`), and the rest.

    `room` is the rest, which the trainer may use.
    """

    on_gpu: bool
    memory: int
    server: int
    serving: int
    room: int


def memory_plan(
    takes: "Footprint",
    recipe: Recipe,
    *,
    model: str,
    device: str,
    memory_gib: float,
    serve_share: float | None,
    context: int,
    turns: int,
    gpus: int = 1,
) -> MemoryPlan:
    """Return the plan of a model; `takes` is what a single process needs (pure)."""
    from trainer.learners.kernels.process import LEFT_FREE
    from trainer.learners.memory import OVERHEAD_BYTES

    memory, alone = int(memory_gib * GIB), takes
    takes = alone.per_process(gpus)
    if serve_share is None and device == "cpu":
        server = takes.served + CPU_CACHE_GIB * GIB
    else:
        server = int(memory * (SHARE_BESIDE_TRAINER if serve_share is None else serve_share))
    # A trainer on a CPU leaves a share of the whole memory free.
    room = max(0, memory - server - int(memory * LEFT_FREE if device == "cpu" else 0))
    serving, on_gpu = takes.served + context * takes.cached, device == "cuda"
    space = _Space(on_gpu=on_gpu, memory=memory, server=server, serving=serving, room=room)
    longest = takes.tokens_that_fit(room, checkpointing=True)
    return MemoryPlan(
        model=model,
        family=takes.family,
        layout="tree" if takes.why_no_tree is None else f"stretches ({takes.why_no_tree})",
        parameters=takes.parameters,
        device=device,
        gpus=gpus,
        memory_gib=round(memory_gib, 2),
        server_gib=round(server / GIB, 2),
        weights_gib=round((takes.weights + takes.gathered) / GIB, 2),
        optimizer_gib=round(takes.optimizer / GIB, 2),
        head_gib=round(takes.head / GIB, 2),
        overhead_gib=round(OVERHEAD_BYTES / GIB, 2),
        plain_mib=round(takes.plain / MIB, 3),
        checkpointed_mib=round(takes.checkpointed / MIB, 3),
        longest=longest,
        longest_plain=takes.tokens_that_fit(room, checkpointing=False),
        micro_batch_tokens=min(recipe.batch.micro_batch_tokens, longest),
        context=context,
        context_gib=round(takes.needed_bytes(context, checkpointing=True) / GIB, 2),
        turns=turns,
        unique_tokens=context,
        # Calls grow by equal steps.
        row_tokens=context * (turns + 1) // 2,
        advice=tuple(_advice(alone, recipe, gpus, space, context)),
    )


def _advice(
    alone: "Footprint", recipe: Recipe, gpus: int, space: "_Space", context: int
) -> Sequence[str]:
    """Return advice for training and serving calls of `context` tokens, a sentence an obstacle.

    A sentence names alternative changes, each of which is enough. `alone` is the memory that
    training in one process needs.
    """
    takes = alone.per_process(gpus)
    longest = takes.tokens_that_fit(space.room, checkpointing=True)
    plain = takes.tokens_that_fit(space.room, checkpointing=False)
    advice = []
    if space.on_gpu and 0 < space.server < space.serving:
        of_a_call = "" if space.server < takes.served else f" and a call of {context} tokens"
        stored = " in 16 bits" if takes.quantised is None else ""
        what = f"weights{of_a_call}{stored}"
        ways = _ways_to_serve(takes, space, context)
        advice.append(f"vLLM's share does not hold the {what}: {_either(ways)}")
    if longest < min(context, SHORTEST_CONTEXT):
        beside = " beside vLLM" if space.server else ""
        ways = [
            *_ways_to_train(alone, gpus, space, min(context, SHORTEST_CONTEXT)),
            "train a smaller model",
        ]
        return [*advice, f"the weights do not fit{beside}: {_either(ways)}"]
    if longest < context:
        ways = ["lower PAWL_MAX_MODEL_LEN to that", *_ways_to_train(alone, gpus, space, context)]
        advice.append(
            f"calls longer than {longest} tokens would not be trained (too_long): {_either(ways)}"
        )
    if recipe.batch.gradient_checkpointing is False and plain < min(longest, context):
        advice.append("leave batch.gradient_checkpointing out: it is switched on where needed")
    if space.on_gpu and SHORTEST_CONTEXT <= longest < recipe.batch.micro_batch_tokens:
        advice.append(f"set batch.micro_batch_tokens = {longest} or less")
    return advice


def _ways_to_serve(takes: "Footprint", space: "_Space", context: int) -> Sequence[str]:
    """Return the possible changes that let vLLM serve calls of `context` tokens on a GPU."""
    ways = []
    if space.serving + takes.needed_bytes(context, checkpointing=True) <= space.memory:
        ways.append("give it more (PAWL_SERVE_GPU_SHARE)")
    # With room for the weights but not for such a call, vLLM serves shorter calls.
    lacking = takes.served if space.server < takes.served else space.serving
    if takes.quantised is None and lacking - takes.served / 2 < space.server:
        ways.append('serve 8 bits (PAWL_VLLM_ARGS="--quantization fp8")')
    if space.serving <= SHARE_ALONE * space.memory:
        ways.append("give it another GPU (PAWL_SERVE_GPUS)")
    else:
        ways.append("give it several GPUs (PAWL_SERVE_GPUS, --tensor-parallel-size)")
    return [*ways, "serve a smaller model"]


def _ways_to_train(alone: "Footprint", gpus: int, space: "_Space", tokens: int) -> Sequence[str]:
    """Return the possible changes that let the trainer compute `tokens` tokens at once."""
    ways = []
    if alone.packed is not None:
        packed = msgspec.structs.replace(alone, weights=alone.packed)
        if packed.tokens_that_fit(space.room, checkpointing=True) >= tokens:
            ways.append("pack the weights (base_bits = 4 in the recipe)")
    if not space.on_gpu:
        return ways
    needed = space.serving + alone.per_process(gpus).needed_bytes(tokens, checkpointing=True)
    if space.serving < space.server and needed <= space.memory:
        ways.append("give vLLM less (PAWL_SERVE_GPU_SHARE)")
    for count in range(gpus if space.server else gpus + 1, MOST_GPUS + 1):
        if alone.per_process(count).tokens_that_fit(space.memory, checkpointing=True) >= tokens:
            own = " of its own" if space.server else ""
            many = f"{count} GPUs{own} (PAWL_TRAIN_GPUS), which share the weights"
            a_gpu = "a GPU of its own (PAWL_TRAIN_GPUS)"
            return [*ways, f"give the trainer {a_gpu if count == 1 else many}"]
    return ways


def _either(ways: Sequence[str]) -> str:
    return f"{', '.join(ways[:-1])}{', or ' if ways[1:] else ''}{ways[-1]}"


def _rehearsal_lines(done: Rehearsal) -> Sequence[tuple[str, str]]:
    ratio = done.computed_tokens / done.unique_tokens
    return [
        ("rehearsed in the layout", done.layout),
        ("distinct tokens", f"{done.unique_tokens}, computed {ratio:.2f} times"),
        ("seconds", f"{done.seconds:g}: {done.computed_tokens / done.seconds:.0f} tokens/s"),
        ("peak memory", f"{done.peak_gib:g} GiB"),
        ("gradient's distance from whole rows'", f"{done.gradient_distance:.1e}"),
    ]


def _table(plans: Sequence[MemoryPlan]) -> Table:
    [made] = plans
    each = f", as each of {made.gpus}" if made.gpus > 1 else ""
    rows = [
        ("family", f"{made.family}, {made.parameters / 1e9:.2f} billion parameters"),
        ("shared prefixes", made.layout),
        ("GPU" if made.device == "cuda" else "memory", f"{made.memory_gib:g} GiB{each}"),
        ("vLLM", f"{made.server_gib:g} GiB"),
        ("weights", f"{made.weights_gib:g} GiB"),
        ("adapter, gradient and moments", f"{made.optimizer_gib:g} GiB"),
        ("logits of a chunk", f"{made.head_gib:g} GiB"),
        ("libraries and fragments", f"{made.overhead_gib:g} GiB"),
        ("activations a token", f"{made.plain_mib:g} MiB"),
        ("with gradient checkpointing", f"{made.checkpointed_mib:g} MiB"),
        ("longest call that can be trained", f"{made.longest} tokens"),
        ("without gradient checkpointing", f"{made.longest_plain} tokens"),
        ("tokens a micro-batch", str(made.micro_batch_tokens)),
        (
            f"an episode of {made.turns} calls up to {made.context} tokens",
            f"{made.unique_tokens} tokens computed; {made.row_tokens} call by call",
        ),
        ("memory for such a call", f"{made.context_gib:g} GiB"),
        *(("to change", advice) for advice in made.advice),
        *(_rehearsal_lines(made.rehearsal) if made.rehearsal is not None else ()),
    ]
    return make_table((made.model, ""), rows)
