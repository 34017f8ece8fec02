"""``infinity train``: its options. The work is in ``training.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.outcome import errors_as_messages


def command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="The config, a JSON file such as configs/nvme.json.", show_default=False)
    ],
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.", rich_help_panel="Model")] = 8,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads of a block; divides the width.", rich_help_panel="Model")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.", rich_help_panel="Model")] = 512,
    context: Annotated[int, typer.Option(min=1, help="Bytes of text that the model sees at once.", rich_help_panel="Model")] = 64,
    meta: Annotated[
        bool,
        typer.Option(
            help="Build the model without memory; the engine makes it real unit by unit. The weights are the same.", rich_help_panel="Model"
        ),
    ] = True,
    checkpoint_activations: Annotated[
        bool,
        typer.Option("--checkpoint-activations", help="Recompute each block in backward: less memory, more time.", rich_help_panel="Model"),
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a micro-batch.  [default: train_micro_batch_size_per_gpu of CONFIG]", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and the sample.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(help="Text to train on, a file or a directory.  [default: the sources of Python's library]", show_default=False),
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="Write one JSON line per step to this file.", show_default=False)] = None,
    io_trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Record every read, write and kernel of the steps, for `infinity bench io --trace FILE`.",
            show_default=False,
        ),
    ] = None,
    sample_bytes: Annotated[int, typer.Option(min=0, help="Length of the text written by the trained model; 0: none.")] = 120,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout at the end, and all else to stderr.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Train a GPT on bytes of text, its state where CONFIG says.

    Ctrl-C ends the run after the step in hand, with the same summary and exit code 130; a second one ends it at once.
    """
    with errors_as_messages(traceback):
        from infinity.cli import training

        code = training.run(
            training.Options(
                config=config,
                layers=layers,
                heads=heads,
                width=width,
                context=context,
                meta=meta,
                checkpoint_activations=checkpoint_activations,
                batch=batch,
                steps=steps,
                seed=seed,
                data=data,
                metrics=metrics,
                io_trace=io_trace,
                sample_bytes=sample_bytes,
                json=json,
            )
        )
    raise typer.Exit(code)
